"""Sorted runs within a number of bytes: the entries of the oldest containers are evicted.

    7/8 of the bound  -> a sweep begins: a quarter of the entries, those of the oldest containers, will be evicted
    each addition     -> the next runs are written without them, enough that the sweep ends below the bound
    last run          -> the sweep has ended

    the table's last keys: 0xfe 01 -> newest evicted container 8, name of the last swept run 9

Super-features find similar chunks that the stream's own order does not lead to, and those are mostly in recent versions
(Palantir, section 3.1). A base that is not found costs space.

Invariant: a deleted location never returns. A run with children keeps an evicted entry as deleted if it may hide one.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.index.lmdb.sorted_run_table import (
    DELETED,
    HAS_DELETED_KEY,
    KeyShape,
    SortedRuns,
    pack_locations,
)
from nearkin_shared.kernels.sorted_runs import DEPTH_MAX, FAN_BITS, NAME
from nearkin_shared.types import U8, U64

_SWEEP_KEY = HAS_DELETED_KEY + b"\x01"
_SWEEP = Struct(f"<Q{NAME.size}s")
START_SHARE = 7 / 8
"""Share of the bound at which a sweep begins: the rest is for what is added before it ends."""
EVICTED_SHARE = 1 / 4
"""Share of the entries that a sweep evicts: each entry is rewritten for three times its size of new ones."""
SWEPT_MIN = 4
"""Runs swept by an addition, at most 2 MB of super-features."""
SWEPT_FACTOR = 16
"""Bytes swept for each byte added: the whole table before it has grown by a sixteenth."""


class BoundedRuns(SortedRuns):
    """One table whose pages have at most `bytes_max` bytes."""

    def __init__(self, db: Any, shape: KeyShape, bytes_max: int) -> None:
        super().__init__(db, shape)
        self._bytes_max = bytes_max

    def add(self, txn: Any, keys: U8, packed: NDArray[np.void]) -> None:
        """Add locations for keys that have none, and evict those of the oldest containers."""
        super().add(txn, keys, packed)
        state = txn.get(_SWEEP_KEY, db=self._db)
        if state is None:
            if self.nbytes(txn) <= self._bytes_max * START_SHARE:
                return
            newest, name = self._newest_evicted(txn), b""
        elif len(state) != _SWEEP.size:
            raise damage_error(f"the state of a sweep has {len(state)} bytes")
        else:
            newest, name = _SWEEP.unpack(state)
        for _ in range(self._runs_due(txn, len(keys))):
            following = self._next_name(txn, name)
            if following is None:
                txn.delete(_SWEEP_KEY, db=self._db)
                return
            name = following
            self._sweep(txn, name, np.uint64(newest))
        txn.put(_SWEEP_KEY, _SWEEP.pack(newest, name), db=self._db)

    def nbytes(self, txn: Any) -> int:
        """Return the bytes of the table's pages."""
        sums = txn.stat(self._db)
        pages: int = sums["branch_pages"] + sums["leaf_pages"] + sums["overflow_pages"]
        return pages * int(sums["psize"])

    def _runs_due(self, txn: Any, added: int) -> int:
        """Return how many runs are swept after so many new entries."""
        runs = int(txn.stat(self._db)["entries"])
        return SWEPT_MIN + SWEPT_FACTOR * added * self._shape.entry_bytes * runs // max(1, self.nbytes(txn))

    def _newest_evicted(self, txn: Any) -> int:
        """Return the newest container that a sweep evicts, by a sample of the entries.

        The sample is one run of each depth. Heads are uniform, so an entry stands for as many as there are such runs.
        """
        found, weights = [np.zeros(0, np.uint64)], [np.zeros(0, np.float64)]
        for depth in range(DEPTH_MAX + 1):
            value = self._value(txn, depth, 0)
            if value is None:
                break
            containers = self._containers(value)
            found.append(containers[containers != DELETED])
            weights.append(np.full(len(found[-1]), float(1 << FAN_BITS * depth)))
        containers = np.concatenate(found)
        if not len(containers):
            return 0
        order = np.argsort(containers, kind="stable")
        sums = np.cumsum(np.concatenate(weights)[order])
        at = int(np.searchsorted(sums, sums[-1] * EVICTED_SHARE))
        return min(int(containers[order[at]]), int(containers.max()) - 1)  # never the newest container

    def _containers(self, value: memoryview) -> U64:
        """Return a copy of the containers of a run's entries."""
        containers: U64 = self._split_rows(self._run(value))[1]["container"].astype(np.uint64)
        return containers

    def _next_name(self, txn: Any, name: bytes) -> bytes | None:
        """Return the name of the run after `name`, b"" before the first; None at the end."""
        cursor = txn.cursor(self._db)
        if not (cursor.set_range(name + b"\0") if name else cursor.first()):
            return None
        key = bytes(cursor.key())
        return key if key < HAS_DELETED_KEY else None

    def _sweep(self, txn: Any, name: bytes, newest: np.uint64) -> None:
        """Write a run without the entries of containers up to `newest`."""
        depth, bits = NAME.unpack(name)
        run = self._run(memoryview(bytes(txn.get(name, db=self._db))))
        tails, stored = self._split_rows(run)
        is_evicted = (stored["container"] <= newest) & (stored["container"] != DELETED)
        if not is_evicted.any():
            return
        self._write(txn, depth, bits, run.children, run.take(~is_evicted))
        if run.children and txn.get(HAS_DELETED_KEY, db=self._db) is not None:
            rows = np.flatnonzero(is_evicted)
            deletions = pack_locations(DELETED, np.zeros(len(rows), np.uint32))
            self._merge(txn, depth, bits, self._packed_run(run.heads[rows], tails[rows], deletions), self._full(txn))
