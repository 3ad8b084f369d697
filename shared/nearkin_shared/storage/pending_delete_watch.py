"""Filter of data pending deletion and of quarantined data, which are no bases.

Invariant: data pending deletion when a container was opened are no bases of its chunks. Neither are data that were
quarantined by then, though a cache may have them intact.

    GC run   withdraws, records -> a grace -> sweeps data that no manifest and no container references
    writer   record, no older than REFRESH_SECONDS -> bases chosen -> container durable within half a grace

So all data that a sweep deletes were pending deletion before any container was opened that the sweep has not listed.
docs/adr/0015-two-phase-garbage-collection.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.storage.containers import ContainerSource, ContainerStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.types import ZERO, Bools, ContainerId, Locations, group_by_container

INTACT_MAX = 10_000
"""Number of containers whose intact segments are cached: 40 GB of data, about 300 KB."""
REFRESH_SECONDS = 5.0
"""Greatest age of the record when a base is chosen; a quarter of the grace if that is less."""


class PendingDeleteWatcher:
    """Pending-delete record, re-read periodically. Shared by threads and tenants."""

    def __init__(
        self,
        store: PendingDeleteStore,
        grace_seconds: float,
        runs: Callable[[], object] = lambda: None,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Watch a record, and the quarantine.

        `runs` returns a token that changes when a GC run has ended: the run may have rewritten containers without
        marking any data for deletion.
        """
        self._store = store
        self._runs = runs
        self._quarantine = quarantine
        self._damaged: dict[int, PendingDelete] = {}
        self.grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._record: dict[int, PendingDelete] = {}
        self._last_run = object()
        self._read_at = -1e9
        self.changes = 0
        """Number of changes: the record differed, a GC run ended, or the last read was so long ago that either may be
        true."""

    def record(self, *, now: bool = False) -> dict[int, PendingDelete]:
        """Return the pending deletes, at most a moment old. Raises StoreUnavailable."""
        with self._lock:
            at = time.monotonic()
            if now or at - self._read_at > min(REFRESH_SECONDS, self.grace_seconds / 4):
                ended, record = self._runs(), self._store.read()
                damaged = {} if self._quarantine is None else self._quarantine.read()
                is_late = at - self._read_at > self.grace_seconds / 2
                before, found = (self._record, self._damaged), (record, damaged)
                if is_late or ended != self._last_run or [*map(_stamp, before)] != [*map(_stamp, found)]:
                    self.changes += 1
                self._record, self._damaged, self._last_run, self._read_at = record, damaged, ended, at
            return self._record

    def damaged(self) -> dict[int, PendingDelete]:
        """Return the quarantined data, as old as the record. Raises StoreUnavailable."""
        self.record()
        return self._damaged


def _stamp(record: dict[int, PendingDelete]) -> list[tuple[int, int, int, int]]:
    return [(c, entry.at_us, len(entry.chunks), len(entry.segments)) for c, entry in sorted(record.items())]


class PendingDeleteFilter:
    """Data pending deletion or deleted, as one tenant sees them.

    Evicts all cached containers when the record changes, and when a GC run has ended.
    """

    def __init__(
        self, watch: PendingDeleteWatcher, containers: ContainerStore, fresh: Callable[[], ContainerStore]
    ) -> None:
        """Create the filter; `fresh` returns the same containers with empty caches."""
        self._watch = watch
        self._fresh = fresh
        self._containers = containers
        self._last_change = watch.changes
        self._intact: OrderedDict[int, Bools] = OrderedDict()
        """Masks of the restorable segments by container, as found since the record last changed."""
        self._lock = threading.RLock()
        """Held while segments are looked for: a committer does so in two threads."""

    @property
    def grace_seconds(self) -> float:
        """Return how long data stay pending delete before they may be deleted."""
        return self._watch.grace_seconds

    def refresh(self) -> None:
        """Re-read the record; after a change evict the containers, which may be deleted."""
        with self._lock:
            self._watch.record()
            if self._last_change != self._watch.changes:
                self._last_change = self._watch.changes
                self._containers.evict()
                self._intact.clear()

    def is_unusable(self, chunks: Locations) -> Bools:
        """Return which chunks are pending deletion or quarantined: nothing new may depend on them."""
        return is_listed(self._watch.record(), chunks) | is_listed(self._watch.damaged(), chunks)

    def is_expiring(self, chunks: Locations) -> Bools:
        """Return which chunks were withdrawn longer than half a grace ago.

        They may be deleted while a blob that names them is in flight.
        """
        withdrawn_before_us = (time.time() - self.grace_seconds / 2) * 1e6
        return is_listed(self._watch.record(), chunks, withdrawn_before_us)

    def lost(self, chunks: Locations, source: ContainerSource) -> Bools:
        """Return which chunks are pending deletion, quarantined or deleted.

        Deleted: missing in what `source` has read since the record last changed.
        """
        self.refresh()
        found = self.is_unusable(chunks)
        for container, rows in group_by_container(chunks.containers):
            if container == ZERO:
                continue
            ordinals = chunks.ordinals[rows]
            try:
                existing = source.directory(ContainerId(container)).chunks.there
            except (Corrupt, NotFound):
                found[rows] = True
                continue
            beyond = ordinals >= len(existing)
            found[rows] |= beyond | ~existing[np.where(beyond, 0, ordinals)]
        return found

    def find_missing(self, segments: Locations) -> tuple[int, str] | None:
        """Return (container, problem) of a segment that cannot be restored, or None.

        Each container is read once between two GC runs. A segment pending deletion for longer than half the grace
        counts as missing: no index names it, unless the index was restored from an older copy, and it may be deleted at
        any moment.

        Raises: StoreUnavailable.
        """
        with self._lock:
            self.refresh()
            record = self._watch.record()
            withdrawn_before_us = (time.time() - self.grace_seconds / 2) * 1e6
            for container, rows in group_by_container(segments.containers):
                ordinals, entry = segments.ordinals[rows], record.get(container)
                try:
                    intact = self._intact_segments(container)
                except (Corrupt, NotFound) as err:
                    return container, str(err)
                if int(ordinals.max()) >= len(intact) or not intact[ordinals].all():
                    return container, f"a segment of container {container:016x}, or a chunk of one, is not in the store"
                if entry is not None and entry.at_us < withdrawn_before_us and np.isin(ordinals, entry.segments).any():
                    return container, f"a segment of container {container:016x} was withdrawn by an earlier GC run"
            return None

    def _intact_segments(self, container: int) -> Bools:
        """Return which segments of a container reference existing chunks only."""
        if container in self._intact:
            self._intact.move_to_end(container)
            return self._intact[container]
        recipes = self._containers.directory(ContainerId(container)).segments
        counts = np.diff(recipes.bounds)
        intact: Bools = counts > 0
        of_row = np.repeat(np.arange(len(counts)), counts)
        for other, rows in group_by_container(recipes.chunks.containers):
            if other == ZERO:
                continue
            try:
                existing = self._containers.directory(ContainerId(other)).chunks.there
            except (Corrupt, NotFound):
                intact[of_row[rows]] = False
                continue
            ordinals = recipes.chunks.ordinals[rows]
            beyond = ordinals >= len(existing)
            intact[of_row[rows[beyond | ~existing[np.where(beyond, 0, ordinals)]]]] = False
        self._intact[container] = intact
        if len(self._intact) > INTACT_MAX:
            self._intact.popitem(last=False)
        return intact

    def find_dangling(self, segments: Locations) -> str | None:
        """Return why segments may no longer be referenced, or None.

        Reads the record and the containers themselves, without caches.

        Raises: StoreUnavailable.
        """
        record, containers = self._watch.record(now=True), self._fresh()
        try:
            for container, rows in group_by_container(segments.containers):
                recipes, ordinals = containers.directory(ContainerId(container)).segments, segments.ordinals[rows]
                counts = np.diff(recipes.bounds)
                if int(ordinals.max()) >= len(counts) or not counts[ordinals].all():
                    return f"a segment of container {container:016x} was collected"
                is_selected = np.zeros(len(counts), np.bool_)
                is_selected[ordinals] = True
                if container in record and is_selected[record[container].segments].any():
                    return f"a segment of container {container:016x} is pending deletion"
                chunks = recipes.chunks.take(np.repeat(is_selected, counts))
                for other, rows_of_chunks in group_by_container(chunks.containers):
                    if other == ZERO:
                        continue
                    existing, ordinals_of_chunks = (
                        containers.directory(ContainerId(other)).chunks.there,
                        chunks.ordinals[rows_of_chunks],
                    )
                    if int(ordinals_of_chunks.max()) >= len(existing) or not existing[ordinals_of_chunks].all():
                        return f"a chunk of container {other:016x} was collected"
                if is_listed(record, chunks).any():
                    return f"a chunk that a segment of container {container:016x} references is pending deletion"
        except (Corrupt, NotFound) as err:
            return str(err)
        return None


def is_listed(record: Mapping[int, PendingDelete], chunks: Locations, before_us: float = math.inf) -> Bools:
    """Return which chunks a record of pending deletes, or of quarantined data, contains.

    `before_us`: only entries from before this time, microseconds since 1970.
    """
    found = np.zeros(len(chunks), np.bool_)
    for container, rows in group_by_container(chunks.containers) if record else ():
        entry = record.get(container)
        if entry is not None and entry.at_us < before_us:
            found[rows] = entry.whole | np.isin(chunks.ordinals[rows], entry.chunks)
    return found
