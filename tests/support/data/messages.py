"""Make batches for tests of messages.

Invariant: the real stages make them, without their servers.
"""

from __future__ import annotations

import numpy as np

from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_dedup import DedupStage
from nearkin_resemblance import ResemblanceStage
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.message import Envelope
from nearkin_shared.pipeline.stage import FoundBases, FoundLocations, LookupResults
from nearkin_shared.types import FreshBatch, Locations, PairedBatch, SegmentBatch

BLOB = Envelope(bytes(range(16)), "tenant", "a/key ü", 4096, 7)
NAMER = Fingerprinter(b"s" * 32, "tenant")


def segment(data: bytes) -> SegmentBatch:
    """Return the chunker's output for a blob."""
    payload = np.frombuffer(data, np.uint8)
    chunked = ChunkerStage(Settings(), NAMER).decide(
        FrameRuns(payload, (BlobRun(0, 0, len(data), True),)), LookupResults()
    )
    return chunked.segments


def mark_known(batch: SegmentBatch, known_every: int = 3) -> FreshBatch:
    """Return the batch with every `known_every`-th chunk known."""
    stage = DedupStage()
    segments = FoundLocations(Locations.empty(batch.segments), np.zeros(batch.segments, np.bool_))
    request = stage.reads(batch, LookupResults(segments=segments))
    assert request is not None
    assert request.names is not None
    found = np.arange(len(request.names)) % known_every == 1
    locations = Locations(np.where(found, 99, 0).astype(np.uint64), np.arange(len(found), dtype=np.uint32))
    return stage.decide(batch, LookupResults(segments=segments, chunks=FoundLocations(locations, found)))


def pair(fresh: FreshBatch) -> PairedBatch:
    """Return the batch with bases for every other fresh chunk."""
    stage = ResemblanceStage(with_changes(Settings(), {"features": {"algorithm": "odess"}}))
    request = stage.reads(fresh, LookupResults())
    assert request is not None
    assert request.super_features is not None
    count = len(fresh.fresh)
    found = np.arange(count) % 2 == 0
    where = Locations(np.where(found, 5, 0).astype(np.uint64), np.arange(count, dtype=np.uint32))
    bases = FoundBases(request.super_features, where, np.zeros(count, np.uint8), found)
    return stage.decide(fresh, LookupResults(bases=bases))


def mixed_content(seed: int = 1) -> bytes:
    """Return 650 kB: noise, zeros, and some of the noise again."""
    random = np.random.default_rng(seed).integers(0, 256, 300_000, np.uint8).tobytes()
    return random + bytes(200_000) + random[:150_000]
