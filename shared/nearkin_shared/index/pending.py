"""Pending index. Invariant: what is not yet durable is found by this writer alone, in the order of its publishing.

Chunks wait here between being placed in a container and that container being durable (I1). Answers do not depend on
when a container was published: what was stored first wins, here as in the index below.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from nearkin_shared.index.container_entries import FEATURE_KEY_BYTES, feature_keys
from nearkin_shared.index.protocols import Index
from nearkin_shared.kernels.fingerprint_table import NameTable
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U64, Bools, ContainerId, Locations

ENTRIES_MAX = 1 << 24
"""Far above what fits in the containers that can be in flight; bounds memory if publishing ever stood still."""


class PendingIndex:
    """Chunks, bases and segments of containers in flight, before an index of durable ones."""

    def __init__(self, index: Index, domain: bytes) -> None:
        self._index = index
        self._domain = domain
        self._lock = threading.Lock()
        self._chunks = NameTable(NAME_BYTES, ENTRIES_MAX)
        self._features = NameTable(FEATURE_KEY_BYTES, ENTRIES_MAX)
        self._segments = NameTable(SEGMENT_ID_BYTES, ENTRIES_MAX)

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        with self._lock:
            return self._merged(self._chunks, names, *self._index.locate_chunks(names))

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        with self._lock:
            return self._merged(self._segments, segment_ids, *self._index.locate_segments(segment_ids))

    def locate_bases(self, sketch: str, super_features: U64) -> tuple[Locations, U8, Bools]:
        """Return (locations, rank, found): the first rank that is found; of one rank the durable holder stands before
        the pending one (stream order).
        """
        count, ranks = super_features.shape
        if not super_features.any():
            return Locations.empty(count), np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        asked = np.flatnonzero(super_features.T)
        keys = feature_keys(sketch, self._domain, super_features)[asked]
        with self._lock:
            everything, there = self._index.locate_ranks(sketch, super_features)
            pending, known = self._merged(self._features, keys, everything.take(asked), there[asked])
        there[asked] = known
        everything.containers[asked], everything.ordinals[asked] = pending.containers, pending.ordinals
        of_rank = there.reshape(ranks, count)
        first = of_rank.argmax(axis=0)
        found: Bools = np.any(of_rank, axis=0)
        rows = np.flatnonzero(found)
        locations = Locations.empty(count)
        taken = everything.take(first[rows] * count + rows)
        locations.containers[rows], locations.ordinals[rows] = taken.containers, taken.ordinals
        return locations, first.astype(np.uint8), found

    def place(
        self,
        names: U8,
        chunks: Locations,
        sketch: str,
        base_chunks: Locations,
        super_features: U64,
        segment_ids: U8,
        segments: Locations,
    ) -> None:
        """Make entries findable by this writer."""
        rows = np.flatnonzero(super_features.T)
        with self._lock:
            self._chunks.put_first_many(names, chunks.containers, chunks.ordinals)
            self._segments.put_first_many(segment_ids, segments.containers, segments.ordinals)
            if len(rows):
                keys = feature_keys(sketch, self._domain, super_features)[rows]
                of = rows % len(super_features)
                self._features.put_first_many(keys, base_chunks.containers[of], base_chunks.ordinals[of])

    def on_published(self, containers: Sequence[ContainerId]) -> None:
        """Forget the entries of containers: the index below has them now."""
        ids = np.array(containers, np.uint64)
        with self._lock:
            for table in (self._chunks, self._features, self._segments):
                table.discard_containers(ids)

    @staticmethod
    def _merged(table: NameTable, keys: U8, locations: Locations, found: Bools) -> tuple[Locations, Bools]:
        """Return the answers with those of the table filled in where the index below found nothing."""
        missing = np.flatnonzero(~found)
        if len(missing) and len(table):
            containers, ordinals, there = table.get_many(np.ascontiguousarray(keys[missing]))
            rows = missing[there]
            locations.containers[rows], locations.ordinals[rows], found[rows] = containers[there], ordinals[there], True
        return locations, found
