"""Run the stages of a put in one process.

    caller's thread     cut thread                reduce thread                        commit thread
    read, BLAKE3  -->  cut, name, group  -->  dedup, resemblance, delta  -->  seal and put container, publish, manifest
       some MiB at a time       a batch or a few  | ^                  bounded queue
                                                  v |  encode threads: blocks of a batch, until the next is decided

Invariant (I2): a manifest is written after every container that it names is durable.
One thread reduces, so that the stored bytes depend on the input only, never on timing. On one core it encodes as
well, and the caller's thread cuts and waits for it (ADR 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearkin.embedded.blob_transfer import BlobTransfer, Splice
from nearkin_chunker.arena_filler import ArenaFiller
from nearkin_chunker.splitter import Arenas, Cutter, FilledArena
from nearkin_dedup import DedupStage
from nearkin_delta import (
    ChunkCounts,
    DeltaOutcome,
    DeltaStage,
    FinishedContainer,
    SparePrefixes,
    StageResources,
    encoders_max,
)
from nearkin_resemblance import ResemblanceStage
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError, PermanentError, RetryableError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import NO_ORIGIN, Manifest
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.index.protocols import Index
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.observability import counters
from nearkin_shared.observability.stage_metrics import count_fresh, count_sealed
from nearkin_shared.pipeline.lookups import EmbeddedLookups, InFlight, SameBatchLookups
from nearkin_shared.pipeline.stage import run_stage
from nearkin_shared.pipeline.worker_thread import InlineWorker, Worker
from nearkin_shared.preconditions import Precondition
from nearkin_shared.results import Ledger, PutResult
from nearkin_shared.retention import retain_until_us
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, ContainerId, FreshBatch, Locations, SegmentBatch, StoredChunks
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.memory import large_from_system, one_heap
from nearkin_shared.utils.thread_pool import ThreadPool, cores

VERSION_RACES_MAX = 1000
GROUP_BLOBS_MAX = 4096
"""So many blobs share a commit at most; each is a file to write and sync."""
PUBLISHED_ENTRIES = 1 << 14
"""Containers are published together once they bring so many entries, or with a commit: each time a transaction is
synced, and the first run of each table written again. No more of them wait in memory than of one large container."""
MANIFEST_THREADS = 8
"""Syncs of a group's manifests wait side by side: 5,000 small files took 17 s one after another."""
COMMIT_CONTAINERS = 1
"""Finished containers that wait for the commit thread: each takes 4 to 16 MB."""
QUEUE_BATCHES = 0
"""Batches that wait between two threads: each takes memory, and one gains no time (docs/adr/0005)."""
CHECK_SECONDS = 1.0
"""A caller that waits for a checkpoint checks so often whether a thread has failed."""


@frozen
class EarlierCommit:
    """A version that an earlier attempt to store the same blob committed."""

    manifest: Manifest


_Commitment = tuple[Manifest, int] | EarlierCommit | PermanentError
"""(manifest, its bytes) of a version made now, or why none was made."""


@frozen
class SparePools:
    """Memory that goes from one writer to the next."""

    arenas: Arenas
    prefixes: SparePrefixes

    @staticmethod
    def of(settings: Settings) -> SparePools:
        """Return those of a first writer."""
        return SparePools(Arenas(int(settings.runner.batch_bytes)), SparePrefixes())


@frozen
class _Commit:
    """The blobs that ended before this point, to commit once earlier containers are durable."""

    blobs: tuple[BlobTransfer, ...]
    seal: bool


class EmbeddedWriter:
    """Puts blobs into a store; commits them in groups. Not to be shared between threads."""

    def __init__(
        self,
        settings: Settings,
        fingerprinter: Fingerprinter,
        containers: ContainerStore,
        manifests: ManifestStore,
        index: Index,
        last_container: int,
        clock: Callable[[], float] = time.time,
        spares: SparePools | None = None,
    ) -> None:
        """Create a writer. `spares`: buffers of the previous writer, if any."""
        large_from_system()
        one_heap()
        spares = spares or SparePools.of(settings)
        self._settings = settings
        self._clock = clock
        self._containers = containers
        self._manifests = manifests
        self._heads = VersionHeads(manifests.objects)
        self._index = index
        self._pending = PendingIndex(index, fingerprinter.domain)
        self._in_flight = InFlight(containers)
        self._dedup = DedupStage()
        count = cores()
        alone = count == 1
        encoders = min(count, encoders_max(settings.block))
        self._encoding = None if alone else ThreadPoolExecutor(encoders, "nearkin-encode")
        helpers = ThreadPool(self._encoding, encoders)
        self._facts = EmbeddedLookups(self._pending, self._in_flight, helpers=helpers)
        self._same_turn = SameBatchLookups(self._facts)
        self._resemblance = ResemblanceStage(settings, looks_up=False, helpers=helpers)
        self._delta = DeltaStage(
            settings,
            fingerprinter.domain,
            last_container,
            asks_bases="late",
            resources=StageResources(self._encoding, True, self._in_flight, spares.prefixes, helpers),
        )
        self._arenas = spares.arenas
        self._ended: list[BlobTransfer] = []
        self._by_number: dict[int, BlobTransfer] = {}
        self._blobs = 0
        self._unpublished: list[ContainerEntries] = []
        """Of containers that are durable; the index has them before any manifest that names them is written."""
        self._written: list[ContainerId] = []
        """Containers of this writer that no version refers to yet: perhaps durable, perhaps published."""
        self._attempted: list[tuple[str, int]] = []
        """Versions whose manifests are being written: one of them may refer to what was `_written`."""
        self._stored = Ledger()
        self._reported = Ledger()
        self._committer: Worker[FinishedContainer | _Commit] = Worker("commit", self._commit, COMMIT_CONTAINERS)
        self._reducer: Worker[SegmentBatch | _Commit] = Worker("reduce", self._reduce, QUEUE_BATCHES, serial=alone)
        self._chunks = Cutter(settings, fingerprinter, self._arenas, self._reducer.put)
        self._cutter: InlineWorker[FilledArena | _Commit] | Worker[FilledArena | _Commit] = (
            InlineWorker(self._cut) if alone else Worker("cut", self._cut, QUEUE_BATCHES)
        )
        self._filler = ArenaFiller(self._arenas, self._cutter.put, self._cutter.add)
        self.window: Callable[[], memoryview] = self._filler.window
        """Returns where the next bytes of the blob in transfer may be written; never empty."""
        self.end_chunk: Callable[..., None] = self._filler.end_chunk
        """Ends a chunk of the blob in transfer; with `ends_segment=True` a segment as well."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.abort(failed=isinstance(err, Exception))

    # --- the caller's side -------------------------------------------------------------------------------------------

    def begin(
        self, key: str, metadata: Mapping[str, str], sha256: bytes | None, precondition: Precondition | None = None
    ) -> BlobTransfer:
        """Start a blob; its bytes follow through `window` and `advance`."""
        blob = self._register(key, metadata, sha256, precondition)
        self._filler.begin(blob.number)
        return blob

    def _register(
        self, key: str, metadata: Mapping[str, str], sha256: bytes | None, precondition: Precondition | None = None
    ) -> BlobTransfer:
        blob = BlobTransfer(self._blobs, key, metadata, sha256, time.perf_counter(), precondition=precondition)
        self._by_number[self._blobs] = blob
        self._blobs += 1
        return blob

    def advance(self, blob: BlobTransfer, count: int) -> None:
        """Take `count` bytes that were written to the window."""
        if not blob.is_tree:
            blob.hasher.update(self.window()[:count])
        blob.size_bytes += count
        blob.fresh_bytes += count
        self._filler.advance(count)

    def splice(self, blob: BlobTransfer, segments: Locations, lengths: U32) -> None:
        """Append stored segments, of these lengths, to the blob in transfer without reading them.

        The caller read them from the manifest of a version that was not deleted when this put began: GC changes
        nothing while a put is in progress.
        """
        size_bytes = int(lengths.sum(dtype=np.int64))
        self.end_chunk(ends_segment=True)
        blob.spliced.append(Splice(blob.fresh_bytes, segments, lengths))
        blob.size_bytes += size_bytes
        blob.ledger += Ledger(logical_bytes=size_bytes)

    def take_over(self, blob: BlobTransfer, chunks: StoredChunks) -> None:
        """Append stored chunks to the blob in transfer without reading them.

        They are of a version as `splice` requires it. Unlike spliced segments they share segments with the bytes
        before and after, so that versions with a few changes have the segments of a version that was read as a whole.
        """
        size_bytes = int(chunks.lengths.sum(dtype=np.int64))
        self._filler.take_over(chunks)
        blob.size_bytes += size_bytes
        blob.fresh_bytes += size_bytes

    def checkpoint(
        self, blob: BlobTransfer, key: str, metadata: Mapping[str, str], end: Iterable[bytes], digest: bytes
    ) -> Future[PutResult]:
        """Commit what the tree in transfer has so far as a version of `key`.

        The parts of `end` follow it; a chunk ends after each, as in the complete tree. The result is resolved once
        the version is durable; `wait_for` waits for that.
        """
        self.end_chunk(ends_segment=True)
        if not blob.seeks_bases:
            self._filler.fill()  # the parts of `end` are a batch of their own
        copy = self._register(key, metadata, None)
        copy.is_tree, copy.tree_digest = True, digest
        copy.prefix = (blob, blob.fresh_bytes, len(blob.spliced))
        self._filler.switch(copy.number)
        for part in end:
            self.write(copy, part)
            self.end_chunk()
        copy.size_bytes += blob.size_bytes
        self._filler.end()
        self._filler.fill()
        self._filler.begin(blob.number)
        self._cutter.put(_Commit((copy,), seal=True))
        return copy.done

    def wait_for(self, done: Future[PutResult]) -> None:
        """Wait until a checkpoint is durable. Raises what went wrong."""
        workers = (self._cutter, self._reducer, self._committer)
        while not done.done():
            with suppress(TimeoutError):
                done.result(timeout=CHECK_SECONDS)
            for worker in workers:
                worker.check()

    def write(self, blob: BlobTransfer, data: bytes | memoryview) -> None:
        """Append bytes to the blob in transfer."""
        position = 0
        while position < len(data):
            window = self.window()
            count = min(len(window), len(data) - position)
            window[:count] = data[position : position + count]
            self.advance(blob, count)
            position += count

    def end(self, blob: BlobTransfer) -> None:
        """End a blob; it is committed with its group."""
        self._filler.end()
        self._ended.append(blob)
        if len(self._ended) >= GROUP_BLOBS_MAX:
            self.flush()

    def flush(self) -> None:
        """Commit all blobs that ended; wait until they are durable. Raises what went wrong."""
        self._filler.flush()
        self._cutter.put(_Commit(tuple(self._ended), seal=True))
        self._ended = []
        self._cutter.drain()
        self._reducer.drain()
        self._committer.drain()

    def close(self) -> None:
        """Commit what ended and stop."""
        try:
            self.flush()
        except BaseException as err:
            self.abort(failed=isinstance(err, Exception))
            raise
        with ExitStack() as steps:  # from the last one up; each is done, whatever interrupts another
            steps.callback(self._filler.close)
            steps.callback(self._in_flight.end)
            if self._encoding is not None:
                steps.callback(self._encoding.shutdown)
            for worker in (self._committer, self._reducer, self._cutter):
                steps.callback(worker.stop)

    def abort(self, *, failed: bool = False) -> None:
        """Stop without committing.

        Data of an interrupted put are kept for the put that resumes it. Data of a `failed` put are not published: the
        caller
        removes the containers that `uncommitted` returns.
        """
        with ExitStack() as steps:
            steps.callback(self._in_flight.end)
            steps.callback(self._in_flight.abandon)
            if not failed:
                steps.callback(self._publish_if_possible)
            if self._encoding is not None:
                steps.callback(self._encoding.shutdown)
            for worker in (self._committer, self._reducer, self._cutter):
                steps.callback(worker.cancel)  # each may wait for room with the next: the cutter's ends first

    def uncommitted(self) -> list[ContainerId]:
        """Return the containers of an aborted writer that no version references.

        Raises StoreUnavailable if that cannot be determined.
        """
        tenant = self._settings.tenant
        if any(self._manifests.is_committed(tenant, key, version) for key, version in self._attempted):
            return []
        return list(self._written)

    def _publish_if_possible(self) -> None:
        with suppress(NearkinError):  # else the writer next finds that the index is behind, and does it
            self._publish()

    def _cut(self, item: FilledArena | _Commit) -> None:
        if isinstance(item, _Commit):
            self._reducer.put(item)
        else:
            self._chunks.cut(item)

    # --- the reduce thread -------------------------------------------------------------------------------------------

    def _reduce(self, item: SegmentBatch | _Commit) -> None:
        if isinstance(item, _Commit):
            for container in self._delta.flush():
                self._pass_on_container(container)
            self._committer.put(item)
            return
        self._in_flight.open_only(*self._delta.open)
        self._delta.seek_bases(is_on=self._seeks_bases(item))
        fresh = run_stage(self._dedup, item, self._facts)
        count_fresh(fresh)
        if is_all_duplicate(fresh):
            outcome = self._delta.fold(fresh, self._resemblance.sketch.name)
        else:
            paired = run_stage(self._resemblance, fresh, self._facts)
            outcome = run_stage(self._delta, paired, self._same_turn)
            placed = outcome.placed
            self._pending.add(
                placed.names,
                placed.chunks,
                placed.sketch,
                placed.base_chunks,
                placed.super_features,
                placed.segment_ids,
                placed.segments,
            )
        self._account(outcome, item.segment_lengths)
        for container in outcome.finished:
            self._pass_on_container(container)
        self._arenas.give_back(item.payload)  # all that is kept was copied into blocks

    def _seeks_bases(self, item: SegmentBatch) -> bool:
        """Return whether bases are sought for a batch.

        Not if it has entries of such checkpoints alone.
        """
        blobs = [
            self._by_number[number].prefix for number in set(item.blobs.tolist())
        ]  # np.unique imports numpy.ma: 6 ms of each put
        return any(prefix is None or prefix[0].seeks_bases for prefix in blobs)

    def _pass_on_container(self, container: FinishedContainer) -> None:
        self._in_flight.on_finished(container)
        self._committer.put(container)

    def _account(self, outcome: DeltaOutcome, lengths: U32) -> None:
        """Give each blob its segments, of these lengths, and its share of the savings.

        Sums are computed for each blob with one numpy call.
        """
        changes = np.flatnonzero(np.diff(outcome.blobs)) + 1
        for start, stop in pairwise([0, *changes.tolist(), len(outcome.blobs)]):
            blob = self._by_number[int(outcome.blobs[start])]
            blob.segments.append(outcome.segments.take(slice(start, stop)))
            blob.known.append(outcome.segment_known[start:stop])
            blob.lengths.append(lengths[start:stop])
        for number, share in _shares(outcome.counts):
            self._by_number[number].ledger += Ledger(*share)

    # --- the commit thread -------------------------------------------------------------------------------------------

    def _commit(self, item: FinishedContainer | _Commit) -> None:
        with counters.STAGE_SECONDS.time("commit"):
            self._make_durable(item)

    def _make_durable(self, item: FinishedContainer | _Commit) -> None:
        """1 put  2 publish  3 manifest  4 catalog.

        A crash in between leaves unreferenced data or a stale index.
        """
        if isinstance(item, FinishedContainer):
            sealed = item.seal()
            failpoint("put.sealed")
            self._written.append(sealed.container)
            self._containers.put(sealed.container, sealed.parts)  # 1
            failpoint("put.container")
            self._in_flight.durable(sealed.claims.directory)
            self._unpublished.append(sealed.claims)
            if sum(claims.entries for claims in self._unpublished) >= PUBLISHED_ENTRIES:
                self._publish()
            count_sealed(sealed.claims.directory)
            summary = summarise(sealed.claims)
            self._stored += Ledger(
                block_bytes=summary.raw_block_bytes + summary.delta_block_bytes,
                raw_block_bytes=summary.raw_block_bytes,
                stored_bytes=self._containers.takes_bytes(sealed.container, summary.container_bytes),
            )
            return
        self._publish()
        failpoint("commit.begun")
        by_key: dict[str, list[BlobTransfer]] = {}
        for blob in item.blobs:
            by_key.setdefault(blob.key, []).append(blob)
        with ThreadPoolExecutor(MANIFEST_THREADS if len(by_key) > 1 else 1) as threads:
            done = dict(pair for pairs in threads.map(self._put_manifests, by_key.values()) for pair in pairs)  # 3
        failpoint("commit.manifests")
        made = [put for put in done.values() if isinstance(put, tuple)]
        if made:
            self._written, self._attempted = [], []
        self._index.commit_many(made)  # 4
        failpoint("commit.catalogued")
        for blob in item.blobs:
            put = done[blob.number]
            if isinstance(put, PermanentError):
                self._report_refused(blob, put)
            elif isinstance(put, EarlierCommit):
                self._report_earlier(blob, put.manifest)
            else:
                self._report(blob, *put)
        self._reported = self._stored

    def _publish(self) -> None:
        many, self._unpublished = self._unpublished, []
        if many:
            self._index.publish_many(many)  # 2
            failpoint("put.published")
            self._pending.on_published([claims.directory.container for claims in many])

    def _put_manifests(self, blobs: list[BlobTransfer]) -> list[tuple[int, _Commitment]]:
        """Commit the versions of a key in order; return a reason for blobs without version."""
        return [(blob.number, self._put_manifest(blob)) for blob in blobs]

    def _report(self, blob: BlobTransfer, manifest: Manifest, manifest_bytes: int) -> None:
        self._stored += Ledger(stored_bytes=self._manifests.stored_bytes(manifest, manifest_bytes))
        group = self._stored
        before = self._reported
        self._reported = group
        written = blob.checkpointed + Ledger(
            block_bytes=group.block_bytes - before.block_bytes,
            raw_block_bytes=group.raw_block_bytes - before.raw_block_bytes,
            stored_bytes=group.stored_bytes - before.stored_bytes,
        )
        if blob.prefix is not None:
            blob.prefix[0].checkpointed += written
        ledger = blob.ledger + written
        del self._by_number[blob.number]
        blob.done.set_result(PutResult(manifest.info, ledger, manifest.seconds))

    def _report_earlier(self, blob: BlobTransfer, manifest: Manifest) -> None:
        """End a repeated put with its earlier version; GC frees the data of the repeat."""
        del self._by_number[blob.number]
        blob.done.set_result(PutResult(manifest.info, manifest.ledger, manifest.seconds))

    def _report_refused(self, blob: BlobTransfer, err: PermanentError) -> None:
        """End a refused conditional put; its data are unreferenced until GC frees them."""
        del self._by_number[blob.number]
        blob.done.set_exception(err)

    def _put_manifest(self, blob: BlobTransfer) -> _Commitment:
        """Commit with the next free version number; on conflict retry with the next (I2)."""
        with self._manifests.exclusive_if(blob.precondition, self._settings.tenant, blob.key):
            return self._claim_version_number(blob)

    def _claim_version_number(self, blob: BlobTransfer) -> _Commitment:
        tenant = self._settings.tenant
        seconds = round(time.perf_counter() - blob.started, 3)  # as the manifest keeps it
        # Numbers in the index count as used too: a lost manifest may be restored from a copy.
        indexed, version = self._index.versions_of(tenant, blob.key), self._heads.highest_taken(tenant, blob.key)
        segments, known, lengths = blob.assemble()
        for retry in range(VERSION_RACES_MAX):
            histories = self._manifests.histories(tenant, blob.key)
            if not retry:
                self._heads.warn_if_removed(tenant, blob.key, histories)
            earlier = self._manifests.find_origin(tenant, blob.key, histories, blob.origin)
            if earlier is not None:  # before the precondition, which this version may fail
                return EarlierCommit(earlier)
            try:
                self._manifests.check_precondition(tenant, blob.key, histories, blob.precondition)
            except PermanentError as err:  # of this blob alone: the others of its group are committed
                return err
            version = max((version, *histories, *indexed)) + 1
            now_us = int(self._clock() * 1e6)
            manifest = Manifest(
                tenant=tenant,
                key=blob.key,
                version=version,
                created_us=now_us if blob.created_us is None else blob.created_us,
                retain_until_us=retain_until_us(
                    self._settings.retention, tenant, blob.key, now_us, self._manifests.known_time
                ),
                size_bytes=blob.size_bytes,
                blake3=blob.tree_digest if blob.is_tree else blob.hasher.digest(),
                sha256=blob.sha256,
                seconds=seconds,
                ledger=blob.ledger,
                segments=segments,
                known=known,
                metadata=dict(blob.metadata),
                origin=NO_ORIGIN if blob.origin is None else blob.origin.id,
                lengths=lengths,
                is_tree=blob.is_tree,
                source_changed=blob.source_changed,
                previous=self._manifests.find_previous(tenant, blob.key, histories),
            )
            self._attempted.append((blob.key, version))
            try:
                manifest_bytes = self._manifests.put(manifest)  # 3
            except AlreadyExists:
                continue
            failpoint("commit.manifest")
            return manifest, manifest_bytes
        raise RetryableError(f"key {blob.key!r}: {VERSION_RACES_MAX} other puts took the next version first; try again")


def is_all_duplicate(fresh: FreshBatch) -> bool:
    """Return whether a batch has only known segments, so that later stages have no work."""
    return bool(fresh.segment_known.all())


def _shares(counts: ChunkCounts) -> list[tuple[int, list[int]]]:
    """Return (blob, its share of the ledger) for each blob of a batch."""
    stored, delta = ~counts.duplicate, counts.delta
    if len(counts.blobs) and counts.blobs[0] == counts.blobs[-1]:  # they ascend: one blob, as in most batches
        numbers, rows = counts.blobs[:1], None
    else:
        numbers, rows = np.unique(counts.blobs, return_inverse=True)

    def summed(values: NDArray[np.generic]) -> NDArray[np.int64]:
        if rows is None:
            return np.asarray([values.sum(dtype=np.int64)])
        return np.bincount(rows, values, len(numbers)).astype(np.int64)

    sums = (
        summed(counts.lengths),
        summed(np.ones(len(counts.blobs), np.uint8)),
        summed(counts.duplicate),
        summed(delta),
        summed(stored & ~delta),
        summed(counts.zero),
        summed(counts.lengths * stored),
        summed(counts.lengths * delta),
        summed(counts.delta_bytes),
    )
    return list(zip(numbers.tolist(), np.stack(sums, axis=1).tolist(), strict=True))
