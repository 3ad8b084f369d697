"""Encode the chunks of Kafka messages into containers, and store them.

main thread                                     commit thread
verify fingerprints, encode, add to the   -->   1 put container  2 publish  3 send to topic placed  4 flush
open container; finish it when due                                                  then offsets may move (I4)

Invariant: the location of a segment is sent only after its container is durable and published.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np

from nearkin_delta import DeltaOutcome, DeltaStage, FinishedContainer, StageResources
from nearkin_delta.base_search import AsksBases
from nearkin_delta.blob_packs import BlobPacks
from nearkin_delta.tenant_activity import TenantActivity
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, Corrupt, KeysLost, NotFound, PermanentError, RetryableError, TenantErased
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Message, Paired, Placed, encode
from nearkin_shared.formats.payload_references import is_referenced, packs_of
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries, PublishableContainer
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.coalesce import follows, merged_pairs, segments_of
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS, Record, patiently
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.offset_tracker import PartitionOffsets
from nearkin_shared.kafka.payload_reader import PayloadReader
from nearkin_shared.kafka.record_guard import TENANTS_MAX, RecordGuard, headers_of, trace_of
from nearkin_shared.kafka.tenant_context import TenantContext, TenantContexts
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.observability import tracing
from nearkin_shared.observability.stage_metrics import count_sealed
from nearkin_shared.pipeline.stage import run_stage
from nearkin_shared.pipeline.worker_thread import Worker
from nearkin_shared.results import Ledger
from nearkin_shared.storage.manifests import key_digest
from nearkin_shared.storage.staged_packs import PackRemover
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.delta")

LINGER_SECONDS = 1.0
"""Maximum time that chunks stay in an open container; the end of a blob finishes it sooner."""
SETTLE_SECONDS = 0.02
"""After a blob's end its container is finished if no message of its tenant arrives for this long: a client waits for
its 201. While the work is for other tenants it is finished at once: the wait would be for their messages."""
WAIT_SECONDS = 0.1
"""The same while messages keep arriving: a client waits, and a stream of small records has no pause."""
SEAL_SECONDS = 0.5
"""Allowance, after LINGER_SECONDS, to finish, put and publish a container: a lower bound of the grace."""
JOBS_MAX = 2
JOIN_BYTES_MAX = 16 * 1024 * 1024
"""Payload encoded at once, as in the embedded writer's batches: chunks of one batch are no bases within it."""
HELD_MAX = 20_000
"""Messages with chunks in one open container; with duplicates only, nothing else bounds them."""


@frozen
class _PendingMessage:
    """A message in work, sent on once its container is durable.

    `weight`: its share of it, in bytes.
    """

    record: Record
    message: Placed | End | BatchEnd
    weight: int = 0
    failure: End | None = None
    """Sent behind the end of a blob: it fails the blob unless the end has committed it."""


@dataclass(slots=True)
class _Open:
    """A tenant's open container."""

    lane: TenantContext
    settings: Settings
    stage: DeltaStage
    held: list[_PendingMessage] = field(default_factory=list)
    since: float = 0.0
    ended: float | None = None
    awaited: float | None = None
    """When the first blob ended for which a client may wait; no client waits for a batch of records."""
    began: float = 0.0
    """When the open container was begun at the earliest; like `since`, by the monotonic clock."""


@frozen
class _Job:
    """One step of the commit thread."""

    lane: TenantContext
    container: FinishedContainer | None
    held: Sequence[_PendingMessage]
    began: float = 0.0


@dataclass(slots=True)
class _Run:
    """Consecutive messages of one blob, encoded together."""

    parts: list[tuple[Record, Paired]] = field(default_factory=list)
    payload_bytes: int = 0

    def takes(self, message: Paired) -> bool:
        """Return whether the message continues this run, and fits."""
        if not self.parts:
            return True
        last = self.parts[-1][1]
        return (
            follows(message, last)
            and message.batch.sketch == last.batch.sketch
            and message.batch.super_features.shape[1] == last.batch.super_features.shape[1]
            and self.payload_bytes + len(segments_of(message).payload) <= JOIN_BYTES_MAX
        )

    def add(self, record: Record, message: Paired) -> None:
        """Add a message."""
        self.parts.append((record, message))
        self.payload_bytes += len(segments_of(message).payload)


def check_grace(settings: Settings) -> None:
    """Raise ConfigError for a grace so short that containers are too old when written."""
    held_seconds = LINGER_SECONDS + SEAL_SECONDS
    if settings.gc.grace_seconds < 2 * held_seconds:
        raise ConfigError(
            f'gc.grace_seconds "{settings.gc.grace_seconds}": services hold a container for {held_seconds:.1f} s, '
            "and publish none older than half the grace: want "
            f">= {math.ceil(2 * held_seconds)}, and in production hours, as long as a blob may be in flight"
        )


class DeltaHandler:
    """Encodes and stores the chunks of topic `paired`."""

    def __init__(
        self,
        settings: Settings,
        current: Callable[[], Settings],
        lanes: TenantContexts,
        worker: str,
        authenticator: EnvelopeAuthenticator | None,
        objects: ObjectStore,
    ) -> None:
        """Raises ConfigError if gc.grace_seconds is too short to publish any container.

        `objects` have the packs of references.
        """
        check_grace(settings)
        self._settings = settings
        self._current = current
        self._lanes = lanes
        self._outbox = Outbox(settings, f"{worker}-aside", authenticator)
        self._placed_outbox = Outbox(settings, f"{worker}-placed", authenticator)
        self._guard = RecordGuard(settings, "delta", self._outbox, "placed", placed_key)
        self._offsets: dict[int, PartitionOffsets] = {}
        self._open: dict[str, _Open] = {}
        self._finished: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._committer: Worker[_Job] = Worker("delta-commit", self._commit, JOBS_MAX)
        self._activity = TenantActivity()
        self._reader = PayloadReader(objects)
        self._packs = BlobPacks(PackRemover(objects))
        self._deletes_packs = True
        self._asks_bases: AsksBases = "again"

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._offsets[partition] = PartitionOffsets()
        self._packs.forget(partition)

    def handle(self, records: list[Record]) -> None:
        """Encode the chunks of records."""
        self._committer.check()  # a failure of the commit thread is not attributed to these records
        for record in records:
            self._offsets[record.partition].start(record.offset)
        readable = [found for record in records if (found := self._with_bytes(record)) is not None]
        is_set_aside, run = len(readable) < len(records), _Run()
        for record, message in zip(readable, self._guard.decode_many(readable), strict=True):
            if isinstance(message, Paired) and self._deletes_packs:
                self._packs.add(record.partition, message.envelope)
            if isinstance(message, Paired) and run.takes(message):
                run.add(record, message)
                continue
            is_set_aside |= self._place_run(run)
            run = _Run()
            if isinstance(message, Paired):
                run.add(record, message)
            elif message is None or not self._place_record(record, message):
                is_set_aside = True
                self._finished.put((record.partition, record.offset))
        if self._place_run(run) or is_set_aside:
            self._outbox.flush()
        self._collect_finished()

    def idle(self) -> float:
        """Finish the containers that are due: after the end of a blob, or after LINGER_SECONDS."""
        now, busy = time.monotonic(), self._activity.end_step()
        due_seconds = IDLE_SECONDS
        for tenant, container_state in self._open.items():
            if not container_state.held:
                continue
            settled = container_state.ended is not None and (
                self._activity.is_minor(tenant) if busy[tenant] else now - container_state.ended >= SETTLE_SECONDS
            )
            is_late = container_state.awaited is not None and now - container_state.awaited >= WAIT_SECONDS
            if settled or is_late or now - container_state.since >= LINGER_SECONDS:
                self._seal(container_state)
            else:
                left = LINGER_SECONDS - (now - container_state.since)
                due_seconds = min(due_seconds, left if container_state.ended is None else SETTLE_SECONDS)
        self._committer.check()
        self._collect_finished()
        return due_seconds

    def drain(self, partition: int) -> None:
        """Finish and commit all containers: those of one partition hold chunks of all."""
        for container_state in self._open.values():
            self._seal(container_state)
        self._committer.drain()
        self._collect_finished()

    def on_dropped(self, partition: int) -> None:  # noqa: D102
        self._offsets.pop(partition, None)
        self._packs.forget(partition)

    def on_source(self, service: str) -> None:
        """Leave the packs to a chunker of the same worker, which sends their bytes.

        Stages of one worker are neighbours: its resemblance stage looks up no candidates.
        """
        self._deletes_packs = service != "chunker"
        self._asks_bases = "late"

    def on_source_dropped(self) -> None:
        """Note that another worker may send some messages of the open blobs."""
        self._packs.on_source_dropped()

    def on_committed(self, partition: int, offset: int) -> None:
        """Delete the packs of blobs that ended before the offset."""
        self._packs.on_committed(partition, offset)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield the offset of each partition before its first pending record."""
        self._collect_finished()
        for partition, offsets in self._offsets.items():
            if offsets.committable is not None:
                yield partition, offsets.committable, ""

    def close(self) -> None:
        """Drop open containers: their offsets were not committed."""
        self._committer.cancel()
        for container_state in self._open.values():
            container_state.lane.in_flight.abandon()
        self._outbox.close()
        self._placed_outbox.close()
        self._packs.close()

    # --- the main thread ---------------------------------------------------------------------------------------------

    def _with_bytes(self, record: Record) -> Record | None:
        """Return a record with the bytes of its references; None for one without effect.

        If a pack is missing, the segments are stored, since another worker's copies of its messages came before; or the
        object store has lost the pack, and the blob fails at its end.
        """
        if not is_referenced(record.value):
            return record
        found: list[Record] = []
        message = self._guard.read_header(record)

        def read() -> None:
            assert message is not None
            packs, missing = packs_of(message), None
            try:
                found.append(replace(record, value=self._reader.with_bytes(message).parts, is_internal=True))
            except NotFound as err:
                missing = str(err)
                _log.info("%s: %s: its segments are stored, or its blob fails", record.label, err)
            self._packs.add(record.partition, message.envelope, packs, missing)

        if message is None or not self._guard.carry_out(record, message.envelope, read) or not found:
            self._finished.put((record.partition, record.offset))
            return None
        return found[0]

    def _place_run(self, run: _Run) -> bool:
        """Place a run's messages together, or one by one if that fails.

        Return whether any was put aside.
        """
        if not run.parts:
            return False
        if len(run.parts) > 1:
            try:
                container_state = self._open_container(run.parts[0][1].envelope.tenant)
                patiently(lambda: self._place(container_state, run.parts))
            except RetryableError:
                raise
            except Exception as err:
                _log.debug("%s: %d messages", run.parts[0][0].label, len(run.parts), exc_info=err)
            else:
                return False
        is_set_aside = False
        for record, message in run.parts:
            if not self._place_record(record, message):
                is_set_aside = True
                self._finished.put((record.partition, record.offset))
        return is_set_aside

    def _place_record(self, record: Record, message: Message) -> bool:
        try:
            container_state = self._open_container(message.envelope.tenant)
        except (TenantErased, KeysLost) as err:
            refusal: PermanentError = err

            def refuse() -> None:
                raise refusal

            return self._guard.carry_out(record, message.envelope, refuse)
        if isinstance(message, End | BatchEnd):
            self._hold(container_state, _PendingMessage(record, message, failure=self._end_packs(record, message)))
            container_state.ended = time.monotonic()
            if isinstance(message, End) and container_state.awaited is None:
                container_state.awaited = container_state.ended
            if container_state.stage.builder.empty:
                self._seal(container_state)
            return True

        def work() -> None:
            if not isinstance(message, Paired):
                raise TypeError(f"a {type(message).__name__} does not belong on {record.topic}")
            self._place(container_state, [(record, message)])

        return self._guard.carry_out(record, message.envelope, work)

    def _end_packs(self, record: Record, end: End | BatchEnd) -> End | None:
        """Record the end of a blob; return the failure to send behind it, if a pack was missing.

        A batch has no packs, and neither has an empty blob.
        """
        if not self._deletes_packs or not isinstance(end, End) or (end.failure is None and end.size_bytes == 0):
            return None
        missing = self._packs.end(record.partition, record.offset, end.envelope)
        if missing is None or end.failure is not None:
            return None
        return replace(end, failure=f"{missing}; upload it again")

    def _place(self, container_state: _Open, parts: Sequence[tuple[Record, Paired]]) -> None:
        """Encode the messages of one blob, and hold them until their container is durable."""
        paired = merged_pairs([message.batch for _, message in parts])
        lane, batch, rows = container_state.lane, paired.fresh.batch, paired.fresh.fresh
        found = lane.fingerprinter.name_chunks(batch.payload, batch.offsets[rows], batch.lengths[rows])
        wrong = np.flatnonzero(np.any(found != batch.names[rows], axis=1))
        if len(wrong):
            raise Corrupt(
                f"{parts[0][0].label}: {len(wrong)} of {len(rows)} chunks fail fingerprint verification: check the "
                "sender's memory and network, then replay the record"
            )
        lane.collected.refresh()
        if container_state.stage.builder.empty:
            container_state.began = time.monotonic()
        container_state.stage.begin()
        lane.in_flight.open_only(container_state.stage.builder)
        container_state.stage.stream = parts[0][1].envelope.blob
        outcome = run_stage(container_state.stage, paired, lane.facts)
        placed = outcome.placed
        lane.pending.add(
            placed.names,
            placed.chunks,
            placed.sketch,
            placed.base_chunks,
            placed.super_features,
            placed.segment_ids,
            placed.segments,
        )
        lengths = batch.segment_lengths
        start = 0
        for record, message in parts:
            some = slice(start, start + message.batch.fresh.batch.segments)
            ledger = _ledger(outcome, slice(int(batch.chunk_bounds[some.start]), int(batch.chunk_bounds[some.stop])))
            sent = Placed(
                message.envelope,
                outcome.segments.take(some),
                outcome.segment_known[some],
                lengths[some],
                ledger,
            )
            weight = ledger.unique_bytes - ledger.delta_chunk_bytes + ledger.delta_bytes + 8 * (some.stop - start)
            self._hold(container_state, _PendingMessage(record, sent, weight))
            start = some.stop
        for container in outcome.finished:
            self._pass_on_container(container_state, container)
        if container_state.stage.builder.empty or len(container_state.held) >= HELD_MAX:
            self._seal(container_state)

    def _open_container(self, tenant: str) -> _Open:
        settings = self._current()
        container_state = self._open.get(tenant)
        if container_state is not None and container_state.settings is not settings:
            self._seal(container_state)  # its chunks were encoded under the old settings
            del self._open[tenant]
            container_state = None
        if container_state is None:
            if len(self._open) >= TENANTS_MAX:
                self.drain(-1)
                self._open.clear()
            lane = self._lanes[tenant]
            domain = lane.fingerprinter.domain
            resources = StageResources(cache=lane.in_flight)
            stage = DeltaStage(settings, domain, 0, asks_bases=self._asks_bases, resources=resources)
            container_state = self._open[tenant] = _Open(lane, settings, stage)
        return container_state

    def _hold(self, container_state: _Open, held: _PendingMessage) -> None:
        self._activity.add(held.message.envelope.tenant)
        if not container_state.held:
            container_state.since = time.monotonic()
        # Without the records' bytes: one container of 4 MiB kept 70 MiB of the messages of a log, up to 1 MB each.
        container_state.held.append(replace(held, record=replace(held.record, value=b"")))

    def _seal(self, container_state: _Open) -> None:
        finished = container_state.stage.flush()
        for container in finished:
            self._pass_on_container(container_state, container)
        if not finished and container_state.held:
            self._queue(container_state, None)

    def _pass_on_container(self, container_state: _Open, container: FinishedContainer) -> None:
        container_state.lane.in_flight.on_finished(container)
        self._queue(container_state, container)

    def _queue(self, container_state: _Open, container: FinishedContainer | None) -> None:
        held, container_state.held = container_state.held, []
        container_state.ended = container_state.awaited = None
        self._committer.put(_Job(container_state.lane, container, held, container_state.began))

    def _collect_finished(self) -> None:
        while True:
            try:
                partition, offset = self._finished.get_nowait()
            except Empty:
                return
            offsets = self._offsets.get(partition)
            if offsets is not None:
                offsets.finish(offset)

    # --- the commit thread -------------------------------------------------------------------------------------------

    def _commit(self, job: _Job) -> None:
        sealed = None if job.container is None else _encode_container(job.container)
        attributes = {"nearkin.bytes": 0 if sealed is None else sealed.size_bytes, "nearkin.messages": len(job.held)}
        with tracing.linked_span("container", (trace_of(one.record) for one in job.held), attributes):
            try:
                self._commit_job(job, sealed)
            except PermanentError as err:  # not the fault of a single record, least of all of the one in work
                raise RetryableError(f"{err}: starting over") from err

    def _commit_job(self, job: _Job, container: PublishableContainer | None) -> None:
        """Execute a job: 1 put  2 publish  3 send  4 flush.

        A crash in between leaves dead bytes, or sends messages twice.
        """
        held: Sequence[_PendingMessage] = job.held
        if container is not None:
            _check_age(job.lane, container, job.began)
            patiently(lambda: _put(job.lane, container))  # 1
            failpoint("place.container")
            _check_age(job.lane, container, job.began)
            patiently(lambda: job.lane.index.publish(_claims(job.lane, container)))  # 2
            failpoint("place.published")
            job.lane.pending.on_published([container.container])
            job.lane.in_flight.durable(container.claims.directory)
            count_sealed(container.claims.directory)
            taken_bytes = job.lane.containers.takes_bytes(container.container, container.size_bytes)
            held = _with_shares(container, held, taken_bytes)
        for one in held:
            envelope = one.message.envelope
            kind = _kind_of(one.message)
            headers = headers_of("delta", kind, envelope, trace_of(one.record))
            self._placed_outbox.send("placed", placed_key(envelope), encode(one.message), headers)  # 3
            if one.failure is not None:
                self._placed_outbox.send("placed", placed_key(envelope), encode(one.failure), headers)
        failpoint("place.sent")
        self._placed_outbox.flush()  # 4
        failpoint("place.flushed")
        for one in held:
            self._finished.put((one.record.partition, one.record.offset))


def _kind_of(message: Placed | End | BatchEnd) -> str:
    return "placed" if isinstance(message, Placed) else "end" if isinstance(message, End) else "batch_end"


def placed_key(envelope: Envelope) -> bytes:
    """Return the key of topic `placed`, so that one committer decides on a key's versions."""
    return bytes.fromhex(key_digest(envelope.tenant, envelope.key))


def _encode_container(container: FinishedContainer) -> PublishableContainer:
    """Encode a container; a failure is one of memory, not of a message."""
    try:
        return container.seal()
    except Corrupt as err:
        raise RetryableError(f"container {container.container:016x}: {err}: starting over") from err


def _put(lane: TenantContext, container: PublishableContainer) -> None:
    """Put a container; an identical stored object is the result of an earlier attempt."""
    try:
        lane.containers.put(container.container, container.parts)
    except (TenantErased, KeysLost) as err:  # erased since the chunks arrived: refused when the message is read again
        raise RetryableError(f"container {container.container:016x}: {err}: starting over") from err
    except AlreadyExists as err:
        if lane.containers.raw(container.container) != container.data:
            raise RetryableError(
                f"container {container.container:016x}: another writer has this id; starting over"
            ) from err


def _check_age(lane: TenantContext, container: PublishableContainer, began: float) -> None:
    """Raise RetryableError for a container so old that its bases may have been collected.

    By the larger of two ages: the system clock may be set back, and the monotonic one stops while the machine sleeps.
    """
    age_seconds = max(time.time() - (container.container >> 20) / 1000, time.monotonic() - began)
    if age_seconds > lane.collected.grace_seconds / 2:
        raise RetryableError(
            f"container {container.container:016x}: {age_seconds:.0f} s old, and its bases may be collected after "
            f"{lane.collected.grace_seconds:.0f} s (gc.grace_seconds): starting over"
        )


def _claims(lane: TenantContext, container: PublishableContainer) -> ContainerEntries:
    """Return the index entries of a container, without segments that name collected chunks.

    A message that waited for more than a grace brings such segments: the committer of its blob detects them, and no
    other blob may refer to them.
    """
    claims, recipes = container.claims, container.claims.directory.segments
    lost = lane.collected.lost(recipes.chunks, lane.in_flight)
    if not lost.any():
        return claims
    of_row = np.repeat(np.arange(len(recipes)), np.diff(recipes.bounds))
    segment_ids = claims.segment_ids.copy()
    segment_ids[of_row[lost]] = 0
    return replace(claims, segment_ids=segment_ids)


def _ledger(outcome: DeltaOutcome, rows: slice) -> Ledger:
    """Return the ledger of a slice of the batch's chunks."""
    counts = outcome.counts
    duplicate, delta = counts.duplicate[rows], counts.delta[rows]
    stored, lengths = ~duplicate, counts.lengths[rows].astype(np.int64)
    return Ledger(
        logical_bytes=int(lengths.sum()),
        chunks=len(lengths),
        duplicate_chunks=int(duplicate.sum()),
        delta_chunks=int(delta.sum()),
        raw_chunks=int((stored & ~delta).sum()),
        zero_chunks=int(counts.zero[rows].sum()),
        unique_bytes=int(lengths[stored].sum()),
        delta_chunk_bytes=int(lengths[delta].sum()),
        delta_bytes=int(counts.delta_bytes[rows].sum(dtype=np.int64)),
    )


def _with_shares(
    container: PublishableContainer, held: Sequence[_PendingMessage], taken_bytes: int
) -> list[_PendingMessage]:
    """Return the messages with their shares of the container, by weight.

    The shares add up to its size.
    """
    summary = summarise(container.claims)
    weights = np.array([one.weight for one in held], np.float64)
    reached = np.concatenate([np.zeros(1), np.cumsum(weights)]) / max(1.0, float(weights.sum()))
    reached[-1] = 1.0
    totals = (
        summary.raw_block_bytes + summary.delta_block_bytes,
        summary.raw_block_bytes,
        taken_bytes,
    )
    block, raw, stored = (np.diff(np.floor(reached * total).astype(np.int64)).tolist() for total in totals)
    result = []
    for row, one in enumerate(held):
        if isinstance(one.message, Placed):
            share = Ledger(block_bytes=block[row], raw_block_bytes=raw[row], stored_bytes=stored[row])
            one = replace(one, message=replace(one.message, ledger=one.message.ledger + share))  # noqa: PLW2901
        result.append(one)
    return result
