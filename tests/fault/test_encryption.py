"""An encrypted store: its history, its bytes on the disk, and damage."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.encrypted_object import HEAD, PAGE_BYTES, STRIDE_BYTES
from nearkin_shared.storage.containers import ContainerStore
from tests.support.data.histories import WORD, history, make_store
from tests.support.data.stores import (
    ENCRYPTED,
    SMALL,
    attempt,
    containers,
    find_broken,
    flip,
    manifests,
    objects,
    settings,
)
from tests.support.engines.bitflips import run

CHOSEN = settings(SMALL, ENCRYPTED, {"delta": {"max_depth": 3}, "gc": {"grace_seconds": 0}})
COVERED = settings(CHOSEN, {"storage": {"parity": "rs-8-2"}})
CLEAR = settings(CHOSEN, {"storage": {"encryption": "none", "key": None}})
OTHER = settings(CHOSEN, {"tenant": "other"})
CONTENTS = history()
MAGICS = (b"NKC1", b"NKD2", b"NKB1", b"NKM1", b"NKT1")


def heads(stored: dict[str, bytes]) -> set[bytes]:
    """Return the first eight bytes of each part of a store in clear; random data contain none of them by chance."""
    found = [(data, magic, data.find(magic)) for data in stored.values() for magic in MAGICS]
    words = {data[at : at + 8] for data, _, at in found if at >= 0}
    assert {magic for _, magic, at in found if at >= 0} == set(MAGICS)
    return words


def test_encrypted_store_leaks_nothing_outside_the_index(sound: Path, tmp_path: Path) -> None:
    """No file of an encrypted store reveals content, names or metadata, except the index."""
    stored = objects(sound)
    secrets = {WORD[:16], b"history", b"a-name", b"a-value", b"a-reason", b"default", CONTENTS["alone", 1][1000:1016]}
    secrets |= heads(objects(make_store(tmp_path / "clear", CLEAR)))
    for name, data in stored.items():
        if not name.startswith("keys/"):
            assert not [some for some in secrets if some in data], name
            assert data[:4] == b"NKE1" or name == "nearkin.json"
    assert b"secret" not in stored["nearkin.json"]
    with open_store(sound, settings=CHOSEN, create=True) as store:
        parts = store.stats()
    assert parts.ledger.stored_bytes == sum(map(len, stored.values()))
    assert parts.parts["encryption"] > 0


def test_encrypted_store_restores_versions_and_ranges(root: Path) -> None:
    """Every version is restored, and every range of one."""
    lot = random.Random(1)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        content = CONTENTS["history", 3]
        for _ in range(30):
            start = lot.randrange(len(content))
            stop = lot.randrange(start, len(content) + 1)
            assert store.get("history", 3, start=start, stop=stop).read() == content[start:stop]


def test_encrypted_store_holds_the_same_as_one_in_clear(tmp_path: Path) -> None:
    """A store in clear and an encrypted one hold the same chunks and blocks."""
    make_store(tmp_path / "clear", CLEAR)
    with open_store(tmp_path / "clear", settings=CLEAR, create=True) as clear:
        make_store(tmp_path / "sealed", CHOSEN)
        with open_store(tmp_path / "sealed", settings=CHOSEN, create=True) as sealed:
            one, other = clear.stats(), sealed.stats()
    for part in ("raw_blocks", "delta_blocks", "recipes", "manifests"):
        assert abs(one.parts[part] - other.parts[part]) < 200, part


def test_encrypted_store_survives_its_whole_life(root: Path) -> None:
    """All operations in the life of a store work encrypted."""
    now = time.time()
    chosen = settings(CHOSEN, {"deletion": {"undelete_seconds": 60}})
    with open_store(root, settings=chosen, clock=lambda: now, create=True) as store:
        store.delete("history", 1)
        assert [entry.version for entry in store.list_deleted("history")] == [1]
        store.undelete("history", 1)
        assert find_broken(store, CONTENTS) == set()
        store.delete("alone")
        store.delete("history", 2)
        now += 3600
        left = {named: content for named, content in CONTENTS.items() if named not in {("alone", 1), ("history", 2)}}
        for _ in range(4):
            secrets = store.gc(dry_run=True)
            before = {name: len(data) for name, data in objects(root).items()}
            report = store.gc()
            assert (secrets.freed_bytes, secrets.versions) == (report.freed_bytes, report.versions)
            assert sum(map(len, objects(root).values())) <= sum(before.values()) + HEAD.size + STRIDE_BYTES
            now += 1
            assert find_broken(store, left) == set()
        assert report.freed_bytes == 0
        with pytest.raises(NotFound):
            store.get("alone")
        store.rebuild_index()
        assert store.verify().damage == ()
        assert {(info.key, info.version) for info in store.versions(all_versions=True)} == set(left)
        assert store.put("alone", CONTENTS["alone", 1]).info.version == 2
        assert store.verify().damage == ()
    shutil.rmtree(root / "index")
    with open_store(root, settings=chosen, clock=lambda: now, create=True) as store:
        assert find_broken(store, left) == set()
        assert store.get("alone").read() == CONTENTS["alone", 1]


def test_gc_dry_run_leaves_nothing_in_clear(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GC dry run writes nothing in clear to any disk."""
    from nearkin_shared.objectstore import overlay

    scratch, seen = tmp_path / "scratch", []
    scratch.mkdir()
    put_new = overlay.OverlayObjectStore.put_new
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(
        overlay.OverlayObjectStore, "put_new", lambda *args: (put_new(*args), seen.append(b"".join(args[2:])))[0]
    )
    now = time.time() + 2e6
    with open_store(root, settings=CHOSEN, clock=lambda: now, create=True) as store:
        store.delete("history", 1)
        now += 2e6
        store.gc(dry_run=True)
    assert seen
    assert all(data[:4] == b"NKE1" for data in seen)


@pytest.mark.soak
def test_damaged_encrypted_object_names_affected_versions(root: Path) -> None:
    """A damaged object of each kind is named with the versions that it affects."""
    lot = random.Random(2)
    kinds = {"containers": containers(root), "manifests": manifests(root), "marks": sorted(root.rglob("*.nkt"))}
    for kind, paths in kinds.items():
        for path in lot.sample(paths, min(3, len(paths))):
            sound = path.read_bytes()
            for at in (4, 12, 30, 57, HEAD.size, lot.randrange(len(sound)), len(sound) - 1):
                flip(path, at, lot.randrange(8))
                with open_store(root, settings=CHOSEN, create=True) as store:
                    report = store.verify()
                    named = [damage.object_name for damage in report.damage]
                    assert str(path.relative_to(root)) in named, (kind, at)
                    failed = find_broken(store, CONTENTS)
                    touched = {version for damage in report.damage for version in damage.versions}
                    assert failed <= touched, (kind, at)
                path.write_bytes(sound)
                with open_store(root, settings=CHOSEN, create=True) as store:
                    assert store.repair().damage == ()


def test_version_with_damaged_tombstone_stays_deleted(root: Path) -> None:
    """A version whose tombstone is damaged stays deleted."""
    before = set(root.rglob("*.nkt"))
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("gone", CONTENTS["alone", 1])
        store.delete("gone")
    (mark,) = set(root.rglob("*.nkt")) - before
    flip(mark, mark.stat().st_size // 2, 1)
    with open_store(root, settings=CHOSEN, create=True) as store:
        reported: list[object] = []
        assert "gone" not in {info.key for info in store.versions(broken=reported.append)}
        assert not reported
        with pytest.raises(NotFound):
            store.get("gone")
        assert [damage.object_name for damage in store.verify().damage] == [str(mark.relative_to(root))]


def test_broken_page_affects_only_versions_that_need_it(tmp_path: Path) -> None:
    """One broken page affects the versions that need it and no others."""
    contents = {(f"key{number}", 1): random_bytes(3 * PAGE_BYTES, 50 + number) for number in range(4)}
    root = tmp_path / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        list(store.put_many((key, content) for (key, _), content in contents.items()))
        flip(containers(root)[0], HEAD.size + 5 * STRIDE_BYTES + 5)
    with open_store(root, settings=CHOSEN, create=True) as store:
        report = store.verify()
        touched = {version for damage in report.damage for version in damage.versions}
        failed = find_broken(store, contents)
    assert failed == touched
    assert 1 <= len(touched) < len(contents)


@pytest.mark.parametrize("parity", ["none", "rs-8-2"])
def test_flipped_bits_are_named_and_repaired_with_parity(tmp_path: Path, parity: str) -> None:
    """Each flipped bit is named, and repaired if there is parity."""
    result = run(20, seed=24, parity=parity, root=tmp_path / "store", encrypted=True)
    assert result.missed == []
    assert result.flips == 20


def test_objects_with_exchanged_names_are_damage(root: Path) -> None:
    """Objects with exchanged names are damage."""
    one, other = containers(root)[:2]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with open_store(root, settings=CHOSEN, create=True) as store:
        named = {damage.object_name for damage in store.verify().damage}
        assert {str(path.relative_to(root)) for path in (one, other)} <= named
        assert find_broken(store, CONTENTS)


def test_object_in_clear_in_encrypted_store_is_damage(root: Path, tmp_path: Path) -> None:
    """An object in clear is not accepted in an encrypted store.

    An attacker who can write to the disk cannot insert content that was not encrypted.
    """
    clear = make_store(tmp_path / "clear", CLEAR)
    (theirs,) = [path for path in manifests(clear) if path.parent.name in {p.parent.name for p in manifests(root)}][:1]
    mine = root / theirs.relative_to(clear)
    mine.write_bytes(theirs.read_bytes())
    with open_store(root, settings=CHOSEN, create=True) as store:
        (damage,) = [damage for damage in store.verify().damage if damage.object_name == str(mine.relative_to(root))]
    assert "is not sealed" in damage.problem
    shutil.copyfile(clear / "nearkin.json", root / "nearkin.json")
    with pytest.raises(Corrupt, match="in clear"):
        open_store(root, settings=CHOSEN, create=True)


def test_parity_restores_bytes_of_encrypted_objects(covered_root: Path) -> None:
    """Reads through parity succeed, and repair restores the exact bytes of encrypted objects."""
    before, lot = objects(covered_root), random.Random(3)
    hit = [*containers(covered_root), *manifests(covered_root), *sorted(covered_root.rglob("*.nkt"))]
    hit += [*sorted(covered_root.rglob("*.nkk")), covered_root / "nearkin.json"]
    for path in hit:
        flip(path, lot.randrange(path.stat().st_size), lot.randrange(8))
    with open_store(covered_root, settings=COVERED, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        report = store.verify()
        assert {damage.object_name for damage in report.damage} >= {
            str(path.relative_to(covered_root)) for path in hit if path.name != "nearkin.json"
        }
        assert all(damage.repairable for damage in report.damage)
        assert store.repair().damage == ()
        assert store.verify().damage == ()
    after = objects(covered_root)
    assert {name: data for name, data in after.items() if not name.startswith("scrub/")} == before


def test_scrub_repairs_encrypted_objects(covered_root: Path) -> None:
    """A scrub finds and repairs damage of encrypted objects."""
    before = objects(covered_root)
    path = containers(covered_root)[1]
    key = next(path for path in sorted(covered_root.rglob("*.nkk")) if path.is_file())
    flip(path, HEAD.size + 100)
    flip(key, 100)
    with open_store(covered_root, settings=COVERED, create=True) as store:
        scrubber, repaired = store.scrubber(), set()
        while not (step := scrubber.step()).ended:
            if step.damaged:
                repaired |= {one.object_name for one in store.attend(step)[0]}
        if step.damaged:
            repaired |= {one.object_name for one in store.attend(step)[0]}
    assert repaired == {str(path.relative_to(covered_root)), str(key.relative_to(covered_root))}
    after = objects(covered_root)
    assert {name: data for name, data in after.items() if not name.startswith("scrub/")} == before


def test_broken_container_is_repaired_by_the_same_put(root: Path) -> None:
    """A broken container is repaired by a put of the same content."""
    flip(containers(root)[0], HEAD.size + STRIDE_BYTES + 100)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.verify().damage
        failed = find_broken(store, CONTENTS)
        assert failed
        for key, version in sorted(failed):
            store.put(key, CONTENTS[key, version])
        assert find_broken(store, CONTENTS) == set()
        assert store.verify().damage == ()


@pytest.mark.parametrize("directory_read", [True, False])
@pytest.mark.parametrize("before_end", [60_000, 30_000])
def test_put_after_broken_directory_page_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_end: int, directory_read: bool
) -> None:
    """No put depends on blocks that a broken page near the directory damages, and they are repaired."""
    chosen, content, root = settings(ENCRYPTED), random_bytes(300_000, 1), tmp_path / "store"
    with open_store(root, settings=chosen, create=True) as store:
        store.put("a", content)
    (path,) = containers(root)
    flip(path, path.stat().st_size - before_end)
    with open_store(root, settings=chosen, create=True) as store:
        with monkeypatch.context() as patched:
            if not directory_read:
                lost = Mock(side_effect=Corrupt("its directory: a bad sector"))
                patched.setattr(ContainerStore, "_read_stored_directory", lost)
            report = store.verify()
            assert report.forgotten
            assert [damage.versions for damage in report.damage] == [(("a", 1),)]
        assert store.put("b", content).ledger.duplicate_chunks == 0
        assert attempt(store, "b", 1) == (content, None)
        if directory_read:
            assert attempt(store, "a", 1) == (content, None)


def test_copies_of_encrypted_objects_repair_damage(root: Path, tmp_path: Path) -> None:
    """Copies of encrypted objects repair damage."""
    container, manifest = containers(root)[0], manifests(root)[0]
    copies = [tmp_path / "copies" / container.name, tmp_path / "copies" / manifest.parent.name / manifest.name]
    for path, copy in zip((container, manifest), copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        flip(path, HEAD.size + 10)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert len(store.verify().damage) == 2
        report = store.repair(copies)
        assert {one.by for one in report.repaired} == {"a copy"}
        assert report.damage == ()
        assert find_broken(store, CONTENTS) == set()


def test_copy_of_smaller_generation_repairs_it(tmp_path: Path) -> None:
    """A copy of a generation with fewer chunks repairs that generation.

    Found by the crash engine: the broken part is the footer that identifies the generation.
    """
    root, now = tmp_path / "store", time.time()
    contents = {(f"key{number}", 1): random_bytes(9_000, 20 + number) for number in range(3)}
    chosen = settings(CHOSEN, {"deletion": {"undelete_seconds": 0}, "gc": {"compact_below": 0.9}})
    with open_store(root, settings=chosen, clock=lambda: now, create=True) as store:
        list(store.put_many((key, content) for (key, _), content in contents.items()))
        store.delete("key1")
        for _ in range(4):
            now += 3600
            store.gc()
        (path,) = containers(root)
        assert path.name.endswith(".0001.nkc")
        copy = tmp_path / path.name
        shutil.copyfile(path, copy)
        flip(path, path.stat().st_size - 5)
        assert store.verify().damage
        report = store.repair([copy])
        assert [one.by for one in report.repaired] == ["a copy"]
        assert report.damage == ()
        assert find_broken(store, {named: contents[named] for named in contents if named[0] != "key1"}) == set()
