"""What was read lately. Invariant: never more bytes than the bound, and of what was used last nothing is dropped.

What is dropped is any but the quarter used last, by lot: docs/decisions/0029. Version after version is read from end to
end, and of data a little larger than the cache the least recently used ones are just those wanted next; but of bases
that lie all over a long history those are wanted again that were wanted a moment ago. What its reader has given up
goes before all others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nearkin import tally

NEWER_SHARE = 4
"""Of what a cache holds, by count: those used last are not dropped."""
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Held(Generic[Value]):
    """A value, where its key stands among all keys, and which use of the cache was the last one of it."""

    value: Value
    value_bytes: int
    place: int
    used: int


class ByteBoundedCache(Generic[Key, Value]):
    """Cache bounded in bytes, safe between threads. A value larger than the bound is not kept."""

    def __init__(self, bytes_max: int, name: str) -> None:
        """`name`: what it is counted as."""
        self._bytes_max = bytes_max
        self._name = name
        self._used_bytes = 0
        self._held: dict[Key, _Held[Value]] = {}
        self._keys: list[Key] = []
        """In no order: one is drawn by lot without a walk."""
        self._given_up: dict[Key, None] = {}
        """Keys that nobody is known to want, as far as they are still there."""
        self._uses = 0
        self._lock = threading.Lock()
        self._lot = random.Random(0)  # noqa: S311 - no secret: the same reads drop the same values
        self.hits = 0
        self.misses = 0
        CACHE_BYTES.watch(self, name)
        CACHE_ENTRIES.watch(self, name)

    def get(self, key: Key) -> Value | None:
        """Return the value and make it the newest, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Key]) -> list[Value | None]:
        """Return each key's value, or None, and make them the newest."""
        values, hits = list[Value | None](), 0
        with self._lock:
            for held in map(self._held.get, keys):
                if held is None:
                    values.append(None)
                else:
                    hits += 1
                    self._uses += 1
                    held.used = self._uses
                    values.append(held.value)
            misses = len(values) - hits
            self.hits += hits
            self.misses += misses
        for count, word in ((misses, "no"), (hits, "yes")):
            if count:
                tally.CACHE_LOOKUPS.add(count, self._name, word)
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

    def put(self, key: Key, value: Value, value_bytes: int) -> None:
        """Keep a value, dropping others until all fit."""
        with self._lock:
            self._put(key, value, value_bytes)

    def put_many(self, keys: Iterable[Key], values: Iterable[Value], values_bytes: Iterable[int]) -> None:
        """Keep values, dropping others until all fit."""
        with self._lock:
            for key, value, value_bytes in zip(keys, values, values_bytes, strict=True):
                self._put(key, value, value_bytes)

    def _put(self, key: Key, value: Value, value_bytes: int) -> None:
        if key in self._held or value_bytes > self._bytes_max:
            return
        self._uses += 1
        self._keys.append(key)
        self._held[key] = _Held(value, value_bytes, len(self._keys) - 1, self._uses)
        self._used_bytes += value_bytes
        self._fit()

    def make_room(self, values_bytes: Iterable[int], beside_bytes: int = 0) -> None:
        """Drop values until these fit, or nothing is left: what will be kept then takes the memory of what was.

        Of those that were given up as many go as come, whatever fits. `beside_bytes`: so much of the bound is taken by
        what is not kept here.
        """
        with self._lock:
            wanted_bytes = sum(value_bytes for value_bytes in values_bytes if value_bytes <= self._bytes_max)
            kept_bytes = self._used_bytes - wanted_bytes
            while self._given_up and self._used_bytes > kept_bytes:
                self._drop(self._given_up.popitem()[0])  # the one given up last: its memory is the warmest
            self._fit(beside_bytes + wanted_bytes)

    def give_up(self, keys: Iterable[Key]) -> None:
        """Let these go before others: whoever read them knows that they will not be asked for."""
        with self._lock:
            self._given_up.update((key, None) for key in keys if key in self._held)

    def bound(self, bytes_max: int) -> None:
        """Hold so much at most from now on, dropping what is too much."""
        with self._lock:
            self._bytes_max = bytes_max
            self._fit()

    def _fit(self, room_bytes: int = 0) -> None:
        """Drop values until the rest fits, and so much more.

        Also where a Ctrl-C fell between two steps: each turn takes a key out.
        """
        while self._used_bytes + room_bytes > self._bytes_max:
            if self._given_up:
                self._drop(self._given_up.popitem()[0])
                continue
            if not self._keys:
                self._clear()
                return
            place = int(self._lot.random() * len(self._keys))
            held = self._held.get(self._keys[place])
            if held is None or len(self._keys) == 1 or not self._is_newer(held):
                self._take(place)

    def _is_newer(self, held: _Held[Value]) -> bool:
        """Return whether a value is the last one used, or one of a quarter of all if each is used once."""
        return self._uses - held.used < max(1, len(self._keys) // NEWER_SHARE)

    def _take(self, place: int) -> None:
        """Take out the value whose key stands at a place: the last key stands there then."""
        key, last = self._keys[place], self._keys.pop()
        if place < len(self._keys):
            self._keys[place] = last
            if (moved := self._held.get(last)) is not None:
                moved.place = place
        held = self._held.pop(key, None)
        self._given_up.pop(key, None)
        self._used_bytes -= 0 if held is None else held.value_bytes

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
        if held is None:
            return
        if held.place < len(self._keys) and self._keys[held.place] == key:
            self._take(held.place)
        else:  # a Ctrl-C, as above
            self._used_bytes -= self._held.pop(key).value_bytes

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
        self._keys.clear()
        self._given_up.clear()
        self._used_bytes = 0


CACHE_BYTES: tally.Levels[ByteBoundedCache[Any, Any]] = tally.level(
    "nearkin_cache_bytes", "Bytes that a cache holds.", "cache", lambda cache: cache.used_bytes
)
CACHE_ENTRIES: tally.Levels[ByteBoundedCache[Any, Any]] = tally.level(
    "nearkin_cache_entries", "Values that a cache holds.", "cache", lambda cache: cache.entries
)
