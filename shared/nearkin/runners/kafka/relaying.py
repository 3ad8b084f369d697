"""Stages without state: dedup and resemblance. Invariant: one message in, one message out, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nearkin.config import Settings
from nearkin.formats.message import End, Fresh, Message, Paired, Segments, encode
from nearkin.runners.kafka.clients import Outbox
from nearkin.runners.kafka.handling import RecordGuard, headers_of, trace_of
from nearkin.runners.kafka.loop import Record
from nearkin.runners.kafka.tenants import Lanes
from nearkin.stage import run_stage
from nearkin_dedup import DedupStage
from nearkin_resemblance import ResemblanceStage

Work = Callable[[Message], Message | None]
"""None: the message is of a kind that does not belong here."""


class RelayHandler:
    """Carries one message after another through a stage."""

    def __init__(self, settings: Settings, stage: str, next_topic: str, work: Work, outbox: Outbox) -> None:
        self._stage = stage
        self._next_topic = next_topic
        self._work = work
        self._outbox = outbox
        self._guard = RecordGuard(settings, stage, outbox, next_topic)
        self._next: dict[int, int | None] = {}

    def assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._next[partition] = None

    def handle(self, records: list[Record]) -> None:
        """Work on what came; wait until Kafka has the results."""
        for record in records:
            message = self._guard.decoded(record)
            if message is not None:
                self._guard.carry_out(record, message.envelope, lambda: self._one(record, message))  # noqa: B023
        self._outbox.flush()
        for record in records:
            self._next[record.partition] = record.offset + 1

    def idle(self) -> None:
        """Nothing waits."""

    def drain(self, partition: int) -> None:
        """Nothing waits."""

    def dropped(self, partition: int) -> None:  # noqa: D102
        self._next.pop(partition, None)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield what lies behind the last batch."""
        return ((partition, offset, "") for partition, offset in self._next.items() if offset is not None)

    def close(self) -> None:  # noqa: D102
        self._outbox.close()

    def _one(self, record: Record, message: Message) -> None:
        if isinstance(message, End):
            self._guard.pass_on(record, headers_of(self._stage, "end", message.envelope, trace_of(record)))
            return
        result = self._work(message)
        if result is None:
            raise TypeError(f"a {type(message).__name__} does not belong on {record.topic}")
        headers = headers_of(self._stage, type(result).__name__.lower(), message.envelope, trace_of(record))
        self._outbox.send(self._next_topic, message.envelope.blob, encode(result), headers)


def dedup_work(lanes: Lanes) -> Work:
    """Return the dedup stage's work: known segments first, then chunks."""
    stage = DedupStage()

    def work(message: Message) -> Message | None:
        if not isinstance(message, Segments):
            return None
        return Fresh(message.envelope, run_stage(stage, message.batch, lanes[message.envelope.tenant].facts))

    return work


def resemblance_work(lanes: Lanes, current: Callable[[], Settings]) -> Work:
    """Return the resemblance stage's work, with the algorithm that is set when a message comes."""
    made: tuple[Settings, ResemblanceStage] | None = None

    def work(message: Message) -> Message | None:
        nonlocal made
        if not isinstance(message, Fresh):
            return None
        settings = current()
        if made is None or made[0] is not settings:
            made = settings, ResemblanceStage(settings)
        return Paired(message.envelope, run_stage(made[1], message.batch, lanes[message.envelope.tenant].facts))

    return work
