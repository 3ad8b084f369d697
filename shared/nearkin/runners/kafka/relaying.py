"""Stages without state: dedup and resemblance. Invariant: what a message says leaves once, in its blob's order.

    decode all -> one question to the index for all -> decide each -> merge what is one blob's -> send

A message that fails takes no other with it: when the joint work fails, each is worked on alone, and the one that
fails again is put aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nearkin.config import Settings
from nearkin.errors import Retryable
from nearkin.formats.message import End, Fresh, Message, Paired, Segments, encode
from nearkin.runners.kafka.acknowledging import Awaiting
from nearkin.runners.kafka.clients import Outbox
from nearkin.runners.kafka.handling import RecordGuard, headers_of, trace_of
from nearkin.runners.kafka.loop import IDLE_SECONDS, Record, patiently
from nearkin.runners.kafka.merging import Size, follows, merged, size_of
from nearkin.runners.kafka.tenants import Lanes
from nearkin.runners.together import run_stage_many
from nearkin_dedup import DedupStage
from nearkin_resemblance import ResemblanceStage

_log = logging.getLogger("nearkin.worker")

Work = Callable[[str, Sequence[Message]], Sequence[Message]]
"""(tenant, messages) -> a message for each. Raises TypeError for a kind that does not belong here."""


@dataclass(slots=True)
class _Run:
    """Results of one blob, one behind the other, that leave as one message."""

    size: Size
    parts: list[tuple[Record, Fresh]] = field(default_factory=list)


class RelayHandler:
    """Carries messages through a stage."""

    def __init__(self, settings: Settings, stage: str, next_topic: str, work: Work, outbox: Outbox) -> None:
        self._settings = settings
        self._stage = stage
        self._next_topic = next_topic
        self._work = work
        self._outbox = outbox
        self._guard = RecordGuard(settings, stage, outbox, next_topic)
        self._awaiting = Awaiting(outbox)
        self._runs: dict[bytes, _Run] = {}

    def assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._awaiting.forget(partition)

    def handle(self, records: list[Record]) -> None:
        """Work on what came, and send the results on."""
        self._runs.clear()
        taken = [(record, message) for record in records if (message := self._guard.decoded(record)) is not None]
        results = self._together([message for _, message in taken])
        for (record, message), result in zip(taken, results, strict=True):
            if isinstance(message, End):
                self._leave(message.envelope.blob)
                self._guard.carry_out(record, message.envelope, lambda: self._pass_on(record, message))  # noqa: B023
            elif result is None:
                self._leave(message.envelope.blob)
                self._guard.carry_out(record, message.envelope, lambda: self._alone(record, message))  # noqa: B023
            elif isinstance(result, Fresh):
                self._gather(record, result)
            else:
                self._guard.carry_out(record, message.envelope, lambda: self._send(record, result))  # noqa: B023
        for blob in list(self._runs):
            self._leave(blob)
        self._awaiting.batch({record.partition: (record.offset + 1, "") for record in records})

    def idle(self) -> float:  # noqa: D102
        self._awaiting.settle()
        return IDLE_SECONDS

    def drain(self, partition: int) -> None:
        """Wait until Kafka has all results."""
        self._awaiting.drain()

    def dropped(self, partition: int) -> None:  # noqa: D102
        self._awaiting.forget(partition)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield what lies behind the last batch whose results Kafka has."""
        return self._awaiting.committable()

    def close(self) -> None:  # noqa: D102
        self._outbox.close()

    def _together(self, messages: Sequence[Message]) -> list[Message | None]:
        """Return each message's result; None for an end, and for what must be worked on alone."""
        results: list[Message | None] = [None] * len(messages)
        by_tenant: dict[str, list[int]] = {}
        for number, message in enumerate(messages):
            if not isinstance(message, End):
                by_tenant.setdefault(message.envelope.tenant, []).append(number)
        for tenant, numbers in by_tenant.items():
            chosen = [messages[number] for number in numbers]
            try:
                found = patiently(lambda: self._work(tenant, chosen))  # noqa: B023
            except Retryable:
                raise
            except Exception as err:
                # One of them is not what it seems, and will be found alone.
                _log.debug("%s: %d messages of tenant %r", self._stage, len(chosen), tenant, exc_info=err)
                continue
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
        return results

    def _alone(self, record: Record, message: Message) -> None:
        self._send(record, self._work(message.envelope.tenant, [message])[0])

    def _gather(self, record: Record, result: Fresh) -> None:
        """Add a result to its blob's run, or begin the next one."""
        blob, size = result.envelope.blob, size_of(result, self._settings.features.super_features)
        run = self._runs.get(blob)
        if run is not None and (whole := run.size + size).fits and follows(result, run.parts[-1][1]):
            run.size = whole
            run.parts.append((record, result))
            return
        self._leave(blob)
        self._runs[blob] = _Run(size, [(record, result)])

    def _leave(self, blob: bytes) -> None:
        """Send on what is gathered of a blob."""
        run = self._runs.pop(blob, None)
        if run is None:
            return
        if len(run.parts) > 1:
            try:
                patiently(lambda: self._send(run.parts[0][0], merged([part for _, part in run.parts])))
            except Retryable:
                raise
            except Exception as err:
                _log.warning("%s: %d messages not merged: %s", self._stage, len(run.parts), err, exc_info=err)
            else:
                return
        for record, part in run.parts:
            self._guard.carry_out(record, part.envelope, lambda: self._send(record, part))  # noqa: B023

    def _pass_on(self, record: Record, end: End) -> None:
        self._guard.pass_on(record, headers_of(self._stage, "end", end.envelope, trace_of(record)))

    def _send(self, record: Record, result: Message) -> None:
        headers = headers_of(self._stage, type(result).__name__.lower(), result.envelope, trace_of(record))
        self._outbox.send(self._next_topic, result.envelope.blob, encode(result), headers)


def dedup_work(lanes: Lanes) -> Work:
    """Return the dedup stage's work: known segments first, then chunks."""
    stage = DedupStage()

    def work(tenant: str, messages: Sequence[Message]) -> Sequence[Message]:
        batches = [message.batch for message in messages if isinstance(message, Segments)]
        _check_kinds(messages, batches, "segments")
        found = run_stage_many(stage, batches, lanes[tenant].facts)
        return [Fresh(message.envelope, batch) for message, batch in zip(messages, found, strict=True)]

    return work


def resemblance_work(lanes: Lanes, current: Callable[[], Settings]) -> Work:
    """Return the resemblance stage's work, with the algorithm that is set when messages come."""
    made: tuple[Settings, ResemblanceStage] | None = None

    def work(tenant: str, messages: Sequence[Message]) -> Sequence[Message]:
        nonlocal made
        batches = [message.batch for message in messages if isinstance(message, Fresh)]
        _check_kinds(messages, batches, "fresh")
        settings = current()
        if made is None or made[0] is not settings:
            made = settings, ResemblanceStage(settings)
        found = run_stage_many(made[1], batches, lanes[tenant].facts)
        return [Paired(message.envelope, batch) for message, batch in zip(messages, found, strict=True)]

    return work


def _check_kinds(messages: Sequence[Message], batches: Sequence[object], topic: str) -> None:
    if len(batches) != len(messages):
        kinds = ", ".join(sorted({type(message).__name__ for message in messages}))
        raise TypeError(f"{kinds}: a kind that does not belong on {topic}")
