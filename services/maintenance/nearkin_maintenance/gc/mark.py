"""Reach. Invariant: what a root needs is reached: its recipes, their chunks, the blocks of these, the blocks' bases.

manifest -> segments -> chunks -> blocks -> bases of a delta, all bases of a patch block -> blocks -> ...

Memory: a byte for each chunk and each segment of the store, and the directories that the cache holds.
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
from nearkin_shared.formats.manifest import NO_ORIGIN, Manifest
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, ZERO, Bools, ContainerId, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

Masks = dict[int, Bools]
"""By container: a bool for each ordinal; shorter where none of the last ones is set."""


@frozen
class DroppedBases:
    """Dead chunks on which nothing of `containers` is to lean: their blocks that do are encoded again without."""

    chunks: Masks
    containers: Collection[int]


class LiveSet:
    """What the roots name, and what that refers to, before any base: chunks and segments of each container."""

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        names: Iterable[str],
        young: Iterable[int] = (),
        summaries: ManifestRefsCache | None = None,
        listed: Collection[int] | None = None,
    ) -> None:
        """Read the manifests named, and the recipes of their segments. Of the containers `young` all is named.

        `summaries`: what is known of manifests that lie there as they did; `listed`: the containers, if they were.

        Raises Corrupt where one cannot be read: what it needs is not known, so nothing may be freed.
        """
        self._containers = containers.of(None)
        self.segments: Masks = {}
        self.chunks: Masks = {}
        self.by_services: str | None = None
        """The name of a manifest, if any is there, that the services behind Kafka have committed."""
        bits = Bits()
        if listed is None:
            listed = [container for container, _ in self._containers.ids()]
        naming = ValidatingManifestReader(manifests, self._containers, listed)
        for name, manifest in _read(naming.read, manifests.read_stored, names, summaries):
            if isinstance(manifest, ManifestRefs):
                if manifest.by_services:
                    self.by_services = name
                for container, number in manifest.segments.items():
                    bits[container] = bits.get(container, 0) | number
                continue
            segments = manifest.segments
            if manifest.origin != NO_ORIGIN:
                self.by_services = name
            for container, rows in group_by_container(segments.containers):
                mark_ordinals(self.segments, container, segments.ordinals[rows])
        for container, mask in masks_of(bits).items():
            mark_ordinals(self.segments, container, np.flatnonzero(mask).astype(np.uint32))
        for container in young:
            whole = self.readable(container)
            if whole is not None:
                mark_ordinals(
                    self.segments, container, np.flatnonzero(np.diff(whole.segments.bounds)).astype(np.uint32)
                )
                mark_ordinals(self.chunks, container, np.flatnonzero(whole.chunks.there).astype(np.uint32))
        for container, wanted in self.segments.items():
            directory = self.directory(container)
            if len(wanted) > len(directory.segments):
                raise _unknown(
                    Corrupt(f"container {container:016x}: {len(directory.segments)} recipes, {len(wanted)} are wanted")
                )
            rows = np.repeat(mask_of(wanted, len(directory.segments)), np.diff(directory.segments.bounds))
            _reach(self.chunks, directory.segments.chunks.take(rows))
        self.referred = False
        """Whether anything that is named refers to what was gathered."""
        self.mark_references()

    def mark_references(self) -> None:
        """Let what is referred to be named as what refers to it is, and with it all that was gathered in its block.

        A part of that takes little besides. Raises Corrupt.
        """
        referred: Masks = {}
        for container, wanted in self.chunks.items():
            directory = self.directory(container)
            chunks, refers = directory.chunks, reference_blocks(directory)
            if refers.any():
                rows = mask_of(wanted, len(chunks)) & chunks.there & refers[chunks.blocks]
                _reach(referred, chunks.bases.take(rows))
        self.referred = bool(referred)
        for container, mask in referred.items():
            directory = self.directory(container)
            chunks, used = directory.chunks, np.zeros(len(directory.blocks), np.bool_)
            used[chunks.blocks[mask_of(mask, len(chunks)) & chunks.there]] = True
            ordinals = np.flatnonzero(chunks.there & used[chunks.blocks])
            mark_ordinals(self.chunks, container, ordinals.astype(np.uint32))

    def references(self) -> LiveSet:
        """Return a copy of its own, to name more in."""
        other = copy.copy(self)
        other.chunks = {container: mask.copy() for container, mask in self.chunks.items()}
        return other

    def directory(self, container: int) -> Directory:
        """Return the directory of a container that is needed. Raises Corrupt: nothing may be freed."""
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound) as err:
            raise _unknown(err) from err

    def readable(self, container: int) -> Directory | None:
        """Return the directory of a container that perhaps nobody needs, None where it cannot be read."""
        try:
            return self._containers.directory(ContainerId(container))
        except PermanentError:
            return None

    def transitive_closure(
        self, chunks: Mapping[int, Bools], whole: Collection[int] = (), giving_up: DroppedBases | None = None
    ) -> Masks:
        """Return `chunks` with all that their blocks lean on; of the containers `whole` every block leans.

        From the newest container down: most lean on older ones, so each is read once. Raises Corrupt.
        """
        found: Masks = {container: mask.copy() for container, mask in chunks.items()}
        all_of = frozenset(whole)
        waiting = {-container for container in (*found, *all_of)}
        heap = sorted(waiting)
        while heap:
            newest = heapq.heappop(heap)
            waiting.discard(newest)
            given = giving_up if giving_up is not None and -newest in giving_up.containers else None
            for other in self._add_bases(-newest, found, every_block=-newest in all_of, giving_up=given):
                if -other not in waiting:
                    waiting.add(-other)
                    heapq.heappush(heap, -other)
        return found

    def closure_within(self, container: int, kept: Bools, giving_up: DroppedBases) -> Bools:
        """Return `kept` with all chunks of the same container that their blocks lean on."""
        found: Masks = {container: kept.copy()}
        self._add_bases(container, found, every_block=False, giving_up=giving_up)
        return found[container]

    def _add_bases(
        self, container: int, found: Masks, *, every_block: bool, giving_up: DroppedBases | None
    ) -> set[int]:
        """Add the bases of a container's blocks to `found`; return the other containers in which some are new."""
        directory = self.directory(container)
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        mine = found[container] = mask_of(found.get(container, _NONE), len(chunks))
        of_prefix = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
        changed: set[int] = set()
        for depth in range(int(blocks.depths.max(initial=0)), 0, -1):
            used = blocks.depths == depth
            if not every_block:
                in_use = np.zeros(len(blocks), np.bool_)
                in_use[chunks.blocks[mine]] = True
                used &= in_use
            deltas = chunks.there & used[chunks.blocks] & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3)
            if not every_block:
                deltas &= mine
            bases = Locations.join([chunks.bases.take(deltas), prefixes.bases.take(used[of_prefix])])
            if giving_up is not None:  # what is encoded again leans on none of these any more
                bases = bases.take(~is_in(giving_up.chunks, bases))
            for other, rows in group_by_container(bases.containers):
                if mark_ordinals(found, other, bases.ordinals[rows]) and other != container:
                    changed.add(other)
            mine = found[container]
        return changed


def _read(
    reading: Callable[[str], Manifest],
    stored: Callable[[str], bytes],
    names: Iterable[str],
    summaries: ManifestRefsCache | None,
) -> Iterator[tuple[str, ManifestRefs | Manifest]]:
    """Yield each manifest, or what is known of it, by its name. Raises Corrupt where it cannot be read."""

    def read(name: str) -> Manifest:
        try:
            return reading(name)
        except (Corrupt, NotFound) as err:
            raise _unknown(err) from err

    if summaries is None:
        yield from ((name, read(name)) for name in names)
        return
    named = list(names)
    yield from summaries.of(named, stored, read)
    summaries.keep_only(named)


_NONE: Bools = np.zeros(0, np.bool_)


def mask_of(mask: Bools, count: int) -> Bools:
    """Return a mask of `count` rows. Raises Corrupt where it names some beyond."""
    if len(mask) > count:
        raise _unknown(Corrupt(f"number {len(mask) - 1} of {count} is wanted"))
    return mask if len(mask) == count else np.concatenate([mask, np.zeros(count - len(mask), np.bool_)])


def is_in(masks: Masks, locations: Locations) -> Bools:
    """Return which of some chunks a mask names."""
    found = np.zeros(len(locations), np.bool_)
    for container, rows in group_by_container(locations.containers):
        mask = masks.get(container)
        if mask is not None and len(mask):
            ordinals = locations.ordinals[rows]
            found[rows] = (ordinals < len(mask)) & mask[np.minimum(ordinals, len(mask) - 1)]
    return found


def dependent_blocks(directory: Directory, on: Masks) -> Bools:
    """Return which blocks of a container lean on any of the chunks `on`."""
    chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
    found = np.zeros(len(blocks), np.bool_)
    deltas = np.flatnonzero(chunks.there & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3))
    found[chunks.blocks[deltas][is_in(on, chunks.bases.take(deltas))]] = True
    of_prefix = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
    found[of_prefix[is_in(on, prefixes.bases)]] = True
    return found


def mark_ordinals(masks: Masks, container: int, ordinals: U32) -> bool:
    """Set what `ordinals` name of a container; return whether any was new."""
    needed = int(ordinals.max()) + 1 if len(ordinals) else 0
    mask = masks.get(container, _NONE)
    if len(mask) < needed:
        mask = masks[container] = np.concatenate([mask, np.zeros(needed - len(mask), np.bool_)])
    if not needed or mask[ordinals].all():
        return False
    mask[ordinals] = True
    return True


def _reach(masks: Masks, chunks: Locations) -> None:
    for container, rows in group_by_container(chunks.containers):
        if container != ZERO:
            mark_ordinals(masks, container, chunks.ordinals[rows])


def _unknown(err: Exception) -> Corrupt:
    return Corrupt(
        f"{err}: what a version needs is not known, so nothing is freed; run `nearkin verify`, then put the object "
        "back from a copy or delete the versions that it touches"
    )
