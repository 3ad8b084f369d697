"""Gather the segments of a blob, or of a batch of blobs, until all have arrived.

Invariant: a blob is complete only when its end and all its segments, without a gap, have arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nearkin_shared.errors import PreconditionFailed
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Placed

TOPIC_METADATA = "kafka"
"""Name of the metadata in which ingest writes a record's position."""
BlobName = tuple[int, bytes, str, str]
"""Partition, blob id, tenant, key: the same blob id from another tenant or partition is another blob (I9)."""


@dataclass(slots=True)
class OpenBlob:
    """A blob with incomplete segments."""

    envelope: Envelope
    name: BlobName
    placed: dict[int, Placed] = field(default_factory=dict)
    end: End | None = None
    records: list[tuple[int, int]] = field(default_factory=list)
    last_seen: float = field(default_factory=time.monotonic)
    segments: int = 0
    refusal: PreconditionFailed | None = None
    """The failed precondition, if any."""
    batch: BatchEnd | None = None
    """The end of a batch."""
    failure: str | None = None
    """Why a batch failed whose end has not arrived: only that names its blobs.

    Of one blob: which bytes a stage lacked; it fails if its segments do not arrive.
    """
    is_ready: bool = False
    """Whether it was found complete and waits for its commit."""

    @property
    def count(self) -> int:
        """Return how many versions it becomes."""
        return 1 if self.batch is None else len(self.batch.blobs)

    @property
    def is_of_topic(self) -> bool:
        """Return whether it was a record of a user's topic, or a batch of them."""
        return self.batch is not None or (self.end is not None and TOPIC_METADATA in self.end.metadata)

    @property
    def is_complete(self) -> bool:
        """Return whether its end and all segments have arrived."""
        wanted = self.batch.segments if self.batch is not None else None if self.end is None else self.end.segments
        return wanted is not None and self.segments >= wanted and self.runs()[1] >= wanted

    def add(self, placed: Placed) -> None:
        """Add a run of segments: for each start, the longest."""
        held = self.placed.get(placed.envelope.sequence)
        if held is None or len(held.segments) < len(placed.segments):
            self.placed[placed.envelope.sequence] = placed
            self.segments += len(placed.segments) - (len(held.segments) if held is not None else 0)

    def runs(self) -> tuple[list[tuple[Placed, int]], int]:
        """Return ([(run, count of its segments in earlier runs)], segments without a gap).

        A chunker that replaces a crashed one groups the same segments differently: runs may overlap.
        """
        found, reached = [], 0
        for sequence in sorted(self.placed):
            placed = self.placed[sequence]
            if sequence > reached:
                break
            if sequence + len(placed.segments) > reached:
                found.append((placed, reached - sequence))
                reached = sequence + len(placed.segments)
        return found, reached


def lacks_bytes(end: End) -> bool:
    """Return whether a stage lacked bytes of a whole upload.

    Another worker may have sent them.
    """
    return end.failure is not None and bool(end.blake3)
