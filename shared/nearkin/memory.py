"""Large memory, from the system itself. Invariant: it goes back to the system when the last view of it is gone.

malloc keeps what it is given back, in pieces, once it was given back a large one; what it maps it maps in small pages.
"""

from __future__ import annotations

import ctypes
import mmap as mapping
import os
from contextlib import suppress
from mmap import mmap

import numpy as np

from nearkin.limits import MIB
from nearkin.records import U8

HUGE_BYTES = 2 * MIB
"""From here on memory asks for huge pages."""
MADV_HUGEPAGE: int | None = getattr(mapping, "MADV_HUGEPAGE", None)
MAP_POPULATE: int = getattr(mapping, "MAP_POPULATE", 0)
PRIVATE = mapping.MAP_PRIVATE | mapping.MAP_ANONYMOUS


def mapped(size_bytes: int) -> U8:
    """Return uint8[size_bytes] zeros: huge pages where it holds some and the system has them, else pages at hand.

    4 KiB are touched in 1.7 us, in 0.7 where they are asked for together, in 0.2 as part of a huge page. Linux lays a
    mapping where huge pages begin only if it is a whole number of them: it is, and what is too much is never touched.
    """
    if not size_bytes:
        return np.zeros(0, np.uint8)
    if size_bytes < HUGE_BYTES or MADV_HUGEPAGE is None:
        memory = mmap(-1, size_bytes, flags=PRIVATE | MAP_POPULATE)
    else:
        huge = size_bytes // HUGE_BYTES
        whole = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        memory = mmap(-1, whole, flags=PRIVATE)  # shared memory, which is the default, is never huge
        with suppress(OSError):  # a kernel without them
            memory.madvise(MADV_HUGEPAGE, 0, huge * HUGE_BYTES)
    return np.frombuffer(memory, np.uint8, size_bytes)


M_MMAP_THRESHOLD = -3
"""glibc, malloc.h."""


def large_from_system() -> None:
    """Let glibc's malloc map what is large, each by itself, from now on and for the whole process; elsewhere nothing.

    By itself it does so only until a large piece is first given back, and then cuts small ones out of it: a process
    that put three Debian images held 502 MiB, and so holds 455. What a user set by MALLOC_MMAP_THRESHOLD_ stays.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS
        return
    mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(HUGE_BYTES))
