"""Track writes that arrive during a GC run.

    change token, containers, manifests              listed at marking, and whenever the token has changed
    new manifests, new containers, their bases       added to the live set; removals that touch them are retained

Invariant (I6): inside an exclusive section, the live set covers every version that exists at that moment. A container
that another process rewrote meanwhile (a repair does) is left unchanged until the next GC run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.gc.mark import LiveSet, Masks
from nearkin_maintenance.gc.writer_gate import WriterGate
from nearkin_shared.index.protocols import ContainerDirectories, SupportsCollection
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, Bools, ContainerId
from nearkin_shared.utils.failpoints import failpoint


class ConcurrentWrites:
    """Exclusive sections of one GC run, and the writes since it listed the store."""

    def __init__(
        self,
        gate: WriterGate,
        token: object,
        containers: ContainerStore,
        manifests: ManifestStore,
        generations: Mapping[ContainerId, Mapping[int, int]],
        manifest_names: Collection[str],
        live_set: LiveSet,
    ) -> None:
        """Track changes since `token`, which was read before the listings.

        `generations` and `manifest_names` are the containers and manifests of these listings. Data that later writes
        need are added to `live_set`.
        """
        self._gate = gate
        self._token = token
        self._containers = containers
        self._manifests = manifests
        self._newest = {int(container): max(found) for container, found in generations.items()}
        self._manifest_names = set(manifest_names)
        self._new_containers: set[int] = set()
        self._retained: set[int] = set()
        self._changed: set[int] = set()
        self._segments: Masks = {}
        self._needed: Masks = {}
        self._live_set = live_set

    @contextmanager
    def exclusive(self) -> Iterator[SupportsCollection]:
        """Block other writers, refresh the live set, and yield the index.

        Raises: StoreLocked, Corrupt, StoreUnavailable.
        """
        self.refresh()  # outside first, so that the exclusive section is short
        with self._gate.exclusive() as index:
            self.refresh()
            failpoint("gc.section-began")
            yield index
            self._token = self._gate.change_token()  # no other process wrote meanwhile
        failpoint("gc.section-ended")

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Look up, outside an exclusive section, the index entries that one will remove.

        Returns the `looked_up` argument of the index.
        """
        looked_up = self._gate.prefetch_removals(chunks, segments)
        failpoint("gc.removals-found")
        return ContainerDirectories(self._containers.directory) if looked_up is None else looked_up

    def refresh(self) -> None:
        """Add writes since the last refresh to the live set.

        Raises: Corrupt if the needs of a new version are unknown.
        """
        token = self._gate.change_token()
        if token == self._token:
            return
        listing = self._containers.generations()  # before the manifests, which name listed containers
        manifest_names, _ = self._manifests.names_and_marks()
        new_containers = [container for container in listing if container not in self._newest]
        new_manifests = [name for name, _ in manifest_names if name not in self._manifest_names]
        changed = {c for c, found in listing.items() if max(found) != self._newest.get(c, max(found))}
        if changed:
            self._containers.evict()
        if new_containers or new_manifests:
            added = LiveSet(
                self._containers,
                self._manifests,
                new_manifests,
                new_containers,
                known_containers=listing,
            )
            self._new_containers.update(new_containers)
            for segments in (self._live_set.segments, self._segments):
                _join(segments, added.segments)
            for chunks in (self._live_set.chunks, self._needed):
                _join(chunks, added.chunks)
            self._needed = self._live_set.transitive_closure(self._needed, self._new_containers)
        self._changed |= changed
        self._newest.update((int(container), max(found)) for container, found in listing.items())
        self._manifest_names.update(new_manifests)
        self._token = token
        failpoint("gc.refreshed")

    def retained(self, removals: Mapping[int, ContainerRemoval]) -> set[int]:
        """Return the containers in `removals` from which nothing may be removed yet.

        New versions, or chunks that depend on them, need these containers. Call inside an exclusive section, with all
        removals that are still to be applied.
        """
        excluded = self._retained | self._changed
        retained, needed = removals.keys() & excluded, self._needed
        while True:
            if all_retained := excluded | retained:  # their dead chunks must stay decodable too
                needed = self._live_set.transitive_closure(needed, all_retained)
            added = {c for c, removal in removals.items() if c not in retained and self._needs_any(needed, c, removal)}
            if not added:
                return retained
            retained |= added

    def is_rewritten_or_retained(self, container: int) -> bool:
        """Return whether another process rewrote a container, or it was retained.

        Call inside an exclusive section.
        """
        return container in self._retained or container in self._changed

    def retain(self, container: int) -> None:
        """Record that a container stays unchanged: its bases stay too."""
        self._retained.add(container)

    def record_deferred(self, containers: Collection[int]) -> None:
        """Record that containers stayed for lack of disk space only.

        They may become pending deletes as before.
        """
        self._retained.difference_update(containers)

    def on_container_rewritten(self, container: ContainerId, generation: int | None) -> None:
        """Record, inside an exclusive section, the new generation of a container.

        `generation` is None if the container was deleted.
        """
        if generation is not None:
            self._newest[container] = generation
        else:
            del self._newest[container]
        self._gate.on_container_rewritten(container)

    def _needs_any(self, needed: Masks, container: int, removal: ContainerRemoval) -> bool:
        if removal.whole_container:  # it lists nothing if the directory was unreadable; repair may have run since
            return any(
                mask is not None and mask.any() for mask in (needed.get(container), self._segments.get(container))
            )
        return _any_of(needed.get(container), removal.chunks) or _any_of(
            self._segments.get(container), removal.segments
        )


def _join(masks: Masks, added: Masks) -> None:
    for container, mask in added.items():
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
