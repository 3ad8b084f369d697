"""Facts for the embedded runner. Invariant: what is in flight is seen before what is durable, and each only once."""

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
"""Of blocks that are looked at though the cache holds them no more, and of those that grow: for what is more it makes
room. The 32nd of a row of dumps, put by a process that had put three before, peaked at 485 MB, and so at 445."""


class FinishedContainer(Protocol):
    """Container that takes no more chunks and is not durable yet."""

    @property
    def container(self) -> ContainerId:
        """Return its id."""

    @property
    def blocks(self) -> int:
        """Return how many blocks it has."""

    def directory(self, container: ContainerId) -> Directory:
        """Return its directory."""

    def record(self, block: int) -> bytes:
        """Return a closed block as it is stored."""


class OpenContainer(FinishedContainer, Protocol):
    """Container that the delta stage still fills."""

    def open_block(self, block: int) -> U8 | None:
        """Return the bytes of a block that is not closed, None where it is."""


class InFlight:
    """Containers by id, wherever they are: open, finished and waiting to be put, or in the store."""

    def __init__(self, store: ContainerStore) -> None:
        self._store = store
        self.buffers = store.buffers
        self._finished: dict[ContainerId, FinishedContainer] = {}
        self._lock = threading.Lock()
        self._open: dict[ContainerId, OpenContainer] = {}

    def open_only(self, *builders: OpenContainer) -> None:
        """Read from these what is not finished, and from no others."""
        self._open = {builder.container: builder for builder in builders}

    def on_finished(self, container: FinishedContainer) -> None:
        """Keep a container readable that takes no more, until it is durable."""
        with self._lock:
            self._finished[container.container] = container

    def durable(self, directory: Directory) -> None:
        """Forget a container: the store has it, and need not read this directory of it."""
        self._store.cache_directory(directory)
        with self._lock:
            self._finished.pop(directory.container, None)

    def end(self) -> None:
        """Let go of what is open: a builder keeps its blocks here: a circle of some 100 MB."""
        self._open = {}

    def abandon(self) -> None:
        """Forget the blocks of containers that may never be durable: a later writer may be given the same id.

        With a clock behind the newest container ids count up by a step of 20 random bits.
        """
        with self._lock:
            blocks = {container: finished.blocks for container, finished in self._finished.items()}
        blocks |= {container: builder.blocks for container, builder in self._open.items()}
        self._store.blocks.drop((container, block) for container, count in blocks.items() for block in range(count))

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        taken = self._open.get(container) or self._finished.get(container)  # each in one step: no lock
        return self._store.directory(container) if taken is None else taken.directory(container)

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return blocks' bytes: cached, or still open. Closed blocks in flight share the store's cache."""
        found = self._store.cached_blocks(names)
        for place, (container, block) in enumerate(names):
            if container in self._open and found[place] is None:
                found[place] = self._open[container].open_block(block)
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
        """Return the first of some closed blocks as they are stored: of one in flight one."""
        with self._lock:
            in_flight = container in self._open or container in self._finished
        if in_flight:
            return [self.record(container, blocks[0])]
        return self._store.records(container, blocks, raw_bytes_max)

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return memory for blocks that will be decoded and kept, undefined."""
        return self._store.room_for(sizes_bytes, NEIGHBOUR_BYTES_MAX)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Keep decoded blocks in the store's cache."""
        self._store.cache_blocks(names, decoded)

    @property
    def changes(self) -> int:
        """Return how many changes of containers were noted."""
        return self._store.changes

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Look whether any of these is there in a later generation than was read."""
        return self._store.has_newer_generation(containers, since)

    def room(self, size_bytes: int) -> U8:
        """Return memory for decoded bytes, undefined."""
        return self.buffers.take(size_bytes)

    def cache_written(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Keep what a block that was just encoded decodes to."""
        self._store.cache_written(container, block, decoded)


class EmbeddedLookups:
    """Answers stages from the pending index and the containers in reach."""

    def __init__(
        self,
        index: PendingIndex,
        source: ContainerSource,
        collected: PendingDeleteFilter | None = None,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`collected`: what a maintenance worker may be about to remove, where it works beside; none of it is a base.

        `helpers` decode beside the caller.
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
        condemned = self._collected.is_pending(found.locations)
        if not condemned.any():
            return found
        lengths = np.where(condemned, np.uint32(0), found.pieces.lengths).astype(np.uint32)
        return replace(found, pieces=replace(found.pieces, lengths=lengths), available=found.available & ~condemned)


class SameBatchLookups:
    """Answers the stage that stores, in the turn in which dedup was answered. Invariant: nothing was placed between.

    This thread alone places chunks, and no other process writes: what dedup was told is unknown still is (I5).
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
    """Return an answer of the index, after counting it: a row of super-features is one question."""
    there = int(np.count_nonzero(answer.found))
    counters.LOOKUPS.add(there, table, "yes")
    counters.LOOKUPS.add(len(answer.found) - there, table, "no")
    return answer
