"""Pass messages between the stages of one process.

    Kafka -> Loop -> chunker -> InProcessOutbox -> dedup -> InProcessOutbox -> ... -> delta -> Outbox -> Kafka

Two neighbouring stages share a topic in memory, with one partition. Its offsets are counted as in Kafka, so the
handlers are the same as in a fleet of one process per stage.

After the assignment of a partition, its messages between these stages in Kafka are processed first.

Invariant (I4): a message is acknowledged when the next stage could commit its offset. So an offset of the first topic
is committed only after the effects of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.message import Encoded, staged_bytes
from nearkin_shared.kafka.clients import Headers, Outbox, topic
from nearkin_shared.kafka.consumer_loop import Handler, Record, SupportsCommitted, hand_over
from nearkin_shared.kafka.earlier_messages import EarlierMessages
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.limits import MIB
from nearkin_shared.utils.frozen import frozen

PARTITION = 0
REFERRED_BYTES_MAX = 16 * MIB
"""Bytes of packs that all stages process at once, if there are as many: two packs of a large upload, as the delta stage
encodes them together. Each call of a stage takes as long for one of them."""


@runtime_checkable
class SupportsSource(Protocol):
    """A later stage that keeps what it has seen of a blob."""

    def on_source(self, service: str) -> None:
        """Note the service of the first stage, which reads from Kafka."""

    def on_source_dropped(self) -> None:
        """Note that another worker may send messages of open blobs."""


@runtime_checkable
class SupportsTakeover(Protocol):
    """A first stage that leaves alone what messages of earlier owners of a partition need."""

    def on_taken_over(self, partitions: Collection[int]) -> None:
        """Note that messages of earlier owners passed all stages: none needs packs."""


class InProcessOutbox:
    """Messages to the next stage of this process; those to other topics go to Kafka."""

    def __init__(
        self,
        settings: Settings,
        stage: str,
        name: str,
        handler: Handler,
        kafka: Outbox,
        later: frozenset[str] = frozenset(),
    ) -> None:
        """Send messages for topic `name` to `handler`, which carries `stage`.

        `later`: the stages behind it that its messages reach in memory.
        """
        self._stage, self._name, self._handler, self._kafka = stage, name, handler, kafka
        self._topic = topic(settings, name)
        self._queue: list[Record] = []
        self._acknowledged = 0
        self.stages_in_memory = later | {stage}
        self.sent_messages = 0
        handler.on_assigned(PARTITION, "")

    @property
    def authenticator(self) -> EnvelopeAuthenticator | None:
        """Return the authenticator of messages that Kafka carried."""
        return self._kafka.authenticator

    @property
    def acknowledged_messages(self) -> int:
        """Number of messages with durable effects, before the first one without."""
        return self._acknowledged

    def send(self, name: str, key: bytes, value: Encoded, headers: Headers) -> None:
        """Queue a message; to a topic other than the next stage's as `Outbox.send`.

        Raises StoreUnavailable, PermanentError.
        """
        if name != self._name:
            self._kafka.send(name, key, value, headers)
            self._kafka.flush()
            return
        held = dict(headers)
        found = Record(self._topic, PARTITION, self.sent_messages, key, value, held, tuple(held.items()), True)
        self._queue.append(found)
        self.sent_messages += 1

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Send a message to any topic of Kafka, and wait until it is acknowledged.

        Used for dead letters, which are rare. Raises StoreUnavailable, PermanentError.
        """
        self._kafka.send_to(full, key, value, headers)
        self._kafka.flush()

    def pass_on(self) -> None:
        """Let the next stage process the queued messages. Raises RetryableError."""
        records, self._queue = self._queue, []
        if records:
            hand_over(self._stage, self._handler, records)

    def poll_acks(self) -> None:
        """Ask the next stage which messages have durable effects, without waiting."""
        for _, offset, _ in self._handler.committable():
            self._acknowledged = max(self._acknowledged, offset)

    def report_durable(self) -> None:
        """Report the messages with durable effects to the next stage, as committed."""
        if isinstance(self._handler, SupportsCommitted):
            self._handler.on_committed(PARTITION, self._acknowledged)

    def flush(self) -> None:
        """Wait until the effects of all messages are durable. Raises RetryableError."""
        self.pass_on()
        self._handler.drain(PARTITION)
        self.poll_acks()
        if self._acknowledged < self.sent_messages:
            left = self.sent_messages - self._acknowledged
            raise StoreUnavailable(f"{self._stage}: {left} messages of {self._topic} have no durable effects yet")

    def close(self) -> None:
        """Drop the queued messages: their offsets are not committed."""
        self._queue.clear()
        self._kafka.close()


class StageChain:
    """Handler that carries the records of one topic through consecutive stages."""

    def __init__(
        self,
        first: Handler,
        outboxes: Sequence[InProcessOutbox],
        later: Sequence[Handler],
        earlier: EarlierMessages | None = None,
    ) -> None:
        """`outboxes` connect the stages in their order; `later` are the handlers behind `first`.

        `earlier`: messages that are processed first, after the assignment of a partition.
        """
        self._first, self._outboxes, self._later = first, outboxes, later
        self._earlier = earlier
        self._unchecked: set[int] = set()

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._first.on_assigned(partition, metadata)
        self._unchecked.add(partition)

    def handle(self, records: list[Record]) -> None:
        """Process records through all stages, references to at most REFERRED_BYTES_MAX at once.

        Raises RetryableError.
        """
        assigned = self._unchecked.intersection(record.partition for record in records)
        if assigned and self._earlier is not None:
            self._earlier.wait(assigned)
            if isinstance(self._first, SupportsTakeover):
                self._first.on_taken_over(assigned)
        self._unchecked -= assigned
        run: list[Record] = []
        referred_bytes = 0
        for record in records:
            own_bytes = staged_bytes(record.value)
            if referred_bytes and referred_bytes + own_bytes > REFERRED_BYTES_MAX:
                self._handle_run(run)
                run, referred_bytes = [], 0
            run.append(record)
            referred_bytes += own_bytes
        if run:
            self._handle_run(run)

    def _handle_run(self, records: list[Record]) -> None:
        self._first.handle(records)
        self._pass_on()

    def idle(self) -> float:
        """Do the due work of all stages; return the seconds until the next call at most."""
        due_seconds = self._first.idle()
        self._pass_on()
        for handler in self._later:
            due_seconds = min(due_seconds, handler.idle())
            self._pass_on()
        return due_seconds

    def drain(self, partition: int) -> None:
        """Complete all effects of all stages.

        A container of the last one holds chunks of every partition.
        """
        self._first.drain(partition)

    def on_dropped(self, partition: int) -> None:
        """Forget a partition, and notify the later stages, which have one of their own."""
        self._first.on_dropped(partition)
        self._unchecked.discard(partition)
        for handler in self._later:
            if isinstance(handler, SupportsSource):
                handler.on_source_dropped()

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield what the first stage may commit."""
        return self._first.committable()

    def on_committed(self, partition: int, offset: int) -> None:  # noqa: D102
        if isinstance(self._first, SupportsCommitted):
            self._first.on_committed(partition, offset)
        for outbox in self._outboxes:
            outbox.report_durable()

    def close(self) -> None:
        """Close all stages, the last one first: its open containers are dropped."""
        for handler in (*reversed(self._later), self._first):
            handler.close()

    def _pass_on(self) -> None:
        for outbox in self._outboxes:
            outbox.pass_on()


@frozen
class ChainLink:
    """One stage of a chain; `make` returns its handler, given a function for an outbox."""

    service: str
    topic: str
    make: Callable[[Callable[[], StageOutbox]], Handler]


def chain(
    settings: Settings,
    links: Sequence[ChainLink],
    kafka_outbox: Callable[[str], Outbox],
    earlier: EarlierMessages | None = None,
) -> Handler:
    """Return the handler of consecutive stages, given in the order of the pipeline.

    `kafka_outbox` returns a new outbox to Kafka for a service.
    """
    handler = links[-1].make(partial(kafka_outbox, links[-1].service))
    later: list[Handler] = []
    outboxes: list[InProcessOutbox] = []
    for link, following in reversed(list(pairwise(links))):
        later.insert(0, handler)
        behind = outboxes[0].stages_in_memory if outboxes else frozenset()
        kafka = kafka_outbox(link.service)
        outbox = InProcessOutbox(settings, following.service, following.topic, handler, kafka, behind)
        outboxes.insert(0, outbox)
        handler = link.make(partial(_same, outbox))
    for behind_first in later:
        if isinstance(behind_first, SupportsSource):
            behind_first.on_source(links[0].service)
    return StageChain(handler, outboxes, later, earlier) if outboxes else handler


def _same(outbox: InProcessOutbox) -> InProcessOutbox:
    return outbox
