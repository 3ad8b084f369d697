# size: one class, used by all stateless stages
"""Track offsets whose messages are not acknowledged.

    batch 1 sent ... batch 2 sent ... batch 1 acknowledged -> offsets of batch 1

The next batch is processed while Kafka stores the messages of the previous one. Waiting took five times as long as the
work (a chunker's 30 ms on 14 MiB, then 150 ms for acknowledgements).

Invariant (I4): an offset is committed after everything sent for it is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from nearkin_shared.kafka.outbox_port import StageOutbox

BATCHES_MAX = 1024
"""Batches with messages in flight; usually the outbox's bound in bytes is reached first."""


class AckTracker:
    """The committable offset and metadata of each partition."""

    def __init__(self, outbox: StageOutbox) -> None:
        self._outbox = outbox
        self._waiting: deque[tuple[int, dict[int, tuple[int, str]]]] = deque()
        self._ready: dict[int, tuple[int, str]] = {}

    def batch(self, reached: Mapping[int, tuple[int, str]]) -> None:
        """Record the offsets that are committable when all messages sent so far are acknowledged.

        Raises as the outbox does.
        """
        self._waiting.append((self._outbox.sent_messages, dict(reached)))
        if len(self._waiting) > BATCHES_MAX:
            self._outbox.flush()
        self.poll_acks()

    def poll_acks(self) -> None:
        """Learn what was acknowledged meanwhile, without waiting. Raises what the outbox does."""
        self._outbox.poll_acks()
        while self._waiting and self._waiting[0][0] <= self._outbox.acknowledged_messages:
            self._ready.update(self._waiting.popleft()[1])

    def drain(self) -> None:
        """Wait until all is acknowledged. Raises what the outbox does."""
        self._outbox.flush()
        self.poll_acks()

    def forget(self, partition: int) -> None:
        """Forget a partition: it begins, or belongs to another worker now."""
        self._ready.pop(partition, None)
        for _, reached in self._waiting:
            reached.pop(partition, None)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield (partition, offset, metadata) that may be committed."""
        self.poll_acks()
        return [(partition, offset, metadata) for partition, (offset, metadata) in self._ready.items()]
