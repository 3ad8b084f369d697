"""Run stages without state.

    read all headers -> decode together -> one index request for all -> decide -> merge per blob -> send

A message that fails does not affect others: if the joint work fails, each message is processed alone, and one that
fails
again becomes a dead letter.

Invariant: each message has one result, in the order of its blob.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import RetryableError
from nearkin_shared.formats.message import ENDS, Encoded, Envelope, UndecodedMessage
from nearkin_shared.kafka.ack_tracker import AckTracker
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS, Record, patiently
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.kafka.record_guard import RecordGuard, headers_of, trace_of
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.worker")


@frozen
class OutgoingMessage:
    """A message for the next stage, encoded when it is sent, so that few are in memory."""

    kind: str
    envelope: Envelope
    encoded: Callable[[], Encoded]


Work = Callable[[str, Sequence[UndecodedMessage]], Sequence[OutgoingMessage | None]]
"""(tenant, messages) -> the result of each; None: a later result of the same blob includes it.

Raises Corrupt or TypeError if any message is damaged or of a wrong kind.
"""

_ALONE = object()


class StatelessStageHandler:
    """Carries messages through a stage."""

    def __init__(self, settings: Settings, stage: str, next_topic: str, work: Work, outbox: StageOutbox) -> None:
        self._settings = settings
        self._stage = stage
        self._next_topic = next_topic
        self._work = work
        self._outbox = outbox
        self._guard = RecordGuard(settings, stage, outbox, next_topic)
        self._awaiting = AckTracker(outbox)

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._awaiting.forget(partition)

    def handle(self, records: list[Record]) -> None:
        """Process records, and send the results."""
        taken: list[tuple[Record, UndecodedMessage]] = []
        ended: set[bytes] = set()
        for record in records:
            message = self._guard.read_header(record)
            if message is None:
                continue
            blob = message.envelope.blob
            if blob in ended:  # sent again: it shall not meet what came before the end
                self._carry(taken)
                taken, ended = [], set()
            if message.kind in ENDS:
                ended.add(blob)
            taken.append((record, message))
        self._carry(taken)
        self._awaiting.batch({record.partition: (record.offset + 1, "") for record in records})

    def idle(self) -> float:  # noqa: D102
        self._awaiting.poll_acks()
        return IDLE_SECONDS

    def drain(self, partition: int) -> None:
        """Wait until Kafka has all results."""
        self._awaiting.drain()

    def on_dropped(self, partition: int) -> None:  # noqa: D102
        self._awaiting.forget(partition)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield the committable offsets after the last acknowledged batch."""
        return self._awaiting.committable()

    def close(self) -> None:  # noqa: D102
        self._outbox.close()

    def _carry(self, taken: Sequence[tuple[Record, UndecodedMessage]]) -> None:
        """Process messages and send results, each at the position of its last source message."""
        results = self._process_batch([message for _, message in taken])
        for (record, message), result in zip(taken, results, strict=True):
            if message.kind in ENDS:
                self._guard.carry_out(record, message.envelope, lambda: self._pass_on(record, message))  # noqa: B023
            elif isinstance(result, OutgoingMessage):
                self._guard.carry_out(record, message.envelope, lambda: self._send(record, result))  # noqa: B023
            elif result is _ALONE:
                self._guard.carry_out(record, message.envelope, lambda: self._process_one(record, message))  # noqa: B023

    def _process_batch(self, messages: Sequence[UndecodedMessage]) -> list[object]:
        """Return the result of each message: outgoing, None, or _ALONE to process it alone."""
        results: list[object] = [_ALONE] * len(messages)
        by_tenant: dict[str, dict[bytes, list[int]]] = {}
        for number, message in enumerate(messages):
            if message.kind not in ENDS:
                envelope = message.envelope
                by_tenant.setdefault(envelope.tenant, {}).setdefault(envelope.blob, []).append(number)
        for tenant, by_blob in by_tenant.items():
            numbers = [number for some in by_blob.values() for number in some]
            chosen = [messages[number] for number in numbers]
            try:
                found = patiently(lambda: self._work(tenant, chosen))  # noqa: B023
            except RetryableError:
                raise
            except Exception as err:
                # One of them is not what it seems, and will be found alone.
                _log.debug("%s: %d messages of tenant %r", self._stage, len(chosen), tenant, exc_info=err)
                continue
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
        return results

    def _process_one(self, record: Record, message: UndecodedMessage) -> None:
        for result in self._work(message.envelope.tenant, [message]):
            if result is not None:
                self._send(record, result)

    def _pass_on(self, record: Record, end: UndecodedMessage) -> None:
        self._guard.forward(record, headers_of(self._stage, end.kind.name.lower(), end.envelope, trace_of(record)))

    def _send(self, record: Record, message: OutgoingMessage) -> None:
        headers = headers_of(self._stage, message.kind, message.envelope, trace_of(record))
        self._outbox.send(self._next_topic, message.envelope.blob, message.encoded(), headers)
        failpoint("relay.sent")
