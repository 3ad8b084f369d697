"""Wait for the messages of earlier owners of a partition to pass the stages of a chain.

    worker of one stage:     frames[p] -> chunker -> segments[p] ... dedup ... -> fresh[p] ...
    worker with all stages:  frames[p] -> chunker -> dedup -> resemblance -> delta

A worker with several stages passes messages in memory, so it would overtake those that wait in the topics between its
stages: a later version of a key would be committed before an earlier one. All topics have the key of the blob, so
only the same partition counts. The worker itself reads these topics too, in loops of their own.

Invariant: blobs of a partition reach the last stage in their order, whichever workers had the partition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.clients import ADMIN_SECONDS_MAX, consumer, group, topic, unavailable
from nearkin_shared.kafka.lag import TELLS_END, without_record

_log = logging.getLogger("nearkin.worker")

WAIT_SECONDS_MAX = 45.0
"""Then the loop starts over: a worker that is to end has a minute."""
ASK_SECONDS = 0.1


class EarlierMessages:
    """Messages in the topics between the stages of a chain."""

    def __init__(self, settings: Settings, stages: Sequence[tuple[str, str]]) -> None:
        """`stages`: (service, topic) of each stage of the chain but the first."""
        self._settings, self._stages = settings, stages

    def wait(self, partitions: Collection[int]) -> None:
        """Wait until no stage has unread messages of these partitions.

        Raises StoreUnavailable after WAIT_SECONDS_MAX, or if Kafka does not answer.
        """
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        for service, name in self._stages:
            asking = consumer(self._settings, group(self._settings, service), "nearkin-handover", **TELLS_END)
            try:
                for partition in sorted(partitions):
                    _wait_for(asking, service, TopicPartition(topic(self._settings, name), partition), deadline)
            except KafkaException as err:
                raise unavailable(self._settings, err) from err
            finally:
                asking.close()


def _wait_for(asking: Consumer, service: str, part: TopicPartition, deadline: float) -> None:
    """Wait until a group has committed all records of a partition.

    Raises: StoreUnavailable at the deadline, KafkaException.
    """
    if not _has_unread(asking, part):
        return
    _log.info("%s[%d]: has messages of other workers, which are processed first", part.topic, part.partition)
    while _has_unread(asking, part):
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"{part.topic}[{part.partition}] has messages of other workers, which {service} has not "
                f"processed in {WAIT_SECONDS_MAX:.0f} s; later ones wait for them"
            )
        time.sleep(ASK_SECONDS)


def _has_unread(asking: Consumer, part: TopicPartition) -> bool:
    """Return whether a group has records of a partition left. Raises KafkaException."""
    (found,) = asking.committed([part], timeout=ADMIN_SECONDS_MAX)
    if found.error is not None:
        raise KafkaException(found.error)
    begin, end = asking.get_watermark_offsets(part, timeout=ADMIN_SECONDS_MAX)
    following = max(begin, found.offset)  # negative: nothing was committed
    if end - following != 1:
        return end > following
    return not without_record(asking, [TopicPartition(part.topic, part.partition, following)])
