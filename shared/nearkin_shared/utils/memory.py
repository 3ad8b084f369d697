"""Map large memory from the system.

malloc keeps freed memory in pieces after the first large free, and maps memory in small pages.

Invariant: memory returns to the system when the last view of it is released.
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
"""Seconds to touch a huge page that the machine's host must provide first: 4 to 5 ms. A page that another process
released takes 0.26 ms.
"""
SMALL_BYTES = 64 * MIB
"""Bytes that are then mapped in small pages, before a huge page is tried again."""
MADV_HUGEPAGE: int | None = getattr(mapping, "MADV_HUGEPAGE", None)
MADV_NOHUGEPAGE: int | None = getattr(mapping, "MADV_NOHUGEPAGE", None)
MAP_POPULATE: int = getattr(mapping, "MAP_POPULATE", 0)
PRIVATE = mapping.MAP_PRIVATE | mapping.MAP_ANONYMOUS


class Mapper:
    """Maps memory, in huge pages if they are available. Safe between threads.

    A virtual machine may return free memory to its host within seconds. Huge pages then take 2.0 to 2.7 ms a MB; small
    pages use memory that the system kept first, at 0.5 to 0.8 ms. If available, a MB takes 0.13 and 0.7 ms.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """Create a measurement. `clock`: working seconds of this thread, with page faults."""
        self._clock = clock
        self._small_bytes_left = 0

    def map(self, size_bytes: int) -> U8:
        """Return uint8[size_bytes] zeros, in huge pages if it holds some and they are available.

        Pages of a mapping smaller than a huge page are populated at once: 4 KiB take 1.7 us when touched, 0.7 us when
        populated
        together. Linux aligns a mapping to huge pages only if its size is a multiple of them, so the size is rounded
        up; the
        rest is never touched.
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
        """Choose the pages of a mapping by the time that its first huge page takes."""
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
"""The mapper of the process, so that all parts of it share the measurement."""


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""glibc, malloc.h."""


def give_back_free() -> None:
    """Return free memory of glibc's malloc to the system; elsewhere do nothing.

    It takes about 10 ms. malloc takes smaller allocations from a heap that shrinks from its end only. A GC run over 28
    dumps took 110 MiB this way, and the peak of every later put and get of the process rose by as much.
    """
    with suppress(OSError, AttributeError):  # musl, macOS
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def release_file_pages(file: tuple[int, int]) -> None:
    """Release the resident pages of a file's shared mappings; the file stays cached.

    Elsewhere than on Linux do nothing. `file`: device and inode. The mappings must exist until this returns: else other
    memory may have their addresses.
    """
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
        for line in lines:
            addresses, permissions, _, device, inode = line.split(None, 5)[:5]
            if int(inode) != file[1] or permissions[3:] != b"s":
                continue
            major, _, minor = device.partition(b":")
            if os.makedev(int(major, 16), int(minor, 16)) != file[0]:
                continue
            start, _, end = addresses.partition(b"-")
            first, last = int(start, 16), int(end, 16)
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mapping.MADV_DONTNEED))


def large_from_system() -> None:
    """Let glibc's malloc map each large allocation separately, in the whole process.

    Elsewhere do nothing. By default malloc does so only until the first large free, and then splits large areas: a
    process
    that put three Debian images held 502 MiB, and holds 455 with this setting. MALLOC_MMAP_THRESHOLD_ of a user is
    kept.
    """
    _set_malloc(M_MMAP_THRESHOLD, HUGE_BYTES, "MALLOC_MMAP_THRESHOLD_")


def one_heap() -> None:
    """Let threads that start later share one heap of glibc's malloc, in the whole process.

    Elsewhere do nothing. By default there is one heap for each of up to eight threads a core, and each keeps its free
    memory: a process that put 24 dumps on two cores held 522 MiB, and holds 450 at the same speed with this setting.
    MALLOC_ARENA_MAX of a user is kept.
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
