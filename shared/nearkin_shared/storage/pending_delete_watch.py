"""What a writer must not lean on. Invariant: what was condemned when a container was opened is no base of it.

    maintenance    forgets, records -> a grace -> sweeps what no manifest and no container leans on
    writer     record, no older than REFRESH_SECONDS -> bases chosen -> container durable within half a grace

So whatever a sweep takes was condemned before any container was opened that the sweep has not listed.
docs/adr/0015-two-phase-garbage-collection.md.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.storage.containers import ContainerSource, ContainerStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import ZERO, Bools, ContainerId, Locations, group_by_container

SOUND_MAX = 10_000
"""Containers whose segments are remembered as sound: 40 GB of data, some 300 KB."""
REFRESH_SECONDS = 5.0
"""A record may be so old when a base is chosen; a quarter of the grace where that is less."""


class PendingDeleteWatcher:
    """The record of what is condemned, read again now and then; shared by threads and tenants."""

    def __init__(
        self, condemned: PendingDeleteStore, grace_seconds: float, rounds: Callable[[], object] = lambda: None
    ) -> None:
        """`rounds` returns what is another once a round has ended: it may have written containers anew, and condemned
        nothing.
        """
        self._condemned = condemned
        self._rounds = rounds
        self.grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._record: dict[int, PendingDelete] = {}
        self._round = object()
        self._read_at = -1e9
        self.changes = 0
        """How often the record was another than before, a round had ended since, or it was not looked at for so long
        that either may have been."""

    def record(self, *, now: bool = False) -> dict[int, PendingDelete]:
        """Return what is condemned, as it is or was a moment ago. Raises StoreUnavailable."""
        with self._lock:
            at = time.monotonic()
            if now or at - self._read_at > min(REFRESH_SECONDS, self.grace_seconds / 4):
                ended, record = self._rounds(), self._condemned.read()
                late = at - self._read_at > self.grace_seconds / 2
                if late or ended != self._round or _stamp(record) != _stamp(self._record):
                    self.changes += 1
                self._record, self._round, self._read_at = record, ended, at
            return self._record


def _stamp(record: dict[int, PendingDelete]) -> list[tuple[int, int, int, int]]:
    return [(c, entry.at_us, len(entry.chunks), len(entry.segments)) for c, entry in sorted(record.items())]


class PendingDeleteFilter:
    """One tenant's view: what is condemned or gone.

    Lets go of all that was read whenever the record changes, and once a round has ended.
    """

    def __init__(
        self, watch: PendingDeleteWatcher, containers: ContainerStore, fresh: Callable[[], ContainerStore]
    ) -> None:
        """`fresh` returns the same containers with nothing of them read yet."""
        self._watch = watch
        self._fresh = fresh
        self._containers = containers
        self._seen = watch.changes
        self._sound: OrderedDict[int, Bools] = OrderedDict()
        """By container, which of its segments can be restored, as found since the record last changed."""

    @property
    def grace_seconds(self) -> float:
        """Return how long something stays condemned before it goes."""
        return self._watch.grace_seconds

    def refresh(self) -> None:
        """Look at the record; what was read before it changed may have gone since."""
        self._watch.record()
        if self._seen != self._watch.changes:
            self._seen = self._watch.changes
            self._containers.evict()
            self._sound.clear()

    def is_pending(self, chunks: Locations) -> Bools:
        """Return which chunks are condemned."""
        return _is_pending(self._watch.record(), chunks)

    def lost(self, chunks: Locations, source: ContainerSource) -> Bools:
        """Return which chunks are condemned, or gone from what `source` has read since the record last changed."""
        self.refresh()
        found = self.is_pending(chunks)
        for container, rows in group_by_container(chunks.containers):
            if container == ZERO:
                continue
            ordinals = chunks.ordinals[rows]
            try:
                there = source.directory(ContainerId(container)).chunks.there
            except (Corrupt, NotFound):
                found[rows] = True
                continue
            beyond = ordinals >= len(there)
            found[rows] |= beyond | ~there[np.where(beyond, 0, ordinals)]
        return found

    def find_missing(self, segments: Locations) -> tuple[int, str] | None:
        """Return (container, problem) of a segment that cannot be restored, None where all can.

        Each container is read once between two GC runs. A segment condemned for longer than half the grace counts as
        missing: no index names it, unless it was restored from an older copy, and it may be freed at any moment.
        Raises StoreUnavailable.
        """
        self.refresh()
        record = self._watch.record()
        stale_us = (time.time() - self.grace_seconds / 2) * 1e6
        for container, rows in group_by_container(segments.containers):
            ordinals, entry = segments.ordinals[rows], record.get(container)
            try:
                sound = self._sound_segments(container)
            except (Corrupt, NotFound) as err:
                return container, str(err)
            if int(ordinals.max()) >= len(sound) or not sound[ordinals].all():
                return container, f"a segment of container {container:016x}, or a chunk of one, is not in the store"
            if entry is not None and entry.at_us < stale_us and np.isin(ordinals, entry.segments).any():
                return container, f"a segment of container {container:016x} was withdrawn by an earlier GC run"
        return None

    def _sound_segments(self, container: int) -> Bools:
        """Return which segments of a container name nothing but chunks that are there."""
        if container in self._sound:
            self._sound.move_to_end(container)
            return self._sound[container]
        recipes = self._containers.directory(ContainerId(container)).segments
        counts = np.diff(recipes.bounds)
        sound: Bools = counts > 0
        of_row = np.repeat(np.arange(len(counts)), counts)
        for other, rows in group_by_container(recipes.chunks.containers):
            if other == ZERO:
                continue
            try:
                there = self._containers.directory(ContainerId(other)).chunks.there
            except (Corrupt, NotFound):
                sound[of_row[rows]] = False
                continue
            ordinals = recipes.chunks.ordinals[rows]
            beyond = ordinals >= len(there)
            sound[of_row[rows[beyond | ~there[np.where(beyond, 0, ordinals)]]]] = False
        self._sound[container] = sound
        if len(self._sound) > SOUND_MAX:
            self._sound.popitem(last=False)
        return sound

    def dangling(self, segments: Locations) -> str | None:
        """Return why segments may not be relied on by now, None where they may. Raises StoreUnavailable.

        Looks at the record and the containers themselves, as they are now.
        """
        record, containers = self._watch.record(now=True), self._fresh()
        try:
            for container, rows in group_by_container(segments.containers):
                recipes, ordinals = containers.directory(ContainerId(container)).segments, segments.ordinals[rows]
                counts = np.diff(recipes.bounds)
                if int(ordinals.max()) >= len(counts) or not counts[ordinals].all():
                    return f"a segment of container {container:016x} was collected"
                wanted = np.zeros(len(counts), np.bool_)
                wanted[ordinals] = True
                if container in record and wanted[record[container].segments].any():
                    return f"a segment of container {container:016x} is condemned"
                chunks = recipes.chunks.take(np.repeat(wanted, counts))
                for other, named in group_by_container(chunks.containers):
                    if other == ZERO:
                        continue
                    there, wanted_there = containers.directory(ContainerId(other)).chunks.there, chunks.ordinals[named]
                    if int(wanted_there.max()) >= len(there) or not there[wanted_there].all():
                        return f"a chunk of container {other:016x} was collected"
                if _is_pending(record, chunks).any():
                    return f"a chunk that a segment of container {container:016x} names is condemned"
        except (Corrupt, NotFound) as err:
            return str(err)
        return None


def _is_pending(record: dict[int, PendingDelete], chunks: Locations) -> Bools:
    found = np.zeros(len(chunks), np.bool_)
    for container, rows in group_by_container(chunks.containers) if record else ():
        entry = record.get(container)
        if entry is not None:
            found[rows] = entry.whole | np.isin(chunks.ordinals[rows], entry.chunks)
    return found
