"""A lost manifest: its number stays in use and its data stay, so that a copy of it restores the version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.results import Damage
from tests.support.data.stores import ENCRYPTED, SMALL, containers, flip, manifests, settings, stored_bytes

CHOSEN = settings(SMALL, {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}})


def lose_newest_manifest(root: Path) -> tuple[Path, bytes]:
    """Put two versions, and lose the manifest of the second; return its path and its bytes."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("a", b"one")
        store.put("a", b"two")
    lost = max(manifests(root))
    data = lost.read_bytes()
    lost.unlink()
    return lost, data


@pytest.mark.parametrize("mode", ["mark-sweep", "hybrid"])
@pytest.mark.parametrize("more", [{}, ENCRYPTED], ids=["clear", "sealed"])
def test_version_with_lost_manifest_keeps_its_data(tmp_path: Path, more: Mapping[str, object], mode: str) -> None:
    """No data of a version with a lost manifest are freed, and a copy restores it."""
    chosen, content = settings(CHOSEN, more, {"gc": {"mode": mode}}), random_bytes(300_000, 1)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.put("a", content)
    (lost,) = manifests(tmp_path / "s")
    copy = tmp_path / lost.parent.name / lost.name
    copy.parent.mkdir()
    lost.rename(copy)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for dry_run in (True, False, False):
            with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 1"):
                store.gc(dry_run=dry_run)
        assert store.repair([copy]).damage == ()
        assert store.get("a").read() == content
        store.gc()


def test_number_of_version_with_lost_manifest_is_not_reused(tmp_path: Path) -> None:
    """The number of a version whose manifest is lost is not reused."""
    lost, data = lose_newest_manifest(tmp_path / "s")
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        assert store.put("a", b"three").info.version == 3
        assert [damage.versions for damage in store.verify().damage] == [(("a", 2),)]
        lost.write_bytes(data)
        assert [store.get("a", version).read() for version in (1, 2, 3)] == [b"one", b"two", b"three"]
        assert store.verify().damage == ()


@pytest.mark.parametrize("more", [{}, ENCRYPTED], ids=["clear", "sealed"])
@pytest.mark.parametrize("listed", [containers, manifests])
def test_dry_run_reads_through_parity_as_the_gc_run_does(
    tmp_path: Path, more: Mapping[str, object], listed: Callable[[Path], list[Path]]
) -> None:
    """A dry run continues over damage that parity repairs, as the GC run does."""
    chosen = settings(CHOSEN, more, {"storage": {"parity": "rs-4-2"}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.put("a", random_bytes(100_000, 1))
        store.put("b", random_bytes(100_000, 2))
        store.delete("b")
    for path in listed(tmp_path / "s"):
        flip(path, path.stat().st_size - 5)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for _ in range(2):
            preview = store.gc(dry_run=True)
            assert preview.freed_bytes == store.gc().freed_bytes != 0


def test_stats_of_encrypted_store_count_a_pause_as_stored(tmp_path: Path) -> None:
    """Stats of an encrypted store count the pause record with its stored size."""
    with open_store(tmp_path / "s", settings=settings(CHOSEN, ENCRYPTED), create=True) as store:
        store.put("a", b"one")
        store.pauses.pause("test")
        assert store.stats().ledger.stored_bytes == stored_bytes(tmp_path / "s")


def test_older_version_never_replaces_newest_with_lost_manifest(tmp_path: Path) -> None:
    """An older version is never returned as the newest if the newest manifest is lost."""
    lost, data = lose_newest_manifest(tmp_path / "s")
    with open_store(tmp_path / "s", settings=CHOSEN, read_only=True) as store:
        for ask in (store.get, store.info, store.explain):
            with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 2 as the newest"):
                ask("a")
        assert store.get("a", 1).read() == b"one"
        lost.write_bytes(data)
        assert store.get("a").read() == b"two"
        lost.unlink()
    shutil.rmtree(tmp_path / "s" / "index")  # without an index the version is unknown
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        assert store.get("a").read() == b"one"


def test_undeleted_newest_version_with_lost_manifest_is_missed(tmp_path: Path) -> None:
    """An undeleted newest version is reported missing though its marks exist."""
    with open_store(
        tmp_path / "s", settings=settings(CHOSEN, {"deletion": {"undelete_seconds": 3600}}), create=True
    ) as store:
        store.put("a", b"one")
        store.put("a", b"two")
        store.delete("a", 2)
        store.undelete("a", 2)
        max(manifests(tmp_path / "s")).unlink()
        with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 2 as the newest"):
            store.get("a")


def test_lost_version_below_deleted_ones_is_missed(tmp_path: Path) -> None:
    """A lost version below deleted ones is reported missing, too."""
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        for content in (b"one", b"two", b"three"):
            store.put("a", content)
        store.delete("a", 3)
        sorted(manifests(tmp_path / "s"))[1].unlink()
        with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 2 as the newest"):
            store.get("a")


def test_deleted_newest_version_is_not_lost(tmp_path: Path) -> None:
    """A deleted newest version is not reported as lost."""
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("a", b"one")
        store.put("a", b"two")
        store.delete("a", 2)
        assert store.get("a").read() == b"one"
        store.delete("a")
        with pytest.raises(NotFound, match="the store has none"):
            store.get("a")
        store.gc()
        store.gc()
        with pytest.raises(NotFound, match="the store has none"):
            store.get("a")


def test_unreadable_manifest_protects_its_key_after_rebuild(
    tmp_path: Path,
) -> None:
    """After an index rebuild an unreadable manifest is named, and `forget` skips its key."""
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("a", b"one")
        store.put("a", b"two")
        store.put("b", b"one")
    broken = next(path for path in manifests(tmp_path / "s") if path.name.startswith(f"{2:016x}"))
    broken.write_bytes(b"")
    shutil.rmtree(tmp_path / "s" / "index")
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("a", b"three")
        damage: list[Damage] = []
        kept = {info.version for info in store.versions(all_versions=True, broken=damage.append) if info.key == "a"}
        assert (kept, [one.versions for one in damage]) == ({1, 3}, [(("a", 2),)])
        decided = store.forget("", RetentionPolicy(keep_last=1), dry_run=True)
        assert [(one.info.version, one.kept) for one in decided if one.info.key == "a"] == [(1, True), (3, True)]


def test_listed_manifests_of_erased_tenant_are_not_lost(tmp_path: Path) -> None:
    """Manifests of an erased tenant that the index still lists are not lost."""
    other = settings(CHOSEN, ENCRYPTED, {"tenant": "other"})
    with open_store(tmp_path / "s", settings=settings(CHOSEN, ENCRYPTED), create=True) as store:
        store.put("a", random_bytes(100_000, 1))
    with open_store(tmp_path / "s", settings=other, create=True) as store:
        store.put("a", random_bytes(100_000, 2))
        store.keyring.erase("default")  # by a process that was killed before it updated the index
        preview = store.gc(dry_run=True)
        assert preview.freed_bytes == store.gc().freed_bytes > 100_000
        assert store.get("a").read() == random_bytes(100_000, 2)


def test_version_with_restored_manifest_is_listed(
    tmp_path: Path,
) -> None:
    """A version whose manifest is put back is listed though the index was rebuilt without it."""
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        for number in range(3):
            store.put("k", random_bytes(50_000, number))
        newest = manifests(tmp_path / "s")[-1]
        copy = shutil.copy(newest, tmp_path / "copy.nkm")
        flip(newest, 40)
        assert store.rebuild_index().skipped
        assert [each.version for each in store.versions("k", all_versions=True)] == [1, 2]
        report = store.repair([Path(copy)])
        assert report.damage == ()
        assert [each.version for each in store.versions("k", all_versions=True)] == [1, 2, 3]
        assert store.verify().damage == ()
