"""What came while a round was at work. Invariant: in a turn it is known what every version needs that is there then.

    state of the store, then containers, then manifests     at marking, and whenever the state is another one
    new manifests, all of new containers, their bases       reached: what of a plan they name stays, with its bases

A container that somebody else wrote anew meanwhile (healing does) stays as it is until the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.gc.mark import LiveSet, Masks
from nearkin_maintenance.gc.writer_gate import WriterGate
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, Bools, ContainerId
from nearkin_shared.utils.failpoints import failpoint


class ConcurrentWrites:
    """Turns of one round, and what others have stored since it listed the store."""

    def __init__(
        self,
        turns: WriterGate,
        state: object,
        containers: ContainerStore,
        manifests: ManifestStore,
        generations: Mapping[ContainerId, Mapping[int, int]],
        names: Collection[str],
        reach: LiveSet,
    ) -> None:
        """`state` was asked for before `generations` and `names`, the manifests, were listed; what comes is added to
        `reach`, what marking found.
        """
        self._turns = turns
        self._state = state
        self._containers = containers
        self._manifests = manifests
        self._newest = {int(container): max(found) for container, found in generations.items()}
        self._names = set(names)
        self._came: set[int] = set()
        self._staying: set[int] = set()
        self._changed: set[int] = set()
        self._segments: Masks = {}
        self._needed: Masks = {}
        self._reach = reach

    @contextmanager
    def exclusive(self) -> Iterator[SupportsCollection]:
        """Keep others out, look what came, and give the index. Raises StoreLocked, Corrupt, StoreUnavailable."""
        self.refresh()  # most of it outside: the turn then is as short as it can be
        with self._turns.exclusive() as index:
            self.refresh()
            failpoint("gc.turn")
            yield index
            self._state = self._turns.change_token()  # nobody else wrote meanwhile
        failpoint("gc.turned")

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Look up, outside of a turn, what the index is to forget in one: its `looked_up`."""
        looked_up = self._turns.prefetch_removals(chunks, segments)
        failpoint("gc.looked-up")
        return looked_up

    def refresh(self) -> None:
        """Add what was stored since to what is reached. Raises Corrupt: what it needs is not known."""
        state = self._turns.change_token()
        if state == self._state:
            return
        listed = self._containers.generations()  # before the manifests: what they name is there
        names, _ = self._manifests.names_and_marks()
        came = [container for container in listed if container not in self._newest]
        committed = [name for name, _ in names if name not in self._names]
        changed = {c for c, found in listed.items() if max(found) != self._newest.get(c, max(found))}
        if changed:
            self._containers.evict()
        if came or committed:
            more = LiveSet(self._containers, self._manifests, committed, came, listed=listed)
            self._came.update(came)
            for segments in (self._reach.segments, self._segments):
                _join(segments, more.segments)
            for chunks in (self._reach.chunks, self._needed):
                _join(chunks, more.chunks)
            self._needed = self._reach.transitive_closure(self._needed, self._came)
        self._changed |= changed
        self._newest.update((int(container), max(found)) for container, found in listed.items())
        self._names.update(committed)
        self._state = state
        failpoint("gc.looked")

    def retained(self, drops: Mapping[int, ContainerRemoval]) -> set[int]:
        """Return the containers of which nothing may go yet, of those in `drops`: others need it, or what leans on it.

        Asked in a turn, with all that is still to go.
        """
        spared = self._staying | self._changed
        kept, needed = drops.keys() & spared, self._needed
        while True:
            if whole := spared | kept:  # what is dead in them decodes too
                needed = self._reach.transitive_closure(needed, whole)
            more = {c for c, drop in drops.items() if c not in kept and self._references_any(needed, c, drop)}
            if not more:
                return kept
            kept |= more

    def is_rewritten_or_retained(self, container: int) -> bool:
        """Return, in a turn, whether somebody else wrote a container anew, or it was spared."""
        return container in self._staying or container in self._changed

    def retain(self, container: int) -> None:
        """Hear that a container was spared: what it leans on stays too."""
        self._staying.add(container)

    def record_deferred(self, containers: Collection[int]) -> None:
        """Hear that containers stayed for want of room alone: they may be condemned still."""
        self._staying.difference_update(containers)

    def on_container_rewritten(self, container: ContainerId, generation: int | None) -> None:
        """Hear, in a turn, that a container was written anew, or None: removed."""
        if generation is not None:
            self._newest[container] = generation
        else:
            del self._newest[container]
        self._turns.on_container_rewritten(container)

    def _references_any(self, needed: Masks, container: int, drop: ContainerRemoval) -> bool:
        if (
            drop.whole_container
        ):  # what that is, is not known where its directory could not be read; it may be mended since
            return any(
                mask is not None and mask.any() for mask in (needed.get(container), self._segments.get(container))
            )
        return _any_of(needed.get(container), drop.chunks) or _any_of(self._segments.get(container), drop.segments)


def _join(masks: Masks, more: Masks) -> None:
    for container, mask in more.items():
        known = masks.get(container)
        if known is None or len(known) < len(mask):
            wider = mask.copy()
            if known is not None:
                wider[: len(known)] |= known
            masks[container] = wider
        else:
            known[: len(mask)] |= mask


def _any_of(mask: Bools | None, ordinals: U32) -> bool:
    if mask is None or not len(ordinals):
        return False
    return bool(mask[ordinals[ordinals < np.uint32(len(mask))]].any())
