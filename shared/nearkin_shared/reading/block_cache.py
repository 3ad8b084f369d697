"""Byte-bounded cache of decoded blocks and directories.

Invariant: the cache never exceeds its bound, and the most recently used entries are not evicted.

A put reads version after version in order, and for a cyclic scan slightly larger than the cache the least recently used
entries are those needed next; bases all over a long history, however, are usually needed again soon. So the entry to
evict is the least frequently used one outside the most recently used quarter, chosen at random among equals; entries
that their reader has given up are evicted first. docs/adr/0029, 0040.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nearkin_shared.observability import counters

NEWER_SHARE = 4
"""Inverse of the share of entries, by count, that are protected as most recently used."""
USES_MAX = 8
"""Upper limit of use counts."""
HALVED_AFTER = 16
"""Uses per entry after which all counts are halved: frequent use long ago does not count now."""
DRAWS_MAX = 8
"""Draws among entries of one use count until one is not protected; then the next count follows."""
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _CacheEntry(Generic[Value]):
    """Value with the number of its last use, its use count up to USES_MAX, and its position.

    `position` is the index of its key in the list of its use count.
    """

    value: Value
    value_bytes: int
    used: int
    uses: int = 0
    position: int = 0


class ByteBoundedCache(Generic[Key, Value]):
    """Cache bounded in bytes, safe between threads; it keeps no value above the bound."""

    def __init__(self, bytes_max: int, name: str) -> None:
        """Create the cache; `name` is its label in metrics."""
        self._bytes_max = bytes_max
        self._name = name
        self._used_bytes = 0
        self._entries: dict[Key, _CacheEntry[Value]] = {}
        self._keys: list[list[Key]] = [[] for _ in range(USES_MAX + 1)]
        """Keys by use count, unordered: a random one is chosen in constant time."""
        self._given_up: dict[Key, None] = {}
        """Keys that no reader is known to need, if still cached."""
        self._uses = 0
        self._halved_at = 0
        """Number of uses at the last halving."""
        self._lock = threading.Lock()
        self._random = random.Random(0)  # noqa: S311 - no secret: equal reads evict equal entries
        self.hits: int = 0
        self.misses: int = 0
        CACHE_BYTES.watch(self, name)
        CACHE_ENTRIES.watch(self, name)

    def get(self, key: Key) -> Value | None:
        """Return the value and make it the most recently used, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
            else:
                self.hits += 1
                self._use(key, entry)
        counters.CACHE_LOOKUPS.add(1, self._name, "no" if entry is None else "yes")
        return None if entry is None else entry.value

    def get_many(self, keys: Iterable[Key]) -> list[Value | None]:
        """Return each key's value, or None, and make them the most recently used."""
        values, hits = list[Value | None](), 0
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    values.append(None)
                else:
                    hits += 1
                    self._use(key, entry)
                    values.append(entry.value)
            misses = len(values) - hits
            self.hits += hits
            self.misses += misses
        for count, word in ((misses, "no"), (hits, "yes")):
            if count:
                counters.CACHE_LOOKUPS.add(count, self._name, word)
        return values

    @property
    def bytes_max(self) -> int:
        """Return the bound in bytes."""
        return self._bytes_max

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use."""
        return self._used_bytes

    @property
    def entries(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def put(self, key: Key, value: Value, value_bytes: int, uses: int = 1) -> None:
        """Add a value and evict others until all fit; `uses` is its initial use count."""
        with self._lock:
            self._put(key, value, value_bytes, uses)

    def put_many(self, keys: Iterable[Key], values: Iterable[Value], values_bytes: Iterable[int]) -> None:
        """Add values and evict others until all fit."""
        with self._lock:
            for key, value, value_bytes in zip(keys, values, values_bytes, strict=True):
                self._put(key, value, value_bytes)

    def _put(self, key: Key, value: Value, value_bytes: int, uses: int = 1) -> None:
        if key in self._entries or value_bytes > self._bytes_max:
            return
        entry = self._entries[key] = _CacheEntry(value, value_bytes, self._uses)
        entry.uses = min(uses, USES_MAX) - 1
        self._used_bytes += value_bytes
        self._use(key, entry)
        self._fit()

    def _use(self, key: Key, entry: _CacheEntry[Value]) -> None:
        """Count a use of a value."""
        self._uses += 1
        entry.used = self._uses
        if self._given_up:
            self._given_up.pop(key, None)
        if entry.uses < USES_MAX:
            self._insert(key, entry, entry.uses + 1)
        if self._uses - self._halved_at > HALVED_AFTER * len(self._entries):
            self._halved_at = self._uses
            for other, other_entry in list(self._entries.items()):
                self._insert(other, other_entry, (other_entry.uses + 1) // 2)
            # Recomputed, since a Ctrl-C may have interrupted an update.
            self._used_bytes = sum(other_entry.value_bytes for other_entry in self._entries.values())

    def _insert(self, key: Key, entry: _CacheEntry[Value], uses: int) -> None:
        """Move a key to the list of a use count."""
        self._remove_key(key, entry)
        keys = self._keys[uses]
        entry.uses, entry.position = uses, len(keys)
        keys.append(key)

    def _remove_key(self, key: Key, entry: _CacheEntry[Value]) -> None:
        """Remove a key from its list, if there; a Ctrl-C may have interrupted an update."""
        keys = self._keys[entry.uses]
        if entry.position < len(keys) and keys[entry.position] == key:
            self._remove_position(entry.uses, entry.position)

    def _remove_position(self, uses: int, position: int) -> None:
        """Remove a position of a list; the last key takes it."""
        keys = self._keys[uses]
        last = keys.pop()
        if position < len(keys):
            keys[position] = last
            moved = self._entries.get(last)
            if moved is not None and (moved.uses, moved.position) == (uses, len(keys)):
                moved.position = position

    def make_room(self, values_bytes: Iterable[int], uncached_bytes: int = 0) -> None:
        """Evict values until new ones fit: their memory is reused for the new ones.

        Of the given-up values as many bytes are evicted as arrive, even if all would fit. `uncached_bytes` is the part
        of the bound used outside the cache.
        """
        with self._lock:
            new_bytes = sum(value_bytes for value_bytes in values_bytes if value_bytes <= self._bytes_max)
            self._release(self._used_bytes - new_bytes)
            self._fit(uncached_bytes + new_bytes)

    def give_up(self, keys: Iterable[Key]) -> None:
        """Evict these before others: their reader knows that it does not need them again."""
        with self._lock:
            self._given_up.update((key, None) for key in keys if key in self._entries)

    def _release(self, kept_bytes: int) -> None:
        """Evict given-up values down to `kept_bytes`, the latest first: its memory is warm."""
        while self._given_up and self._used_bytes > kept_bytes:
            self._drop(self._given_up.popitem()[0])

    def bound(self, bytes_max: int) -> None:
        """Set the bound and evict the excess."""
        with self._lock:
            self._bytes_max = bytes_max
            self._fit()

    def _fit(self, room_bytes: int = 0) -> None:
        """Evict values until the rest and `room_bytes` fit.

        It ends even after a Ctrl-C interrupted an update: each iteration removes a key.
        """
        self._release(self._bytes_max - room_bytes)
        while self._used_bytes + room_bytes > self._bytes_max:
            candidate = self._eviction_candidate()
            if candidate is None:
                self._clear()
                return
            uses, position = candidate
            key = self._keys[uses][position]
            self._remove_position(uses, position)
            entry = self._entries.get(key)
            if entry is not None and (entry.uses, entry.position) == candidate:
                self._remove(key)

    def _eviction_candidate(self) -> tuple[int, int] | None:
        """Return (use count, position) of the next entry to evict, or None.

        It is the least frequently used one that is not among the most recently used quarter.
        """
        protected, fallback = max(1, len(self._entries) // NEWER_SHARE), None
        for uses, keys in enumerate(self._keys):
            for _ in range(DRAWS_MAX if keys else 0):
                position = int(self._random.random() * len(keys))
                fallback = fallback or (uses, position)
                entry = self._entries.get(keys[position])
                if entry is None or self._uses - entry.used >= protected:
                    return uses, position
        return fallback

    def _remove(self, key: Key) -> None:
        self._given_up.pop(key, None)
        self._used_bytes -= self._entries.pop(key).value_bytes

    def items(self) -> list[tuple[Key, Value]]:
        """Return all entries, unordered, without counting a use."""
        with self._lock:
            return [(key, entry.value) for key, entry in self._entries.items()]

    def drop(self, keys: Iterable[Key]) -> None:
        """Remove the entries of these keys, if cached."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._remove_key(key, entry)
            self._remove(key)

    def drop_if(self, condition: Callable[[Key], bool]) -> None:
        """Remove the entries whose key fulfils a condition."""
        with self._lock:
            keys = [key for key in self._entries if condition(key)]
        self.drop(keys)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._entries.clear()
        for keys in self._keys:
            keys.clear()
        self._given_up.clear()
        self._used_bytes = 0


CACHE_BYTES: counters.Gauge[ByteBoundedCache[Any, Any]] = counters.level(
    "nearkin_cache_bytes", "Bytes that a cache holds.", "cache", lambda cache: cache.used_bytes
)
CACHE_ENTRIES: counters.Gauge[ByteBoundedCache[Any, Any]] = counters.level(
    "nearkin_cache_entries", "Values that a cache holds.", "cache", lambda cache: cache.entries
)
