# size: one counter
"""Count the complete blobs of a committer, for the other stages of its process.

Partitions of topic `placed` are spread over the committers of a fleet as those of `frames` are over its workers, so
the backlog of one committer stands for all.
"""

from __future__ import annotations

LONG_BLOBS = 6144
"""Above what ingest has in flight; a committer reads no more records at 8,192."""


class CommitBacklog:
    """Number of complete blobs without a version.

    The thread of the committer writes it, others read it.
    """

    def __init__(self) -> None:
        self.blobs = 0

    @property
    def is_long(self) -> bool:
        """Return whether other stages should take records of short queues alone."""
        return self.blobs >= LONG_BLOBS
