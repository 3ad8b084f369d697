"""Make the content and the manifest of a version from the gathered segments of its blob.

Invariant: the content of a version has all segments of its blob, in order, without a gap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_committer.open_blob import OpenBlob
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import BatchEnd, End, Placed
from nearkin_shared.results import LEDGER_FIELDS, Ledger
from nearkin_shared.retention import retain_until_us
from nearkin_shared.storage.manifests import History, ManifestStore
from nearkin_shared.types import U32, Bools, Locations
from nearkin_shared.utils.frozen import frozen


@frozen
class VersionContent:
    """Segments, lengths and ledger of a version."""

    segments: Locations
    known: Bools
    lengths: U32
    ledger: Ledger


def assemble_content(blob: OpenBlob, end: End) -> VersionContent:
    """Return a blob's segments in order. Raises Corrupt if they do not fit together."""
    runs, reached = blob.runs()
    if reached != end.segments:
        raise Corrupt(f"blob {blob.envelope.blob.hex()}: {reached} of {end.segments} segments arrived; put it again")
    lengths = np.concatenate([np.zeros(0, np.uint32), *(run.lengths[reported:] for run, reported in runs)])
    logical_bytes = int(lengths.sum(dtype=np.uint64))
    if logical_bytes != end.size_bytes:
        raise Corrupt(
            f"blob {blob.envelope.blob.hex()}: {logical_bytes} of {end.size_bytes} bytes placed; put it again"
        )
    ledger = sum((_share_of_run(run, reported) for run, reported in runs), Ledger())
    known = np.concatenate([np.zeros(0, np.bool_), *(run.known[reported:] for run, reported in runs)])
    segments = Locations.join([run.segments.take(slice(reported, None)) for run, reported in runs])
    return VersionContent(segments, known, lengths, replace(ledger, logical_bytes=logical_bytes))


def split_content(blob: OpenBlob, batch: BatchEnd) -> list[VersionContent]:
    """Return the segments of each blob of a batch. Raises Corrupt.

    Each has the share of the batch's ledger that its bytes have of the batch's; the counts, that its segments have.
    """
    sizes = [one.size_bytes for one in batch.blobs]
    end = End(batch.envelope, 0, batch.envelope.blob, sum(sizes), segments=batch.segments)
    whole = assemble_content(blob, end)
    bounds = np.cumsum([0, *(one.segments or 0 for one in batch.blobs)])
    reached = np.concatenate([np.zeros(1, np.int64), np.cumsum(whole.lengths, dtype=np.int64)])[bounds]
    if np.diff(reached).tolist() != sizes:
        raise Corrupt(f"batch {batch.envelope.blob.hex()}: its segments are not those of its blobs; put them again")
    shares = _split_ledger(whole.ledger, bounds, reached)
    found = []
    for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
        rows = slice(start, stop)
        ledger = replace(shares[number], logical_bytes=sizes[number])
        found.append(VersionContent(whole.segments.take(rows), whole.known[rows], whole.lengths[rows], ledger))
    return found


def _split_ledger(ledger: Ledger, segments: NDArray[np.int64], reached_bytes: NDArray[np.int64]) -> list[Ledger]:
    """Return the share of each blob: the shares of a field add up to it."""
    by_bytes, by_segments = (found / max(1, int(found[-1])) for found in (reached_bytes, segments))
    columns = []
    for name in LEDGER_FIELDS:
        part = by_bytes if name.endswith("_bytes") else by_segments
        columns.append(np.diff(np.floor(part * getattr(ledger, name) + 0.5).astype(np.int64)).tolist())
    return [Ledger(*values) for values in zip(*columns, strict=True)]


def _share_of_run(run: Placed, reported: int) -> Ledger:
    """Return a run's ledger, less the share of the segments in earlier runs."""
    left, whole = len(run.segments) - reported, len(run.segments)
    if not reported:
        return run.ledger
    return Ledger(*(getattr(run.ledger, name) * left // whole for name in LEDGER_FIELDS))


def make_manifest(
    settings: Settings,
    manifests: ManifestStore,
    end: End,
    content: VersionContent,
    histories: Mapping[int, History],
    taken: int,
) -> Manifest:
    """Return the manifest of the version after all existing ones of its key.

    `taken`: the highest number that a lost version may have had.
    """
    tenant, key, now_us = end.envelope.tenant, end.envelope.key, time.time_ns() // 1000
    return Manifest(
        tenant=tenant,
        key=key,
        version=max((taken, *histories)) + 1,
        created_us=now_us,
        retain_until_us=retain_until_us(settings.retention, tenant, key, now_us, manifests.known_time),
        size_bytes=end.size_bytes,
        blake3=end.blake3,
        sha256=end.sha256,
        seconds=round(max(0, now_us - end.began_us) / 1e6, 3),
        ledger=content.ledger,
        segments=content.segments,
        known=content.known,
        metadata=dict(end.metadata),
        origin=end.origin,
        lengths=content.lengths,
        previous=manifests.find_previous(tenant, key, histories),
    )
