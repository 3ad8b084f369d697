"""Tables of an LMDB index with many entries a container: chunks, segments, super-features.

Invariant: a table changes within the transaction that it is given, with the other tables or not at all.

    chunks      name 32                     -> container 8, ordinal 4
    features    namespace 8, rank 1, SF 8   -> container 8, ordinal 4       first in stream order
    segments    segment id 20               -> container 8, ordinal 4

`ExactTables` has all three as sorted runs; the kind `tablets` has others for chunks and segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from nearkin_shared.index.container_entries import FEATURE_KEY_BYTES, ContainerEntries, feature_keys
from nearkin_shared.index.lmdb.entry_encoding import KeyedLocations
from nearkin_shared.index.lmdb.lmdb_removal import Removals, find_keys, is_removed
from nearkin_shared.index.lmdb.sorted_run_table import FeatureShape, KeyShape, SortedRuns
from nearkin_shared.observability import counters
from nearkin_shared.results import IndexReport
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, Bools, Locations

TABLETS_MARKER = b" tablets"
"""Ends the marker of an index of the kind `tablets` or `sampled`."""
Rows = Callable[[str], Iterator[tuple[U8, Locations]]]
"""Yields (keys, locations) of a table, in transactions of its own."""
Portion = tuple[bytes, U8, Locations]
"""A position in a table, and the keys and locations up to it."""
SHAPES: Mapping[str, KeyShape] = {
    "chunks": KeyShape(NAME_BYTES),
    "segments": KeyShape(SEGMENT_ID_BYTES),
    "features": FeatureShape(FEATURE_KEY_BYTES),
}


class EntryTables(Protocol):
    """Tables of many entries, by name."""

    @property
    def marker(self) -> bytes:
        """Return what distinguishes a complete index with these tables.

        An index of another kind is rebuilt.
        """

    def locate(self, txn: Any, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, width] keys, n > 0; rows not found are zeros."""

    def next_rows(self, txn: Any, table: str, position: bytes) -> Portion | None:
        """Return the entries of a table after a position, b"" first; None at the end.

        No entry is missed in several transactions; some may be repeated.
        """

    def report(self, txn: Any) -> IndexReport:
        """Return memory and expected loss of the index."""

    def add(self, txn: Any, many: Sequence[ContainerEntries]) -> None:
        """Add the entries of containers, in order; the first entry of a key stays."""

    def find_removed(self, rows: Rows, removals: Mapping[str, Removals]) -> dict[str, U8]:
        """Return keys by table, among them all that name a removal; prepares `drop`."""

    def drop(
        self, txn: Any, removals: Mapping[str, Removals], deleted: Collection[int], keys: Mapping[str, U8] | None
    ) -> None:
        """Remove entries by location; `keys`: the result of `find_removed` for these or more.

        `deleted` containers are removed as a whole, and `removals` say so.
        """

    def on_renewed(self, txn: Any, container: int) -> None:
        """Take note that a container was rewritten."""

    def on_written(self) -> None:
        """Take note that the transaction of the last `add` or `drop` is committed."""

    def on_aborted(self) -> None:
        """Take note that a transaction failed, and its changes with it."""

    def close(self) -> None:
        """Release memory and threads. Idempotent."""


class ExactTables(EntryTables):
    """All entries in sorted runs."""

    marker = b""

    def __init__(self, databases: Mapping[str, Any]) -> None:
        self.runs: dict[str, SortedRuns] = {name: SortedRuns(databases[name], shape) for name, shape in SHAPES.items()}

    def locate(self, txn: Any, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys."""
        counters.INDEX_READS.add(len(keys), table)
        return self.runs[table].locate(txn, keys)

    def next_rows(self, txn: Any, table: str, position: bytes) -> Portion | None:
        """Return the next run."""
        return self.runs[table].next_run(txn, position)

    def report(self, _txn: Any) -> IndexReport:
        """Return that the index uses the page cache."""
        return IndexReport("exact")

    def add(self, txn: Any, many: Sequence[ContainerEntries]) -> None:
        """Add the entries of containers."""
        chunks, segments = KeyedLocations(NAME_BYTES), KeyedLocations(SEGMENT_ID_BYTES)
        for claims in many:
            container = claims.directory.container
            chunks.add(claims.directory.chunks.names[claims.findable], container, claims.findable)
            rows = np.flatnonzero(claims.segment_ids.any(axis=1))
            segments.add(claims.segment_ids[rows], container, rows)
        self.runs["chunks"].add(txn, *chunks.join)
        add_features(txn, self.runs["features"], many)
        self.runs["segments"].add(txn, *segments.join)

    def find_removed(self, rows: Rows, removals: Mapping[str, Removals]) -> dict[str, U8]:
        """Return the keys that name a removal: a scan of three tables."""
        return {table: find_keys(rows(table), removed, SHAPES[table].key_bytes) for table, removed in removals.items()}

    def drop(
        self, txn: Any, removals: Mapping[str, Removals], _deleted: Collection[int], keys: Mapping[str, U8] | None
    ) -> None:
        """Remove entries; without `keys` a scan of three tables."""
        for table, removed in removals.items():
            if removed:
                is_gone = partial(is_removed, removals=removed)
                self.runs[table].drop(txn, is_gone, None if keys is None else keys[table])

    def on_renewed(self, _txn: Any, _container: int) -> None:
        """Do nothing: no entry changed."""

    def on_written(self) -> None:
        """Do nothing: all is in the transaction."""

    def on_aborted(self) -> None:
        """Do nothing: all was in the transaction."""

    def close(self) -> None:
        """Do nothing: all is in the environment."""


def add_features(txn: Any, runs: SortedRuns, many: Sequence[ContainerEntries]) -> None:
    """Add the super-features of containers' bases."""
    features = KeyedLocations(FEATURE_KEY_BYTES)
    for claims in many:
        directory = claims.directory
        for sketch, (bases, super_features) in claims.super_features.items():
            rows = np.flatnonzero(super_features.T)
            if len(rows):
                keys = feature_keys(sketch, directory.domain, super_features)[rows]
                features.add(keys, directory.container, bases[rows % len(super_features)])
    runs.add(txn, *features.join)
