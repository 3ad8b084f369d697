"""A lost manifest: its number stays in use and its data stay, so that a copy of it restores the version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.results import Damage
from nearkin_shared.retention import RetentionPolicy
from tests.support.data.stores import ENCRYPTED, SMALL, containers, flip, manifests, settings, stored_bytes

CHOSEN = settings(SMALL, {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}})


def without_the_newest(root: Path) -> tuple[Path, bytes]:
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
def test_nothing_of_a_version_goes_whose_manifest_is_lost_and_a_copy_brings_it_back(
    tmp_path: Path, more, mode: str
) -> None:
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


def test_the_number_of_a_version_whose_manifest_is_lost_is_not_given_again(tmp_path: Path) -> None:
    lost, data = without_the_newest(tmp_path / "s")
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        assert store.put("a", b"three").info.version == 3
        assert [damage.versions for damage in store.verify().damage] == [(("a", 2),)]
        lost.write_bytes(data)
        assert [store.get("a", version).read() for version in (1, 2, 3)] == [b"one", b"two", b"three"]
        assert store.verify().damage == ()


@pytest.mark.parametrize("more", [{}, ENCRYPTED], ids=["clear", "sealed"])
@pytest.mark.parametrize("listed", [containers, manifests])
def test_a_preview_goes_on_over_what_parity_mends_as_the_round_does(tmp_path: Path, more, listed) -> None:
    chosen = settings(CHOSEN, more, {"storage": {"parity": "rs-4-2"}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.put("a", random_bytes(100_000, 1))
        store.put("b", random_bytes(100_000, 2))
        store.delete("b")
    for path in listed(tmp_path / "s"):
        flip(path, path.stat().st_size - 5)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for _ in range(2):
            told = store.gc(dry_run=True)
            assert told.freed_bytes == store.gc().freed_bytes != 0


def test_stats_of_a_sealed_store_count_a_pause_as_it_lies_there(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", settings=settings(CHOSEN, ENCRYPTED), create=True) as store:
        store.put("a", b"one")
        store.pauses.pause("test")
        assert store.stats().ledger.stored_bytes == stored_bytes(tmp_path / "s")


def test_an_older_version_never_stands_in_for_the_newest_where_its_manifest_is_lost(tmp_path: Path) -> None:
    lost, data = without_the_newest(tmp_path / "s")
    with open_store(tmp_path / "s", settings=CHOSEN, read_only=True) as store:
        for ask in (store.get, store.info, store.explain):
            with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 2 as the newest"):
                ask("a")
        assert store.get("a", 1).read() == b"one"
        lost.write_bytes(data)
        assert store.get("a").read() == b"two"
        lost.unlink()
    shutil.rmtree(tmp_path / "s" / "index")  # who has no index does not know
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        assert store.get("a").read() == b"one"


def test_a_newest_version_that_was_brought_back_is_missed_though_its_marks_are_there(tmp_path: Path) -> None:
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


def test_a_lost_version_below_deleted_ones_is_missed_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        for content in (b"one", b"two", b"three"):
            store.put("a", content)
        store.delete("a", 3)
        sorted(manifests(tmp_path / "s"))[1].unlink()
        with pytest.raises(Corrupt, match="missing, but the index lists 'a' version 2 as the newest"):
            store.get("a")


def test_a_deleted_newest_version_is_not_a_lost_one(tmp_path: Path) -> None:
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


def test_a_manifest_that_cannot_be_read_is_named_and_keeps_its_key_from_forget_once_the_index_was_made_anew(
    tmp_path: Path,
) -> None:
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


def test_manifests_of_an_erased_tenant_that_the_index_still_lists_are_not_lost(tmp_path: Path) -> None:
    other = settings(CHOSEN, ENCRYPTED, {"tenant": "other"})
    with open_store(tmp_path / "s", settings=settings(CHOSEN, ENCRYPTED), create=True) as store:
        store.put("a", random_bytes(100_000, 1))
    with open_store(tmp_path / "s", settings=other, create=True) as store:
        store.put("a", random_bytes(100_000, 2))
        store.keyring.erase("default")  # by a process that was killed before it updated the index
        told = store.gc(dry_run=True)
        assert told.freed_bytes == store.gc().freed_bytes > 100_000
        assert store.get("a").read() == random_bytes(100_000, 2)


def test_a_version_whose_manifest_is_brought_back_is_listed_though_the_index_was_made_without_it(
    tmp_path: Path,
) -> None:
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
