"""Detect logs that were truncated below a committed offset.

Causes are an unclean leader election, or a disk that lost writes.

    commit  the offset, and the leader epoch of the last record that was read
    resume  one record earlier: if it has a later epoch, the log was truncated and written again
    again   records below the offset, of no later epoch, were handled: `HandledRecords` skips them

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


class HandledRecords:
    """The records of each partition that a consumer has handled, in order.

    Not shared between threads. The commit's metadata name the topic's id: epochs of another topic of the same name
    mean nothing.

    Invariant: a leader that truncates a log begins a later epoch, so a record below the handled offset, of no later
    epoch, is a handled one.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[str, int], tuple[int, int]] = {}
        """The offset after the last handled record, and the epoch of that record."""
        self._read_again: set[tuple[str, int]] = set()

    def resume(self, committed: TopicPartition, topic_id: str) -> TopicPartition:
        """Return where to begin with a partition, given what is committed for it."""
        place, epoch = (committed.topic, committed.partition), committed.leader_epoch
        self.forget(*place)
        if committed.offset <= 0 or epoch is None or epoch < 0 or not topic_id or committed.metadata != topic_id:
            return TopicPartition(*place)
        self._following[place] = (committed.offset, epoch)
        return TopicPartition(*place, committed.offset - 1)

    def judge(self, message: KafkaMessage) -> Reading:
        """Return what a message is.

        TRUNCATED at most once, for the offset before the committed one; the caller then calls `read_again`.
        """
        place = (message.topic() or "", message.partition() or 0)
        offset, epoch = message.offset(), message.leader_epoch()
        following, handled_epoch = self._following.get(place, (0, -1))
        if offset is None or epoch is None or epoch < 0 or offset >= following:
            return Reading.NEW
        if epoch <= handled_epoch:
            return Reading.HANDLED
        if offset != following - 1 or place in self._read_again:
            return Reading.NEW
        self._read_again.add(place)
        return Reading.TRUNCATED

    def add(self, name: str, partition: int, offset: int, epoch: int | None) -> None:
        """Note that a record, and all before it, were handled."""
        self._following[name, partition] = (offset + 1, -1 if epoch is None else epoch)

    def committed(self, name: str, partition: int, offset: int, topic_id: str) -> TopicPartition:
        """Return what to commit for a partition."""
        following, epoch = self._following.get((name, partition), (0, -1))
        return TopicPartition(name, partition, offset, topic_id, epoch if following == offset else -1)

    def forget(self, name: str, partition: int) -> None:
        """Forget a partition that another consumer reads from now on."""
        self._following.pop((name, partition), None)
        self._read_again.discard((name, partition))


def read_again(client: Consumer, name: str, partition: int) -> None:
    """Read a partition from its beginning: every effect is idempotent. Raises KafkaException."""
    client.seek(TopicPartition(name, partition, OFFSET_BEGINNING))
