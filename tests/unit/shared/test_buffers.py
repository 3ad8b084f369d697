"""Test the buffer pool: memory is used again, but not while any view of it exists."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from nearkin_shared.limits import KIB, MIB
from nearkin_shared.types import U8
from nearkin_shared.utils.buffers import (
    LARGEST_BYTES,
    SLAB_BYTES,
    SMALLEST_BYTES,
    BufferPool,
    SlabAllocator,
    round_up_size,
)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_reused_after_its_array_is_freed() -> None:
    buffers = BufferPool()
    first = buffers.take(MIB)
    at = address(first)
    del first
    assert address(buffers.take(MIB)) == at


@pytest.mark.parametrize("look", [lambda a: a[10:20], lambda a: memoryview(a)[5:], lambda a: a.reshape(2, -1)[1][::3]])
def test_memory_is_not_reused_while_a_view_exists(look: Callable[[U8], object]) -> None:
    buffers = BufferPool()
    first = buffers.take(MIB)
    at, view = address(first), look(first)
    del first
    second = buffers.take(MIB)
    assert address(second) != at
    del view
    assert address(buffers.take(MIB)) == at


def test_sizes_that_round_to_one_share_memory() -> None:
    assert round_up_size(4 * MIB) == 4 * MIB
    assert round_up_size(4 * MIB + 1) == 4 * MIB + 256 * KIB
    assert round_up_size(65 * KIB) == 68 * KIB
    buffers = BufferPool()
    first = buffers.take(512 * KIB + 17)
    at = address(first)
    del first
    other = buffers.take(544 * KIB - 3)
    assert (address(other), len(other)) == (at, 544 * KIB - 3)


def test_lease_that_an_interrupt_left_unrecorded_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = BufferPool()

    class Forgetting(dict):
        def __setitem__(self, key: object, value: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(buffers, "_loans", Forgetting())
        with pytest.raises(KeyboardInterrupt):
            buffers.take(MIB)
    assert buffers.take(MIB).nbytes == MIB
    assert buffers.unused_bytes == MIB, "only the second buffer may be counted"


def test_leased_bytes_are_those_with_views() -> None:
    buffers = BufferPool()
    held = [buffers.take(size) for size in (MIB, 64 * KIB, SMALLEST_BYTES - 1, LARGEST_BYTES + 1)]
    assert buffers.leased_bytes == MIB + 64 * KIB, "other sizes are allocated by malloc or mmap"
    part = held[0][10:20]
    del held
    assert (buffers.leased_bytes, buffers.unused_bytes) == (MIB, 64 * KIB)
    del part
    assert (buffers.leased_bytes, buffers.unused_bytes) == (0, MIB + 64 * KIB)


def test_large_request_takes_the_smallest_spare_up_to_twice() -> None:
    buffers = BufferPool()
    sizes = [2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB]
    held = [buffers.take(size) for size in sizes]
    at = {size: address(array) for size, array in zip(sizes, held, strict=True)}
    del held
    taken = [buffers.take(2 * MIB) for _ in range(4)]
    assert [address(array) for array in taken[:3]] == [at[2 * MIB], at[3 * MIB], at[4 * MIB]]
    assert address(taken[3]) != at[5 * MIB]
    assert all(len(array) == 2 * MIB for array in taken)
    del taken
    assert buffers.unused_bytes == 16 * MIB  # spares keep their size


def test_small_request_takes_a_spare_of_its_own_size_only() -> None:
    buffers = BufferPool()
    first = buffers.take(320 * KIB)
    at = address(first)
    del first
    other = buffers.take(256 * KIB)
    assert address(other) != at
    assert address(buffers.take(320 * KIB)) == at


def test_end_of_a_lease_runs_no_python() -> None:
    buffers, seen = BufferPool(), []
    array = buffers.take(MIB)

    def look(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    sys.setprofile(look)
    del array
    sys.setprofile(None)
    assert not seen, "a Ctrl-C in a Python callback would be lost"
    assert buffers.unused_bytes == MIB


def test_memory_that_outlives_its_pool_is_freed() -> None:
    buffers = BufferPool()
    array = buffers.take(MIB)
    array[:] = 7
    del buffers
    assert (array == 7).all()


def test_request_is_served_before_the_excess_is_freed() -> None:
    buffers = BufferPool(spare_bytes_max=MIB)
    sizes = [300 * KIB, MIB, 300 * KIB, 900 * KIB]
    first = buffers.take_many(sizes)
    assert [len(array) for array in first] == sizes
    at = {address(array) for array in first}
    del first
    second = buffers.take_many(sizes)
    assert {address(array) for array in second} == at
    del second
    assert buffers.unused_bytes <= MIB


def test_unused_memory_is_bounded() -> None:
    buffers = BufferPool(spare_bytes_max=3 * MIB)
    held = [buffers.take(MIB) for _ in range(8)]
    del held
    assert buffers.unused_bytes == 3 * MIB


@pytest.mark.parametrize("size_bytes", [0, 1, SMALLEST_BYTES - 1, LARGEST_BYTES + 1])
def test_other_sizes_are_left_to_malloc(size_bytes: int) -> None:
    buffers = BufferPool()
    assert len(buffers.take(size_bytes)) == size_bytes
    assert not buffers._spares


def test_threads_never_share_memory() -> None:
    buffers, wrong = BufferPool(), []

    def fill(number: int) -> None:
        for _ in range(300):
            mine = buffers.take(100 * KIB)
            mine[:] = number
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.unused_bytes == sum(len(memory) for spares in buffers._spares.values() for memory in spares)
    assert 0 < buffers.unused_bytes <= 2 * 5 * round_up_size(100 * KIB), (
        "the last one and the next of five threads, no more"
    )


def test_memory_above_the_largest_size_is_returned() -> None:
    """The system gets it back with the last view."""
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("resident memory is known on Linux only")

    def pages() -> int:
        return int(resident.read_text().split()[1])

    size_bytes = 8 * LARGEST_BYTES
    buffers, page_bytes = BufferPool(), os.sysconf("SC_PAGE_SIZE")
    before = pages()
    taken = buffers.take(size_bytes)
    assert (len(taken), taken.flags.writeable) == (size_bytes, True)
    taken[:] = 1
    view = taken[100:200]
    del taken
    assert (pages() - before) * page_bytes > size_bytes * 3 // 4
    assert view.tolist() == [1] * 100
    del view
    assert (pages() - before) * page_bytes < size_bytes // 4


def test_returned_sizes_replace_unused_sizes() -> None:
    buffers = BufferPool(spare_bytes_max=4 * MIB)
    old = [buffers.take(MIB) for _ in range(4)]
    del old
    for _ in range(3):
        new = buffers.take(2 * MIB)
        at = address(new)
        del new
        again = buffers.take(2 * MIB)
        assert address(again) == at
        del again
    assert buffers.unused_bytes <= 4 * MIB


def test_pieces_of_a_slab_are_adjacent_and_disjoint() -> None:
    buffers = BufferPool()
    slabs = SlabAllocator(buffers.take)
    sizes = [1, 70 * KIB, SLAB_BYTES // 2, 5, SLAB_BYTES // 2 + 1, SLAB_BYTES - 4, 0]
    pieces = [slabs.allocate(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for number, piece in enumerate(pieces):
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    assert address(pieces[1]) == address(pieces[0]) + 1


def test_slab_is_returned_with_its_last_piece() -> None:
    buffers = BufferPool()
    slabs = SlabAllocator(buffers.take)
    first, second = slabs.allocate(10), slabs.allocate(SLAB_BYTES // 2)
    at = address(first)
    del first
    held = slabs.allocate(SLAB_BYTES // 2)  # begins another slab
    assert buffers.unused_bytes == 0
    del second
    assert buffers.unused_bytes == SLAB_BYTES
    assert address(buffers.take(SLAB_BYTES)) == at
    del held
