"""Collect the segments of a blob while it is put.

    fresh bytes -> chunked, deduplicated -> segments, appended by the reduce thread
    splices     -> segments of an earlier version, taken over at a position

Invariant: the segments of a version, fresh and spliced, are in the order of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from nearkin_shared.preconditions import Precondition
from nearkin_shared.results import Ledger, PutResult
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.types import U32, Bools, Locations
from nearkin_shared.utils.frozen import frozen


@frozen
class Splice:
    """Stored segments that a blob takes from an earlier version, after so many fresh bytes."""

    at: int
    segments: Locations
    lengths: U32


@dataclass(slots=True)
class BlobTransfer:
    """A blob in transfer."""

    number: int
    key: str
    metadata: Mapping[str, str]
    sha256: bytes | None
    started: float
    created_us: int | None = None
    """Creation time to record; None: the moment of the commit."""
    source_changed: bool = False
    """Whether the source changed while it was read: the content may mix two states of it."""
    size_bytes: int = 0
    hasher: blake3 = field(default_factory=blake3)
    is_tree: bool = False
    """Whether the caller sets `tree_digest` in place of the digest of all bytes."""
    tree_digest: bytes = b""
    fresh_bytes: int = 0
    """Bytes of the blob that went through `advance`."""
    spliced: list[Splice] = field(default_factory=list)
    prefix: tuple[BlobTransfer, int, int] | None = None
    """Of a checkpoint: the blob that it begins with, up to so many fresh bytes and so many splices of it."""
    seeks_bases: bool = True
    """Of a tree: whether bases are sought for the entries of its checkpoints."""
    segments: list[Locations] = field(default_factory=list)
    known: list[Bools] = field(default_factory=list)
    lengths: list[U32] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    checkpointed: Ledger = field(default_factory=Ledger)
    """Bytes of its checkpoints; changed by the commit thread alone."""
    done: Future[PutResult] = field(default_factory=Future)
    precondition: Precondition | None = None
    origin: BlobOrigin | None = None
    """Of a blob that is stored once, however often it is sent; None: each put makes a version."""

    def assemble(self) -> tuple[Locations, Bools, U32]:
        """Return all segments in order, which of them were known, and their lengths."""
        fresh = (self.segments, self.known, self.lengths, self.fresh_bytes, self.spliced)
        if self.prefix is None:
            return merge(*fresh)
        blob, fresh_bytes, splices = self.prefix
        before = merge(blob.segments, blob.known, blob.lengths, fresh_bytes, blob.spliced[:splices])
        own = merge(*fresh)
        return Locations.join([before[0], own[0]]), np.append(before[1], own[1]), np.append(before[2], own[2])


def merge(
    segments: Sequence[Locations],
    known: Sequence[Bools],
    lengths: Sequence[U32],
    fresh_bytes: int,
    spliced: list[Splice],
) -> tuple[Locations, Bools, U32]:
    """Return the fresh segments of the first `fresh_bytes`, with spliced ones between them."""
    count = len(lengths)  # the last list that the reduce thread extends: a checkpoint is made meanwhile
    all_lengths = np.concatenate([np.zeros(0, np.uint32), *lengths[:count]])
    all_segments, all_known = (
        Locations.join(list(segments[:count])),
        np.concatenate([np.zeros(0, np.bool_), *known[:count]]),
    )
    ends = np.cumsum(all_lengths, dtype=np.int64)
    parts: list[tuple[Locations, Bools, U32]] = []
    start = 0
    for splice in spliced:
        stop = int(np.searchsorted(ends, splice.at, side="right"))
        parts.append((all_segments.take(slice(start, stop)), all_known[start:stop], all_lengths[start:stop]))
        parts.append((splice.segments, np.ones(len(splice.segments), np.bool_), splice.lengths))
        start = stop
    stop = int(np.searchsorted(ends, fresh_bytes, side="right"))
    if (int(ends[stop - 1]) if stop else 0) != fresh_bytes:
        raise AssertionError(
            f"a blob of {fresh_bytes} fresh bytes has segments up to {int(ends[stop - 1]) if stop else 0}"
        )
    parts.append((all_segments.take(slice(start, stop)), all_known[start:stop], all_lengths[start:stop]))
    columns = tuple(zip(*parts, strict=True))
    return Locations.join(list(columns[0])), np.concatenate(columns[1]), np.concatenate(columns[2])
