"""Put blobs into a local store.

Invariant: one put at a time; a failed or interrupted put blocks no later one.

items -> groups of an EmbeddedWriter -> committed -> quarantined containers are repaired with new chunks

Decoded blocks are cached within a bound: that of puts during a put, that of restores or GC runs before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.local.failed_puts import FailedPutCleaner
from nearkin.local.index_lifecycle import LocalIndex
from nearkin.local.source_feed import PutItem, TreeSource, feed
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError, PermanentError, StoreLocked
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import check_tenant
from nearkin_shared.objectstore.encrypted_store import check_keys
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.results import PutResult
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.signals import interrupts_wait
from nearkin_shared.validation import Progress, check_metadata, check_stored_key, check_user_key

if TYPE_CHECKING:
    from nearkin.embedded.runner import EmbeddedWriter, SparePools

GC_MEMORY_BYTES = 48 * MIB
"""Bound of decoded blocks cached for puts and restores while a GC run writes, which caches twice as many itself."""
TREE_CACHE_BYTES = 32 * MIB
"""Bound of decoded blocks cached while a tree is put: a backup of a machine should take at most 300 MB."""


@frozen
class WriterParts:
    """The parts of an open store that puts use."""

    root: Path
    settings: Callable[[], Settings]
    """Called at each put, because settings change at run time."""
    covered: ParityObjectStore
    fingerprinter: Fingerprinter
    containers: ContainerStore
    manifests: ManifestStore
    index: LocalIndex
    clock: Callable[[], float]


class LocalPuts:
    """Carries out the puts of one open store."""

    def __init__(
        self,
        parts: WriterParts,
        verify_noted: Callable[[], None],
        repair: Callable[[], None],
        failed: FailedPutCleaner,
    ) -> None:
        """Create a writer. `verify_noted` is called before each put, `repair` after each commit."""
        self._verify_noted = verify_noted
        self._failed = failed
        self._root = parts.root
        self._settings = parts.settings
        self._covered = parts.covered
        self._fingerprinter = parts.fingerprinter
        self._containers = parts.containers
        self._manifests = parts.manifests
        self._index = parts.index
        self._clock = parts.clock
        self._repair = repair
        self._reading_bytes = int(parts.settings().restore.cache_bytes)
        self._spares: SparePools | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Reset in a forked process."""
        self._claim: object | None = None
        """Of the put at work."""
        self._claiming = threading.Lock()
        self._by = 0
        """The thread that began it."""
        self._writer: EmbeddedWriter | None = None
        """Of that put."""
        self.release_memory()

    def release_memory(self) -> None:
        """Keep no memory for the next put."""
        self._spares = None

    @property
    def at_work(self) -> bool:
        """Return whether a put is at work."""
        return self._claim is not None

    @property
    def is_put_of_thread(self) -> bool:
        """Return whether a put of this thread is at work."""
        return self.at_work and self._by == threading.get_ident()

    @property
    def is_written_by_other_process(self) -> bool:
        """Return whether a put of another thread is at work."""
        return self.at_work and not self.is_put_of_thread

    def check_none(self) -> None:
        """Raise StoreLocked while a put is at work."""
        if self.at_work:
            raise self.is_put_in_progress()

    def is_put_in_progress(self, of: str = "a put") -> StoreLocked:
        """Return the error of what cannot be done within a put."""
        return StoreLocked(f"store {self._root}: {of} is in progress in this process; wait for it to finish")

    def abort_put_of_thread(self) -> None:
        """End an unfinished put of this thread: its uncommitted data will never be committed."""
        if self._writer is not None and self.is_put_of_thread:
            self._writer.abort()

    def limit_memory_for_reading(self) -> None:
        """Cache as much as restores may, keeping what is cached for the next readers."""
        if not self.at_work:
            blocks = self._containers.blocks
            blocks.bound(max(self._reading_bytes, blocks.used_bytes))

    def limit_memory_for_gc(self) -> None:
        """Cache less while a GC run writes. A running put takes the memory that it needs."""
        if not self.at_work:
            self._containers.blocks.bound(min(GC_MEMORY_BYTES, self._reading_bytes))

    def put(self, items: Iterable[PutItem], progress: Progress | None) -> Iterator[PutResult | PermanentError]:
        """Put blobs; yield results as groups commit, and the error of each refused precondition.

        Raises what `Store.put` does.
        """
        if self.at_work:
            raise self.is_put_in_progress("another put")
        settings = self._settings()
        check_tenant(self._covered, settings.tenant)
        self._verify_noted()
        crossing = self._index.crossing  # of this process: one that is forked meanwhile has another
        entry = object()
        with ExitStack() as steps:  # from the last one up; each is done, whatever interrupts another
            steps.callback(crossing.leave, entry)  # by whichever thread ends this
            crossing.enter(entry)
            steps.callback(self._finish_put, entry)
            with self._claiming:  # here: two may have waited for the same GC step
                if self.at_work:
                    raise self.is_put_in_progress("another put")
                self._claim, self._by = entry, threading.get_ident()
            self._containers.blocks.bound(int(settings.base.cache_bytes))  # a put has much else in memory
            try:
                yield from self._in_groups(settings, items, progress)
            except Exception:
                self._remove_uncommitted()
                raise

    def _remove_uncommitted(self) -> None:
        """Remove the data of a failed put; an interrupted put keeps them, to be resumed."""
        writer = self._writer
        if writer is None:
            return
        with interrupts_wait(), suppress(NearkinError):  # the error that ended the put is the one to report
            if self._failed.remove(writer.uncommitted()):
                self.release_memory()  # prefixes of removed chunks

    def _finish_put(self, claim: object) -> None:
        with interrupts_wait():
            if self._claim is not claim:
                return
            self._index.on_put_end()  # before the next put can begin
            self._claim, self._writer = None, None
            self.limit_memory_for_reading()

    def _in_groups(
        self, settings: Settings, items: Iterable[PutItem], progress: Progress | None
    ) -> Iterator[PutResult | PermanentError]:
        with interrupts_wait():
            from nearkin.embedded.runner import EmbeddedWriter, SparePools

        if self._spares is None:
            self._spares = SparePools.of(settings)
        index = self._index.on_put_start()
        check_keys(self._covered, settings.tenant, index.catalog)
        listed = [container for container, _ in self._containers.ids()]
        self._index.withdraw_missing(listed)
        failpoint("put.begun")
        last = max(listed, default=0)
        with ExitStack() as steps:
            with interrupts_wait():  # one in the midst of it would leave the threads that it has begun for ever
                writer = self._writer = steps.enter_context(
                    EmbeddedWriter(
                        settings,
                        self._fingerprinter,
                        self._containers,
                        self._manifests,
                        index,
                        last,
                        self._clock,
                        self._spares,
                    )
                )
            waiting = []
            for item in items:
                (check_stored_key if item.is_checkpoint else check_user_key)(item.key)
                check_metadata(item.metadata)
                if isinstance(item.source, TreeSource):
                    self._containers.blocks.bound(min(int(settings.base.cache_bytes), TREE_CACHE_BYTES))
                waiting.append(feed(writer, item, progress))
                if waiting[0].done():
                    yield from (_outcome(done) for done in waiting if done.done())
                    waiting = [pending for pending in waiting if not pending.done()]
            writer.flush()
            self._index.on_put_published()
            failpoint("put.settled")
            self._repair()
            yield from (_outcome(done) for done in waiting)


def _outcome(done: Future[PutResult]) -> PutResult | PermanentError:
    """Return the result, or the refused precondition of this blob.

    Raises errors of the whole put.
    """
    err = done.exception()
    return err if isinstance(err, PermanentError) else done.result()
