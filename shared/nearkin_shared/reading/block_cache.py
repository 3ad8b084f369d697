"""What was read lately. Invariant: never more bytes than the bound, and of what was used last nothing is dropped.

Version after version is read from end to end, and of data a little larger than the cache the least recently used ones
are just those wanted next; but of bases that lie all over a long history those are wanted again that were wanted a
moment ago. So of all but the quarter used last those go that were used least often, one of them by lot; and before any
other what its reader has given up: docs/adr/0029, 0040.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nearkin_shared.observability import counters

NEWER_SHARE = 4
"""Of what a cache holds, by count: those used last are not dropped."""
USES_MAX = 8
"""So far the uses of a value are counted."""
HALVED_AFTER = 16
"""Once there were so many uses a value, all counts are halved: what was wanted often, long ago, is not wanted now."""
LOTS_MAX = 8
"""So often one is drawn of those used equally often, until it is none of those used last; then of the next more often.
"""
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _CacheEntry(Generic[Value]):
    """A value; which use of the cache was the last one of it, and how often it was used, up to USES_MAX; where its key
    stands among those used so often.
    """

    value: Value
    value_bytes: int
    used: int
    uses: int = 0
    place: int = 0


class ByteBoundedCache(Generic[Key, Value]):
    """Cache bounded in bytes, safe between threads. A value larger than the bound is not kept."""

    def __init__(self, bytes_max: int, name: str) -> None:
        """`name`: what it is counted as."""
        self._bytes_max = bytes_max
        self._name = name
        self._used_bytes = 0
        self._held: dict[Key, _CacheEntry[Value]] = {}
        self._keys: list[list[Key]] = [[] for _ in range(USES_MAX + 1)]
        """By the uses of their values, each in no order: one is drawn by lot without a walk."""
        self._given_up: dict[Key, None] = {}
        """Keys that nobody is known to want, as far as they are still there."""
        self._uses = 0
        self._halved = 0
        """At which use."""
        self._lock = threading.Lock()
        self._lot = random.Random(0)  # noqa: S311 - no secret: the same reads drop the same values
        self.hits = 0
        self.misses = 0
        CACHE_BYTES.watch(self, name)
        CACHE_ENTRIES.watch(self, name)

    def get(self, key: Key) -> Value | None:
        """Return the value and make it the newest, or None."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                self.misses += 1
            else:
                self.hits += 1
                self._use(key, held)
        counters.CACHE_LOOKUPS.add(1, self._name, "no" if held is None else "yes")
        return None if held is None else held.value

    def get_many(self, keys: Iterable[Key]) -> list[Value | None]:
        """Return each key's value, or None, and make them the newest."""
        values, hits = list[Value | None](), 0
        with self._lock:
            for key in keys:
                held = self._held.get(key)
                if held is None:
                    values.append(None)
                else:
                    hits += 1
                    self._use(key, held)
                    values.append(held.value)
            misses = len(values) - hits
            self.hits += hits
            self.misses += misses
        for count, word in ((misses, "no"), (hits, "yes")):
            if count:
                counters.CACHE_LOOKUPS.add(count, self._name, word)
        return values

    @property
    def bytes_max(self) -> int:
        """Return how much it may hold."""
        return self._bytes_max

    @property
    def used_bytes(self) -> int:
        """Return how much it holds."""
        return self._used_bytes

    @property
    def entries(self) -> int:
        """Return how many values it holds."""
        return len(self._held)

    def put(self, key: Key, value: Value, value_bytes: int, uses: int = 1) -> None:
        """Keep a value, dropping others until all fit. `uses`: as if it was used so often already."""
        with self._lock:
            self._put(key, value, value_bytes, uses)

    def put_many(self, keys: Iterable[Key], values: Iterable[Value], values_bytes: Iterable[int]) -> None:
        """Keep values, dropping others until all fit."""
        with self._lock:
            for key, value, value_bytes in zip(keys, values, values_bytes, strict=True):
                self._put(key, value, value_bytes)

    def _put(self, key: Key, value: Value, value_bytes: int, uses: int = 1) -> None:
        if key in self._held or value_bytes > self._bytes_max:
            return
        held = self._held[key] = _CacheEntry(value, value_bytes, self._uses)
        held.uses = min(uses, USES_MAX) - 1
        self._used_bytes += value_bytes
        self._use(key, held)
        self._fit()

    def _use(self, key: Key, held: _CacheEntry[Value]) -> None:
        """Count a use of a value."""
        self._uses += 1
        held.used = self._uses
        if self._given_up:
            self._given_up.pop(key, None)
        if held.uses < USES_MAX:
            self._insert(key, held, held.uses + 1)
        if self._uses - self._halved > HALVED_AFTER * len(self._held):
            self._halved = self._uses
            for other, its in list(self._held.items()):
                self._insert(other, its, (its.uses + 1) // 2)
            # Anew, since a Ctrl-C may have fallen between two steps.
            self._used_bytes = sum(its.value_bytes for its in self._held.values())

    def _insert(self, key: Key, held: _CacheEntry[Value], uses: int) -> None:
        """Put a value among those used so often."""
        self._leave(key, held)
        keys = self._keys[uses]
        held.uses, held.place = uses, len(keys)
        keys.append(key)

    def _leave(self, key: Key, held: _CacheEntry[Value]) -> None:
        """Take a key from where it stands; nothing where it does not, since a Ctrl-C fell between two steps."""
        keys = self._keys[held.uses]
        if held.place < len(keys) and keys[held.place] == key:
            self._take(held.uses, held.place)

    def _take(self, uses: int, place: int) -> None:
        """Take a place out: the last key of as many uses stands there then."""
        keys = self._keys[uses]
        last = keys.pop()
        if place < len(keys):
            keys[place] = last
            moved = self._held.get(last)
            if moved is not None and (moved.uses, moved.place) == (uses, len(keys)):
                moved.place = place

    def make_room(self, values_bytes: Iterable[int], beside_bytes: int = 0) -> None:
        """Drop values until these fit, or nothing is left: what will be kept then takes the memory of what was.

        Of those that were given up as many go as come, whatever fits. `beside_bytes`: so much of the bound is taken by
        what is not kept here.
        """
        with self._lock:
            wanted_bytes = sum(value_bytes for value_bytes in values_bytes if value_bytes <= self._bytes_max)
            self._release(self._used_bytes - wanted_bytes)
            self._fit(beside_bytes + wanted_bytes)

    def give_up(self, keys: Iterable[Key]) -> None:
        """Let these go before others: whoever read them knows that they will not be asked for."""
        with self._lock:
            self._given_up.update((key, None) for key in keys if key in self._held)

    def _release(self, kept_bytes: int) -> None:
        """Drop what was given up until so much is left; what was last first, since its memory is the warmest."""
        while self._given_up and self._used_bytes > kept_bytes:
            self._drop(self._given_up.popitem()[0])

    def bound(self, bytes_max: int) -> None:
        """Hold so much at most from now on, dropping what is too much."""
        with self._lock:
            self._bytes_max = bytes_max
            self._fit()

    def _fit(self, room_bytes: int = 0) -> None:
        """Drop values until the rest fits, and so much more.

        Also where a Ctrl-C fell between two steps: each turn takes a key out.
        """
        self._release(self._bytes_max - room_bytes)
        while self._used_bytes + room_bytes > self._bytes_max:
            drawn = self._eviction_candidate()
            if drawn is None:
                self._clear()
                return
            uses, place = drawn
            key = self._keys[uses][place]
            self._take(uses, place)
            held = self._held.get(key)
            if held is not None and (held.uses, held.place) == drawn:
                self._forget(key)

    def _eviction_candidate(self) -> tuple[int, int] | None:
        """Return where a key stands whose value goes: of those used least often one that is none of those used last."""
        newer, least = max(1, len(self._held) // NEWER_SHARE), None
        for uses, keys in enumerate(self._keys):
            for _ in range(LOTS_MAX if keys else 0):
                place = int(self._lot.random() * len(keys))
                least = least or (uses, place)
                held = self._held.get(keys[place])
                if held is None or self._uses - held.used >= newer:
                    return uses, place
        return least

    def _forget(self, key: Key) -> None:
        self._given_up.pop(key, None)
        self._used_bytes -= self._held.pop(key).value_bytes

    def items(self) -> list[tuple[Key, Value]]:
        """Return what it holds, in no order; that is no use of it."""
        with self._lock:
            return [(key, held.value) for key, held in self._held.items()]

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget what these keys name; those that are not there are fine."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        held = self._held.get(key)
        if held is not None:
            self._leave(key, held)
            self._forget(key)

    def drop_if(self, unwanted: Callable[[Key], bool]) -> None:
        """Forget what these keys name."""
        with self._lock:
            keys = [key for key in self._held if unwanted(key)]
        self.drop(keys)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._held.clear()
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
