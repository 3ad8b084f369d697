"""Rebuilding in the background. Invariant: only the holder of the one lease can say that the index is whole.

    lease free -> taken, with a number that grows -> renewed every third of its life -> entries -> whole -> let go
                          | holder dead: it ends by itself, and another takes it

The lease saves work; it is not what keeps the index right. Two that rebuild at once add the same entries, of which the
first stay, and "whole" is written only for the epoch that the rebuild began in, by the lease's holder.
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
from nearkin_shared.index.redis.connection import Server
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
    """This rebuild's epoch or lease is gone: another began, or will."""


class RebuildTarget:
    """The index as a rebuild sees it: writes stop as soon as the rebuild is no longer this process's."""

    def __init__(self, index: RedisIndex, epoch: Epoch, held: threading.Event, *, reported: bool = False) -> None:
        """`reported`: a container that an entry names was found missing."""
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
        """Return whether entries may be missing of containers that the index lists."""
        return self._index.epochs.is_incomplete(self._epoch)

    @property
    def has_unchecked(self) -> bool:
        """Return whether entries may name what the store no longer has."""
        return self._reported or self._index.epochs.has_unchecked(self._epoch)

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog. Raises RebuildSuperseded."""
        self._go_on()
        self._index.collect_many(versions)

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries of what is not in the store. Raises RebuildSuperseded."""
        self._go_on()
        try:
            return self._index.withdraw_missing(numbered, chunks, segments)
        except EpochReplaced as err:
            raise RebuildSuperseded(
                f"rebuild: epoch {self._epoch.name} ended; it begins again in the next one"
            ) from err

    def declare_catalog(self) -> None:
        """Declare that the catalog lists every version. Raises RebuildSuperseded."""
        self._go_on()
        self._index.declare_catalog(self._epoch)

    def publish(self, claims: ContainerEntries) -> None:
        """Publish. Raises RebuildSuperseded."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Publish. Raises RebuildSuperseded."""
        self._go_on()
        self._index.publish_many(many)

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Commit. Raises RebuildSuperseded."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Commit. Raises RebuildSuperseded."""
        self._go_on()
        self._index.commit_many(versions)

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Note marks. Raises RebuildSuperseded."""
        self._go_on()
        self._index.mark_many(marks)

    def close(self) -> None:
        """Leave the index open: it is not this rebuild's."""

    def _go_on(self) -> None:
        if not self._held.is_set():
            raise RebuildSuperseded("rebuild: its lease has passed to another, or it was told to stop")
        if self._index.epochs.current.name != self._epoch.name:
            raise RebuildSuperseded(f"rebuild: epoch {self._epoch.name} is gone; it begins again in the next one")


Rebuild = Callable[[RebuildTarget], object]
"""Publishes every durable container and commits every version into the index that it is given."""


class Rebuilder:
    """A thread that rebuilds the index whenever it needs that, unless another process does."""

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
        """How many rebuilds this process brought to their end."""
        self.failure: NearkinError | None = None
        """Why the last one did not, if it did not."""

    def start(self) -> Rebuilder:
        """Begin to look whether a rebuild is needed."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a rebuild that is running ends at its next container or batch of versions."""
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
        """Rebuild if it is needed and nobody else does; return whether this brought one to its end.

        Raises what the rebuild raised, or RebuildSuperseded.
        """
        index = self._index
        needed = index.check() or index.is_stale()
        metrics.INDEX_WHOLE.labels("redis").set(not needed)
        metrics.REDIS_BYTES.set(index.server.memory_bytes())
        if not needed:
            return False
        holder = index.server.one(Server.call("take", self._keys, secrets.token_hex(8), self._lease_ms))
        if holder is None:
            return False
        self._held.set()
        over = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(holder, over), name="rebuild-lease", daemon=True)
        renewing.start()
        try:
            if not (index.check() or index.is_stale()):  # another was done since this one looked
                return False
            epoch, generation = index.epochs.current, index.epochs.generation  # no GC run begins meanwhile
            _log.warning("%s: rebuilding the index, epoch %s", index.server.name, epoch.name)
            reported = index.take_reports()
            self._rebuild(RebuildTarget(index, epoch, self._held, reported=reported))
            if not index.epochs.mark_checked(epoch, generation):
                raise RebuildSuperseded(f"rebuild of epoch {epoch.name}: a server of the index restarted meanwhile")
            if not index.server.one(Server.call("whole", [index.epochs.key, self._keys[0]], epoch.name, holder)):
                raise RebuildSuperseded(f"rebuild of epoch {epoch.name}: its lease or its epoch is gone")
            index.check()
            swept = index.sweep()
            _log.warning("%s: index rebuilt, epoch %s; %d old keys swept", index.server.name, epoch.name, swept)
        finally:
            over.set()
            renewing.join()
            self._held.clear()
            with suppress(NearkinError):  # it ends by itself
                index.server.one(Server.call("release", self._keys[:1], holder))
        self.rebuilt += 1
        metrics.INDEX_WHOLE.labels("redis").set(1)
        metrics.REBUILDS.labels("done").inc()
        self.failure = None
        return True

    def _renew(self, holder: bytes, over: threading.Event) -> None:
        """Keep the lease; give the rebuild up once it cannot be known to be held."""
        missed = 0
        while not over.wait(self._lease_ms / 1000 / RENEWALS_A_LEASE):
            try:
                held = self._index.server.one(Server.call("renew", self._keys[:1], holder, self._lease_ms))
                missed = 0 if held else RENEWALS_A_LEASE
            except NearkinError:
                missed += 1
            if missed >= RENEWALS_A_LEASE - 1:
                self._held.clear()
                return


def rebuild_in_background(
    index: RedisIndex, rebuild: Rebuild, *, lease_seconds: float = LEASE_SECONDS, poll_seconds: float = POLL_SECONDS
) -> Rebuilder:
    """Start to keep an index whole; `rebuild` fills the index that it is given from the object store.

    It is called again after an error, and may skip the containers that `index.container_ids()` names: their entries
    are all there. Stop what is returned before the index is closed.
    """
    return Rebuilder(index, rebuild, lease_seconds=lease_seconds, poll_seconds=poll_seconds).start()
