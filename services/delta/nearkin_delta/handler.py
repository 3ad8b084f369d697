"""Pairs into containers. Invariant: where a segment lies is told only after its container is durable and published.

main thread                                     commit thread
verify names, delta, place in the open   -->    1 put container  2 publish  3 send placed  4 flush
container; seal it when due                                                        then offsets may move (I4)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np

from nearkin_delta import DeltaOutcome, DeltaStage, FinishedContainer
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, Corrupt, KeysLost, PermanentError, RetryableError, TenantErased
from nearkin_shared.formats.message import End, Envelope, Message, Paired, Placed, encode
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries, PublishableContainer
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.coalesce import follows, merged_pairs, segments_of
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS, Record, patiently
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.offset_tracker import PartitionOffsets
from nearkin_shared.kafka.record_guard import TENANTS_MAX, RecordGuard, headers_of, trace_of
from nearkin_shared.kafka.tenant_context import TenantContext, TenantContexts
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.observability import tracing
from nearkin_shared.observability.stage_metrics import count_sealed
from nearkin_shared.pipeline.stage import run_stage
from nearkin_shared.pipeline.worker_thread import Worker
from nearkin_shared.results import Ledger
from nearkin_shared.storage.manifests import key_digest
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.delta")

SETTLE_SECONDS = 0.02
"""After the end of a blob a container is sealed once nothing has come for so long: who waits for a 201 waits for it."""
SEAL_SECONDS = 0.5
"""Allowed, beside kafka.linger_ms, for sealing a container, putting it and publishing it: what a grace must leave room
for at the least."""
JOBS_MAX = 2
JOIN_BYTES_MAX = 16 * 1024 * 1024
"""Payload that is encoded at once, as the embedded runner's batches: what one brings is no base for the same one."""
HELD_MAX = 20_000
"""Messages whose chunks lie in one open container; all-duplicate data hold nothing else back."""


@frozen
class _PendingMessage:
    """A message that is worked on; told onwards once its container is durable. `weight` its share of it, in bytes."""

    record: Record
    message: Placed | End
    weight: int = 0


@dataclass(slots=True)
class _Open:
    """A tenant's open container."""

    lane: TenantContext
    settings: Settings
    stage: DeltaStage
    held: list[_PendingMessage] = field(default_factory=list)
    since: float = 0.0
    ended: float | None = None
    began: float = 0.0
    """The open container was not begun before; as `since`, seconds of a clock that is never set."""


@frozen
class _Job:
    """What the commit thread does in one step."""

    lane: TenantContext
    container: FinishedContainer | None
    held: Sequence[_PendingMessage]
    began: float = 0.0


@dataclass(slots=True)
class _Run:
    """Messages of one blob, one behind the other, that are encoded together."""

    parts: list[tuple[Record, Paired]] = field(default_factory=list)
    payload_bytes: int = 0

    def takes(self, message: Paired) -> bool:
        """Return whether the message goes on where this run ends, and there is room for it."""
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
        """Take a message."""
        self.parts.append((record, message))
        self.payload_bytes += len(segments_of(message).payload)


def check_grace(settings: Settings) -> None:
    """Refuse a grace by which a container would be too old as soon as it is written (`_in_time`)."""
    held_seconds = settings.kafka.linger_ms / 1000 + SEAL_SECONDS
    if settings.gc.grace_seconds < 2 * held_seconds:
        raise ConfigError(
            f'gc.grace_seconds "{settings.gc.grace_seconds}": services hold a container for up to {held_seconds:.1f} s '
            "(kafka.linger_ms), and publish none older than half the grace: want "
            f">= {math.ceil(2 * held_seconds)}, and in earnest hours, as long as a blob may be on its way"
        )


class DeltaHandler:
    """Encodes and stores."""

    def __init__(
        self,
        settings: Settings,
        current: Callable[[], Settings],
        lanes: TenantContexts,
        worker: str,
        authenticator: EnvelopeAuthenticator | None,
    ) -> None:
        """Raises ConfigError where no container would be young enough to be published."""
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
        self._busy = False

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._offsets[partition] = PartitionOffsets()

    def handle(self, records: list[Record]) -> None:
        """Place what came."""
        self._committer.check()  # what failed there is no fault of these records
        self._busy = True
        aside, run = False, _Run()
        for record, message in zip(records, self._guard.decode_many(records), strict=True):
            self._offsets[record.partition].start(record.offset)
            if isinstance(message, Paired) and run.takes(message):
                run.add(record, message)
                continue
            aside |= self._all(run)
            run = _Run()
            if isinstance(message, Paired):
                run.add(record, message)
            elif message is None or not self._one(record, message):
                aside = True
                self._finished.put((record.partition, record.offset))
        if self._all(run) or aside:
            self._outbox.flush()
        self._collect()

    def idle(self) -> float:
        """Seal what is due: a blob ended and nothing follows, or chunks have waited long enough."""
        now, busy, self._busy = time.monotonic(), self._busy, False
        linger_seconds, due_seconds = self._settings.kafka.linger_ms / 1000, IDLE_SECONDS
        for opened in self._open.values():
            if not opened.held:
                continue
            settled = opened.ended is not None and not busy and now - opened.ended >= SETTLE_SECONDS
            if settled or now - opened.since >= linger_seconds:
                self._seal(opened)
            else:
                left = linger_seconds - (now - opened.since)
                due_seconds = min(due_seconds, left if opened.ended is None else SETTLE_SECONDS)
        self._committer.check()
        self._collect()
        return due_seconds

    def drain(self, partition: int) -> None:
        """Seal and commit everything: the containers of one partition's chunks are those of all."""
        for opened in self._open.values():
            self._seal(opened)
        self._committer.drain()
        self._collect()

    def on_dropped(self, partition: int) -> None:  # noqa: D102
        self._offsets.pop(partition, None)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield what lies before everything that is held."""
        self._collect()
        for partition, offsets in self._offsets.items():
            if offsets.committable is not None:
                yield partition, offsets.committable, ""

    def close(self) -> None:
        """Drop what is open: its offsets were not committed."""
        self._committer.cancel()
        for opened in self._open.values():
            opened.lane.in_flight.abandon()
        self._outbox.close()
        self._placed_outbox.close()

    # --- the main thread ---------------------------------------------------------------------------------------------

    def _all(self, run: _Run) -> bool:
        """Place a run's messages: at once, or one by one where one of them fails. Return whether any was put aside."""
        if not run.parts:
            return False
        if len(run.parts) > 1:
            try:
                opened = self._opened(run.parts[0][1].envelope.tenant)
                patiently(lambda: self._place(opened, run.parts))
            except RetryableError:
                raise
            except Exception as err:
                _log.debug("%s: %d messages", run.parts[0][0].label, len(run.parts), exc_info=err)
            else:
                return False
        aside = False
        for record, message in run.parts:
            if not self._one(record, message):
                aside = True
                self._finished.put((record.partition, record.offset))
        return aside

    def _one(self, record: Record, message: Message) -> bool:
        try:
            opened = self._opened(message.envelope.tenant)
        except (TenantErased, KeysLost) as err:
            refused: PermanentError = err

            def refuse() -> None:
                raise refused

            return self._guard.carry_out(record, message.envelope, refuse)
        if isinstance(message, End):
            self._hold(opened, _PendingMessage(record, message))
            opened.ended = time.monotonic()
            if opened.stage.builder.empty:
                self._seal(opened)
            return True

        def work() -> None:
            if not isinstance(message, Paired):
                raise TypeError(f"a {type(message).__name__} does not belong on {record.topic}")
            self._place(opened, [(record, message)])

        return self._guard.carry_out(record, message.envelope, work)

    def _place(self, opened: _Open, parts: Sequence[tuple[Record, Paired]]) -> None:
        """Encode and place what messages of one blob bring, one behind the other."""
        paired = merged_pairs([message.batch for _, message in parts])
        lane, batch, rows = opened.lane, paired.fresh.batch, paired.fresh.fresh
        found = lane.fingerprinter.name_chunks(batch.payload, batch.offsets[rows], batch.lengths[rows])
        wrong = np.flatnonzero(np.any(found != batch.names[rows], axis=1))
        if len(wrong):
            raise Corrupt(f"{parts[0][0].label}: {len(wrong)} of {len(rows)} chunks are not what their names say")
        lane.collected.refresh()
        if opened.stage.builder.empty:
            opened.began = time.monotonic()
        opened.stage.begin()
        lane.in_flight.open_only(opened.stage.builder)
        opened.stage.stream = parts[0][1].envelope.blob
        outcome = run_stage(opened.stage, paired, lane.facts)
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
            told = Placed(
                message.envelope,
                outcome.segments.take(some),
                outcome.segment_known[some],
                lengths[some],
                ledger,
            )
            weight = ledger.unique_bytes - ledger.delta_chunk_bytes + ledger.delta_bytes + 8 * (some.stop - start)
            self._hold(opened, _PendingMessage(record, told, weight))
            start = some.stop
        for container in outcome.finished:
            self._pass_on_container(opened, container)
        if opened.stage.builder.empty or len(opened.held) >= HELD_MAX:
            self._seal(opened)

    def _opened(self, tenant: str) -> _Open:
        settings = self._current()
        opened = self._open.get(tenant)
        if opened is not None and opened.settings is not settings:
            self._seal(opened)  # what is open was encoded under the old settings
            del self._open[tenant]
            opened = None
        if opened is None:
            if len(self._open) >= TENANTS_MAX:
                self.drain(-1)
                self._open.clear()
            lane = self._lanes[tenant]
            domain = lane.fingerprinter.domain
            stage = DeltaStage(settings, domain, 0, asks_bases="again", keeper=lane.in_flight)
            opened = self._open[tenant] = _Open(lane, settings, stage)
        return opened

    @staticmethod
    def _hold(opened: _Open, held: _PendingMessage) -> None:
        if not opened.held:
            opened.since = time.monotonic()
        # Without its bytes: one container of 4 MiB kept 70 MiB of the messages of a log, up to 1 MB each.
        opened.held.append(replace(held, record=replace(held.record, value=b"")))

    def _seal(self, opened: _Open) -> None:
        finished = opened.stage.flush()
        for container in finished:
            self._pass_on_container(opened, container)
        if not finished and opened.held:
            self._queue(opened, None)

    def _pass_on_container(self, opened: _Open, container: FinishedContainer) -> None:
        opened.lane.in_flight.on_finished(container)
        self._queue(opened, container)

    def _queue(self, opened: _Open, container: FinishedContainer | None) -> None:
        held, opened.held, opened.ended = opened.held, [], None
        self._committer.put(_Job(opened.lane, container, held, opened.began))

    def _collect(self) -> None:
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
        told = {"nearkin.bytes": 0 if sealed is None else sealed.size_bytes, "nearkin.messages": len(job.held)}
        with tracing.linked_span("container", (trace_of(one.record) for one in job.held), told):
            try:
                self._commit_job(job, sealed)
            except PermanentError as err:  # no fault of any one record, least of all of that which hears of it
                raise RetryableError(f"{err}: starting over") from err

    def _commit_job(self, job: _Job, container: PublishableContainer | None) -> None:
        """1 put  2 publish  3 tell  4 flush: dying in between leaves dead space, or tells the same twice."""
        held: Sequence[_PendingMessage] = job.held
        if container is not None:
            _in_time(job.lane, container, job.began)
            patiently(lambda: _put(job.lane, container))  # 1
            failpoint("place.container")
            _in_time(job.lane, container, job.began)
            patiently(lambda: job.lane.index.publish(_claims(job.lane, container)))  # 2
            failpoint("place.published")
            job.lane.pending.on_published([container.container])
            job.lane.in_flight.durable(container.claims.directory)
            count_sealed(container.claims.directory)
            taken_bytes = job.lane.containers.takes_bytes(container.container, container.size_bytes)
            held = _with_shares(container, held, taken_bytes)
        for one in held:
            envelope = one.message.envelope
            kind = "end" if isinstance(one.message, End) else "placed"
            headers = headers_of("delta", kind, envelope, trace_of(one.record))
            self._placed_outbox.send("placed", placed_key(envelope), encode(one.message), headers)  # 3
        failpoint("place.told")
        self._placed_outbox.flush()  # 4
        failpoint("place.flushed")
        for one in held:
            self._finished.put((one.record.partition, one.record.offset))


def placed_key(envelope: Envelope) -> bytes:
    """Return what `placed` is keyed by: one committer at a time decides over a key's versions."""
    return bytes.fromhex(key_digest(envelope.tenant, envelope.key))


def _encode_container(container: FinishedContainer) -> PublishableContainer:
    """Write a container down. Where that fails memory did: nothing is wrong with any one message."""
    try:
        return container.seal()
    except Corrupt as err:
        raise RetryableError(f"container {container.container:016x}: {err}: starting over") from err


def _put(lane: TenantContext, container: PublishableContainer) -> None:
    """Put a container; one that is there with the same bytes was put by an earlier try."""
    try:
        lane.containers.put(container.container, container.parts)
    except (TenantErased, KeysLost) as err:  # since its chunks came: what they are of is refused when it comes again
        raise RetryableError(f"container {container.container:016x}: {err}: starting over") from err
    except AlreadyExists as err:
        if lane.containers.raw(container.container) != container.data:
            raise RetryableError(
                f"container {container.container:016x}: another writer has this id; starting over"
            ) from err


def _in_time(lane: TenantContext, container: PublishableContainer, began: float) -> None:
    """Refuse a container that was opened too long ago: what it leans on may have been collected since.

    By whichever clock says more: one may be set back meanwhile, the other stands still while the machine sleeps.
    """
    age_seconds = max(time.time() - (container.container >> 20) / 1000, time.monotonic() - began)
    if age_seconds > lane.collected.grace_seconds / 2:
        raise RetryableError(
            f"container {container.container:016x}: {age_seconds:.0f} s old, and what it leans on may be collected "
            f"after {lane.collected.grace_seconds:.0f} s (gc.grace_seconds): starting over"
        )


def _claims(lane: TenantContext, container: PublishableContainer) -> ContainerEntries:
    """Return what may be found of a container: no segment that names what is condemned or gone.

    A message that waited for more than a grace brings such: its own blob's committer will see, no other must be told.
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
    """Return what these chunks of the batch add to their blob's ledger."""
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
    """Return what is held with each message's share of the container, by weight; the shares add up to what it takes."""
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
