"""Process one record: complete it, repeat it after a restart, or make it a dead letter.

Invariant: a dead letter fails its blob.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, NearkinError, NotAuthentic, PermanentError, RetryableError
from nearkin_shared.formats.message import (
    ENDS,
    End,
    Envelope,
    Message,
    MessageKind,
    Paired,
    StagedFrame,
    UndecodedMessage,
    decode,
    encode,
    joined,
    read,
    read_header,
)
from nearkin_shared.formats.message_batches import read_paired
from nearkin_shared.kafka.clients import Headers
from nearkin_shared.kafka.consumer_loop import Record, patiently
from nearkin_shared.kafka.dead_letters import send_dead_letter
from nearkin_shared.kafka.message_authentication import MAC_HEADER
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.observability import metrics, tracing
from nearkin_shared.observability.log_setup import about

_log = logging.getLogger("nearkin.worker")

SURPRISES_MAX = 3
"""Attempts for a record that raises an unexpected error, before it becomes a dead letter."""
TENANTS_MAX = 256
"""Tenants whose stages a worker keeps: each holds an open container of a few MiB at most."""

Made = TypeVar("Made")
Key = TypeVar("Key")


class BoundedCache(Generic[Key, Made]):
    """A cache of objects made once by key, limited to the most recently used."""

    def __init__(
        self, make: Callable[[Key], Made], entries_max: int, check: Callable[[Key], None] = lambda _: None
    ) -> None:
        """`check` raises where a key is not to be used any more; it is asked every time."""
        self._make = make
        self._check = check
        self._entries: OrderedDict[Key, Made] = OrderedDict()
        self._entries_max = entries_max

    def __getitem__(self, key: Key) -> Made:
        self._check(key)
        if key not in self._entries:
            self._entries[key] = self._make(key)
            if len(self._entries) > self._entries_max:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()


def headers_of(stage: str, kind: str, envelope: Envelope, traceparent: bytes | None) -> dict[str, bytes]:
    """Return CloudEvents attributes in binary mode, and the W3C trace context if there is one."""
    found = {
        "ce_specversion": b"1.0",
        "ce_type": f"io.nearkin.{kind}.v1".encode(),
        "ce_source": f"/nearkin/{stage}".encode(),
        "ce_id": f"{envelope.blob.hex()}/{kind}/{envelope.sequence}/{envelope.position}".encode(),
    }
    return found if traceparent is None else found | {"traceparent": traceparent}


def trace_of(record: Record) -> bytes | None:
    """Return a record's trace context."""
    return record.headers.get("traceparent")


class RecordGuard:
    """Carries out the work on one record, whatever it holds and whatever that raises."""

    def __init__(
        self,
        settings: Settings,
        stage: str,
        outbox: StageOutbox,
        next_topic: str | None,
        next_key: Callable[[Envelope], bytes] = lambda envelope: envelope.blob,
    ) -> None:
        """Guard the records of one stage.

        `next_topic` None: the last stage, which reports failures. `next_key`: key of that topic.
        """
        self._settings = settings
        self._stage = stage
        self._outbox = outbox
        self._next_topic = next_topic
        self._next_key = next_key
        for counter in (metrics.DEAD_LETTERS, metrics.CORRUPT, metrics.UNAUTHENTICATED):
            counter.labels(stage)  # there from the start, so that the first one is seen as a change

    def decode(self, record: Record) -> Message | None:
        """Return the record's message, or None after putting it aside."""
        try:
            self._authenticate(record)
        except NotAuthentic as err:
            self._reject(record, err)
            return None
        return self._decode(record)

    def _reject(self, record: Record, err: BaseException) -> None:
        """Make a record a dead letter.

        One that another stage of this process sent is signed, as Kafka's are: a replay sends it through Kafka. So is
        one whose references were replaced by the bytes of packs: the signature that Kafka carried is of the references.
        """
        authenticator = self._outbox.authenticator
        if record.is_internal and authenticator is not None:
            mac = authenticator.mac_of(record.topic, record.key, joined(record.value))
            others = [(name, text) for name, text in record.all_headers if name != MAC_HEADER]
            record = replace(record, all_headers=((MAC_HEADER, mac), *others))
        send_dead_letter(self._settings, self._outbox, record, self._stage, err, is_in_memory=record.is_internal)

    def _authenticate(self, record: Record) -> None:
        """Refuse a record that no process of this store has sent. Raises NotAuthentic."""
        authenticator = self._outbox.authenticator
        if authenticator is not None and not record.is_internal:
            mac = record.headers.get(MAC_HEADER)
            authenticator.check(self._stage, record.topic, record.key, joined(record.value), mac)

    def _decode(self, record: Record) -> Message | None:
        try:
            return decode(record.value, record.label)
        except PermanentError as err:
            self._reject(record, err)
            return None

    def read_header(self, record: Record) -> UndecodedMessage | None:
        """Return the message of a record; None after making it a dead letter.

        Its columns are not decoded unless it is an end that Kafka carried.
        """
        try:
            self._authenticate(record)
            found = read_header(record.value, record.label)
            if found.kind in ENDS and not record.is_internal:
                read(found)
        except PermanentError as err:
            self._reject(record, err)
            return None
        return found

    def decode_many(self, records: Sequence[Record]) -> list[Message | None]:
        """Decode records together; decode them one by one if any is damaged."""
        found = [self.read_header(record) for record in records]
        pairs = [message for message in found if message is not None and message.kind is MessageKind.PAIRED]
        try:
            batches = iter(read_paired(pairs) if pairs else ())
        except Corrupt as err:
            _log.debug("%d messages from %s", len(pairs), pairs[0].what, exc_info=err)
            return [
                self._decode(record) if message is not None else None
                for record, message in zip(records, found, strict=True)
            ]
        return [
            None
            if message is None
            else Paired(message.envelope, next(batches))
            if message.kind is MessageKind.PAIRED
            else self._decode(record)
            for record, message in zip(records, found, strict=True)
        ]

    def belongs(self, record: Record, envelope: Envelope, blob: Envelope) -> bool:
        """Return whether a message belongs to the blob of its id (I9).

        Otherwise it becomes a dead letter.
        """
        if (envelope.tenant, envelope.key) == (blob.tenant, blob.key):
            return True
        problem = Corrupt(
            f"{record.label}: is of key {envelope.key!r:.80} of tenant {envelope.tenant!r:.80}, "
            f"and blob {blob.blob.hex()} of another one"
        )
        self._reject(record, problem)
        return False

    def carry_out(self, record: Record, envelope: Envelope, work: Callable[[], None]) -> bool:
        """Do `work`; return False after putting the record aside.

        Raises RetryableError when a dependency stays away.
        """
        with about(envelope.blob, envelope.tenant, trace_of(record)):
            try:
                self._try(work)
            except RetryableError:
                raise
            except Exception as err:
                _log.debug("%s", record.label, exc_info=err)
                tracing.record_failure(trace_of(record), err)
                self._reject(record, err)
                self.fail(envelope, f"{self._stage}: {err}", trace_of(record))
                return False
            return True

    @staticmethod
    def _try(work: Callable[[], None]) -> None:
        """Call `work`, up to SURPRISES_MAX times if it raises unexpected errors.

        The first attempt is plain, as in `retrying`.
        """
        try:
            return patiently(work)
        except NearkinError:
            raise
        except Exception:
            surprises = Retrying(
                retry=retry_if_exception(lambda err: not isinstance(err, NearkinError)),
                wait=wait_random_exponential(multiplier=0.05, max=1.0),
                stop=stop_after_attempt(SURPRISES_MAX - 1),
                reraise=True,
            )
        surprises(patiently, work)
        return None

    def fail(
        self, envelope: Envelope, failure: str, traceparent: bytes | None, committed_as: StagedFrame | None = None
    ) -> None:
        """End a blob as failed: the committer publishes the failure.

        `committed_as`: a reference of a blob that may be committed; the committer then looks for its origin first.
        """
        if self._next_topic is None:
            return
        end = End(envelope, began_us=0, origin=envelope.blob, failure=failure[:500])
        if committed_as is not None:
            end = replace(end, began_us=committed_as.began_us, origin=committed_as.origin, segments=0)
        headers = headers_of(self._stage, "end", envelope, traceparent)
        self._outbox.send(self._next_topic, self._next_key(envelope), encode(end), headers)

    def forward(self, record: Record, headers: Headers) -> None:
        """Send a record on as it is."""
        assert self._next_topic is not None
        self._outbox.send(self._next_topic, record.key or b"", record.value, headers)
