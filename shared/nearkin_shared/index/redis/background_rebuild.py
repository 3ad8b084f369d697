"""Index rebuild in the background of a worker.

Invariant: only the holder of the GC lease can declare the index complete.

    lease free -> taken, with a growing number -> renewed every third of its life -> entries -> complete -> released
                            | holder dead: it expires, and another process takes it

The lease saves work; it is not needed for correctness. Two concurrent rebuilds add the same entries, of which the first
stay, and the index is declared complete only for the epoch in which the rebuild began, by the lease's holder.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import CollectedVersion, MarkedVersion
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.epoch import Epoch, EpochReplaced, NumberedContainers
from nearkin_shared.index.redis.redis_index import RedisIndex
from nearkin_shared.observability import metrics
from nearkin_shared.types import Bools

LEASE_SECONDS = 30.0
POLL_SECONDS = 5.0
RENEWALS_A_LEASE = 3
STOP_SECONDS = 60.0

_log = logging.getLogger("nearkin.redis")


class RebuildSuperseded(RetryableError):
    """The rebuild's epoch or lease has ended: another rebuild has begun, or will."""


class RebuildTarget:
    """Index as a rebuild uses it: writes stop once this process no longer holds the lease."""

    def __init__(self, index: RedisIndex, epoch: Epoch, held: threading.Event, *, reported: bool = False) -> None:
        """Wrap `index`; `reported`: a container that an entry names was found missing."""
        self._index = index
        self._reported = reported
        self._epoch = epoch
        self._held = held
        self.locate_chunks = index.locate_chunks
        self.locate_segments = index.locate_segments
        self.locate_ranks = index.locate_ranks
        self.versions_of = index.versions_of
        self.catalog = index.catalog
        self.manifest_names = index.manifest_names
        self.containers = index.containers
        self.container_ids = index.container_ids
        self.tenants = index.tenants
        self.container_numbers = index.container_numbers

    @property
    def is_incomplete(self) -> bool:
        """Return whether entries of listed containers may be missing."""
        return self._index.epochs.is_incomplete(self._epoch)

    @property
    def has_unchecked(self) -> bool:
        """Return whether entries may name data that the store no longer has."""
        return self._reported or self._index.epochs.has_unchecked(self._epoch)

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog. Raises RebuildSuperseded."""
        self._check_held()
        self._index.collect_many(versions)

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries of data that the store lacks. Raises RebuildSuperseded."""
        self._check_held()
        try:
            return self._index.withdraw_missing(numbered, chunks, segments)
        except EpochReplaced as err:
            raise RebuildSuperseded(f"rebuild: epoch {self._epoch.name} ended; it restarts in the next epoch") from err

    def declare_catalog(self) -> None:
        """Declare that the catalog lists every version. Raises RebuildSuperseded."""
        self._check_held()
        self._index.declare_catalog(self._epoch)

    def publish(self, claims: ContainerEntries) -> None:
        """Publish a container's entries. Raises RebuildSuperseded."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Publish containers' entries. Raises RebuildSuperseded."""
        self._check_held()
        self._index.publish_many(many)

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Commit a version. Raises RebuildSuperseded."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Commit versions. Raises RebuildSuperseded."""
        self._check_held()
        self._index.commit_many(versions)

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Record marks. Raises RebuildSuperseded."""
        self._check_held()
        self._index.mark_many(marks)

    def close(self) -> None:
        """Do nothing: the rebuild does not own the index."""

    def _check_held(self) -> None:
        if not self._held.is_set():
            raise RebuildSuperseded("rebuild: the lease was lost, or the process is stopping")
        if self._index.epochs.current.name != self._epoch.name:
            raise RebuildSuperseded(f"rebuild: epoch {self._epoch.name} ended; it restarts in the next epoch")


Rebuild = Callable[[RebuildTarget], object]
"""Function that publishes every durable container and commits every version into a target."""


class Rebuilder:
    """Thread that rebuilds the index when needed, unless another process does."""

    def __init__(
        self,
        index: RedisIndex,
        rebuild: Rebuild,
        *,
        lease_seconds: float = LEASE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._index = index
        self._rebuild = rebuild
        self._lease_ms = int(lease_seconds * 1000)
        self._poll_seconds = poll_seconds
        self._keys = [f"{index.prefix}:{{m}}:lease", f"{index.prefix}:{{m}}:fence"]
        self._stopping = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rebuild", daemon=True)
        self.rebuilt = 0
        """Number of rebuilds that this process completed."""
        self.failure: NearkinError | None = None
        """Failure of the last rebuild, if it failed."""

    def start(self) -> Rebuilder:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop; a running rebuild ends at its next container or batch of versions."""
        self._stopping.set()
        self._held.clear()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.run_once()
            except RebuildSuperseded as err:
                _log.warning("%s", err)
            except NearkinError as err:
                self.failure = err
                metrics.REBUILDS.labels("failed").inc()
                _log.warning("rebuild failed, next try in %.1f s: %s", self._poll_seconds, err)
            except Exception:
                metrics.REBUILDS.labels("failed").inc()
                _log.exception("rebuild failed, next try in %.1f s", self._poll_seconds)
            self._stopping.wait(self._poll_seconds)

    def run_once(self) -> bool:
        """Rebuild if needed and no other process does; return whether a rebuild was completed.

        Raises: the failure of the rebuild, or RebuildSuperseded.
        """
        index = self._index
        needed = index.check() or index.is_stale()
        metrics.INDEX_WHOLE.labels("redis").set(not needed)
        metrics.REDIS_BYTES.set(index.server.memory_bytes())
        if not needed:
            return False
        holder = index.server.one(RedisServer.call("take", self._keys, secrets.token_hex(8), self._lease_ms))
        if holder is None:
            return False
        self._held.set()
        stop_renewal = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(holder, stop_renewal), name="rebuild-lease", daemon=True)
        renewing.start()
        try:
            if not (index.check() or index.is_stale()):  # another process rebuilt it since the first check
                return False
            epoch, generation = index.epochs.current, index.epochs.generation  # no GC run begins meanwhile
            _log.warning("%s: rebuilding the index, epoch %s", index.server.name, epoch.name)
            reported = index.take_reports()
            self._rebuild(RebuildTarget(index, epoch, self._held, reported=reported))
            if not index.epochs.mark_checked(epoch, generation):
                raise RebuildSuperseded(f"rebuild of epoch {epoch.name}: a server of the index restarted meanwhile")
            if not index.server.one(RedisServer.call("whole", [index.epochs.key, self._keys[0]], epoch.name, holder)):
                raise RebuildSuperseded(f"rebuild of epoch {epoch.name}: its lease or its epoch has ended")
            index.check()
            swept = index.sweep()
            _log.warning("%s: index rebuilt, epoch %s; %d old keys swept", index.server.name, epoch.name, swept)
        finally:
            stop_renewal.set()
            renewing.join()
            self._held.clear()
            with suppress(NearkinError):  # the lease expires by itself
                index.server.one(RedisServer.call("release", self._keys[:1], holder))
        self.rebuilt += 1
        metrics.INDEX_WHOLE.labels("redis").set(1)
        metrics.REBUILDS.labels("done").inc()
        self.failure = None
        return True

    def _renew(self, holder: bytes, stop_renewal: threading.Event) -> None:
        """Renew the lease; abandon the rebuild once the lease may have expired."""
        missed = 0
        while not stop_renewal.wait(self._lease_ms / 1000 / RENEWALS_A_LEASE):
            try:
                held = self._index.server.one(RedisServer.call("renew", self._keys[:1], holder, self._lease_ms))
                missed = 0 if held else RENEWALS_A_LEASE
            except NearkinError:
                missed += 1
            if missed >= RENEWALS_A_LEASE - 1:
                self._held.clear()
                return


def rebuild_in_background(
    index: RedisIndex, rebuild: Rebuild, *, lease_seconds: float = LEASE_SECONDS, poll_seconds: float = POLL_SECONDS
) -> Rebuilder:
    """Start a thread that keeps an index complete.

    `rebuild` fills its target from the object store. It is called again after an error, and may skip the containers in
    `index.container_ids()`: all their entries exist. Stop the returned Rebuilder before the index is closed.
    """
    return Rebuilder(index, rebuild, lease_seconds=lease_seconds, poll_seconds=poll_seconds).start()
