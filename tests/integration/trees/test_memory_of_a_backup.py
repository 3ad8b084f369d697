"""Test what a backup holds in memory: few decoded blocks, and no checkpoint as a whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.local.writer import TREE_CACHE_BYTES
from nearkin.trees import checkpoint_schedule
from nearkin.trees.backup import TreeBackup
from nearkin.trees.tree_sinks import StoreSink
from nearkin_delta.base_search import BaseFinder
from nearkin_delta.gap_alignment import StreamMark
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.results import PutResult
from nearkin_shared.types import PairedBatch

FOLDERS, FILES = 40, 100
FOLDER_BYTES = 4500
"""Of the contents of one folder, about: each has at most one checkpoint."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of 4,000 tiny files."""
    for folder in range(FOLDERS):
        (tmp_path / "tree" / f"{folder:03}").mkdir(parents=True)
        for number in range(FILES):
            (tmp_path / "tree" / f"{folder:03}" / f"{number:03}").write_bytes(b"%d %d" % (folder, number) * 10)
    return tmp_path / "tree"


def test_backup_caches_fewer_blocks_than_other_puts(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []
    with open_store(tmp_path / "store", create=True) as store:
        add_root = TreeBackup._add_root

        def record_bound(self: TreeBackup) -> None:
            bounds.append(store._containers.blocks.bytes_max)
            add_root(self)

        monkeypatch.setattr(TreeBackup, "_add_root", record_bound)
        store.backup("tree", [tree])
        assert bounds == [TREE_CACHE_BYTES]
        assert int(store.settings.base.cache_bytes) > TREE_CACHE_BYTES


def test_checkpoint_is_written_part_by_part(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of all checkpoints are groups and an end, of which one is in memory at a time."""
    parts: list[list[int]] = []
    checkpoint = StoreSink.checkpoint

    def record_parts(
        self: StoreSink, key: str, metadata: dict[str, str], end: Iterator[bytes], digest: bytes
    ) -> Future[PutResult]:
        sizes: list[int] = []
        parts.append(sizes)

        def passed_on() -> Iterator[bytes]:
            for part in end:
                sizes.append(len(part))
                yield part

        return checkpoint(self, key, metadata, passed_on(), digest)

    monkeypatch.setattr(StoreSink, "checkpoint", record_parts)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", FOLDER_BYTES)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_GROUPS_FACTOR", 0)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("tree", [tree])
        store.restore("tree", tmp_path / "restored")
    assert len(parts) > 10
    assert max(len(sizes) for sizes in parts) > 8
    assert max(max(sizes) for sizes in parts) < sum(parts[-1]) / 4
    assert (tmp_path / "restored" / "039" / "099").read_bytes() == b"39 99" * 10


def test_entries_of_checkpoints_seek_no_bases(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a first backup; contents, the complete tree's entries and later backups seek bases as ever."""
    asked: list[tuple[set[int], set[str]]] = []
    reads = BaseFinder.reads

    def record(
        self: BaseFinder, batch: PairedBatch, facts: LookupResults, stream: Hashable, here: StreamMark
    ) -> LookupRequest | None:
        request = reads(self, batch, facts, stream, here)
        kinds = {name for name in ("names", "gaps", "super_features") if getattr(request, name, None) is not None}
        asked.append((set(batch.fresh.batch.blobs.tolist()), kinds))
        return request

    monkeypatch.setattr(BaseFinder, "reads", record)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", FOLDER_BYTES)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_GROUPS_FACTOR", 0)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("tree", [tree])
        first = len(asked)
        (tree / "000" / "000").write_bytes(b"new")
        for folder in range(FOLDERS):
            (tree / f"{folder:03}" / "001").write_bytes(b"%d" % folder * 100)
        store.backup("tree", [tree])
    later = [kinds for blobs, kinds in asked[first:] if blobs != {0}]
    asked = asked[:first]
    assert "gaps" in set.union(*later)
    of_tree = [kinds for blobs, kinds in asked if 0 in blobs]
    of_checkpoints = [kinds for blobs, kinds in asked if 0 not in blobs]
    assert all(blobs == {0} or 0 not in blobs for blobs, _ in asked)
    assert len(of_checkpoints) > 20
    assert set.union(*of_checkpoints) == {"names"}
    assert {"names", "gaps", "super_features"} <= set.union(*of_tree)


@pytest.mark.parametrize(("factor", "least", "most"), [(0, 11, FOLDERS + 1), (4, 1, 4)])
def test_checkpoints_of_tiny_files_are_rare(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int, least: int, most: int
) -> None:
    """Entries of tiny files are larger than their contents, and a checkpoint writes all of them."""
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", FOLDER_BYTES)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_GROUPS_FACTOR", factor)
    keys: list[str] = []
    checkpoint = StoreSink.checkpoint

    def record_key(
        self: StoreSink, key: str, metadata: dict[str, str], end: Iterator[bytes], digest: bytes
    ) -> Future[PutResult]:
        keys.append(key)
        return checkpoint(self, key, metadata, end, digest)

    monkeypatch.setattr(StoreSink, "checkpoint", record_key)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("tree", [tree])
    assert least <= len(keys) <= most
