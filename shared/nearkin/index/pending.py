"""Pending index. Invariant: what is not yet durable is found by this writer alone, in the order of its publishing.

Chunks wait here between being placed in a container and that container being durable (I1). Answers do not depend on
when a container was published: what was stored first wins, here as in the index below.
"""

from __future__ import annotations

import threading

import numpy as np

from nearkin.claims import FEATURE_KEY_BYTES, feature_keys
from nearkin.index.protocols import Index, SupportsAllRanks
from nearkin.kernels.nametable import NameTable
from nearkin.records import NAME_BYTES, SEGMENT_ID_BYTES, U8, U64, Bools, ContainerId, Locations

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
        """Return (locations, rank, found): rank by rank, the durable holder before the pending one (stream order)."""
        count, ranks = super_features.shape
        locations, rank_found, found = Locations.empty(count), np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        if not super_features.any():
            return locations, rank_found, found
        with self._lock:
            all_ranks = None
            if isinstance(self._index, SupportsAllRanks):
                all_ranks = self._index.locate_ranks(sketch, super_features)
            for rank in range(ranks):
                rows = np.flatnonzero(~found & (super_features[:, rank] != 0))
                if not len(rows):
                    continue
                if all_ranks is not None:
                    durable, there = all_ranks[0].take(rank * count + rows), all_ranks[1][rank * count + rows]
                else:
                    durable, there = self._index.locate_rank(sketch, rank, super_features[rows, rank])
                keys = feature_keys(sketch, self._domain, rank, super_features[rows, rank])
                hits, there = self._merged(self._features, keys, durable, there)
                rows = rows[there]
                locations.containers[rows], locations.ordinals[rows] = hits.containers[there], hits.ordinals[there]
                rank_found[rows], found[rows] = rank, True
        return locations, rank_found, found

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
        with self._lock:
            self._chunks.put_first_many(names, chunks.containers, chunks.ordinals)
            self._segments.put_first_many(segment_ids, segments.containers, segments.ordinals)
            for rank in range(super_features.shape[1]):
                rows = np.flatnonzero(super_features[:, rank])
                keys = feature_keys(sketch, self._domain, rank, super_features[rows, rank])
                self._features.put_first_many(keys, base_chunks.containers[rows], base_chunks.ordinals[rows])

    def published(self, container: ContainerId) -> None:
        """Forget a container's entries: the index below has them now."""
        ids = np.array([container], np.uint64)
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
