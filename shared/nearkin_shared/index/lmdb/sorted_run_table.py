"""Sorted runs: a table of an LMDB index. Invariant: of a key what its shallowest run says holds: a place, or that it is
gone; the first place that was put for a key that had none stays.

    run 0            all heads                           8 children, by the next 3 bits of a head
    runs 1, 0..7     heads that begin with 3 bits        ...
    runs 2, 0..63    with 6 bits

    name             depth 1, these bits 8 (big-endian)
    value            children 8 | head 8 ... | rest of the key, place 12 ...
    place            container 8, ordinal 23 bits, check of head and place 9 bits

A run is one value: a batch of keys is looked up in it by one call of a kernel, and one that is written anew lies in
pages that follow each other. New entries are merged into run 0; a run of more than ENTRIES_MAX gives all to its
children. So an entry is written some five times a depth, where a tree of single entries writes a page for each that is
put, and entries are packed. What a run gives on comes to all of its children at once, and keys being even these fill
together: SPILLS_MAX give on in one transaction, and as many more as what came in wants, the shallowest first; others
are a little fuller meanwhile.

What is dropped is written into run 0 as gone, and moves down until it meets what it hides: to take 2,000 entries out of
nearly as many runs would write all of these anew. In a run without children nothing is hidden, and nothing need be.

The check tells a place of which one bit has flipped, always, and one of another key or of garbage but for one time in
512: a place that is wrong would come to stand in recipes and manifests. A head or a rest of a key that is damaged is
asked for by nobody.

An entry moves to a deeper run only: who goes through the runs by name, in several transactions, misses none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.kernels.sorted_runs import CHILDREN_BYTES, DEPTH_MAX, FAN_BITS, HEAD_BYTES, NAME, find_in_runs
from nearkin_shared.types import U8, U32, U64, Bools, Locations
from nearkin_shared.utils.frozen import frozen

ENTRIES_MAX = 1 << 14
ROOT_ENTRIES_MAX = 1 << 12
"""Of run 0: all of it is written again for a single entry that comes."""
SPILLS_MAX = 4
"""So many give on in one transaction, 0.7 MB each of chunks, whatever comes in."""
GONE = np.uint64(2**64 - 1)
"""In place of a container: the key has no place any more. No container has this id: it would be of the year 2527."""
DROPPED_AT_ONCE = 1 << 16
PLACE = np.dtype([("container", "<u8"), ("ordinal", "<u4")])
_ORDINAL_BITS = 23
assert ROWS_MAX == 1 << _ORDINAL_BITS
_STIRRED = np.uint64(0x9E3779B97F4A7C15)
"""Odd, and no 9 bits of it that follow each other are all alike: a flipped bit of what it stirs shows in the check."""
Get = Callable[[bytes], memoryview | None]
_FULL = b"\xff"
"""Names of the runs that have too much, one behind the other: the last key of the table."""
_HIDES = b"\xfe"
"""Is there where something may be hidden: where nothing was ever dropped from below a run, each entry holds."""
_NOWHERE: NDArray[np.intp] = np.zeros(0, np.intp)
_FAN = 1 << FAN_BITS


@frozen
class _Run:
    """n entries: `heads` uint64[n] ascending, `rows` V[n] of the rest of the key and the place. `children`: bits."""

    children: int
    heads: U64
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.heads)

    def take(self, chosen: Bools | slice) -> _Run:
        return _Run(0, self.heads[chosen], self.rows[chosen])


class KeyShape:
    """How a key of some width is parted: 8 bytes that are even over all keys, its head, and the rest, its tail."""

    def __init__(self, key_bytes: int) -> None:
        self.key_bytes = key_bytes
        self.tail_bytes = key_bytes - HEAD_BYTES
        self.row_dtype = np.dtype(f"V{self.tail_bytes + PLACE.itemsize}")
        self.entry_bytes = HEAD_BYTES + self.row_dtype.itemsize

    def part(self, keys: U8) -> tuple[U64, U8]:
        """Return (heads uint64[n], tails uint8[n, width - 8]) of uint8[n, width] keys."""
        heads = np.ascontiguousarray(keys[:, :HEAD_BYTES]).view(np.uint64).ravel()
        return heads, np.ascontiguousarray(keys[:, HEAD_BYTES:])

    def join(self, heads: U64, tails: U8) -> U8:
        """Return the keys of these heads and tails."""
        keys = np.empty((len(heads), self.key_bytes), np.uint8)
        keys[:, :HEAD_BYTES] = heads.view(np.uint8).reshape(-1, HEAD_BYTES)
        keys[:, HEAD_BYTES:] = tails
        return keys


class FeatureShape(KeyShape):
    """A super-feature's key: its namespace and rank, which many share, are the tail, and stirred into the head."""

    def part(self, keys: U8) -> tuple[U64, U8]:
        """Return (heads, tails): the super-feature is the last 8 bytes."""
        tails = np.ascontiguousarray(keys[:, :-HEAD_BYTES])
        own = np.ascontiguousarray(keys[:, -HEAD_BYTES:]).view(np.uint64).ravel()
        return own ^ self._stirred(tails), tails

    def join(self, heads: U64, tails: U8) -> U8:
        """Return the keys of these heads and tails."""
        keys = np.empty((len(heads), self.key_bytes), np.uint8)
        keys[:, :-HEAD_BYTES] = tails
        keys[:, -HEAD_BYTES:] = (heads ^ self._stirred(tails)).view(np.uint8).reshape(-1, HEAD_BYTES)
        return keys

    @staticmethod
    def _stirred(tails: U8) -> U64:
        namespaces = np.ascontiguousarray(tails[:, :HEAD_BYTES]).view(np.uint64).ravel()
        return namespaces ^ (tails[:, HEAD_BYTES].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


class SortedRuns:
    """One table. Each call is given the transaction in which it works; `txn` must give buffers."""

    def __init__(self, db: Any, shape: KeyShape) -> None:
        self._db = db
        self._shape = shape

    def locate(self, txn: Any, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, width] keys; rows not found are zeros."""
        heads, tails = self._shape.part(keys)
        order = np.argsort(heads)
        places, there = self._places(self._get(txn), heads[order], tails[order])
        held = order[there]
        found = np.zeros(len(keys), np.bool_)
        found[held] = True
        rows = np.zeros(len(keys), PLACE)
        rows[held] = places[there]
        return _to_locations(rows), found

    def _get(self, txn: Any) -> Get:
        return partial(txn.get, db=self._db)

    def _places(self, get: Get, heads: U64, tails: U8) -> tuple[NDArray[np.void], Bools]:
        """Return (places, found) of keys whose heads ascend; what is gone is not found."""
        places, found = np.zeros((len(heads), PLACE.itemsize), np.uint8), np.zeros(len(heads), np.bool_)
        try:
            find_in_runs(get, heads, tails, places, found)
        except BadInput as err:
            raise damage_error(err) from err
        rows = _verify_check(heads, places.view(PLACE).ravel(), found)
        return rows, found & (rows["container"] != GONE)

    def _value(self, txn: Any, depth: int, bits: int) -> memoryview | None:
        value: memoryview | None = txn.get(NAME.pack(depth, bits), db=self._db)
        return value

    def _run(self, value: memoryview | None) -> _Run:
        """Return a run as it lies there, no copy: it is good until its transaction writes or ends."""
        held = np.frombuffer(value if value is not None else bytes(CHILDREN_BYTES), np.uint8)
        count, rest = divmod(len(held) - CHILDREN_BYTES, self._shape.entry_bytes)
        if count < 0 or rest:
            raise damage_error(f"a run of {len(held)} bytes")
        rows = CHILDREN_BYTES + count * HEAD_BYTES
        heads = held[CHILDREN_BYTES:rows].view(np.uint64)
        if (heads[1:] < heads[:-1]).any():
            raise damage_error("the entries of a run are in no order")
        return _Run(int(held[0]), heads, held[rows:].view(self._shape.row_dtype))

    def add(self, txn: Any, keys: U8, places: NDArray[np.void]) -> None:
        """Put places for uint8[n, width] keys that have none; of one key the first stays."""
        heads, tails = self._shape.part(keys)
        order = _first(keys, heads, np.argsort(heads))
        _, there = self._places(self._get(txn), heads[order], tails[order])
        order = order[~there]
        self._put(txn, heads[order], tails[order], places[order])

    def _put(self, txn: Any, heads: U64, tails: U8, places: NDArray[np.void]) -> None:
        """Put what these keys, whose heads ascend, are to say from now on."""
        if not len(heads):
            return
        rows = np.empty((len(heads), self._shape.row_dtype.itemsize), np.uint8)
        rows[:, : self._shape.tail_bytes] = tails
        rows[:, self._shape.tail_bytes :] = _with_check(heads, places).view(np.uint8).reshape(-1, PLACE.itemsize)
        full = self._full(txn)
        before = set(full)
        self._merge(txn, 0, 0, _Run(0, heads, rows.view(self._shape.row_dtype).ravel()), full)
        depths = 1 + max((depth for depth, _ in full), default=0)
        for depth, bits in sorted(full)[: SPILLS_MAX + depths * len(heads) // ENTRIES_MAX]:
            full.remove((depth, bits))
            self._spill(txn, depth, bits, full)
        if full != before:
            self._set_full(txn, full)

    def _merge(self, txn: Any, depth: int, bits: int, more: _Run, full: set[tuple[int, int]]) -> None:
        """Let `more` hold in place of what a run says of these keys."""
        held = self._run(self._value(txn, depth, bits))
        at = np.searchsorted(held.heads, more.heads)
        met = held.heads[np.minimum(at, max(len(held), 1) - 1)] == more.heads if len(held) else at < 0
        if met.any() or (not held.children and self._run_lost(more).any()):
            both = self._over(more, held)
            self._write(txn, depth, bits, held.children, both if held.children else both.take(~self._run_lost(both)))
            count = len(both)
        else:
            self._write(txn, depth, bits, held.children, held, more, at)
            count = len(held) + len(more)
        if count > (ENTRIES_MAX if depth else min(ENTRIES_MAX, ROOT_ENTRIES_MAX)) and depth < DEPTH_MAX:
            full.add((depth, bits))

    def _over(self, more: _Run, held: _Run) -> _Run:
        """Return what both say, `more` in place of `held` where both have a key."""
        heads, rows = np.concatenate([more.heads, held.heads]), np.concatenate([more.rows, held.rows])
        both = _Run(0, heads, rows)
        keys = self._shape.join(heads, self._parted(both)[0])
        order = _first(keys, heads, np.argsort(heads, kind="stable"))
        return _Run(0, heads[order], rows[order])

    def _run_lost(self, run: _Run) -> Bools:
        gone: Bools = self._parted(run)[1]["container"] == GONE
        return gone

    def _spill(self, txn: Any, depth: int, bits: int, full: set[tuple[int, int]]) -> None:
        """Give all of a run to its children."""
        value = self._value(txn, depth, bits)
        held = self._run(None if value is None else memoryview(bytes(value)))
        parts = _parts(held.heads, 0, len(held), depth)
        children = held.children
        for i, _ in parts:
            children |= 1 << i
        self._write(txn, depth, bits, children, held.take(slice(0)))
        for i, (start, end) in parts:
            self._merge(txn, depth + 1, bits * _FAN + i, held.take(slice(start, end)), full)

    def _write(
        self,
        txn: Any,
        depth: int,
        bits: int,
        children: int,
        held: _Run,
        more: _Run | None = None,
        at: NDArray[np.intp] = _NOWHERE,
    ) -> None:
        """Write a run of what it held and what comes to it, each before entry `at` of what it held."""
        count = len(held) + (0 if more is None else len(more))
        value = np.empty(CHILDREN_BYTES + count * self._shape.entry_bytes, np.uint8)
        value[:CHILDREN_BYTES] = 0
        value[0] = children
        rows_at = CHILDREN_BYTES + count * HEAD_BYTES
        heads, rows = value[CHILDREN_BYTES:rows_at].view(np.uint64), value[rows_at:].view(self._shape.row_dtype)
        if more is None:
            heads[:], rows[:] = held.heads, held.rows
        else:
            at = at + np.arange(len(more))
            old = np.ones(count, np.bool_)
            old[at] = False
            heads[at], rows[at] = more.heads, more.rows
            heads[old], rows[old] = held.heads, held.rows
        txn.put(NAME.pack(depth, bits), memoryview(value), db=self._db)

    def _full(self, txn: Any) -> set[tuple[int, int]]:
        names = bytes(txn.get(_FULL, b"", db=self._db))
        return {_parse_name(names[at : at + NAME.size]) for at in range(0, len(names), NAME.size)}

    def _set_full(self, txn: Any, full: set[tuple[int, int]]) -> None:
        if full:
            txn.put(_FULL, b"".join(NAME.pack(*run) for run in sorted(full)), db=self._db)
        else:
            txn.delete(_FULL, db=self._db)

    def after(self, txn: Any, name: bytes) -> tuple[bytes, U8, Locations] | None:
        """Return (name, keys, locations) of the run that comes after the one of that name, copied; None at the end.

        Without what is gone, and what is hidden.
        """
        cursor = txn.cursor(self._db)
        if not (cursor.set_range(name + b"\0") if name else cursor.first()) or bytes(cursor.key()) >= _HIDES:
            return None
        name = bytes(cursor.key())
        _parse_name(name)
        run = self._run(cursor.value())
        tails, kept = self._parted(run)
        places = _verify_check(run.heads, kept, np.ones(len(kept), np.bool_))
        keys = self._shape.join(run.heads, tails)
        if txn.get(_HIDES, db=self._db) is not None:
            said, found = self._places(self._get(txn), run.heads.copy(), tails)
            shown = found & (said["container"] == places["container"]) & (said["ordinal"] == places["ordinal"])
            keys, places = keys[shown], places[shown]
        return name, keys, _to_locations(places)

    def _parted(self, run: _Run) -> tuple[U8, NDArray[np.void]]:
        rows = run.rows.view(np.uint8).reshape(len(run), self._shape.row_dtype.itemsize)
        tails, places = rows[:, : self._shape.tail_bytes], rows[:, self._shape.tail_bytes :]
        return np.ascontiguousarray(tails), np.ascontiguousarray(places).view(PLACE).reshape(len(run))

    def drop(self, txn: Any, unwanted: Callable[[Locations], Bools], keys: U8 | None = None) -> None:
        """Let the entries be gone whose location is unwanted: of `keys`, or of all."""
        if keys is not None:
            for start in range(0, len(keys), DROPPED_AT_ONCE):
                self._drop(txn, unwanted, keys[start : start + DROPPED_AT_ONCE])
            return
        name = b""
        while (found := self.after(txn, name)) is not None:
            name, keys, locations = found
            self._drop(txn, unwanted, keys[unwanted(locations)])

    def _drop(self, txn: Any, unwanted: Callable[[Locations], Bools], keys: U8) -> None:
        heads, tails = self._shape.part(keys)
        order = _first(keys, heads, np.argsort(heads))
        heads, tails = heads[order], tails[order]
        places, there = self._places(self._get(txn), heads, tails)
        there[there] = unwanted(_to_locations(places[there]))
        if not there.any():
            return
        txn.put(_HIDES, b"1", db=self._db)
        self._put(txn, heads[there], tails[there], places_of(GONE, np.zeros(np.count_nonzero(there), np.uint32)))


def _check(heads: U64, places: NDArray[np.void]) -> U32:
    """Return what stands above the ordinals of places that these heads have."""
    ordinals = places["ordinal"].astype(np.uint64) << np.uint64(64 - _ORDINAL_BITS)
    checks: U32 = ((heads ^ places["container"] ^ ordinals) * _STIRRED >> np.uint64(64 - 9)).astype(np.uint32)
    return checks << np.uint32(_ORDINAL_BITS)


def _with_check(heads: U64, places: NDArray[np.void]) -> NDArray[np.void]:
    """Return places as they lie in a run."""
    kept = places.copy()
    kept["ordinal"] |= _check(heads, places)
    return kept


def _verify_check(heads: U64, kept: NDArray[np.void], found: Bools) -> NDArray[np.void]:
    """Return places as they were put. Raises IndexDamaged where one that was found is another by now."""
    if not found.any():
        return kept
    places = kept.copy()
    places["ordinal"] &= np.uint32((1 << _ORDINAL_BITS) - 1)
    wrong = found & (_check(heads, places) != kept["ordinal"] ^ places["ordinal"])
    if wrong.any():
        row = int(wrong.argmax())
        place = f"number {int(places['ordinal'][row])} of container {int(places['container'][row]):016x}"
        raise damage_error(f"{place} is not what was put for {heads[row].tobytes().hex()}...")
    return places


def _parse_name(name: bytes) -> tuple[int, int]:
    """Return (depth, bits) of a run's name."""
    if len(name) != NAME.size or name[0] > DEPTH_MAX:
        raise damage_error(f"no run is named {name.hex()}")
    depth, bits = NAME.unpack(name)
    return depth, bits


def _first(keys: U8, heads: U64, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return `order`, in which heads ascend, without the rows whose key an earlier row has."""
    ordered = heads[order]
    shared = np.zeros(len(order), np.bool_)
    np.equal(ordered[1:], ordered[:-1], out=shared[1:])
    if not shared.any():
        return order
    shared[:-1] |= shared[1:]
    rows = np.sort(order[shared])
    gone = np.zeros(len(order), np.bool_)
    gone[rows[first_occurrence(keys[rows]) != np.arange(len(rows))]] = True
    return order[~gone[order]]


def _parts(heads: U64, start: int, end: int, depth: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (child, (first and last row)) of the ascending heads `start` to `end` of a run of that depth."""
    bits = (heads[start:end] >> np.uint64(64 - FAN_BITS * (depth + 1))) & np.uint64(_FAN - 1)
    cuts = [start, *(np.searchsorted(bits, np.arange(1, _FAN, dtype=np.uint64)) + start).tolist(), end]
    return [(i, (cuts[i], cuts[i + 1])) for i in range(_FAN) if cuts[i] < cuts[i + 1]]


def places_of(containers: Any, ordinals: NDArray[np.integer]) -> NDArray[np.void]:
    """Return PLACE[n] of these ordinals, and of one container or n."""
    places = np.empty(len(ordinals), PLACE)
    places["container"], places["ordinal"] = containers, ordinals
    return places


def _to_locations(places: NDArray[np.void]) -> Locations:
    return Locations(places["container"].astype(np.uint64), places["ordinal"].astype(np.uint32))
