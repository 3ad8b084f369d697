"""Embedded ingest: uploads of a gateway are put into the store of its own process.

    request tasks                 one writer thread                                       one GC thread, at times
    spool to disk   -- queue -->  put_many: waiting uploads are committed together        a GC run

Invariant: `finish` returns after the version is committed and durable.
A body is spooled to disk before it is queued, so that a slow client does not delay the one writer.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from io import BytesIO
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any, BinaryIO, cast

from nearkin.embedded.background_scrub import BackgroundScrubTask
from nearkin.store import Item, Store, open_store
from nearkin.trees.spliced_tree import CopiedRanges, SplicedTree
from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.auth.tokens import token_file
from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult, committed_event
from nearkin_gateway.blocking_threads import WorkerPool, WorkerPools
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_gateway.setting_changes import ConfigChanges
from nearkin_gateway.state import HAND_OVERS_MAX, Gateway, shares_of
from nearkin_gateway.uploads.resumable_store import Resumable
from nearkin_gateway.uploads.upload_status import UploadIds, UploadStatuses, new_id
from nearkin_maintenance.gc.schedule import GcSchedule
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NearkinError, NotFound, PermanentError, StoreUnavailable
from nearkin_shared.formats.manifest import us_of
from nearkin_shared.formats.upload_parts import CopiedRange
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.factory import as_set, local_objects
from nearkin_shared.observability import counters, metrics
from nearkin_shared.reading.copy_sources import SourceVersion
from nearkin_shared.results import PutResult, Stats
from nearkin_shared.results_json import gc_json
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import make_private_folder
from nearkin_shared.validation import check_metadata, check_stored_key, is_reserved_key

GROUP_BLOBS_MAX = 256
GROUP_BYTES_MAX = 64 * 1024 * 1024
MARKED_A_PAGE = 512
"""Entries read at a time where deleted versions are searched."""
CLOSE_SECONDS_MAX = 60.0
GC_WAIT_SECONDS = 600.0
"""So long a GC run waits for the put that is at work as it begins: a body can be large."""
BROKEN_SECONDS = 60.0
"""After a GC run or a scrub that could not even begin, the next look is so much later."""
PAUSED_SECONDS = 2.0
"""So often it is looked whether a GC run that is due is still paused; at each passing that took all of a core."""
_log = logging.getLogger("nearkin.gateway")


@frozen
class _Job:
    intent: UploadRequest
    source: BinaryIO | SplicedTree
    ending: UploadResult
    done: asyncio.Future[PutResult]
    loop: asyncio.AbstractEventLoop


class _Wake:
    """Queue item for a requested or ended GC run; nothing else wakes the idle writer."""


def embedded_gateway(settings: Settings, lock_wait_seconds: float = 0.0) -> Gateway:
    """Return the parts of a gateway with a store in its own process.

    Its start waits for the store's lock. Raises NearkinError.
    """
    if settings.store is None:
        raise ConfigError("store: gateway.ingest embedded wants the folder of a local store")
    root = Path(settings.store).expanduser()
    store = open_store(root, settings=settings, create=settings.storage.create)
    store.wait_for_lock(lock_wait_seconds)
    settings = store.settings  # the store's chunker and profile, where ours name none
    objects = as_set(local_objects(root, settings), settings)
    found = descriptor.read(objects)
    secret = bytes.fromhex(found.secret)

    hot = LiveConfig(settings, None, None)
    outcomes = UploadStatuses(limits.UPLOAD_STATUS_BYTES)
    outcomes.set_known_from(time.time_ns() // 1_000_000)
    pools = WorkerPools()
    catalogue = VersionCatalog(objects, found, settings, StoreListing(store))
    catalogue.report_damage_to(store.damage_notes.note)
    ingest = EmbeddedIngest(store, outcomes, lambda: hot.settings, pools.disk)
    return Gateway(
        hot=ConfigChanges(settings, hot),
        tokens=token_file(settings.auth.tokens_file),
        ingest=ingest,
        outcomes=outcomes,
        tickets=UploadIds(secret),
        catalogue=catalogue,
        deletions=store.deletions,
        resumable=Resumable(objects, limits.RESUMABLE_MAX, shares_of(settings.gateway)),
        collecting=ingest,
        pauses=store.pauses,
        pools=pools,
    )


class EmbeddedIngest:
    """Commits into a local store; the store's own tenant alone."""

    commits = True
    takes_ranges = True

    def __init__(
        self, store: Store, outcomes: UploadStatuses, settings: Callable[[], Settings], disk: WorkerPool
    ) -> None:
        self._store = store
        self._outcomes = outcomes
        self._settings = settings
        self.disk = disk
        """Threads that spool bodies."""
        # Bodies of uploads, of resumable ones handed over, a word that a GC run is wanted, that one has ended, to stop.
        self._queue: Queue[_Job | _Wake | None] = Queue(limits.UPLOADS_MAX + HAND_OVERS_MAX + 3)
        UPLOADS.watch(self, "writer")
        self._scrubbing = BackgroundScrubTask(store)
        self._thread = threading.Thread(target=self._run, name="nearkin-gateway-writer", daemon=True)
        self._collected: dict[str, object] | None = None
        self._asked = threading.Event()
        self._schedule = GcSchedule(time.monotonic())
        self._collector: threading.Thread | None = None
        self._closing = threading.Event()
        self._paused_until = 0.0
        self._broken_until = 0.0

    @property
    def queue_length(self) -> int:
        """Return about how many bodies wait for the writer."""
        return self._queue.qsize()

    def accepts(self, tenant: str) -> bool:
        """Return whether `tenant` is the store's: a writer has one tenant."""
        return tenant == self._store.settings.tenant

    async def open(self) -> None:
        """Take the store's lock now: a second writer is refused at start, not during an upload."""
        await asyncio.to_thread(lambda: list(self._store.put_many([])))
        self._thread.start()

    async def close(self) -> None:
        """Commit what is queued; give the lock back."""
        self._closing.set()
        if self._thread.is_alive():
            self._queue.put_nowait(None)
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS_MAX)
        if (collector := self._collector) is not None:
            await asyncio.to_thread(collector.join, CLOSE_SECONDS_MAX)
        await asyncio.to_thread(self._store.close)

    async def begin(self, intent: UploadRequest) -> EmbeddedUpload:
        """Start an upload."""
        check_stored_key(intent.key)
        check_metadata(intent.metadata)
        return EmbeddedUpload(self, intent)

    def check(self) -> None:
        """Raise StoreUnavailable if the writer thread has ended."""
        if not self._thread.is_alive():
            raise StoreUnavailable("the store's writer has stopped: start the gateway again")

    def spliced(self, key: str, sources: Sequence[SourceVersion], file: BinaryIO, ranges: CopiedRanges) -> SplicedTree:
        """Return the source of a put of new bytes and of ranges of versions."""
        return SplicedTree(self._store.tree_access(), key, sources, file, ranges)

    @property
    def scratch(self) -> Path:
        """Return the folder where bodies wait, on the store's own device."""
        folder = self._store.root / "tmp"
        make_private_folder(folder)
        return folder

    async def commit(self, intent: UploadRequest, source: BinaryIO | SplicedTree, ending: UploadResult) -> None:
        """Queue a whole body and wait until it is committed.

        Raises BaseUnusable if the version is deleted that ranges are copied of.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[PutResult] = loop.create_future()
        self.check()
        self._queue.put_nowait(_Job(intent, source, ending, done, loop))
        # Shielded: a client that disconnects now does not cancel the commit.
        result = await asyncio.shield(done)
        metrics.count_committed(result.ledger, 0, result.seconds)  # its ledger counts the manifest
        began = datetime.fromtimestamp(intent.began_us / 1e6, UTC)
        self._outcomes.add(committed_event(intent, _text_of(began), result))

    async def find_committed(self, tenant: str, key: str, origin: BlobOrigin) -> dict[str, Any] | None:
        """Return the event of a version that an earlier attempt committed, in any process."""
        result = await asyncio.to_thread(self._store.find_origin, key, origin)
        if result is None:
            return None
        began = result.info.created - timedelta(seconds=result.seconds)
        intent = UploadRequest(tenant, key, new_id(), origin.id, us_of(began))
        event = committed_event(intent, _text_of(began), result)
        self._outcomes.add(event)
        return event

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=self._waits_seconds())
            except Empty:
                self._run_maintenance()
                continue
            if job is None:
                self._scrubbing.close()
                return
            jobs: list[_Job | _Wake] = [job]
            waiting_bytes, last = 0 if isinstance(job, _Wake) else job.ending.size_bytes, False
            while len(jobs) < GROUP_BLOBS_MAX and waiting_bytes < GROUP_BYTES_MAX:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                if more is None:
                    last = True
                    break
                jobs.append(more)
                waiting_bytes += 0 if isinstance(more, _Wake) else more.ending.size_bytes
            if blobs := [one for one in jobs if not isinstance(one, _Wake)]:
                for group in _groups(blobs):
                    self._put(group)
            if last:
                self._scrubbing.close()
                return
            self._run_maintenance()  # here too, or a gateway that is always busy would never collect or scrub

    def _waits_seconds(self) -> float | None:
        """Return how long the writer has nothing to do but puts; None: until it is woken."""
        if self._collects():
            return None
        if self._asked.is_set():  # and could not begin
            return max(0.0, self._broken_until - time.monotonic())
        gc_due = self._schedule.next_run(self._settings().gc.interval_seconds)
        gc_waits = None if gc_due is None else max(0.0, max(gc_due, self._paused_until) - time.monotonic())
        wait = min((wait for wait in (gc_waits, self._scrubbing.waits_seconds()) if wait is not None), default=None)
        return None if wait is None else max(wait, self._broken_until - time.monotonic())

    def _run_maintenance(self) -> None:
        """Start a due GC run, or scrub.

        An exception must not end this thread, or no put would run.
        """
        if self._collects() or time.monotonic() < self._broken_until:
            return
        try:
            self._begin_upkeep()
        except Exception:
            _log.exception("store maintenance failed; retry in %.0f s", BROKEN_SECONDS)
            self._broken_until = time.monotonic() + BROKEN_SECONDS

    def _begin_upkeep(self) -> None:
        """Never both at once: they would meet at the same containers."""
        if self._is_gc_due():
            asked = self._asked.is_set()
            self._asked.clear()
            self._store.settings = self._settings()
            self._collector = threading.Thread(target=self._collect, name="nearkin-gateway-collector", daemon=True)
            try:
                self._collector.start()
            except RuntimeError:  # the system lets this process have no more threads
                self._collector = None
                if asked:
                    self._asked.set()
                raise
        else:
            self._scrubbing.step_if_due()

    def _collects(self) -> bool:
        collector = self._collector  # which a GC run that ends takes away
        return collector is not None and collector.is_alive()

    def last_run(self) -> dict[str, object] | None:
        """Return what the last GC run did, or why it failed; None before the first one."""
        return self._collected

    def request_run(self) -> None:
        """Ask for a GC run: it begins next, or once the one at work has ended."""
        if not self._asked.is_set():
            self._asked.set()
            self._queue.put_nowait(_Wake())

    def _is_gc_due(self) -> bool:
        if self._asked.is_set():
            return True
        gc_due, now = self._schedule.next_run(self._settings().gc.interval_seconds), time.monotonic()
        if gc_due is None or now < max(gc_due, self._paused_until):
            return False
        try:
            paused = self._store.pauses.read() is not None
        except NearkinError as err:  # doubt pauses, and puts go on
            _log.error("garbage is not collected, whether that is paused is not known: %s", err)
            paused = True
        if paused:
            self._paused_until = now + PAUSED_SECONDS
        return not paused

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StoreUnavailable("the gateway stops: the next GC run does the rest")

    def _collect(self) -> None:
        """Do a GC run: here, since no process else may write this store. Puts wait for its steps."""
        due_seconds: float | None = None
        try:
            report = self._store.gc(wait_seconds=GC_WAIT_SECONDS, go_on=self._check_open)
        except Exception as err:  # damage, or a full disk: the next GC run tries again
            if not isinstance(err, NearkinError):
                _log.exception("a GC run broke")
            self._collected = {"ended": _now(), "failure": str(err)}
            metrics.count_collected(None)
            _log.error("gc run failed: %s", err)
        else:
            self._collected = {"ended": _now(), "failure": None, **gc_json(report)}
            metrics.count_collected(report)
            _log.info("a GC run freed %d bytes in %.1f s", report.freed_bytes, report.seconds)
            if report.due is not None:
                due_seconds = report.due.timestamp() - time.time()
        interval_seconds = self._settings().gc.interval_seconds
        self._schedule = self._schedule.after(time.monotonic(), interval_seconds, due_seconds)
        self._collector = None
        self._queue.put(_Wake())

    def _put(self, jobs: list[_Job]) -> None:
        """Commit a group; uploads committed before a failure stay committed and are reported so."""
        self._store.settings = self._settings()  # the hot ones may have changed
        results = iter(
            self._store.put_outcomes(
                Item(
                    job.intent.key,
                    job.source,
                    job.intent.metadata,
                    job.ending.sha256,
                    precondition=job.intent.precondition,
                    origin=BlobOrigin(job.intent.origin, job.intent.first_attempt_us),
                    is_checkpoint=is_reserved_key(job.intent.key),
                )
                for job in jobs
            )
        )
        failure: Exception | None = None
        for job in jobs:
            try:
                if failure is None:
                    job.loop.call_soon_threadsafe(_set_result, job.done, next(results), None)
                    continue
            except Exception as err:
                failure = err if isinstance(err, NearkinError) else StoreUnavailable(f"{type(err).__name__}: {err}")
                _log.error("a group of %d blobs was not committed: %s", len(jobs), err)
            job.loop.call_soon_threadsafe(_set_result, job.done, None, failure)
        for job in jobs:
            job.source.close()


UPLOADS: counters.Gauge[EmbeddedIngest] = counters.level(
    "nearkin_uploads_waiting", "Bodies that wait for the writer.", "queue", lambda ingest: ingest.queue_length
)


class EmbeddedUpload:
    """A body in transfer to disk; one of a frame's size stays in memory."""

    def __init__(self, ingest: EmbeddedIngest, intent: UploadRequest) -> None:
        self._ingest = ingest
        self._intent = intent
        self._held = bytearray()
        """New bytes that are not on disk."""
        self._file: BinaryIO | None = None
        self._fresh_bytes = 0
        self._ranges = CopiedRanges()

    async def write(self, frame: bytes | bytearray) -> None:
        """Take a frame."""
        self._fresh_bytes += len(frame)
        if len(self._held) + len(frame) > FRAME_BYTES_MAX:
            await self._ingest.disk.run(self._spool)
        self._held += frame

    async def copy(self, copied: CopiedRange) -> None:
        """Take a range of the sources."""
        self._ranges.add(self._fresh_bytes, copied)

    async def finish(self, ending: UploadResult) -> None:
        """Commit the body."""
        if self._file is not None:
            await self._ingest.disk.run(self._spool)
            self._file.seek(0)
        file = self._file if self._file is not None else BytesIO(self._held)
        self._file = None
        if self._intent.sources is None:
            await self._ingest.commit(self._intent, file, ending)
            return
        tree = self._ingest.spliced(self._intent.key, self._intent.sources, file, self._ranges)
        try:
            await self._ingest.disk.run(tree.check, ending.size_bytes, ending.blake3)
        except BaseException:
            tree.close()
            raise
        await self._ingest.commit(self._intent, tree, ending)

    async def abort(self, why: str) -> None:
        """Drop the body: nothing of it has reached the store."""
        file, self._file, self._held = self._file, None, bytearray()
        if file is not None:
            await self._ingest.disk.run(file.close)  # to free the room of a large one takes long

    def _spool(self) -> None:
        try:
            if self._file is None:
                self._file = cast(
                    "BinaryIO",
                    tempfile.TemporaryFile(buffering=0, dir=self._ingest.scratch, suffix=".part"),  # noqa: SIM115 - closed when the upload ends
                )
            _write_all(self._file, self._held)
            self._held = bytearray()
        except OSError as err:
            raise StoreUnavailable(
                f"the body cannot be kept meanwhile: {err.strerror}; make room and try again"
            ) from err


class StoreListing:
    """The index of an embedded store."""

    is_complete = True

    def __init__(self, store: Store) -> None:
        self._store = store

    def catalog_after(
        self, tenant: str, prefix: str, after_key: str, after_version: int | None, count: int
    ) -> Iterator[CatalogEntry]:
        """Yield entries by key and version, after what was given, `count` at a time."""
        while page := self._store.catalog_after(tenant, prefix, after_key, after_version, count):
            yield from page
            if len(page) < count:
                return
            after_key, after_version = page[-1].key, page[-1].version

    def marked_keys(self, tenant: str, prefix: str, from_key: str = "") -> Iterator[str]:
        """Yield the keys from `from_key` on that have a version with marks, by key."""
        entries = self.catalog_after(tenant, prefix, from_key, 0 if from_key else None, MARKED_A_PAGE)
        return (key for key, _ in groupby(entry.key for entry in entries if entry.sequence))

    def entries(self, tenant: str) -> Iterator[CatalogEntry]:
        """Yield what is kept of every version, by key and version."""
        return self._store.catalog(tenant)

    def stats(self, tenant: str) -> Stats:
        """Return the sums of the store's own tenant, nothing of other tenants in the same folder."""
        own = self._store.settings.tenant
        if tenant != own:
            raise NotFound(f"stats of tenant {tenant!r}: this gateway runs embedded and sums up {own!r} alone")
        return self._store.tenant_stats()


def _groups(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Yield groups to commit together.

    A tree with ranges is a group of its own: its base may be gone, which must fail no other put.
    """
    for _, group in groupby(enumerate(jobs), lambda pair: pair[0] if isinstance(pair[1].source, SplicedTree) else -1):
        yield [job for _, job in group]


def _now() -> str:
    return _text_of(datetime.now(UTC))


def _text_of(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _write_all(file: BinaryIO, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _set_result(
    done: asyncio.Future[PutResult], result: PutResult | PermanentError | None, failure: Exception | None
) -> None:
    if done.done():
        return
    if isinstance(result, PermanentError):  # its precondition refused it
        failure = result
    if failure is not None:
        done.set_exception(failure)
        done.exception()  # looked at: no process may be waiting any more
    else:
        assert isinstance(result, PutResult)
        done.set_result(result)
