"""Lookups of stages in one process: pending index, open containers, object store.

Invariant: pending entries are found before durable ones, and each chunk only once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.limits import MIB
from nearkin_shared.observability import counters
from nearkin_shared.pipeline.stage import Contents, FoundBases, FoundLocations, LookupRequest, LookupResults
from nearkin_shared.reading.base_reader import BaseReader
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.reading.stream_neighbours import Neighbourhood
from nearkin_shared.storage.containers import ContainerSource, ContainerStore
from nearkin_shared.storage.pending_delete_watch import PendingDeleteFilter
from nearkin_shared.types import U8, U32, ContainerId, Locations
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

Answer = TypeVar("Answer", FoundLocations, FoundBases)

NEIGHBOUR_BYTES_MAX = 40 * MIB
"""Bound on decoded neighbour blocks that the cache no longer holds, and on blocks that grow.

More would evict other blocks. The 32nd version of a series of dumps, put by a process that had put three before, peaked
at 485 MB, and at 445 MB with this bound.
"""


class ReadableContainer(Protocol):
    """Container in flight whose directory and closed blocks can be read."""

    @property
    def container(self) -> ContainerId:
        """Return the container id."""

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""

    def directory(self, container: ContainerId) -> Directory:
        """Return the container's directory."""

    def record(self, block: int) -> bytes:
        """Return a closed block as it is stored."""


class OpenContainer(ReadableContainer, Protocol):
    """Container that the delta stage still fills."""

    def open_block(self, block: int) -> U8 | None:
        """Return the bytes of an open block, or None if the block is closed."""


class InFlight:
    """Containers by id: open, finished but not durable, or in the object store."""

    def __init__(self, store: ContainerStore) -> None:
        self._store = store
        self.buffers = store.buffers
        self._finished: dict[ContainerId, ReadableContainer] = {}
        self._lock = threading.Lock()
        self._open: dict[ContainerId, OpenContainer] = {}

    def open_only(self, *builders: OpenContainer) -> None:
        """Replace the set of open containers by `builders`."""
        self._open = {builder.container: builder for builder in builders}

    def on_finished(self, container: ReadableContainer) -> None:
        """Keep a finished container readable until it is durable."""
        with self._lock:
            self._finished[container.container] = container

    def durable(self, directory: Directory) -> None:
        """Release a container that the object store now has, and cache its directory."""
        self._store.cache_directory(directory)
        with self._lock:
            self._finished.pop(directory.container, None)

    def end(self) -> None:
        """Release the open containers.

        Each builder refers to its blocks through this object: a reference cycle of about 100 MB.
        """
        self._open = {}

    def abandon(self) -> None:
        """Evict the blocks of containers that may never become durable.

        A later writer may receive the same container id: with a clock behind the newest container, ids count up in
        steps of 20 random bits.
        """
        with self._lock:
            blocks = {container: finished.blocks for container, finished in self._finished.items()}
        blocks |= {container: builder.blocks for container, builder in self._open.items()}
        self._store.blocks.drop((container, block) for container, count in blocks.items() for block in range(count))

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        in_flight = self._open.get(container) or self._finished.get(container)  # dict.get is atomic: no lock
        return self._store.directory(container) if in_flight is None else in_flight.directory(container)

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return the bytes of cached or open blocks, None for others.

        Closed blocks in flight share the store's cache.
        """
        found = self._store.cached_blocks(names)
        for position, (container, block) in enumerate(names):
            if container in self._open and found[position] is None:
                found[position] = self._open[container].open_block(block)
        return found

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a closed block as it is stored."""
        if container in self._open:
            return self._open[container].record(block)
        with self._lock:
            finished = self._finished.get(container)
        return self._store.record(container, block) if finished is None else finished.record(block)

    def records(
        self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int
    ) -> Sequence[bytes | memoryview]:
        """Return the first closed blocks as stored; one if the container is in flight."""
        with self._lock:
            in_flight = container in self._open or container in self._finished
        if in_flight:
            return [self.record(container, blocks[0])]
        return self._store.records(container, blocks, raw_bytes_max)

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return uninitialised memory for blocks that will be decoded and cached."""
        return self._store.room_for(sizes_bytes, NEIGHBOUR_BYTES_MAX)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Keep decoded blocks in the store's cache."""
        self._store.cache_blocks(names, decoded)

    @property
    def changes(self) -> int:
        """Return the number of container changes recorded so far."""
        return self._store.changes

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Return whether any container has a later generation than the one that was read."""
        return self._store.has_newer_generation(containers, since)

    def room(self, size_bytes: int) -> U8:
        """Return uninitialised memory for decoded bytes."""
        return self.buffers.take(size_bytes)

    def cache_written(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Cache the decoded bytes of a block that was just encoded."""
        self._store.cache_written(container, block, decoded)


class EmbeddedLookups:
    """Source of lookup results from the pending index and the readable containers."""

    def __init__(
        self,
        index: PendingIndex,
        source: ContainerSource,
        collected: PendingDeleteFilter | None = None,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """Create the source.

        `collected` filters data that a concurrent GC run may remove, and quarantined data; such chunks are no bases.
        `helpers` decode blocks concurrently with the caller.
        """
        self._index = index
        self._collected = collected
        self._bases = BaseReader(source, helpers)
        self._neighbourhood = Neighbourhood(source)

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers added."""
        if reads.segment_ids is not None:
            facts = replace(
                facts,
                segments=_count_lookups("segments", FoundLocations(*self._index.locate_segments(reads.segment_ids))),
            )
        if reads.names is not None:
            facts = replace(
                facts, chunks=_count_lookups("chunks", FoundLocations(*self._index.locate_chunks(reads.names)))
            )
        if reads.super_features is not None and reads.sketch is not None:
            locations, ranks, found = self._index.locate_bases(reads.sketch, reads.super_features)
            bases = FoundBases(reads.super_features, locations, ranks, found)
            facts = replace(facts, bases=_count_lookups("features", bases))
        if reads.gaps is not None:
            facts = replace(facts, neighbours=self._neighbourhood.between(reads.gaps))
        if reads.contents is not None:
            facts = replace(facts, contents=self._contents(reads.contents, reads, reads.bounds))
        if reads.similar is not None:
            facts = replace(facts, similar=self._contents(reads.similar, reads))
        if reads.lower is not None:
            facts = replace(facts, lower=self._contents(reads.lower, reads, reads.bounds))
        return facts

    def _contents(self, locations: Locations, reads: LookupRequest, bounds: U32 | None = None) -> Contents:
        found = self._bases.contents(locations, reads.depth_below, no_deltas=reads.no_deltas, bounds=bounds)
        if self._collected is None:
            return found
        unusable = self._collected.is_unusable(found.locations)
        if not unusable.any():
            return found
        lengths = np.where(unusable, np.uint32(0), found.pieces.lengths).astype(np.uint32)
        return replace(found, pieces=replace(found.pieces, lengths=lengths), available=found.available & ~unusable)


class SameBatchLookups:
    """Lookups of the storing stage, in the same batch in which dedup received its answers.

    Invariant: nothing was stored in between. Only this thread stores chunks and no other process writes, so chunks that
    dedup did not find are still not in the index (I5).
    """

    def __init__(self, below: EmbeddedLookups) -> None:
        self._below = below

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers added."""
        if reads.names is not None:
            count = len(reads.names)
            facts = replace(facts, chunks=FoundLocations(Locations.empty(count), np.zeros(count, np.bool_)))
            reads = replace(reads, names=None)
        return self._below.answer(reads, facts)


def _count_lookups(table: str, answer: Answer) -> Answer:
    """Count the rows of an index lookup and return it; a row of super-features counts once."""
    found = int(np.count_nonzero(answer.found))
    counters.LOOKUPS.add(found, table, "yes")
    counters.LOOKUPS.add(len(answer.found) - found, table, "no")
    return answer
