"""Test refusals of columns and location runs, which precede the allocation of memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from backports.zstd import compress, get_frame_info

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats import columns, location_runs
from nearkin_shared.types import SELF, ZERO

U16, U32, U64 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")
MIB = 1 << 20


def table(rows: int = 3) -> list[Any]:
    return [np.arange(rows, dtype=np.uint16), np.arange(rows, dtype=np.uint32) * 70_000]


def peak_bytes(call: Any) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_empty_table_takes_eight_bytes() -> None:
    packed = columns.pack(table(0))
    assert packed == bytes(8)
    found, used = columns.unpack(memoryview(packed), [U16, U32], 0, "t")
    assert used == 8
    assert [(len(c), c.dtype) for c in found] == [(0, U16), (0, U32)]


def test_bytes_after_a_table_are_left_unread() -> None:
    packed = columns.pack(table())
    found, used = columns.unpack(memoryview(packed + b"next"), [U16, U32], 3, "t")
    assert used == len(packed)
    assert all(np.array_equal(a, b) for a, b in zip(found, table(), strict=True))


def test_columns_of_unequal_length_are_refused_when_packed() -> None:
    with pytest.raises(ValueError, match="one length"):
        columns.pack([np.zeros(2, np.uint8), np.zeros(3, np.uint8)])


def test_table_truncated_anywhere_is_corrupt() -> None:
    packed = columns.pack(table(300))
    for length in range(len(packed)):
        with pytest.raises(Corrupt):
            columns.unpack(memoryview(packed[:length]), [U16, U32], 300, "t")


def test_rows_above_the_limit_are_refused_before_allocation() -> None:
    packed = columns.pack([np.zeros(20 * MIB, np.uint8)])
    assert len(packed) < 4096

    def refused() -> None:
        with pytest.raises(Corrupt, match="at most 1000"):
            columns.unpack(memoryview(packed), [np.dtype("u1")], 1000, "t")

    assert peak_bytes(refused) < MIB


def test_rows_missing_in_the_frame_are_corrupt() -> None:
    packed = columns.pack(table())
    for rows in (0, 1, 2, 4, 1 << 20):
        changed = rows.to_bytes(4, "little") + packed[4:]
        with pytest.raises(Corrupt):
            columns.unpack(memoryview(changed), [U16, U32], 1 << 20, "t")


def test_bytes_behind_the_frame_are_corrupt() -> None:
    packed = columns.pack(table())
    stored = int.from_bytes(packed[4:8], "little")
    for extra in (b"\0", compress(b""), compress(b"more")):
        changed = packed[:4] + (stored + len(extra)).to_bytes(4, "little") + packed[8:] + extra
        with pytest.raises(Corrupt):
            columns.unpack(memoryview(changed), [U16, U32], 3, "t")


def test_frame_of_false_size_allocates_nothing() -> None:
    honest = compress(bytes(256 * MIB))
    lying = honest[:6] + (1000).to_bytes(4, "little") + honest[10:]
    assert get_frame_info(lying).decompressed_size == 1000

    def refused() -> None:
        with pytest.raises(Corrupt):
            columns.inflate(lying, 1000, "t")

    assert peak_bytes(refused) < MIB


# --- runs ------------------------------------------------------------------------------------------------------------


def expand(refs: list[int], steps: list[int], counts: list[int], rows_max: int = 1000) -> Any:
    return location_runs.expand(np.array(refs, U16), np.array(steps, U32), np.array(counts, U32), rows_max, "t")


def test_fresh_run_has_step_zero() -> None:
    refs, steps, counts, parts = location_runs.compress(
        np.zeros(50, np.uint32), np.arange(50, dtype=np.uint32), np.array([0, 50], np.uint32)
    )
    assert (refs.tolist(), steps.tolist(), counts.tolist(), parts.tolist()) == ([SELF], [0], [50], [1])


def test_hole_repeats_its_length() -> None:
    refs, _, counts, _ = location_runs.compress(
        np.full(9, ZERO, np.uint32), np.full(9, 65536, np.uint32), np.array([0, 9], np.uint32)
    )
    assert (refs.tolist(), counts.tolist()) == ([ZERO], [9])


def test_no_run_crosses_a_part() -> None:
    _, _, counts, parts = location_runs.compress(
        np.zeros(10, np.uint32), np.arange(10, dtype=np.uint32), np.array([0, 4, 4, 10], np.uint32)
    )
    assert (counts.tolist(), parts.tolist()) == ([4, 6], [1, 0, 1])


def test_ordinals_beyond_a_step_are_refused_when_written() -> None:
    highest = np.array([location_runs.ORDINAL_MAX, 0, location_runs.ORDINAL_MAX], np.uint32)
    refs, bounds = np.full(3, 2, np.uint32), np.array([0, 3], np.uint32)
    run_refs, steps, counts, _ = location_runs.compress(refs, highest, bounds)
    assert location_runs.expand(run_refs, steps, counts, 3, "t")[1].tolist() == highest.tolist()
    with pytest.raises(BadInput, match="ordinal"):
        location_runs.compress(refs, highest + np.uint32(1), bounds)


@pytest.mark.parametrize(
    ("refs", "steps", "counts"),
    [
        ([2], [1], [1]),  # starts at -1
        ([2, 2], [0, 5], [2, 1]),  # steps back below 0
        ([2], [0xFFFFFFFE], [2]),  # starts at ORDINAL_MAX, continues beyond
        ([2], [0], [0]),  # holds nothing
        ([2], [0], [1001]),  # more than rows_max
        ([2, 3], [0, 0], [0xFFFFFFFF, 0xFFFFFFFF]),  # a sum beyond 32 bits
        ([ZERO], [0], [0xFFFFFFFF]),
    ],
)
def test_runs_out_of_bounds_are_corrupt_without_allocation(
    refs: list[int], steps: list[int], counts: list[int]
) -> None:
    def refused() -> None:
        with pytest.raises(Corrupt):
            expand(refs, steps, counts)

    assert peak_bytes(refused) < MIB


def test_table_names_over_65536_containers_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    containers = np.arange(2, 2 + 100_000, dtype=np.uint64)
    table, refs = location_runs.container_table(np.r_[containers, np.uint64(ZERO), np.uint64(0)], 0)
    assert (len(table), int(refs.max()), refs[-2:].tolist()) == (100_000, 100_001, [ZERO, SELF])
    monkeypatch.setattr(location_runs, "TABLE_MAX", 100_000)
    location_runs.container_table(containers, 0)
    with pytest.raises(BadInput, match="at most 100000"):
        location_runs.container_table(np.r_[containers, np.uint64(1 << 40)], 0)


@pytest.mark.parametrize("table", [[5, 5], [9, 5], [1, 5], [0, 5], [5, 77]], ids=str)
def test_table_that_no_writer_makes_is_corrupt(table: list[int]) -> None:
    with pytest.raises(Corrupt, match="not in order"):
        location_runs.from_table(np.array([2], np.uint32), np.array(table, np.uint64), 77, "t")


def test_index_beyond_the_table_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="container 4 of 4"):
        location_runs.from_table(np.array([4], np.uint32), np.array([5, 6], np.uint64), 77, "t")
