"""Read-ahead of blocks.

Invariant: waiting records are bounded in bytes and number; a failed read is repeated when its block is needed.

    plans, in recipe order ->  blocks not cached, and their bases  ->  concurrent reads  ->  taken, once

For object stores with high latency: reading block by block, a restore from S3 would wait for some hundred reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from nearkin_shared.errors import Corrupt, NearkinError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import DEPTH_MAX, MIB
from nearkin_shared.observability import counters
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import BlockName, ReadPlan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, ZERO, ContainerId

THREADS = 8
"""Concurrent reads. One S3 connection has 50 to 90 MB/s, after 10 to 30 ms."""
AHEAD_BYTES_MAX = 32 * MIB
"""Bound on stored bytes of records requested and not yet taken."""
AHEAD_BLOCKS_MAX = 1024


class _RequestedBlock(NamedTuple):
    """Requested block; `plan` is the last plan that requested it."""

    reading: Future[bytes | memoryview]
    stored_bytes: int
    plan: int


class ReadAhead:
    """ContainerSource whose records are read ahead. For one reader; end it by `close`."""

    def __init__(self, store: ContainerStore, plans_ahead: int) -> None:
        """Start the threads; `plans_ahead` is the number of plans requested in advance."""
        self._store = store
        self._plans_ahead = plans_ahead
        self._plans = 0
        self._reader = ChunkReader(store)
        self.buffers = store.buffers
        self._threads = ThreadPoolExecutor(THREADS, "nearkin-ahead")
        self._requested: OrderedDict[BlockName, _RequestedBlock] = OrderedDict()
        """Requested blocks, ordered by the last plan that requested each."""
        self._requested_bytes = 0

    def close(self) -> None:
        """Wait for reads in progress and start no more."""
        self._threads.shutdown(cancel_futures=True)

    def directories(self, containers: Iterable[ContainerId]) -> None:
        """Read directories concurrently; a failed read is repeated when needed."""
        stored = [ContainerId(container) for container in containers if container != ZERO]
        for _ in self._threads.map(self._try_directory, stored):
            pass

    def _try_directory(self, container: ContainerId) -> Directory | None:
        try:
            return self._store.directory(container)
        except NearkinError:
            return None

    def request(self, plan: ReadPlan) -> bool:
        """Request the blocks of a plan within the bounds; return True: continue."""
        self._plans += 1
        self._drop_unneeded()
        try:
            for key in self._needed(plan):
                self._request_block(key)
        except NearkinError:  # reported when the plan is read
            pass
        return True

    def _needed(self, plan: ReadPlan) -> Iterable[BlockName]:
        """Yield the blocks that are not cached, each level followed by its bases."""
        seen: set[BlockName] = set()
        level = _blocks_of(plan)
        for _ in range(DEPTH_MAX + 1):
            next_level: list[BlockName] = []
            for key in level:
                if key in seen or self._store.cached_blocks([key])[0] is not None:
                    continue
                seen.add(key)
                yield key
                directory = self._store.directory(key[0])
                if directory.blocks.kinds[key[1]] == container_layout.PATCH:
                    next_level += _blocks_of(self._reader.plan(directory.prefixes.of(key[1])))
            deltas = np.flatnonzero(plan.kinds == container_layout.XDELTA3)
            if len(deltas):
                plan = self._reader.plan(plan.bases.take(deltas))
                next_level += _blocks_of(plan)
            else:
                plan = plan.take(slice(0, 0))
            if not next_level:
                return
            level = next_level

    def _drop_unneeded(self) -> None:
        """Drop blocks whose plans are past: another reader had cached them by then."""
        while self._requested:
            key, oldest = next(iter(self._requested.items()))
            if oldest.plan >= self._plans - self._plans_ahead:
                return
            oldest.reading.cancel()
            counters.AHEAD_BLOCKS.add(1, "vain")
            self._take(key)

    def _take(self, key: BlockName) -> Future[bytes | memoryview] | None:
        """Remove a requested block and return its read, or None."""
        requested = self._requested.pop(key, None)
        if requested is None:
            return None
        self._requested_bytes -= requested.stored_bytes
        return requested.reading

    def _request_block(self, key: BlockName) -> None:
        requested = self._requested.get(key)
        if requested is not None:
            self._requested[key] = requested._replace(plan=self._plans)
            self._requested.move_to_end(key)
            return
        if len(self._requested) >= AHEAD_BLOCKS_MAX or self._requested_bytes >= AHEAD_BYTES_MAX:
            return
        stored_bytes = int(self._store.directory(key[0]).blocks.stored[key[1]])
        self._requested[key] = _RequestedBlock(
            self._threads.submit(self._store.record, *key), stored_bytes, self._plans
        )
        self._requested_bytes += stored_bytes

    # --- as a ContainerSource ----------------------------------------------------------------------------------------

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        return self._store.directory(container)

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return the bytes of cached blocks, None for others."""
        return self._store.cached_blocks(names)

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as stored: the requested one, or else read now."""
        reading = self._take((container, block))
        counters.AHEAD_BLOCKS.add(1, "late" if reading is None else "ahead")
        if reading is None:
            return self._store.record(container, block)
        try:
            return reading.result()
        except NearkinError:
            return self._store.record(container, block)

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return uninitialised memory for blocks that will be decoded and cached."""
        return self._store.room_for(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Cache decoded blocks."""
        self._store.cache_blocks(names, decoded)

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | memoryview | None:
        """Return a damaged block as written, if parity can reconstruct it."""
        return self._store.reconstruct_record(container, block, why)

    @property
    def changes(self) -> int:
        """Return the number of recorded container changes."""
        return self._store.changes

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Return whether a container has a later generation than the one read."""
        return self._store.has_newer_generation(containers, since)


def _blocks_of(plan: ReadPlan) -> list[BlockName]:
    """Return the distinct blocks of a plan's rows, in the order of the rows."""
    stored = plan.locations.containers != np.uint64(ZERO)
    pairs = zip(plan.locations.containers[stored].tolist(), plan.blocks[stored].tolist(), strict=True)
    return [(ContainerId(container), block) for container, block in dict.fromkeys(pairs)]
