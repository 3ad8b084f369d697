"""Index entries of one writer whose containers are not durable yet.

Invariant: pending entries are found by this writer alone, in publishing order.

Entries stay here from the time a chunk is added to a container until that container is durable (I1). Answers do not
depend on when a container was published: the first stored chunk wins, as in the durable index.
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
"""Bound on memory if publishing stopped; far above the entries of all containers that can be in flight."""


class PendingIndex:
    """Pending entries of chunks, bases and segments, consulted in addition to a durable index."""

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
        """Return (locations, rank, found) by the first rank that is found.

        Within one rank the durable chunk precedes the pending one (stream order).
        """
        count, ranks = super_features.shape
        if not super_features.any():
            return Locations.empty(count), np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        nonzero = np.flatnonzero(super_features.T)
        keys = feature_keys(sketch, self._domain, super_features)[nonzero]
        with self._lock:
            durable, is_found = self._index.locate_ranks(sketch, super_features)
            pending, found_rows = self._merged(self._features, keys, durable.take(nonzero), is_found[nonzero])
        is_found[nonzero] = found_rows
        durable.containers[nonzero], durable.ordinals[nonzero] = pending.containers, pending.ordinals
        found_by_rank = is_found.reshape(ranks, count)
        first = found_by_rank.argmax(axis=0)
        found: Bools = np.any(found_by_rank, axis=0)
        rows = np.flatnonzero(found)
        locations = Locations.empty(count)
        chosen = durable.take(first[rows] * count + rows)
        locations.containers[rows], locations.ordinals[rows] = chosen.containers, chosen.ordinals
        return locations, first.astype(np.uint8), found

    def add(
        self,
        names: U8,
        chunks: Locations,
        sketch: str,
        base_chunks: Locations,
        super_features: U64,
        segment_ids: U8,
        segments: Locations,
    ) -> None:
        """Add entries that only this writer finds."""
        rows = np.flatnonzero(super_features.T)
        with self._lock:
            self._chunks.put_first_many(names, chunks.containers, chunks.ordinals)
            self._segments.put_first_many(segment_ids, segments.containers, segments.ordinals)
            if len(rows):
                keys = feature_keys(sketch, self._domain, super_features)[rows]
                chunk_rows = rows % len(super_features)
                self._features.put_first_many(
                    keys, base_chunks.containers[chunk_rows], base_chunks.ordinals[chunk_rows]
                )

    def on_published(self, containers: Sequence[ContainerId]) -> None:
        """Remove the entries of containers that the durable index now has."""
        ids = np.array(containers, np.uint64)
        with self._lock:
            for table in (self._chunks, self._features, self._segments):
                table.discard_containers(ids)

    @staticmethod
    def _merged(table: NameTable, keys: U8, locations: Locations, found: Bools) -> tuple[Locations, Bools]:
        """Fill in rows that the durable index did not find from the pending table."""
        missing = np.flatnonzero(~found)
        if len(missing) and len(table):
            containers, ordinals, is_pending = table.get_many(np.ascontiguousarray(keys[missing]))
            rows = missing[is_pending]
            locations.containers[rows], locations.ordinals[rows], found[rows] = (
                containers[is_pending],
                ordinals[is_pending],
                True,
            )
        return locations, found
