"""Sorted runs: a table of an LMDB index from keys to locations.

Invariant: the shallowest run that has a key decides: its location, or that it was deleted. The first location added for
a key without one stays.

    run 0           all heads                           8 children, by the next 3 bits of a head
    runs 1, 0..7    heads that begin with 3 bits        ...
    runs 2, 0..63   with 6 bits

    name            depth 1, these bits 8 (big-endian)
    value           children 8 | head 8 ... | rest of the key, packed location 12 ...
    location        container 8, ordinal 23 bits, check of head and location 9 bits

A run is one value: one kernel call looks up a batch of keys in it, and a rewritten run occupies consecutive pages. New
entries are merged into run 0; a run of more than ENTRIES_MAX passes all its entries to its children. So an entry is
written about five times per depth, where a B-tree of single entries writes a page per entry, and entries are packed. A
spill reaches all children at once, and since heads are uniform, these fill up together: at most SPILLS_MAX runs spill
in one transaction, plus as many as the new entries need, the shallowest first; other runs exceed the limit meanwhile.

A removed entry is written into run 0 as deleted, and moves down until it meets the entry that it hides: to take 2,000
entries out of nearly as many runs would rewrite all of these. A run without children hides nothing, so it keeps no
deletions.

The check detects every single flipped bit of a location, and a location of another key or garbage in 511 of 512 cases:
a wrong location would be written into recipes and manifests. A damaged head or rest of a key matches no lookup.

An entry moves to deeper runs only: an iteration over the runs by name, in several transactions, misses none.
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
"""Limit of run 0, which is rewritten as a whole for a single new entry."""
SPILLS_MAX = 4
"""Runs that spill in one transaction, 0.7 MB each for chunks, regardless of the new entries."""
DELETED = np.uint64(2**64 - 1)
"""Container id of a deleted key's location. No container has this id: its time would be the year 2527."""
DROP_BATCH_ENTRIES = 1 << 16
PACKED_LOCATION = np.dtype([("container", "<u8"), ("ordinal", "<u4")])
_ORDINAL_BITS = 23
assert ROWS_MAX == 1 << _ORDINAL_BITS
_MIX_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, and no 9 consecutive bits of it are equal: a flipped bit of the product shows in the check."""
Get = Callable[[bytes], memoryview | None]
_FULL_RUNS_KEY = b"\xff"
"""Key of the list of the runs above their limit; the last key of the table."""
HAS_DELETED_KEY = b"\xfe"
"""Key that exists once entries may be hidden: before the first deletion every entry of every run is valid."""
_NO_POSITIONS: NDArray[np.intp] = np.zeros(0, np.intp)
_FAN = 1 << FAN_BITS


@frozen
class _Run:
    """Run of n entries and a bit mask of its children.

    `heads` uint64[n] ascend. `rows` is V[n]; a row is the rest of the key and the packed location.
    """

    children: int
    heads: U64
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.heads)

    def take(self, chosen: Bools | slice) -> _Run:
        return _Run(0, self.heads[chosen], self.rows[chosen])


class KeyShape:
    """Split of a key into its head, 8 uniformly distributed bytes, and its tail."""

    def __init__(self, key_bytes: int) -> None:
        self.key_bytes = key_bytes
        self.tail_bytes = key_bytes - HEAD_BYTES
        self.row_dtype = np.dtype(f"V{self.tail_bytes + PACKED_LOCATION.itemsize}")
        self.entry_bytes = HEAD_BYTES + self.row_dtype.itemsize

    def split(self, keys: U8) -> tuple[U64, U8]:
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
    """Split of a super-feature's key: namespace and rank are the tail.

    Many keys share them, so they are mixed into the head.
    """

    def split(self, keys: U8) -> tuple[U64, U8]:
        """Return (heads, tails); the super-feature is the last 8 bytes."""
        tails = np.ascontiguousarray(keys[:, :-HEAD_BYTES])
        own = np.ascontiguousarray(keys[:, -HEAD_BYTES:]).view(np.uint64).ravel()
        return own ^ self._mix(tails), tails

    def join(self, heads: U64, tails: U8) -> U8:
        """Return the keys of these heads and tails."""
        keys = np.empty((len(heads), self.key_bytes), np.uint8)
        keys[:, :-HEAD_BYTES] = tails
        keys[:, -HEAD_BYTES:] = (heads ^ self._mix(tails)).view(np.uint8).reshape(-1, HEAD_BYTES)
        return keys

    @staticmethod
    def _mix(tails: U8) -> U64:
        namespaces = np.ascontiguousarray(tails[:, :HEAD_BYTES]).view(np.uint64).ravel()
        return namespaces ^ (tails[:, HEAD_BYTES].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


class SortedRuns:
    """One table. Each call is given its transaction, which must return buffers."""

    def __init__(self, db: Any, shape: KeyShape) -> None:
        self._db = db
        self._shape = shape

    def locate(self, txn: Any, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, width] keys; rows not found are zeros."""
        heads, tails = self._shape.split(keys)
        order = np.argsort(heads)
        packed, is_found = self._locate_sorted(self._get(txn), heads[order], tails[order])
        found_rows = order[is_found]
        found = np.zeros(len(keys), np.bool_)
        found[found_rows] = True
        rows = np.zeros(len(keys), PACKED_LOCATION)
        rows[found_rows] = packed[is_found]
        return _to_locations(rows), found

    def _get(self, txn: Any) -> Get:
        return partial(txn.get, db=self._db)

    def _locate_sorted(self, get: Get, heads: U64, tails: U8) -> tuple[NDArray[np.void], Bools]:
        """Return (packed locations, found) of keys whose heads ascend, without deleted ones."""
        packed, found = np.zeros((len(heads), PACKED_LOCATION.itemsize), np.uint8), np.zeros(len(heads), np.bool_)
        try:
            find_in_runs(get, heads, tails, packed, found)
        except BadInput as err:
            raise damage_error(err) from err
        rows = _verify_check(heads, packed.view(PACKED_LOCATION).ravel(), found)
        return rows, found & (rows["container"] != DELETED)

    def _value(self, txn: Any, depth: int, bits: int) -> memoryview | None:
        value: memoryview | None = txn.get(NAME.pack(depth, bits), db=self._db)
        return value

    def _run(self, value: memoryview | None) -> _Run:
        """Return a run as a view, valid until its transaction writes or ends."""
        data = np.frombuffer(value if value is not None else bytes(CHILDREN_BYTES), np.uint8)
        count, rest = divmod(len(data) - CHILDREN_BYTES, self._shape.entry_bytes)
        if count < 0 or rest:
            raise damage_error(f"a run has {len(data)} bytes")
        rows = CHILDREN_BYTES + count * HEAD_BYTES
        heads = data[CHILDREN_BYTES:rows].view(np.uint64)
        if (heads[1:] < heads[:-1]).any():
            raise damage_error("the entries of a run are not sorted")
        return _Run(int(data[0]), heads, data[rows:].view(self._shape.row_dtype))

    def add(self, txn: Any, keys: U8, packed: NDArray[np.void]) -> None:
        """Add locations for uint8[n, width] keys that have none; the first per key stays."""
        heads, tails = self._shape.split(keys)
        order = _first_rows(keys, heads, np.argsort(heads))
        _, is_found = self._locate_sorted(self._get(txn), heads[order], tails[order])
        order = order[~is_found]
        self._put(txn, heads[order], tails[order], packed[order])

    def _put(self, txn: Any, heads: U64, tails: U8, packed: NDArray[np.void]) -> None:
        """Write the new locations of keys whose heads ascend, replacing those of before."""
        if not len(heads):
            return
        full = self._full(txn)
        before = set(full)
        self._merge(txn, 0, 0, self._packed_run(heads, tails, packed), full)
        depths = 1 + max((depth for depth, _ in full), default=0)
        for depth, bits in sorted(full)[: SPILLS_MAX + depths * len(heads) // ENTRIES_MAX]:
            full.remove((depth, bits))
            self._spill(txn, depth, bits, full)
        if full != before:
            self._set_full(txn, full)

    def _packed_run(self, heads: U64, tails: U8, packed: NDArray[np.void]) -> _Run:
        """Return a run of keys whose heads ascend, and their locations."""
        rows = np.empty((len(heads), self._shape.row_dtype.itemsize), np.uint8)
        rows[:, : self._shape.tail_bytes] = tails
        location_bytes = _with_check(heads, packed).view(np.uint8)
        rows[:, self._shape.tail_bytes :] = location_bytes.reshape(-1, PACKED_LOCATION.itemsize)
        return _Run(0, heads, rows.view(self._shape.row_dtype).ravel())

    def _merge(self, txn: Any, depth: int, bits: int, added: _Run, full: set[tuple[int, int]]) -> None:
        """Merge `added` into a run, replacing its entries of the same keys."""
        existing = self._run(self._value(txn, depth, bits))
        at = np.searchsorted(existing.heads, added.heads)
        overlaps = existing.heads[np.minimum(at, max(len(existing), 1) - 1)] == added.heads if len(existing) else at < 0
        if overlaps.any() or (not existing.children and self._is_deleted(added).any()):
            merged = self._overlay(added, existing)
            count = len(merged)
            if not existing.children:  # nothing is hidden below: no deletion need be kept
                merged = merged.take(~self._is_deleted(merged))
            self._write(txn, depth, bits, existing.children, merged)
        else:
            self._write(txn, depth, bits, existing.children, existing, added, at)
            count = len(existing) + len(added)
        if count > (ENTRIES_MAX if depth else min(ENTRIES_MAX, ROOT_ENTRIES_MAX)) and depth < DEPTH_MAX:
            full.add((depth, bits))

    def _overlay(self, added: _Run, existing: _Run) -> _Run:
        """Return the entries of two runs; where a key is in each, that of `added`."""
        heads, rows = np.concatenate([added.heads, existing.heads]), np.concatenate([added.rows, existing.rows])
        merged = _Run(0, heads, rows)
        keys = self._shape.join(heads, self._split_rows(merged)[0])
        order = _first_rows(keys, heads, np.argsort(heads, kind="stable"))
        return _Run(0, heads[order], rows[order])

    def _is_deleted(self, run: _Run) -> Bools:
        deleted: Bools = self._split_rows(run)[1]["container"] == DELETED
        return deleted

    def _spill(self, txn: Any, depth: int, bits: int, full: set[tuple[int, int]]) -> None:
        """Move all entries of a run to its children."""
        value = self._value(txn, depth, bits)
        existing = self._run(None if value is None else memoryview(bytes(value)))
        parts = _child_ranges(existing.heads, 0, len(existing), depth)
        children = existing.children
        for i, _ in parts:
            children |= 1 << i
        self._write(txn, depth, bits, children, existing.take(slice(0)))
        for i, (start, end) in parts:
            self._merge(txn, depth + 1, bits * _FAN + i, existing.take(slice(start, end)), full)

    def _write(
        self,
        txn: Any,
        depth: int,
        bits: int,
        children: int,
        existing: _Run,
        added: _Run | None = None,
        at: NDArray[np.intp] = _NO_POSITIONS,
    ) -> None:
        """Write a run of `existing` and, if given, `added`.

        Each entry of `added` is inserted before entry `at` of `existing`.
        """
        count = len(existing) + (0 if added is None else len(added))
        value = np.empty(CHILDREN_BYTES + count * self._shape.entry_bytes, np.uint8)
        value[:CHILDREN_BYTES] = 0
        value[0] = children
        rows_at = CHILDREN_BYTES + count * HEAD_BYTES
        heads, rows = value[CHILDREN_BYTES:rows_at].view(np.uint64), value[rows_at:].view(self._shape.row_dtype)
        if added is None:
            heads[:], rows[:] = existing.heads, existing.rows
        else:
            at = at + np.arange(len(added))
            old = np.ones(count, np.bool_)
            old[at] = False
            heads[at], rows[at] = added.heads, added.rows
            heads[old], rows[old] = existing.heads, existing.rows
        txn.put(NAME.pack(depth, bits), memoryview(value), db=self._db)

    def _full(self, txn: Any) -> set[tuple[int, int]]:
        names = bytes(txn.get(_FULL_RUNS_KEY, b"", db=self._db))
        return {_parse_name(names[at : at + NAME.size]) for at in range(0, len(names), NAME.size)}

    def _set_full(self, txn: Any, full: set[tuple[int, int]]) -> None:
        if full:
            txn.put(_FULL_RUNS_KEY, b"".join(NAME.pack(*run) for run in sorted(full)), db=self._db)
        else:
            txn.delete(_FULL_RUNS_KEY, db=self._db)

    def next_run(self, txn: Any, name: bytes) -> tuple[bytes, U8, Locations] | None:
        """Return (name, keys, locations) of the run after `name`; None at the end.

        The arrays are copies. Deleted and hidden entries are left out.
        """
        cursor = txn.cursor(self._db)
        if not (cursor.set_range(name + b"\0") if name else cursor.first()) or bytes(cursor.key()) >= HAS_DELETED_KEY:
            return None
        name = bytes(cursor.key())
        _parse_name(name)
        run = self._run(cursor.value())
        tails, stored = self._split_rows(run)
        packed = _verify_check(run.heads, stored, np.ones(len(stored), np.bool_))
        keys = self._shape.join(run.heads, tails)
        if txn.get(HAS_DELETED_KEY, db=self._db) is not None:
            current, found = self._locate_sorted(self._get(txn), run.heads.copy(), tails)
            is_current = found & (current["container"] == packed["container"])
            is_current &= current["ordinal"] == packed["ordinal"]
            keys, packed = keys[is_current], packed[is_current]
        return name, keys, _to_locations(packed)

    def _split_rows(self, run: _Run) -> tuple[U8, NDArray[np.void]]:
        rows = run.rows.view(np.uint8).reshape(len(run), self._shape.row_dtype.itemsize)
        tails, packed = rows[:, : self._shape.tail_bytes], rows[:, self._shape.tail_bytes :]
        return np.ascontiguousarray(tails), np.ascontiguousarray(packed).view(PACKED_LOCATION).reshape(len(run))

    def drop(self, txn: Any, is_removed: Callable[[Locations], Bools], keys: U8 | None = None) -> None:
        """Delete the entries, of `keys` or of all, whose location is removed."""
        if keys is not None:
            for start in range(0, len(keys), DROP_BATCH_ENTRIES):
                self._drop(txn, is_removed, keys[start : start + DROP_BATCH_ENTRIES])
            return
        name = b""
        while (found := self.next_run(txn, name)) is not None:
            name, keys, locations = found
            self._drop(txn, is_removed, keys[is_removed(locations)])

    def _drop(self, txn: Any, is_removed: Callable[[Locations], Bools], keys: U8) -> None:
        heads, tails = self._shape.split(keys)
        order = _first_rows(keys, heads, np.argsort(heads))
        heads, tails = heads[order], tails[order]
        packed, is_found = self._locate_sorted(self._get(txn), heads, tails)
        is_found[is_found] = is_removed(_to_locations(packed[is_found]))
        if not is_found.any():
            return
        txn.put(HAS_DELETED_KEY, b"1", db=self._db)
        deletions = pack_locations(DELETED, np.zeros(np.count_nonzero(is_found), np.uint32))
        self._put(txn, heads[is_found], tails[is_found], deletions)


def _check(heads: U64, packed: NDArray[np.void]) -> U32:
    """Return the checks of packed locations under these heads, above the ordinal bits."""
    ordinals = packed["ordinal"].astype(np.uint64) << np.uint64(64 - _ORDINAL_BITS)
    checks: U32 = ((heads ^ packed["container"] ^ ordinals) * _MIX_FACTOR >> np.uint64(64 - 9)).astype(np.uint32)
    return checks << np.uint32(_ORDINAL_BITS)


def _with_check(heads: U64, packed: NDArray[np.void]) -> NDArray[np.void]:
    """Return packed locations with their checks, as a run stores them."""
    stored = packed.copy()
    stored["ordinal"] |= _check(heads, packed)
    return stored


def _verify_check(heads: U64, stored: NDArray[np.void], found: Bools) -> NDArray[np.void]:
    """Return packed locations without their checks.

    Raises: IndexDamaged, if the check of a row found fails.
    """
    if not found.any():
        return stored
    packed = stored.copy()
    packed["ordinal"] &= np.uint32((1 << _ORDINAL_BITS) - 1)
    wrong = found & (_check(heads, packed) != stored["ordinal"] ^ packed["ordinal"])
    if wrong.any():
        row = int(wrong.argmax())
        location = f"ordinal {int(packed['ordinal'][row])} of container {int(packed['container'][row]):016x}"
        raise damage_error(f"{location} fails its check under key {heads[row].tobytes().hex()}...")
    return packed


def _parse_name(name: bytes) -> tuple[int, int]:
    """Return (depth, bits) of a run's name."""
    if len(name) != NAME.size or name[0] > DEPTH_MAX:
        raise damage_error(f"invalid run name {name.hex()}")
    depth, bits = NAME.unpack(name)
    return depth, bits


def _first_rows(keys: U8, heads: U64, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return `order`, in which heads ascend, without rows that repeat an earlier key."""
    ordered = heads[order]
    shared = np.zeros(len(order), np.bool_)
    np.equal(ordered[1:], ordered[:-1], out=shared[1:])
    if not shared.any():
        return order
    shared[:-1] |= shared[1:]
    rows = np.sort(order[shared])
    repeated = np.zeros(len(order), np.bool_)
    repeated[rows[first_occurrence(keys[rows]) != np.arange(len(rows))]] = True
    return order[~repeated[order]]


def _child_ranges(heads: U64, start: int, end: int, depth: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (child, (first row, end row)) of ascending heads in a run of that depth."""
    bits = (heads[start:end] >> np.uint64(64 - FAN_BITS * (depth + 1))) & np.uint64(_FAN - 1)
    cuts = [start, *(np.searchsorted(bits, np.arange(1, _FAN, dtype=np.uint64)) + start).tolist(), end]
    return [(i, (cuts[i], cuts[i + 1])) for i in range(_FAN) if cuts[i] < cuts[i + 1]]


def pack_locations(containers: Any, ordinals: NDArray[np.integer]) -> NDArray[np.void]:
    """Pack the ordinals of one container, or of n, as PACKED_LOCATION[n]."""
    packed = np.empty(len(ordinals), PACKED_LOCATION)
    packed["container"], packed["ordinal"] = containers, ordinals
    return packed


def _to_locations(packed: NDArray[np.void]) -> Locations:
    return Locations(packed["container"].astype(np.uint64), packed["ordinal"].astype(np.uint32))
