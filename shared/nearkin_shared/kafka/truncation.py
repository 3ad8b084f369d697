"""Detect logs that were truncated below a committed offset.

Causes are an unclean leader election, or a disk that lost writes.

    commit  the offset, and the leader epoch of the last record that was read
    resume  one record earlier: if it has a later epoch, the log was truncated and written again

Invariant: a consumer that resumes at an offset skips no record that was written after a truncation below it. The client
checks this itself (KIP-320), but only if the leader changes while it reads, not when it resumes.
"""

from __future__ import annotations

from enum import Enum, auto

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka import Message as KafkaMessage


class Reading(Enum):
    """The meaning of a message for a consumer that resumed."""

    NEW = auto()
    HANDLED = auto()
    """The last record before the committed offset."""
    TRUNCATED = auto()
    """The log was truncated and written again: it is to be read from its beginning."""


class LeaderEpochs:
    """The leader epochs of the partitions that a consumer reads. Not shared between threads."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, int], int] = {}
        self._resumed: dict[tuple[str, int], tuple[int, int]] = {}

    def resume(self, committed: TopicPartition) -> TopicPartition:
        """Return where to begin with a partition, given what is committed for it."""
        place, epoch = (committed.topic, committed.partition), committed.leader_epoch
        if committed.offset <= 0 or epoch is None or epoch < 0:
            return TopicPartition(committed.topic, committed.partition)
        self._read[place] = epoch
        self._resumed[place] = (committed.offset - 1, epoch)
        return TopicPartition(committed.topic, committed.partition, committed.offset - 1)

    def note(self, message: KafkaMessage) -> Reading:
        """Note the epoch of a message that was read; return what it is."""
        place, epoch = (message.topic() or "", message.partition() or 0), message.leader_epoch()
        offset, committed_epoch = self._resumed.pop(place, (-1, 0))
        if message.offset() == offset:
            return Reading.HANDLED if epoch is None or epoch <= committed_epoch else Reading.TRUNCATED
        if epoch is not None:
            self._read[place] = epoch
        return Reading.NEW

    def committed(self, name: str, partition: int, offset: int, metadata: str = "") -> TopicPartition:
        """Return what to commit for a partition."""
        return TopicPartition(name, partition, offset, metadata, self._read.get((name, partition), -1))

    def forget(self, name: str, partition: int) -> None:
        """Forget a partition that another consumer reads from now on."""
        self._read.pop((name, partition), None)
        self._resumed.pop((name, partition), None)


def read_again(client: Consumer, name: str, partition: int) -> None:
    """Read a partition from its beginning: every effect is idempotent. Raises KafkaException."""
    client.seek(TopicPartition(name, partition, OFFSET_BEGINNING))
