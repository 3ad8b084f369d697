"""Test read plans of hostile files.

Memory is bounded by what a version may be, not by what the file claims.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import encode_block
from nearkin_shared.formats.container import encode_container
from nearkin_shared.formats.directory import CHUNK_ROW, ChunkTable, SegmentTable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.limits import MIB, SEGMENT_BYTES_MAX
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.reading.restore import planned_batches
from nearkin_shared.results import Ledger
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ZERO, Locations
from tests.support.data import samples


def a_segment_of_single_bytes() -> bytes:
    """Return a container of 300 bytes whose recipe has a zero chunk for each byte."""
    count, none = SEGMENT_BYTES_MAX, np.zeros(1, np.uint32)
    one, zeros = np.ones(1, np.uint32), np.zeros(1, np.uint8)
    chunks = ChunkTable(samples.names_of([1]), one, none, none, one, zeros, Locations.empty(1), zeros)
    recipe = Locations(np.full(count, ZERO, np.uint64), np.ones(count, np.uint32))
    segments = SegmentTable(np.array([0, count], np.uint32), zeros, recipe)
    block = encode_block(np.ones(1, np.uint8), container_layout.RAW, 0, samples.compressor())
    return encode_container(samples.CONTAINER, bytes(16), 3, ["x"], [block], chunks, segments).data


class RewritingFolder(LocalObjectStore):
    """A folder in which another thread rewrites a container while its directory is read."""

    rewrite: Callable[[], None] | None = None

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        found = super().get_ranges(name, starts, ends)
        rewrite, self.rewrite = self.rewrite, None
        if rewrite is not None:
            rewrite()
        return found


def test_directory_of_a_replaced_generation_is_not_kept(tmp_path: Path) -> None:
    """It lists chunks that the rewritten container lacks: a later put would depend on them."""
    objects = RewritingFolder(tmp_path)
    store, data = ContainerStore(objects, bytes(16), MIB), a_segment_of_single_bytes()
    store.put(samples.CONTAINER, [data])
    objects.rewrite = lambda: store.put(samples.CONTAINER, [data], 1)
    replaced = store.directory(samples.CONTAINER)
    assert store.directory(samples.CONTAINER) is not replaced
    assert store.directory(samples.CONTAINER) is store.directory(samples.CONTAINER)


def test_small_file_of_60_million_chunks_is_planned_in_parts(tmp_path: Path) -> None:
    store = ContainerStore(LocalObjectStore(tmp_path), bytes(16), MIB)
    data = a_segment_of_single_bytes()
    assert len(data) < 400
    store.put(samples.CONTAINER, [data])
    segments = Locations(np.full(64, samples.CONTAINER, np.uint64), np.zeros(64, np.uint32))
    size_bytes = 64 * SEGMENT_BYTES_MAX
    manifest = Manifest("t", "k", 1, 0, size_bytes, bytes(32), None, 0.0, Ledger(), segments, np.ones(64, np.bool_))
    tracemalloc.start()
    try:
        first = next(planned_batches(manifest, store))
        assert first.size_bytes == SEGMENT_BYTES_MAX
        assert tracemalloc.get_traced_memory()[1] < 256 * MIB  # a plan of the whole took 5.3 GiB
    finally:
        tracemalloc.stop()


def test_column_of_one_row_is_a_copy_too() -> None:
    rows = np.zeros(3, CHUNK_ROW)
    rows["lengths"], rows["depths"], rows["ranks"] = 7, 1, 2
    for plan in (ReadPlan(Locations.empty(3), rows), ReadPlan(Locations.empty(1), rows[1:2])):
        columns: list[np.ndarray] = [
            plan.lengths,
            plan.encoded,
            plan.blocks,
            plan.positions,
            plan.depths,
            plan.names,
            plan.ranks,
        ]
        for column in columns:
            assert column.flags.aligned
            assert column.flags.c_contiguous
            column[:] = 9
        assert plan.lengths.tolist() == [7] * len(plan)
        assert (rows["depths"] == 1).all()
        assert (rows["ranks"] == 2).all()
