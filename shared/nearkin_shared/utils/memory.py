"""Large memory, from the system itself. Invariant: it goes back to the system when the last view of it is gone.

malloc keeps what it is given back, in pieces, once it was given back a large one; what it maps it maps in small pages.
"""

from __future__ import annotations

import ctypes
import mmap as mapping
import os
import time
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap

import numpy as np

from nearkin_shared.limits import MIB
from nearkin_shared.types import U8

HUGE_BYTES = 2 * MIB
"""From here on memory asks for huge pages."""
CACHED_SECONDS_MAX = 1e-3
"""A huge page that takes longer to touch is one that the machine's host has to give first: 4 to 5 ms. One that another
process has let go of takes 0.26."""
SMALL_BYTES = 64 * MIB
"""So much is mapped in small pages then, before a huge one is tried again."""
MADV_HUGEPAGE: int | None = getattr(mapping, "MADV_HUGEPAGE", None)
MADV_NOHUGEPAGE: int | None = getattr(mapping, "MADV_NOHUGEPAGE", None)
MAP_POPULATE: int = getattr(mapping, "MAP_POPULATE", 0)
PRIVATE = mapping.MAP_PRIVATE | mapping.MAP_ANONYMOUS


class Mapper:
    """Maps memory, in huge pages where these are at hand. Safe between threads.

    A virtual machine may give free memory back to its host within seconds. Huge pages come from just that, at 2.0 to
    2.7 ms a MB; small ones first from what the system has kept, at 0.5 to 0.8. At hand a MB takes 0.13 and 0.7.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: seconds that this thread has worked, page faults included and its waiting for a core not."""
        self._clock = clock
        self._small_bytes_left = 0

    def map(self, size_bytes: int) -> U8:
        """Return uint8[size_bytes] zeros: huge pages where it holds some and the system has them at hand, else small.

        Less than a huge page has its pages at once: 4 KiB are touched in 1.7 us, in 0.7 where they are asked for
        together. Linux lays a mapping where huge pages begin only if it is a whole number of them: it is, and what is
        too much is never touched.
        """
        if not size_bytes:
            return np.zeros(0, np.uint8)
        if size_bytes < HUGE_BYTES:
            return np.frombuffer(mmap(-1, size_bytes, flags=PRIVATE | MAP_POPULATE), np.uint8)
        memory = mmap(-1, -(-size_bytes // HUGE_BYTES) * HUGE_BYTES, flags=PRIVATE)  # shared memory is never huge
        array: U8 = np.frombuffer(memory, np.uint8, size_bytes)
        if MADV_HUGEPAGE is not None and MADV_NOHUGEPAGE is not None:
            with suppress(OSError):  # a kernel without them
                self._choose(memory, array)
        return array

    def _choose(self, memory: mmap, array: U8) -> None:
        """Say which pages a mapping shall have, by how long its first huge one takes."""
        assert MADV_HUGEPAGE is not None
        assert MADV_NOHUGEPAGE is not None
        if self._small_bytes_left > 0:
            self._small_bytes_left -= len(array)
            memory.madvise(MADV_NOHUGEPAGE)
            return
        memory.madvise(MADV_HUGEPAGE, 0, len(array) // HUGE_BYTES * HUGE_BYTES)
        first = -array.ctypes.data % HUGE_BYTES
        if first + HUGE_BYTES > len(array):
            return  # an older kernel has laid it across two
        began = self._clock()
        array[first] = 0
        if self._clock() - began > CACHED_SECONDS_MAX:
            self._small_bytes_left = SMALL_BYTES
            memory.madvise(MADV_NOHUGEPAGE)


mapped = Mapper().map
"""The process's own: what one part of it finds out holds for all."""


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""glibc, malloc.h."""


def give_back_free() -> None:
    """Give back to the system what glibc's malloc holds and nobody uses; elsewhere nothing. It takes some 10 ms.

    What is not large malloc cuts out of a heap that shrinks from its end alone. A round over 28 dumps took 110 MiB so,
    and every put and get of the process peaked higher by as much from then on.
    """
    with suppress(OSError, AttributeError):  # musl, macOS
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def large_from_system() -> None:
    """Let glibc's malloc map what is large, each by itself, from now on and for the whole process; elsewhere nothing.

    By itself it does so only until a large piece is first given back, and then cuts small ones out of it: a process
    that put three Debian images held 502 MiB, and so holds 455. What a user set by MALLOC_MMAP_THRESHOLD_ stays.
    """
    _set_malloc(M_MMAP_THRESHOLD, HUGE_BYTES, "MALLOC_MMAP_THRESHOLD_")


def one_heap() -> None:
    """Let the threads that come share one heap of glibc's malloc, for the whole process; elsewhere nothing.

    By itself it has one for each of up to eight threads a core, and each keeps what is free between what is in use: a
    process that put 24 dumps on two cores held 522 MiB, and so holds 450, as fast. What a user set by MALLOC_ARENA_MAX
    stays.
    """
    _set_malloc(M_ARENA_MAX, 1, "MALLOC_ARENA_MAX")


def _set_malloc(option: int, value: int, variable: str) -> None:
    if variable in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS
        return
    mallopt(ctypes.c_int(option), ctypes.c_int(value))
