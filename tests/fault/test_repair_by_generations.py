"""Repair from copies of several generations: each is checked, read again, and only the needed parts are used."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.local.local_repair import _sorted_out
from nearkin_maintenance.repair import backup_copies
from nearkin_shared.errors import SourceFailed
from nearkin_shared.formats.container import decode_container
from nearkin_shared.types import ContainerId
from tests.support.checks.inspection import check_index_equals_a_rebuilt_one
from tests.support.data.stores import SMALL, blocks_of, containers, find_broken, flip, settings

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}})


@pytest.fixture
def rebased(tmp_path: Path) -> tuple[Path, Path, dict[tuple[str, int], bytes]]:
    """Return a store whose deltas a GC run rebased, copies of its earlier containers, and its live contents."""
    root, backup = tmp_path / "store", tmp_path / "backup"
    contents = {
        ("k", number): mutate(text_like(120_000, 1), number, edits=30 * number) + random_bytes(30_000, number)
        for number in range(1, 7)
    }
    chosen = settings(CHOSEN, {"gc": {"grace_seconds": 0, "compact_below": 0.9}, "deletion": {"undelete_seconds": 0}})
    with open_store(root, settings=chosen, create=True) as store:
        for content in contents.values():
            store.put("k", content)
        shutil.copytree(root / "containers", backup)
        for number in range(1, 5):
            store.delete("k", number)
        for _ in range(4):
            store.gc()
    kept = {version: content for version, content in contents.items() if version[1] > 4}
    assert len(containers(root)) < len(list(backup.glob("*/*.nkc")))
    assert all(path.name.count(".") == 2 for path in containers(root))
    return root, backup, kept


def test_copy_older_than_a_gc_run_removes_nothing_sound(
    rebased: tuple[Path, Path, dict[tuple[str, int], bytes]], tmp_path: Path
) -> None:
    """A copy from before a GC run does not remove sound data."""
    root, backup, kept = rebased
    for path in containers(root):
        copy = backup / path.parent.name / f"{path.name[:16]}.nkc"
        for at in blocks_of(path):
            harmed = Path(shutil.copytree(root, tmp_path / f"{path.name}-{at}"))
            flip(harmed / path.relative_to(root), at + 3)
            with open_store(harmed, settings=CHOSEN, create=True) as store:
                before = find_broken(store, kept)
                store.repair([copy])
                assert find_broken(store, kept) <= before


def test_copies_older_than_a_gc_run_repair_later_damage(
    rebased: tuple[Path, Path, dict[tuple[str, int], bytes]],
) -> None:
    """Copies of all containers from before a GC run repair damage after it."""
    root, backup, kept = rebased
    present = [path.name[:16] for path in containers(root)]
    for path in containers(root):
        flip(path, blocks_of(path)[0] + 3)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, kept)
        report = store.repair(sorted(backup.glob("*/*.nkc")))
        assert (report.damage, report.quarantined_chunks) == ((), 0)
        assert find_broken(store, kept) == set()
        assert [path.name[:16] for path in containers(root)] == present  # data freed by GC runs stay freed
        check_index_equals_a_rebuilt_one(store)


@pytest.mark.parametrize("newest_first", [False, True])
def test_copies_in_any_order_use_the_needed_generation(
    rebased: tuple[Path, Path, dict[tuple[str, int], bytes]], tmp_path: Path, newest_first: bool
) -> None:
    """Of copies of several generations the needed one is used, in whatever order they are given.

    The last given copy was used: in generation 0 deltas depend on data that a GC run has removed since.
    """
    root, backup, kept = rebased
    later = Path(shutil.copytree(root / "containers", tmp_path / "later"))
    files = sorted([*backup.glob("*/*.nkc"), *later.glob("*/*.nkc")], reverse=newest_first)
    for path in containers(root):
        harmed = Path(shutil.copytree(root, tmp_path / path.name))
        (harmed / path.relative_to(root)).unlink()
        with open_store(harmed, settings=CHOSEN, create=True) as store:
            assert store.repair(files).damage == ()
            assert find_broken(store, kept) == set()
            present = decode_container(path.read_bytes(), path.name).chunks.there
            (repaired,) = (one for one in containers(harmed) if one.name[:16] == path.name[:16])
            assert (decode_container(repaired.read_bytes(), repaired.name).chunks.there == present).all()


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("rolled_back", [False, True])
def test_freed_container_is_restored_only_if_named(tmp_path: Path, newest_first: bool, rolled_back: bool) -> None:
    """A container that a GC run has freed is restored only if the store names it."""
    root, before = tmp_path / "store", tmp_path / "before"
    chosen = settings(CHOSEN, {"gc": {"grace_seconds": 0, "compact_below": 0.95}, "deletion": {"undelete_seconds": 0}})
    contents = {("going", 1): random_bytes(100_000, 1), ("staying", 1): random_bytes(100_000, 2)}
    with open_store(root, settings=chosen, create=True) as store:
        list(store.put_many([(key, content) for (key, _), content in contents.items()]))
        shutil.copytree(root, before)
        store.delete("going")
        for _ in range(4):
            store.gc()
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, copy in ((before, old), (root, new)):
        (path,) = containers(folder)
        copy.write_bytes(path.read_bytes())
    present = [decode_container(copy.read_bytes(), copy.name).chunks.there for copy in (old, new)]
    assert present[0].sum() > present[1].sum()
    harmed = before if rolled_back else root
    (path,) = containers(harmed)
    path.unlink()
    with open_store(harmed, settings=chosen, create=True) as store:
        assert store.repair([new, old] if newest_first else [old, new]).damage == ()
        assert find_broken(store, contents) == (set() if rolled_back else {("going", 1)})
        (path,) = containers(harmed)
        assert (decode_container(path.read_bytes(), path.name).chunks.there == present[not rolled_back]).all()


def test_chunks_are_found_in_copies_of_each_generation(
    rebased: tuple[Path, Path, dict[tuple[str, int], bytes]], tmp_path: Path
) -> None:
    """Chunks are found in a copy of each generation."""
    root, backup, kept = rebased
    later = Path(shutil.copytree(root / "containers", tmp_path / "later"))
    for path in containers(root):
        for at in blocks_of(path):
            flip(path, at + 3)
    for number, path in enumerate(sorted(later.glob("*/*.nkc"))):
        path.rename(path.with_name(f"{number}.copy"))
    for path in containers(root):
        path.write_bytes(path.read_bytes()[:-40])  # no copy is known for the same generation
    files = [*backup.glob("*/*.nkc"), *later.glob("*/*.copy")]
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.repair(files).damage == ()
        assert find_broken(store, kept) == set()


def test_copies_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are not kept in memory."""
    root = tmp_path / "store"
    with open_store(root, settings=settings({"runner": {"batch_bytes": 4 << 20}}), create=True) as store:
        store.put("large", random_bytes(48 << 20, 5))
        files = containers(root)
        largest_bytes = max(path.stat().st_size for path in files)
        assert len(files) >= 5
        store.repair([])  # imports its modules
        tracemalloc.start()
        try:
            _, kept, _ = _sorted_out(files, store._covered)
            left_bytes, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(kept) == len(files)
        assert left_bytes < 100_000
        assert peak_bytes < 3 * largest_bytes
        monkeypatch.setattr(backup_copies, "HELD_BYTES", 2 * largest_bytes)
        held = backup_copies.BackupCache()
        for of in kept.values():
            assert held.of(of[0])[0] == of[0].data
            assert held.held_bytes < 3.5 * largest_bytes


def test_copy_that_changes_during_repair_is_not_used(root: Path, tmp_path: Path) -> None:
    """A copy that changes while it is read is not used."""
    path = containers(root)[0]
    (copy := tmp_path / "copy").write_bytes(path.read_bytes())
    with open_store(root, settings=CHOSEN, create=True) as store:
        _, kept, _ = _sorted_out([copy], store._covered)
        flip(copy, 100)
        with pytest.raises(SourceFailed, match="changed while"):
            len(kept[ContainerId(int(path.name[:16], 16))][0].data)
