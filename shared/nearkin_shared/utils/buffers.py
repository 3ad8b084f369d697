"""Reuse large memory.

    take -> array -> views of it in caches, readers, batches -> last view released -> ended leases -> next take
    BufferPool: decoded blocks, containers, records, each in own memory; SlabAllocator: frames in slabs

The first touch of a page takes 2 us on a virtual machine, as much as decoding into it.

Invariant: memory is reused when its last view is released, never before.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from nearkin_shared.limits import KIB, MIB
from nearkin_shared.types import U8
from nearkin_shared.utils.memory import mapped

SMALLEST_BYTES = 64 * KIB
"""Less is left to malloc."""
LARGEST_BYTES = 32 * MIB
"""More is mapped, and goes back to the system at once. The raw blocks of `archive`, 30 MiB, are not more."""
ROOMY_BYTES = MIB
"""From here on a spare of up to twice the room will do: no two pieces of a restore are of the same size."""
MAPPED_BYTES = 256 * KIB
"""Size from which memory is mapped: between pieces of malloc in use, freed memory stays allocated (ten botocore
releases put and read in one process: 383 MiB, mapped 375).
"""
SPARE_BYTES_MAX = 16 * MIB
"""Unused memory that is held, of all sizes together."""
STEPS = 16
"""Sizes between a power of two and the next one: at most a sixteenth of what is taken is slack. With a quarter the
cache of five dumps held 176 MiB of blocks in 206."""

SLAB_BYTES = 4 * MIB


class _Lease(weakref.ref[U8]):
    """An array that was lent, and its memory."""

    __slots__ = ("memory", "room_bytes")
    memory: memoryview
    room_bytes: int


_ROOM_BYTES = attrgetter("room_bytes")
"""Asked of a thousand loans and more for each group of blocks: a generator took 2 % of the 12th dump."""


class BufferPool:
    """Arrays whose memory is used again. Safe between threads.

    The end of a loan is noted by a method of C alone. It may come anywhere, and a Ctrl-C that falls into a finalizer
    written in Python is lost: of some 470 puts that were interrupted three went on.
    """

    def __init__(self, spare_bytes_max: int = SPARE_BYTES_MAX) -> None:
        self._spare_bytes_max = spare_bytes_max
        self._spares: dict[int, deque[memoryview]] = {}
        self._loans: dict[int, _Lease] = {}
        self._ended: deque[weakref.ref[Any]] = deque()
        self._lock = threading.Lock()

    @property
    def unused_bytes(self) -> int:
        """Return how much unused memory is held."""
        with self._lock:
            self._collect()
            self._trim()
            return self._counted_bytes()

    @property
    def leased_bytes(self) -> int:
        """Bytes in memory with views."""
        with self._lock:
            self._collect()
            loans = list(self._loans.values())  # in one step: `take` adds leases without the lock
        return sum(map(_ROOM_BYTES, loans))

    def release_unused(self) -> None:
        """Release all unused memory; leased memory is collected later as usual."""
        with self._lock:
            self._collect()
            self._spares.clear()

    def take(self, size_bytes: int) -> U8:
        """Return uint8[size_bytes], its bytes undefined."""
        return self.take_many([size_bytes])[0]

    def take_many(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return uint8[size_bytes] for each size, their bytes undefined."""
        with self._lock:
            self._collect()
            spares = [
                self._find_unused(round_up_size(size_bytes)) if SMALLEST_BYTES <= size_bytes <= LARGEST_BYTES else None
                for size_bytes in sizes_bytes
            ]
            self._trim()
        return list(map(self._lease, sizes_bytes, spares))

    def _lease(self, size_bytes: int, memory: memoryview | None) -> U8:
        """Return an array in a spare; None: in new memory."""
        if size_bytes > LARGEST_BYTES:
            return mapped(size_bytes)
        if size_bytes < SMALLEST_BYTES:
            return np.empty(size_bytes, np.uint8)
        if memory is None:
            room_bytes = round_up_size(size_bytes)
            small = room_bytes < MAPPED_BYTES
            memory = (np.empty(room_bytes, np.uint8) if small else mapped(room_bytes)).data
        # Views of an array whose base is a memoryview keep that very array alive, so its end is the end of them all.
        array: U8 = np.frombuffer(memory, np.uint8, size_bytes)
        loan = _Lease(array, self._ended.append)
        loan.memory, loan.room_bytes = memory, len(memory)
        self._loans[id(loan)] = loan
        return array

    def _find_unused(self, room_bytes: int) -> memoryview | None:
        """Return the smallest spare that will do."""
        rooms = [room_bytes]
        if room_bytes >= ROOMY_BYTES:
            rooms = sorted(room for room in self._spares if room_bytes <= room <= 2 * room_bytes)
        for room in rooms:
            if self._spares.get(room):
                return self._spares[room].pop()
        return None

    def _collect(self) -> None:
        """Collect the memory of leases that ended."""
        while self._ended:
            loan = self._loans.pop(id(self._ended.popleft()), None)
            if loan is None:  # a KeyboardInterrupt between the lease and its record: the memory was freed with it
                continue
            mine = self._spares.pop(loan.room_bytes, None) or deque()
            mine.append(loan.memory)
            self._spares[loan.room_bytes] = mine  # the newest size is last

    def _trim(self) -> None:
        """Release excess memory after the current request was served.

        The current request makes room for itself: sizes unused for the longest time are released first.
        """
        unused_bytes = self._counted_bytes()
        while unused_bytes > self._spare_bytes_max:
            oldest = next(iter(self._spares))
            if self._spares[oldest]:
                unused_bytes -= len(self._spares[oldest].popleft())
            else:
                del self._spares[oldest]

    def _counted_bytes(self) -> int:
        """Counted, not kept: an interrupt between two steps would let a sum drift."""
        return sum(room_bytes * len(spares) for room_bytes, spares in self._spares.items())


class SlabAllocator:
    """Pieces of large memory, allocated consecutively. Not shared between threads.

    A slab is reused when its last piece is released: for pieces of any size with a common lifetime.
    """

    def __init__(self, take: Callable[[int], U8]) -> None:
        """`take` returns memory of so many bytes, its content undefined."""
        self._take = take
        self._left: U8 = np.zeros(0, np.uint8)

    def allocate(self, size_bytes: int) -> U8:
        """Return uint8[size_bytes], its bytes undefined."""
        if size_bytes > SLAB_BYTES // 2:  # with little slack, and without an end of a slab left over
            return self._take(size_bytes)
        if size_bytes > len(self._left):
            self._left = self._take(SLAB_BYTES)
        piece, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return piece


def round_up_size(size_bytes: int) -> int:
    """Return the size allocated for `size_bytes`: the next of STEPS per power of two."""
    step = max(1, (1 << (size_bytes - 1).bit_length()) // (2 * STEPS))
    return -(-size_bytes // step) * step
