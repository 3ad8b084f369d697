"""Cut uploads in a gateway, and ask the index which chunks the store lacks.

    frames | tail of the batch before -> chunker stage -> dedup stage, index -> sparse segments, each within a message

The same stages as in the workers, put together for `nearkin_gateway.backends.edge_upload`.

Invariant: only what the index answered as known is left out. Without an answer all bytes are sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from nearkin_chunker import BlobRun, ChunkerStage, CutState, FrameRuns
from nearkin_chunker.segment_messages import check_messages_fit, message_bounds
from nearkin_chunker.splitter import Arenas
from nearkin_dedup import DedupStage
from nearkin_gateway.backends.source_dedup import BATCH_BYTES
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import RetryableError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.formats.message import Envelope, Sparse, encode
from nearkin_shared.index.protocols import Index
from nearkin_shared.kafka.record_guard import TENANTS_MAX, BoundedCache
from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.pipeline.stage import FoundLocations, LookupRequest, LookupResults, run_stage
from nearkin_shared.storage.descriptor import Descriptor
from nearkin_shared.types import U8, FreshBatch, Locations, SegmentBatch

AWAY_SECONDS = 10.0
"""How long the index is not asked after it did not answer: each question would wait for its timeout."""
_log = logging.getLogger("nearkin.gateway")


class IndexLookups:
    """Lookups of one tenant's names; nothing is known while the index is away. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._away_until = 0.0

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers added."""
        if reads.segment_ids is not None:
            return replace(facts, segments=self._located(reads.segment_ids, is_segment=True))
        assert reads.names is not None
        return replace(facts, chunks=self._located(reads.names, is_segment=False))

    def _located(self, names: U8, *, is_segment: bool) -> FoundLocations:
        locate = self._index.locate_segments if is_segment else self._index.locate_chunks
        if time.monotonic() >= self._away_until:
            try:
                return FoundLocations(*locate(names))
            except RetryableError as err:
                _log.warning("uploads are sent whole for %.0f s: %s", AWAY_SECONDS, err)
                self._away_until = time.monotonic() + AWAY_SECONDS
        return FoundLocations(Locations.empty(len(names)), np.zeros(len(names), np.bool_))


class _Tenant:
    """The stages of one tenant."""

    def __init__(self, settings: Settings, fingerprinter: Fingerprinter, index: Index) -> None:
        self.chunker, self.lookups = ChunkerStage(settings, fingerprinter), IndexLookups(index)


class EdgeDedup:
    """The stages of all tenants. Thread-safe."""

    def __init__(
        self, settings: Settings, fingerprinter_of: Callable[[str], Fingerprinter], index_of: Callable[[bytes], Index]
    ) -> None:
        """Raises ConfigError for settings with which a segment could exceed a message."""
        check_messages_fit(settings)
        self.super_features = settings.features.super_features
        self.arenas = Arenas(BATCH_BYTES + FRAME_BYTES_MAX)

        def make(tenant: str) -> _Tenant:
            fingerprinter = fingerprinter_of(tenant)
            return _Tenant(settings, fingerprinter, index_of(fingerprinter.domain))

        self._tenants: BoundedCache[str, _Tenant] = BoundedCache(make, TENANTS_MAX)
        self._lock = threading.Lock()

    def open(self, envelope: Envelope) -> UploadReducer:
        """Return a reducer of a new upload."""
        with self._lock:
            tenant = self._tenants[envelope.tenant]
        return UploadReducer(self, tenant, envelope)


def connect_edge(settings: Settings, found: Descriptor, index: FleetIndex) -> EdgeDedup:
    """Return the stages of a gateway. Raises ConfigError."""
    secret, bits = bytes.fromhex(found.secret), found.fingerprint_bits
    return EdgeDedup(settings, lambda tenant: Fingerprinter(secret, tenant, bits), index.for_domain)


class UploadReducer:
    """The bytes of one upload that are not cut yet. Not shared between threads."""

    def __init__(self, edge: EdgeDedup, tenant: _Tenant, envelope: Envelope) -> None:
        self._edge, self._tenant, self._envelope = edge, tenant, envelope
        self._tail = np.zeros(0, np.uint8)
        """The last bytes, of which no segment is certain yet."""
        self._state: CutState | None = None

    def reduce(self, frames: Sequence[bytes | bytearray], *, final: bool) -> list[bytes]:
        """Cut frames and return encoded messages with the bytes of unknown chunks."""
        arena = self._edge.arenas.take()
        try:
            return self._reduce(arena, frames, final=final)
        finally:
            self._edge.arenas.give_back(arena)

    def keep_alive(self) -> bytes:
        """Return an encoded message without segments, for the position that `reduce` has reached."""
        return encode(Sparse(self._envelope, FreshBatch.empty()))

    def _reduce(self, arena: U8, frames: Sequence[bytes | bytearray], *, final: bool) -> list[bytes]:
        size_bytes = len(self._tail) + sum(map(len, frames))
        payload = arena[:size_bytes] if size_bytes <= len(arena) else np.empty(size_bytes, np.uint8)
        payload[: len(self._tail)] = self._tail
        at = len(self._tail)
        for frame in frames:
            payload[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
            at += len(frame)
        runs = FrameRuns(payload, (BlobRun(0, 0, size_bytes, final),), self._state)
        chunked = self._tenant.chunker.decide(runs, LookupResults())
        messages = []
        for one in self._sparse(chunked.segments):
            messages.append(encode(Sparse(self._envelope, one)))
            position = self._envelope.position + one.batch.logical_bytes
            sequence = self._envelope.sequence + one.batch.segments
            self._envelope = replace(self._envelope, position=position, sequence=sequence)
        self._tail, self._state = payload[chunked.consumed :].copy(), chunked.state
        return messages

    def _sparse(self, batch: SegmentBatch) -> Iterator[FreshBatch]:
        """Yield runs of segments that fit into a message, with what the index knows of them.

        Each segment is looked up independently; then a chunk is fresh once in each run.
        """
        if not batch.segments:
            return
        found = run_stage(DedupStage(np.arange(batch.segments, dtype=np.uint32)), batch, self._tenant.lookups)
        for start, stop in message_bounds(batch, ~found.chunk_known, self._edge.super_features):
            segments = slice(start, stop)
            chunks = slice(int(batch.chunk_bounds[start]), int(batch.chunk_bounds[stop]))
            known = found.chunk_known[chunks]
            first, unknown = np.arange(len(known), dtype=np.int64), np.flatnonzero(~known)
            first[unknown] = unknown[first_occurrence(batch.names[chunks][unknown])]
            yield FreshBatch(
                batch=batch.cut(segments, chunks, batch.payload),
                segment_known=found.segment_known[segments],
                segment_locations=found.segment_locations.take(segments),
                chunk_known=known,
                chunk_locations=found.chunk_locations.take(chunks),
                first=first,
                fresh=unknown[first[unknown] == unknown],
            )
