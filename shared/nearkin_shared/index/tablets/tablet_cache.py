"""Keep tablets, the names of one container each, within a bound in bytes.

    names in stream order -> sorted by tag: a batch of names is found with one bisection

Invariant: a cached tablet has the names that its container had when it was read; a change drops it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import NearkinError
from nearkin_shared.observability import counters
from nearkin_shared.types import U8, U32, U64, Bools
from nearkin_shared.utils.frozen import frozen

TABLET_BYTES = 512
"""Memory for an empty tablet: its Python objects."""
_WORD = 8


class CachePolicy(StrEnum):
    """Which tablets stay in memory (PRUNE, section 4)."""

    SINGLE = "single"
    """The one used last."""
    LINEAR = "linear"
    """Those read last, however often they are used."""
    LRU = "lru"
    """Those used last."""
    PREFETCH = "lru+prefetch"
    """Those used last; after a read, the next container of the stream is read too."""


class NotCached(Exception):
    """A tablet is not in memory."""


@frozen
class Tablet:
    """Names uint8[n, width] of one container, their tags ascending, and the ordinal of each."""

    names: U8
    tags: U64
    ordinals: U32

    @staticmethod
    def make(names: U8, tags: U64, ordinals: U32) -> Tablet:
        """Return the tablet of names in stream order."""
        order = np.argsort(tags, kind="stable")
        return Tablet(np.ascontiguousarray(names[order]), tags[order], ordinals[order])

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that the tablet occupies."""
        return self.names.nbytes + self.tags.nbytes + self.ordinals.nbytes + TABLET_BYTES

    def find(self, names: U8, tags: U64) -> tuple[U32, Bools]:
        """Return (ordinals, found) of names and their tags; the lowest ordinal of equal names."""
        ordinals, found = np.zeros(len(names), np.uint32), np.zeros(len(names), np.bool_)
        if not len(self.tags):
            return ordinals, found
        rows: NDArray[np.intp] = np.arange(len(names))
        at = self.tags.searchsorted(tags)
        while len(rows):
            is_open = at < len(self.tags)
            rows, at = rows[is_open], at[is_open]
            is_open = self.tags[at] == tags[rows]
            rows, at = rows[is_open], at[is_open]
            is_equal = are_equal(self.names[at], names[rows])
            found[rows[is_equal]] = True
            ordinals[rows[is_equal]] = self.ordinals[at[is_equal]]
            rows, at = rows[~is_equal], at[~is_equal] + 1
        return ordinals, found


class TabletCache:
    """Tablets by container, bounded in bytes; calls of several threads are safe."""

    def __init__(self, read: Callable[[int], Tablet], bytes_max: int, policy: CachePolicy) -> None:
        """Create the cache; `read` returns the tablet of a container."""
        self._read = read
        self._bytes_max = bytes_max
        self._policy = policy
        self._tablets: OrderedDict[int, Tablet] = OrderedDict()
        self._used_bytes = 0
        self._drops = 0
        """Number of calls that dropped tablets: a tablet read before is not kept after one."""
        self._lock = threading.Lock()
        self._ahead: ThreadPoolExecutor | None = None
        self._awaited: dict[int, Future[None]] = {}
        """Containers that are read ahead, or will be."""
        self.reads: int = 0
        """Number of tablets read."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all tablets."""
        return self._used_bytes

    def get(self, container: int, successor_of: Callable[[int], int | None] | None = None) -> Tablet:
        """Return a container's tablet; if it must be read, its successor's may be read too.

        Raises as the reader does.
        """
        tablet = self._cached(container)
        counters.CACHE_LOOKUPS.add(1, "tablets", "no" if tablet is None else "yes")
        if tablet is None:
            tablet = self._read_ahead(container) or self._load(container)
            if successor_of is not None and self._policy is CachePolicy.PREFETCH:
                successor = successor_of(container)
                if successor is not None:
                    self._load_ahead(successor)
        return tablet

    def get_cached(self, container: int) -> Tablet:
        """Return a container's tablet. Raises NotCached, if it must be read."""
        tablet = self._cached(container)
        if tablet is None:
            raise NotCached
        counters.CACHE_LOOKUPS.add(1, "tablets", "yes")
        return tablet

    def _cached(self, container: int) -> Tablet | None:
        with self._lock:
            tablet = self._tablets.get(container)
            if tablet is not None and self._policy is not CachePolicy.LINEAR:
                self._tablets.move_to_end(container)
            return tablet

    def _read_ahead(self, container: int) -> Tablet | None:
        """Return a tablet that is being read ahead, once it is read.

        One whose reading has not begun is taken off the queue, and None is returned.
        """
        with self._lock:
            reading = self._awaited.get(container)
        if reading is None or reading.cancel():
            return None
        wait([reading])
        return self._cached(container)

    def _load(self, container: int) -> Tablet:
        drops = self._drops
        tablet = self._read(container)
        self.reads += 1
        counters.INDEX_READS.add(1, "chunks")
        self.put(container, tablet, drops)
        return tablet

    def _load_ahead(self, container: int) -> None:
        with self._lock:
            if container in self._tablets or container in self._awaited:
                return
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(1, "tablet-ahead")
            try:
                reading = self._awaited[container] = self._ahead.submit(self._try_load, container)
            except RuntimeError:  # no more threads
                return
        reading.add_done_callback(lambda _: self._end_read_ahead(container))

    def _end_read_ahead(self, container: int) -> None:
        with self._lock:
            self._awaited.pop(container, None)

    def _try_load(self, container: int) -> None:
        with suppress(NearkinError):  # a lookup that needs it raises the error
            if self._cached(container) is None:
                self._load(container)

    def put(self, container: int, tablet: Tablet, drops: int | None = None) -> None:
        """Keep a tablet, unless tablets were dropped since there were `drops` of them."""
        with self._lock:
            if drops not in (None, self._drops):
                return
            self._remove(container)
            if self._policy is CachePolicy.SINGLE:
                self._tablets.clear()
                self._used_bytes = 0
            self._tablets[container] = tablet
            self._used_bytes += tablet.memory_bytes
            self._fit()

    def bound(self, bytes_max: int) -> None:
        """Change the bound in bytes."""
        with self._lock:
            self._bytes_max = bytes_max
            self._fit()

    def _fit(self) -> None:
        while self._used_bytes > self._bytes_max and len(self._tablets) > 1:
            _, tablet = self._tablets.popitem(last=False)
            self._used_bytes -= tablet.memory_bytes

    def _remove(self, container: int) -> None:
        tablet = self._tablets.pop(container, None)
        if tablet is not None:
            self._used_bytes -= tablet.memory_bytes

    def drop(self, containers: Collection[int]) -> None:
        """Drop the tablets of containers that change."""
        with self._lock:
            self._drops += 1
            for container in containers:
                self._remove(container)

    def clear(self) -> None:
        """Drop all tablets."""
        with self._lock:
            self._drops += 1
            self._tablets.clear()
            self._used_bytes = 0

    def close(self) -> None:
        """Drop all tablets and end the thread that reads ahead. Idempotent."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.shutdown(cancel_futures=True)
        self.clear()


def words_of(keys: U8, start: int) -> U64:
    """Return the 8 bytes from `start` of each key, uint8[n, width], as uint64[n]."""
    return np.ascontiguousarray(keys[:, start : start + _WORD]).view("<u8").ravel().astype(np.uint64)


def are_equal(keys: U8, others: U8) -> Bools:
    """Return which rows of two uint8[n, width] are equal.

    Word by word: numpy is slow to reduce many short rows.
    """
    word = np.uint64 if keys.shape[1] % _WORD == 0 else np.uint32
    different = np.ascontiguousarray(keys).view(word) ^ np.ascontiguousarray(others).view(word)
    merged = different[:, 0]
    for column in different.T[1:]:
        merged = merged | column
    equal: Bools = merged == 0
    return equal
