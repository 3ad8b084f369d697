"""Commit the version of a blob once all its segments are placed.

The topic is the state: offsets move only past blobs that are committed or failed, so that a restart reads the rest
again. A repeated message is recognised by its sequence, a repeated blob by its origin among the key's newest versions.

Invariants: a blob is committed once, when all its segments are placed, or reported failed. A blob that may have been
reported as refused is never committed afterwards.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from nearkin_committer.batch_commit import BatchCommits, CommittedVersion, ends_of
from nearkin_committer.begun_batches import BatchVersions, BegunBatch, BegunBatches
from nearkin_committer.committed_events import CommittedEvents
from nearkin_committer.late_versions import durable_us, take_back
from nearkin_committer.open_blob import BlobName, OpenBlob, lacks_bytes
from nearkin_committer.ready_blobs import ReadyBlobs
from nearkin_committer.refusals import Refusals, check_precondition
from nearkin_committer.version_content import VersionContent, assemble_content, make_manifest
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, PermanentError, PreconditionFailed, RetryableError
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Placed
from nearkin_shared.index.protocols import SupportsReports
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.commit_backlog import CommitBacklog
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS, Record, patiently
from nearkin_shared.kafka.lag import BACKLOG_SECONDS, WAITS, Backlog
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.offset_tracker import PartitionOffsets
from nearkin_shared.kafka.record_guard import RecordGuard, trace_of
from nearkin_shared.kafka.tenant_context import TenantContext, TenantContexts
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.observability import metrics
from nearkin_shared.observability.log_setup import about
from nearkin_shared.observability.tracing import about as about_span
from nearkin_shared.observability.tracing import span
from nearkin_shared.preconditions import PRECONDITION
from nearkin_shared.results import Ledger
from nearkin_shared.storage.committed_origins import BlobOrigin, CommittedOrigins
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import Locations
from nearkin_shared.utils.failpoints import failpoint

_log = logging.getLogger("nearkin.commit")

VERSION_RACES_MAX = 1000
FINISHED_MAX = 10_000
"""Blobs remembered as committed or failed: later messages about them are ignored."""
OPEN_BLOBS_MAX = 20_000
RECORDS_MAX = 1 << 20
"""Records of all incomplete blobs: 1.2 KiB each if a run has 14 segments of 128 KiB, as most do."""
STAGES_BEFORE = frozenset(WAITS) - {"committer"}
"""A blob may miss segments that wait for one of these. It holds back the committers' own offset."""
LATE_TIMES = 1 + len(STAGES_BEFORE)
"""A blob fails after this many times `upload_idle_seconds`: a stage with a shorter lag is not detected, and
segments may meet such a lag in each stage."""
LOOKS = 10
"""Checks of the stages' lag in each such time: a lag may appear and disappear in between."""
CLOCK_SKEW_US = CLOCK_SKEW_SECONDS_MAX * 1_000_000
"""A version older than its blob's start by more than this has another origin."""
COMMITTING_SECONDS = 0.02
"""How long complete blobs are committed before further records are read: a blob of another tenant may be among them."""
BEGUN_SECONDS = 0.005
"""How long it waits for records at a time while batches are in work: a record wakes it, the end of a batch does not."""
READY_BLOBS_MAX = 8192
"""Complete blobs that wait for their commit, in memory; others wait in Kafka. Some 3 KiB each."""
EARLIER_VERSIONS_MAX = 1000
"""Versions of a key that the search for an earlier attempt reads at most: about 20 s on S3, once per process."""


class CommitterHandler:
    """Assembles blobs from topic `placed` and commits them."""

    def __init__(
        self,
        settings: Settings,
        manifests: ManifestStore,
        lanes: TenantContexts,
        worker: str,
        backlog: Backlog,
        authenticator: EnvelopeAuthenticator | None,
        refusals: Refusals | None = None,
        commits: CommitBacklog | None = None,
    ) -> None:
        """`backlog`: checked before a blob fails for lack of segments.

        `refusals`: of conditional puts. `commits`: receives the number of complete blobs that wait.
        """
        self._refusals = refusals
        self._settings = settings
        self._backlog = backlog
        self._manifests = manifests
        self._heads = VersionHeads(manifests.objects)
        self._origins = CommittedOrigins(manifests.get, older_max=0)
        self._batches = BatchCommits(settings, manifests, self._heads, self._earlier)
        self._begun = BegunBatches(self._batches, self._is_late)
        self._lanes = lanes
        self._outbox = Outbox(settings, f"{worker}-committed", authenticator)
        self._events = CommittedEvents(self._outbox)
        self._guard = RecordGuard(settings, "committer", self._outbox, None)
        self._offsets: dict[int, PartitionOffsets] = {}
        self._open: OrderedDict[BlobName, OpenBlob] = OrderedDict()
        """In the order of the last message."""
        self._ready = ReadyBlobs()
        self._commits = CommitBacklog() if commits is None else commits
        self._commits.blobs = 0
        self._has_committed = False  # in `handle`, so that `idle` lets further records be read first
        self._records = 0
        self._looked = -math.inf
        self._finished: OrderedDict[BlobName, None] = OrderedDict()
        for state in ("committed", "failed"):
            metrics.BLOBS.labels(state)

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._offsets[partition] = PartitionOffsets()

    def handle(self, records: list[Record]) -> None:
        """Add records to their blobs; commit complete blobs, for COMMITTING_SECONDS."""
        done: list[tuple[int, int]] = []
        for record in records:
            self._offsets[record.partition].start(record.offset)
            done += self._one(record)
        done += self._commit_ready()
        self._has_committed = True
        self._outbox.flush()
        self._done(done)

    @property
    def has_room(self) -> bool:
        """Return whether few blobs wait for their commit."""
        return self._commits.blobs < READY_BLOBS_MAX

    def idle(self) -> float:
        """Commit complete blobs, for COMMITTING_SECONDS; fail blobs that receive no more segments."""
        if self.has_ready_blobs and not self._has_committed:
            done = self._commit_ready()
            self._outbox.flush()
            self._done(done)
        self._has_committed = False
        self._fail_late()
        if self._begun.is_due or self._ready.has_any(self._may_take):
            return 0.0
        return BEGUN_SECONDS if len(self._begun) else IDLE_SECONDS

    @property
    def has_ready_blobs(self) -> bool:
        """Return whether complete blobs wait for their commit, or batches are in work."""
        return len(self._ready) + len(self._begun) > 0

    def _fail_late(self) -> None:
        """Fail blobs that receive no more segments, since an earlier stage put one aside.

        Not while an earlier stage lags that far behind: an outage would fail every accepted blob. The wait then starts
        again: segments that a stage has caught up with still have the other stages before them.
        """
        seconds, now = self._settings.kafka.upload_idle_seconds, time.monotonic()
        waiting = [blob for blob in self._open.values() if not blob.is_ready and now - blob.last_seen > seconds]
        if not waiting or now - self._looked < max(BACKLOG_SECONDS, seconds / LOOKS):
            return
        self._looked = now
        if self._unread(waiting) or self._backlog.oldest_seconds(STAGES_BEFORE) > seconds:
            for blob in waiting:
                blob.last_seen = now
                self._open.move_to_end(blob.name)
            return
        for blob in waiting:
            known = None if blob.envelope.blobs else blob.failure
            if known is not None or now - blob.last_seen > LATE_TIMES * seconds:
                failure = known or "some of its segments are missing; look among the dead letters"
                done = self._fail(blob, failure, None)
                self._outbox.flush()
                self._done(done)

    def _unread(self, blobs: Iterable[OpenBlob]) -> bool:
        """Return whether the topic has unread records in the partitions of these blobs."""
        found = {partition: self._offsets[partition].following for partition in {blob.records[0][0] for blob in blobs}}
        return any(self._backlog.unread("placed", part, after) for part, after in found.items() if after is not None)

    def drain(self, partition: int) -> None:
        """Wait for the manifests in work.

        The next owner of the partition assembles its blobs again.
        """
        self._begun.wait_until_idle()

    def on_dropped(self, partition: int) -> None:
        """Forget a partition and its blobs."""
        self._offsets.pop(partition, None)
        for blob in [blob for blob in self._open.values() if blob.name[0] == partition]:
            del self._open[blob.name]
            self._records -= len(blob.records)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield the offset of each partition before its oldest open blob."""
        for partition, offsets in self._offsets.items():
            if offsets.committable is not None:
                yield partition, offsets.committable, ""

    def close(self) -> None:  # noqa: D102
        self._outbox.close()
        self._backlog.close()
        self._begun.close()
        self._batches.close()

    def _done(self, records: Iterable[tuple[int, int]]) -> None:
        for partition, offset in records:
            offsets = self._offsets.get(partition)
            if offsets is not None:
                offsets.finish(offset)

    def _one(self, record: Record) -> list[tuple[int, int]]:
        """Return the records that are done after this one."""
        place = (record.partition, record.offset)
        message = self._guard.decode(record)
        if message is None or (name := _name(record.partition, message.envelope)) in self._finished:
            return [place]
        if not isinstance(message, Placed | End | BatchEnd):
            _log.warning("%s: unexpected %s on this topic, ignored", record.label, type(message).__name__)
            return [place]
        blob = self._open.setdefault(name, OpenBlob(message.envelope, name))
        self._open.move_to_end(name)
        self._records += 1
        blob.records.append(place)
        blob.last_seen = time.monotonic()
        if blob.is_ready:  # sent again
            return []
        if isinstance(message, Placed):
            blob.add(message)
        elif isinstance(message, BatchEnd):
            blob.batch = message
        elif message.failure is not None and message.envelope.blobs:
            blob.failure = message.failure
        elif lacks_bytes(message):
            blob.end, blob.failure = blob.end or replace(message, failure=None), message.failure
            if self._version_of(blob.end) is not None:
                return self._fail(blob, str(message.failure), trace_of(record))
        else:
            blob.end = message
        return self._decide(blob, record)

    def _decide(self, blob: OpenBlob, record: Record) -> list[tuple[int, int]]:
        """Commit or fail a blob once that is possible; return the records that are done."""
        end = blob.end
        if end is not None and end.failure is not None:
            return self._fail(blob, end.failure, trace_of(record))
        if blob.batch is not None and blob.failure is not None:
            return self._fail(blob, blob.failure, trace_of(record))
        if blob.is_complete:
            blob.is_ready = True
            self._ready.add(blob, record)
            self._commits.blobs += blob.count
            return []
        return self._make_room(blob)

    def _commit_ready(self) -> list[tuple[int, int]]:
        """Commit complete blobs for COMMITTING_SECONDS; return their records.

        Batches are begun, and brought to their end once their manifests are durable.
        """
        done: list[tuple[int, int]] = []
        until = time.monotonic() + COMMITTING_SECONDS
        while not done or time.monotonic() < until:
            if self._begun.is_due:
                done += self._carry_out_batch(self._begun.take())
            elif self._ready.has_any(self._may_take):
                done += self._commit_next()
            else:
                break
        return done

    def _may_take(self, blob: OpenBlob) -> bool:
        """Return whether a complete blob may be taken.

        Records of a tenant stay behind its batches in work.
        """
        if blob.batch is not None:
            return self._begun.has_room
        return not blob.is_of_topic or not self._begun.has_batch_of(blob.envelope.tenant)

    def _commit_next(self) -> list[tuple[int, int]]:
        """Begin the next batch, or commit the next blob; return the records that are done."""
        done: list[tuple[int, int]] = []
        taken, due = self._ready.take(self._may_take)
        self._commits.blobs -= taken.count
        for blob, record in due:
            if self._open.get(blob.name) is not blob:  # its partition was revoked
                continue
            if blob.batch is not None:
                self._begun.begin(partial(self._lane_of, blob), blob, blob.batch, record)
            elif blob.end is not None:
                done += self._carry_out(blob, blob.end, record)
        return done

    def _carry_out(self, blob: OpenBlob, end: End, record: Record) -> list[tuple[int, int]]:
        """Commit a complete blob, or fail it; return its records."""
        if not self._guard.carry_out(record, blob.envelope, lambda: self._commit_traced(blob, end, record)):
            return self._fail(blob, "it could not be committed; look among the dead letters", trace_of(record))
        if blob.refusal is not None:
            return self._fail(blob, str(blob.refusal), trace_of(record), PRECONDITION)
        return self._finish(blob)

    def _make_room(self, newest: OpenBlob) -> list[tuple[int, int]]:
        """Fail a blob if too many are incomplete; return its records.

        The least recently seen one if its upload must have ended, else the newest one: to fail those that wait longest
        would fail all of them if slightly too many are active in parallel.
        """
        if len(self._open) > OPEN_BLOBS_MAX:
            longest = next(blob for blob in self._open.values() if not blob.is_ready)
            dead = time.monotonic() - longest.last_seen > self._settings.kafka.upload_idle_seconds
            blob, problem = longest if dead else newest, f"more than {OPEN_BLOBS_MAX} blobs are gathering"
        elif self._records > RECORDS_MAX:
            blob = max((one for one in self._open.values() if not one.is_ready), key=lambda one: len(one.records))
            problem = f"the blobs that are gathering have more than {RECORDS_MAX} records, this one most of them"
        else:
            return []
        return self._fail(blob, f"{problem}: add partitions (kafka.partitions) or committers, then put it again", None)

    def _finish(self, blob: OpenBlob) -> list[tuple[int, int]]:
        del self._open[blob.name]
        self._records -= len(blob.records)
        self._finished[blob.name] = None
        if len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        return blob.records

    def _commit_traced(self, blob: OpenBlob, end: End, record: Record) -> None:
        attributes = about_span(blob.envelope.blob, blob.envelope.tenant) | {"nearkin.bytes": end.size_bytes or 0}
        with span("commit", trace_of(record), attributes) as traceparent:
            try:
                self._commit(end, assemble_content(blob, end), traceparent)
            except PreconditionFailed as err:  # a response to the caller, not a fault: no dead letter
                blob.refusal = err

    def _lane_of(self, blob: OpenBlob) -> TenantContext:
        return self._lanes[blob.envelope.tenant]

    def _carry_out_batch(self, begun: BegunBatch) -> list[tuple[int, int]]:
        """Commit the blobs of a batch in work, or fail them; return its records."""
        blob, record = begun.blob, begun.record
        if self._open.get(blob.name) is not blob or blob.batch is None:  # its partition was revoked
            return []
        batch = blob.batch
        if not self._guard.carry_out(record, blob.envelope, lambda: self._commit_batch(begun, batch, record)):
            return self._fail(blob, "it could not be committed; look among the dead letters", trace_of(record))
        return self._finish(blob)

    def _commit_batch(self, begun: BegunBatch, batch: BatchEnd, record: Record) -> None:
        """Commit a batch as `_commit` does one blob, each step for all blobs.

        A blob that this leaves out is committed by itself.
        """
        lane = self._lanes[batch.envelope.tenant]
        created = begun.versions()  # 1
        failpoint("batch.manifest")
        made = self._confirmed(lane, batch, created) if created.is_late else created.versions
        self._catalogue_all(lane, [version for version in made if version is not None])  # 2
        failpoint("batch.catalogued")
        for end, content, version, one in zip(created.ends, created.contents, made, batch.blobs, strict=True):
            if version is None:
                self._commit_alone(end, content, record, one.traceparent)
                continue
            ledger = content.ledger + self._stored_bytes(version.manifest, version.manifest_bytes)
            self._events.send_committed(end, version.manifest, ledger, one.traceparent)  # 3
        failpoint("batch.sent")

    def _is_late(self, lane: TenantContext, batch: BatchEnd) -> bool:
        """Return whether versions of a batch that are durable now are to be confirmed."""
        return not self._in_time(lane, _took_us(batch))

    def _confirmed(self, lane: TenantContext, batch: BatchEnd, created: BatchVersions) -> list[CommittedVersion | None]:
        """Return the versions of a late batch that stay; `_confirm` withdraws the others."""
        took_us = _took_us(batch)
        stay: list[CommittedVersion | None] = []
        for version in created.versions:
            try:
                if version is not None:
                    self._confirm(lane, version.manifest, took_us)
                stay.append(version)
            except PermanentError:
                stay.append(None)
        return stay

    def _commit_alone(self, end: End, content: VersionContent, record: Record, traceparent: bytes | None) -> None:
        """Commit one blob of a batch, or report it failed. Raises RetryableError."""

        def work() -> None:
            self._commit(end, content, traceparent)

        if not self._guard.carry_out(record, end.envelope, work):
            self._report_failed(
                end.envelope, end, "it could not be committed; look among the dead letters", traceparent
            )

    def _commit(self, end: End, gathered: VersionContent, traceparent: bytes | None) -> None:
        """Commit: 1 manifest  2 index  3 event.

        After a crash in between, the next delivery finds the origin and sends the same event.
        """
        lane = self._lanes[end.envelope.tenant]  # first: a new key must exist before a manifest is encrypted with it
        manifest, manifest_bytes, durable_us = self._committed(lane, end, gathered)  # 1
        failpoint("version.manifest")
        self._confirm(lane, manifest, durable_us - end.began_us)
        self._catalogue(lane, manifest, manifest_bytes)  # 2
        failpoint("version.catalogued")
        ledger = gathered.ledger + self._stored_bytes(manifest, manifest_bytes)
        self._events.send_committed(end, manifest, ledger, traceparent)  # 3
        failpoint("version.sent")

    def _stored_bytes(self, manifest: Manifest, manifest_bytes: int) -> Ledger:
        return Ledger(stored_bytes=self._manifests.stored_bytes(manifest, manifest_bytes))

    def _catalogue_all(self, lane: TenantContext, versions: Sequence[CommittedVersion]) -> None:
        """Add versions to the index as `_catalogue` does. Raises RetryableError."""
        try:
            lane.index.commit_many([(version.manifest, version.manifest_bytes) for version in versions])
        except PermanentError:
            for version in versions:
                self._catalogue(lane, version.manifest, version.manifest_bytes)

    @staticmethod
    def _catalogue(lane: TenantContext, manifest: Manifest, manifest_bytes: int) -> None:
        """Add the version to the index.

        A permanent error is logged only: the version exists, a rebuild adds it.

        Raises: RetryableError.
        """
        try:
            lane.index.commit(manifest, manifest_bytes)
        except PermanentError as err:
            if isinstance(err, Corrupt):
                metrics.CORRUPT.labels("committer").inc()
            _log.error(
                "key %r version %d: committed, but the index refused it; listings lack it until the index is rebuilt: "
                "%s",
                manifest.key,
                manifest.version,
                err,
            )

    def _confirm(self, lane: TenantContext, manifest: Manifest, took_us: int) -> None:
        """Withdraw a version that became durable so late that its chunks may be collected.

        Every location in a blob was valid after its start. Data marked for deletion at that moment or later are deleted
        a grace later at the earliest, unless a manifest that is durable by then names them. So a version that was
        durable in time stays, however late it is delivered again: damaged chunks of it may still be repaired.

        Raises: PermanentError.
        """
        if self._in_time(lane, took_us):
            return
        problem = lane.collected.find_dangling(manifest.segments)
        if problem is not None:
            take_back(self._manifests, lane.index, manifest)
            raise PermanentError(f"{problem}: the blob was in flight for too long (gc.grace_seconds); put it again")

    @staticmethod
    def _in_time(lane: TenantContext, took_us: int) -> bool:
        """Return whether a version became durable before its chunks could be collected."""
        return took_us < lane.collected.grace_seconds / 2 * 1e6 - CLOCK_SKEW_US

    @staticmethod
    def _require_stored(lane: TenantContext, segments: Locations) -> None:
        """Refuse segments that the store lacks (I2), as an index from an older copy may name.

        Raises: PermanentError, after reporting the container, so that the index is checked and the same content is
        stored when it is put again.
        """
        missing = lane.collected.find_missing(segments)
        if missing is None:
            return
        container, problem = missing
        if isinstance(lane.index, SupportsReports):
            lane.index.report_missing(container)
        metrics.CORRUPT.labels("committer").inc()
        raise PermanentError(
            f"the index named a segment that the store lacks ({problem}): it is being checked; put the blob again"
        )

    def _committed(self, lane: TenantContext, end: End, gathered: VersionContent) -> tuple[Manifest, int, int]:
        """Return (manifest, its bytes, us when durable), of this delivery or an earlier one (I2).

        Raises: PreconditionFailed.
        """
        with self._manifests.exclusive_if(end.precondition, end.envelope.tenant, end.envelope.key):
            return self._claim_version_number(lane, end, gathered)

    def _claim_version_number(
        self, lane: TenantContext, end: End, gathered: VersionContent
    ) -> tuple[Manifest, int, int]:
        tenant, key = end.envelope.tenant, end.envelope.key
        taken = self._heads.highest_taken(tenant, key)  # a lost manifest may be restored from a copy
        for retry in range(VERSION_RACES_MAX):
            histories = self._manifests.histories(tenant, key)
            if not retry:
                self._heads.warn_if_removed(tenant, key, histories)
            earlier = self._earlier(end, sorted(histories))
            if earlier is not None:
                return *earlier, durable_us(self._manifests, earlier[0])
            check_precondition(self._manifests, self._refusals, end, histories)
            self._require_stored(lane, gathered.segments)
            manifest = make_manifest(self._settings, self._manifests, end, gathered, histories, taken)
            try:
                manifest_bytes = self._manifests.put(manifest)
            except AlreadyExists:
                continue  # another put took the number, or this one did and the response was lost
            metrics.count_committed(gathered.ledger, manifest_bytes, manifest.seconds)
            return manifest, manifest_bytes, time.time_ns() // 1000
        raise RetryableError(f"key {key!r}: {VERSION_RACES_MAX} other puts took the next version first")

    def _earlier(self, end: End, versions: list[int]) -> tuple[Manifest, int] | None:
        """Return the version with this origin; search back to the first attempt.

        Manifests are read once per process. An upload with an `Idempotency-Key`, or a resumable one, may have been
        committed hours ago: the newest EARLIER_VERSIONS_MAX of the key are searched then, at most.
        """
        tenant, key, is_long_ago = end.envelope.tenant, end.envelope.key, end.first_attempt_us is not None
        origin = BlobOrigin(end.origin, min(end.first_attempt_us or end.began_us, end.began_us))
        known = self._manifests.origins if is_long_ago else self._origins
        manifest = known.find(tenant, key, versions, origin, EARLIER_VERSIONS_MAX if is_long_ago else len(versions))
        return None if manifest is None else (manifest, self._manifests.size_bytes(manifest))

    def _fail(
        self, blob: OpenBlob, failure: str, traceparent: bytes | None, reason: str | None = None
    ) -> list[tuple[int, int]]:
        """Report a blob failed, or committed if a version has its origin; return its records.

        `reason`: a name for programs, if one exists. Raises RetryableError.
        """
        if blob.batch is None:
            self._report_failed(blob.envelope, blob.end, failure, traceparent, reason)
        else:
            for end, one in zip(ends_of(blob.batch), blob.batch.blobs, strict=True):
                self._report_failed(end.envelope, end, failure, one.traceparent, reason)
        return self._finish(blob)

    def _report_failed(
        self, envelope: Envelope, end: End | None, failure: str, traceparent: bytes | None, reason: str | None = None
    ) -> None:
        """Report a blob failed, or committed if a version has its origin. Raises RetryableError."""
        earlier = self._version_of(end) if end is not None and end.segments is not None else None
        with about(envelope.blob, envelope.tenant, traceparent):
            if end is not None and earlier is not None:
                manifest, manifest_bytes = earlier
                _log.warning(
                    "blob %s: committed before as version %d; now: %s", end.origin.hex(), manifest.version, failure
                )
                ledger = manifest.ledger + self._stored_bytes(manifest, manifest_bytes)
                self._events.send_committed(end, manifest, ledger, traceparent)
            else:
                self._events.send_failed(envelope, end, failure, reason, traceparent)

    def _version_of(self, end: End) -> tuple[Manifest, int] | None:
        """Return the committed version of a blob, or None if there is none that can be read."""

        def look() -> tuple[Manifest, int] | None:
            return self._earlier(end, self._manifests.versions(end.envelope.tenant, end.envelope.key))

        try:
            return patiently(look)
        except PermanentError as err:
            _log.warning("blob %s: versions of its key not readable: %s", end.envelope.blob.hex(), err)
            return None


def _took_us(batch: BatchEnd) -> int:
    """Return the time since a batch was begun, by its id: its locations were valid then."""
    return time.time_ns() // 1000 - int.from_bytes(batch.envelope.blob[:6], "big") * 1000


def _name(partition: int, envelope: Envelope) -> BlobName:
    return partition, envelope.blob, envelope.tenant, envelope.key
