"""Delete at once all data that no version needs, while no other process writes.

    1 delete containers without needed chunks       2 store blocks raw that depend on unneeded chunks
    3 rewrite containers without unneeded chunks, dependents before their bases

A GC run waits a grace and leaves unneeded bytes whose removal costs more than it frees; a purge does neither. Needed
chunks are those that recipes of live versions name: bases and merged blocks are not.

Invariant (I6): the caller holds the writer lock and the GC lock throughout. Invariant (I8): after each step, every
remaining chunk can be decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.mark import LiveSet, Masks, dependent_blocks, is_in, mark_ordinals, mask_of
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice
from nearkin_shared.errors import Corrupt
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.catalog import summarise_directory
from nearkin_shared.index.protocols import ContainerDirectories, SupportsCollection
from nearkin_shared.limits import MIB
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U32, ZERO, Bools, ContainerId, Locations
from nearkin_shared.utils.failpoints import failpoint

BLOCK_BYTES = 4 * MIB
"""Size at which a raw block is finished."""
_NONE: Bools = np.zeros(0, np.bool_)


class Purge:
    """Deletion of all data of one store that no live version needs."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        encode_block: BlockEncoderPort,
        step: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """`step` is called with the containers done, their total, and the kind of work."""
        self._containers = containers.of(None)
        self._reader = VerifiedReader(self._containers, tenants, any_fingerprinter)
        self._encode_block = encode_block
        self._step = step or (lambda done, total, what: None)
        self.deleted = 0
        self.rewritten = 0

    def run(self, live_set: LiveSet, index: SupportsCollection) -> None:
        """Delete all data that are not in `live_set`.

        Raises: Corrupt (a needed chunk is damaged), NoRoom, StoreUnavailable.
        """
        live, unneeded = _needed_chunks(live_set), Masks()
        directories = {container: live_set.readable(container) for container, _ in self._containers.ids()}
        for container, directory in directories.items():
            if directory is not None:
                unneeded[container] = directory.chunks.there & ~mask_of(
                    live.get(container, _NONE), len(directory.chunks)
                )
        unneeded_containers = [
            c for c in directories if not live.get(c, _NONE).any() and not live_set.segments.get(c, _NONE).any()
        ]
        self._withdraw(index, live_set, directories, unneeded, unneeded_containers)
        bases = live_set.transitive_closure(live)
        self._delete([c for c in self._dependents_first(unneeded_containers) if not bases.get(c, _NONE).any()])  # 1
        self._store_raw(index, directories, live, unneeded)  # 2
        self._delete([c for c in self._dependents_first(unneeded_containers) if c in dict(self._containers.ids())])
        self._rewrite(index, live_set, unneeded, set(unneeded_containers))  # 3

    def _withdraw(
        self,
        index: SupportsCollection,
        live_set: LiveSet,
        directories: dict[ContainerId, Directory | None],
        unneeded: Masks,
        unneeded_containers: list[ContainerId],
    ) -> None:
        """Withdraw the entries of data that are deleted from the index (I1)."""
        chunks: dict[int, U32 | None] = {c: np.flatnonzero(mask).astype(np.uint32) for c, mask in unneeded.items()}
        chunks = {c: rows for c, rows in chunks.items() if rows is not None and len(rows)}
        segments = {}
        for container, directory in directories.items():
            if directory is not None and len(rows := _unneeded_recipes(live_set, directory)):
                segments[int(container)] = rows
        removals: dict[int, U32 | None] = {**chunks, **dict.fromkeys(unneeded_containers)}
        index.withdraw(removals, segments, unneeded_containers, ContainerDirectories(directories.get))
        failpoint("purge.withdrawn")

    def _dependents_first(self, containers: list[ContainerId]) -> list[ContainerId]:
        def bases(container: int) -> list[int]:
            try:
                return self._containers.directory(ContainerId(container)).base_containers()
            except Corrupt:
                return []

        return [ContainerId(c) for c in reversed(list(topological_order(sorted(containers), bases)))]

    def _delete(self, containers: list[ContainerId]) -> None:
        for done, container in enumerate(containers):
            self._step(done, len(containers), "containers deleted")
            self._containers.delete(container, self._containers.generation(container))
            self._containers.evict(container)
            self.deleted += 1
            failpoint("purge.container")

    def _store_raw(
        self,
        index: SupportsCollection,
        directories: dict[ContainerId, Directory | None],
        live: Masks,
        unneeded: Masks,
    ) -> None:
        """Store blocks raw that hold needed chunks and depend on unneeded ones.

        All chunks are kept for now.
        """
        blocks_by_container = {}
        for container, directory in directories.items():
            if directory is not None:
                is_dependent = dependent_blocks(directory, unneeded) & _blocks_with(directory, live)
                blocks_by_container.update({container: is_dependent} if is_dependent.any() else {})
        for done, (container, is_dependent) in enumerate(blocks_by_container.items()):
            self._step(done, len(blocks_by_container), "containers without unneeded bases")
            directory = self._containers.directory(container)
            self._replace(
                index, container, self._encode(directory, directory.chunks.there, is_dependent, np.zeros(0, np.uint32))
            )

    def _rewrite(
        self, index: SupportsCollection, live_set: LiveSet, unneeded: Masks, unneeded_containers: set[ContainerId]
    ) -> None:
        """Rewrite containers without unneeded chunks and recipes."""
        recipes_by_container = {}
        for container, _ in self._containers.ids():
            directory = self._containers.directory(container)
            recipes = _unneeded_recipes(live_set, directory)
            has_stale_recipes = len(recipes) and is_in(unneeded, _chunks_of(directory, recipes)).any()
            if container not in unneeded_containers and (unneeded[container].any() or has_stale_recipes):
                recipes_by_container[container] = recipes
        order = [
            container
            for container in self._dependents_first(list(recipes_by_container))
            if container in recipes_by_container
        ]
        for done, container in enumerate(order):
            self._step(done, len(order), "containers rewritten")
            directory = self._containers.directory(container)
            kept = directory.chunks.there & ~mask_of(unneeded[container], len(directory.chunks))
            is_partial = np.zeros(len(directory.blocks), np.bool_)
            is_partial[directory.chunks.blocks[directory.chunks.there & ~kept]] = True
            self._replace(index, container, self._encode(directory, kept, is_partial, recipes_by_container[container]))

    def _encode(self, directory: Directory, kept: Bools, raw: Bools, dropped_recipes: U32) -> bytes:
        """Return the next generation with the chunks `kept`.

        The blocks `raw` are stored raw, others are copied.
        """
        new = NewGeneration(self._containers, directory, kept, self._encode_block)
        chunks = directory.chunks
        for number in np.flatnonzero(directory.blocks.raw).tolist():
            rows = np.flatnonzero(kept & (chunks.blocks == number))
            if not len(rows):
                continue
            if not raw[number]:
                new.copy(number)
                continue
            for part in _portions(rows, chunks.lengths):
                lengths = chunks.lengths[part]
                containers = np.full(len(part), directory.container, np.uint64)
                payload = self._reader.read(directory.domain, Locations(containers, part.astype(np.uint32)))
                none, no_bytes, no_lengths = Locations.empty(), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
                block = BlockSlice(container_layout.RAW, 0, payload, lengths, none, none, no_bytes, no_lengths)
                new.write(part, self._encode_block(block), lengths, int(new.roles[number]))
                new.clear_bases(part)
        return new.encode(dropped_recipes)

    def _replace(self, index: SupportsCollection, container: ContainerId, data: bytes) -> None:
        generation = self._containers.generation(container)
        self._containers.put(container, [data], generation + 1)
        self._containers.evict(container)
        failpoint("purge.put")
        index.renew(summarise_directory(self._containers.directory(container)))
        failpoint("purge.renewed")
        self._containers.delete(container, generation)
        self.rewritten += 1
        failpoint("purge.replaced")


def _needed_chunks(live_set: LiveSet) -> Masks:
    """Return the chunks that recipes of live versions name."""
    found: Masks = {}
    for container, live in live_set.segments.items():
        directory = live_set.directory(container)
        locations = _chunks_of(directory, np.flatnonzero(mask_of(live, len(directory.segments))).astype(np.uint32))
        for other in np.unique(locations.containers).tolist():
            if other != ZERO:
                mark_ordinals(found, other, locations.ordinals[locations.containers == np.uint64(other)])
    return found


def _chunks_of(directory: Directory, recipes: U32) -> Locations:
    is_selected = np.zeros(len(directory.segments), np.bool_)
    is_selected[recipes] = True
    return directory.segments.chunks.take(np.repeat(is_selected, np.diff(directory.segments.bounds)))


def _unneeded_recipes(live_set: LiveSet, directory: Directory) -> U32:
    is_stored = np.diff(directory.segments.bounds) > 0
    needed = mask_of(live_set.segments.get(directory.container, _NONE), len(is_stored))
    return np.flatnonzero(is_stored & ~needed).astype(np.uint32)


def _blocks_with(directory: Directory, live: Masks) -> Bools:
    """Return bool[b]: whether each block holds needed chunks."""
    found = np.zeros(len(directory.blocks), np.bool_)
    mask = mask_of(live.get(directory.container, _NONE), len(directory.chunks)) & directory.chunks.there
    found[directory.chunks.blocks[mask]] = True
    return found


def _portions(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    portion = np.cumsum(lengths[rows], dtype=np.int64) // BLOCK_BYTES
    return np.split(rows, np.flatnonzero(np.diff(portion)) + 1)
