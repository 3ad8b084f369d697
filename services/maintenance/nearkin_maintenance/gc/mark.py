"""Compute the live set: all chunks and segments that some version needs.

    manifest -> segments -> chunks -> blocks -> bases of a delta, all bases of a patch block -> blocks -> ...

Invariant (I6): the live set covers each root's recipes, their chunks, the blocks of these, and the blocks' bases.
Memory: one byte for each chunk and each segment of the store, and the cached directories.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from nearkin_maintenance.gc.manifest_refs_cache import Bits, ManifestRefs, ManifestRefsCache, masks_of
from nearkin_maintenance.verify.manifest_validation import ValidatingManifestReader
from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, ZERO, Bools, ContainerId, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

Masks = dict[int, Bools]
"""One bool per ordinal, by container; a mask may end after its last True."""


@frozen
class DroppedBases:
    """Dead chunks that may no longer be bases of the chunks in `containers`.

    Blocks of `containers` that depend on them are re-encoded.
    """

    chunks: Masks
    containers: Collection[int]


class LiveSet:
    """Chunks and segments that the roots name, without the bases of the chunks.

    Includes the targets of reference blocks. `transitive_closure` adds the bases.
    """

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        names: Iterable[str],
        recent: Iterable[int] = (),
        refs_cache: ManifestRefsCache | None = None,
        known_containers: Collection[int] | None = None,
    ) -> None:
        """Read the manifests `names` and the recipes of their segments.

        `recent`: containers of which every chunk and segment counts as live. `refs_cache`: references of manifests
        whose bytes are unchanged. `known_containers`: ids of a listing, if there is one.

        Raises: Corrupt if a manifest or recipe cannot be read: its needs are unknown, so nothing may be freed.
        """
        self._containers = containers.of(None)
        self.segments: Masks = {}
        self.chunks: Masks = {}
        self.by_services: str | None = None
        """Name of some manifest that the services behind Kafka committed."""
        bits = Bits()
        if known_containers is None:
            known_containers = [container for container, _ in self._containers.ids()]
        reader = ValidatingManifestReader(manifests, self._containers, known_containers)
        for name, manifest in _read_references(reader.read, manifests.read_stored, names, refs_cache):
            if isinstance(manifest, ManifestRefs):
                if manifest.by_services:
                    self.by_services = name
                for container, number in manifest.segments.items():
                    bits[container] = bits.get(container, 0) | number
                continue
            segments = manifest.segments
            if manifest.is_by_services:
                self.by_services = name
            for container, rows in group_by_container(segments.containers):
                mark_ordinals(self.segments, container, segments.ordinals[rows])
        for container, mask in masks_of(bits).items():
            mark_ordinals(self.segments, container, np.flatnonzero(mask).astype(np.uint32))
        for container in recent:
            directory = self.readable(container)
            if directory is not None:
                mark_ordinals(
                    self.segments, container, np.flatnonzero(np.diff(directory.segments.bounds)).astype(np.uint32)
                )
                mark_ordinals(self.chunks, container, np.flatnonzero(directory.chunks.there).astype(np.uint32))
        self._mark_chunks()
        self.has_references = False
        """Whether a live chunk is in a reference block."""
        self.mark_references()
        self._needed = self.chunks
        """Chunks that versions need; `references` copies only the masks of `chunks`."""

    def _mark_chunks(self) -> None:
        """Mark the chunks that the recipes of live segments name. Raises Corrupt."""
        for container, live in self.segments.items():
            directory = self.directory(container)
            if len(live) > len(directory.segments):
                raise _explain_unknown_needs(
                    Corrupt(
                        f"container {container:016x}: a version names segment {len(live) - 1}, but the container has "
                        f"{len(directory.segments)} segments"
                    )
                )
            rows = np.repeat(mask_of(live, len(directory.segments)), np.diff(directory.segments.bounds))
            _mark_locations(self.chunks, directory.segments.chunks.take(rows))

    def mark_references(self) -> None:
        """Mark the targets of live reference blocks, and all chunks of the targets' merged blocks.

        Keeping a part of a merged block saves little. Raises Corrupt.
        """
        targets: Masks = {}
        for container, live in self.chunks.items():
            directory = self.directory(container)
            chunks, is_reference = directory.chunks, reference_blocks(directory)
            if is_reference.any():
                rows = mask_of(live, len(chunks)) & chunks.there & is_reference[chunks.blocks]
                _mark_locations(targets, chunks.bases.take(rows))
        self.has_references = bool(targets)
        for container, mask in targets.items():
            directory = self.directory(container)
            chunks, is_used = directory.chunks, np.zeros(len(directory.blocks), np.bool_)
            is_used[chunks.blocks[mask_of(mask, len(chunks)) & chunks.there]] = True
            ordinals = np.flatnonzero(chunks.there & is_used[chunks.blocks])
            mark_ordinals(self.chunks, container, ordinals.astype(np.uint32))

    def references(self) -> LiveSet:
        """Return a copy whose chunk masks are its own."""
        other = copy.copy(self)
        other.chunks = {container: mask.copy() for container, mask in self.chunks.items()}
        return other

    def directory(self, container: int) -> Directory:
        """Return the directory of a live container. Raises Corrupt: nothing may be freed."""
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound) as err:
            raise _explain_unknown_needs(err) from err

    def readable(self, container: int) -> Directory | None:
        """Return the directory of a container, live or not; None if it cannot be read."""
        try:
            return self._containers.directory(ContainerId(container))
        except PermanentError:
            return None

    def transitive_closure(
        self, chunks: Mapping[int, Bools], complete: Collection[int] = (), dropped_bases: DroppedBases | None = None
    ) -> Masks:
        """Return `chunks` with all bases of their blocks.

        Of the containers `complete`, the bases of every block are added. Containers are processed from the newest to
        the oldest: most depend on older ones, so each is read once. Raises Corrupt, unless only dead data depend on
        the container that cannot be read.
        """
        found: Masks = {container: mask.copy() for container, mask in chunks.items()}
        complete_containers = frozenset(complete)
        waiting = {-container for container in (*found, *complete_containers)}
        heap = sorted(waiting)
        while heap:
            newest = heapq.heappop(heap)
            waiting.discard(newest)
            dropped = dropped_bases if dropped_bases is not None and -newest in dropped_bases.containers else None
            try:
                others = self._add_bases(
                    -newest, found, every_block=-newest in complete_containers, dropped_bases=dropped
                )
            except Corrupt:
                if chunks is self._needed and not complete_containers:
                    raise
                self.transitive_closure(self._needed)  # raises if versions need it
                continue
            for other in others:
                if -other not in waiting:
                    waiting.add(-other)
                    heapq.heappush(heap, -other)
        return found

    def closure_within(self, container: int, kept: Bools, dropped_bases: DroppedBases) -> Bools:
        """Return `kept` with all bases of its blocks in the same container."""
        found: Masks = {container: kept.copy()}
        self._add_bases(container, found, every_block=False, dropped_bases=dropped_bases)
        return found[container]

    def _add_bases(
        self, container: int, found: Masks, *, every_block: bool, dropped_bases: DroppedBases | None
    ) -> set[int]:
        """Add the bases of a container's blocks to `found`.

        Returns the other containers in which some of them are new.
        """
        directory = self.directory(container)
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        own = found[container] = mask_of(found.get(container, _NONE), len(chunks))
        of_prefix = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
        changed: set[int] = set()
        for depth in range(int(blocks.depths.max(initial=0)), 0, -1):
            is_used = blocks.depths == depth
            if not every_block:
                in_use = np.zeros(len(blocks), np.bool_)
                in_use[chunks.blocks[own]] = True
                is_used &= in_use
            deltas = chunks.there & is_used[chunks.blocks] & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3)
            if not every_block:
                deltas &= own
            bases = Locations.join([chunks.bases.take(deltas), prefixes.bases.take(is_used[of_prefix])])
            if dropped_bases is not None:  # re-encoded blocks no longer depend on these
                bases = bases.take(~is_in(dropped_bases.chunks, bases))
            for other, rows in group_by_container(bases.containers):
                if mark_ordinals(found, other, bases.ordinals[rows]) and other != container:
                    changed.add(other)
            own = found[container]
        return changed


def _read_references(
    read_manifest: Callable[[str], Manifest],
    read_stored: Callable[[str], bytes],
    names: Iterable[str],
    refs_cache: ManifestRefsCache | None,
) -> Iterator[tuple[str, ManifestRefs | Manifest]]:
    """Yield each manifest, or its cached references, with its name.

    Raises: Corrupt if one cannot be read.
    """

    def read(name: str) -> Manifest:
        try:
            return read_manifest(name)
        except (Corrupt, NotFound) as err:
            raise _explain_unknown_needs(err) from err

    if refs_cache is None:
        yield from ((name, read(name)) for name in names)
        return
    all_names = list(names)
    yield from refs_cache.of(all_names, read_stored, read)
    refs_cache.keep_only(all_names)


_NONE: Bools = np.zeros(0, np.bool_)


def mask_of(mask: Bools, count: int) -> Bools:
    """Return `mask` extended to `count` entries. Raises Corrupt if it is longer."""
    if len(mask) > count:
        raise _explain_unknown_needs(
            Corrupt(f"ordinal {len(mask) - 1} is named, but the container has {count} entries")
        )
    return mask if len(mask) == count else np.concatenate([mask, np.zeros(count - len(mask), np.bool_)])


def is_in(masks: Masks, locations: Locations) -> Bools:
    """Return bool[n]: whether a mask contains each location."""
    found = np.zeros(len(locations), np.bool_)
    for container, rows in group_by_container(locations.containers):
        mask = masks.get(container)
        if mask is not None and len(mask):
            ordinals = locations.ordinals[rows]
            found[rows] = (ordinals < len(mask)) & mask[np.minimum(ordinals, len(mask) - 1)]
    return found


def dependent_blocks(directory: Directory, bases: Masks) -> Bools:
    """Return bool[b]: whether each block of a container depends on any of `bases`."""
    chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
    found = np.zeros(len(blocks), np.bool_)
    deltas = np.flatnonzero(chunks.there & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3))
    found[chunks.blocks[deltas][is_in(bases, chunks.bases.take(deltas))]] = True
    of_prefix = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
    found[of_prefix[is_in(bases, prefixes.bases)]] = True
    return found


def mark_ordinals(masks: Masks, container: int, ordinals: U32) -> bool:
    """Set `ordinals` in the mask of a container; return whether any was new."""
    needed = int(ordinals.max()) + 1 if len(ordinals) else 0
    mask = masks.get(container, _NONE)
    if len(mask) < needed:
        mask = masks[container] = np.concatenate([mask, np.zeros(needed - len(mask), np.bool_)])
    if not needed or mask[ordinals].all():
        return False
    mask[ordinals] = True
    return True


def _mark_locations(masks: Masks, chunks: Locations) -> None:
    for container, rows in group_by_container(chunks.containers):
        if container != ZERO:
            mark_ordinals(masks, container, chunks.ordinals[rows])


def _explain_unknown_needs(err: Exception) -> Corrupt:
    return Corrupt(
        f"{err}: the chunks that a version needs are unknown, so nothing is freed; run `nearkin verify`, then restore "
        "the object from a copy or delete the affected versions"
    )
