"""Reading ahead. Invariant: records that wait are bounded in bytes and number; what failed is read again when asked.

plans, in recipe order ->  blocks not at hand, and the blocks these lean on  ->  read side by side  ->  taken, once

For stores that answer slowly: a block at a time, a restore from S3 would wait once for each of some hundred.
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
from nearkin_shared.reading.read_plan import BlockName, Plan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, ZERO, ContainerId

THREADS = 8
"""Reads at a time. S3 gives one connection some 50 to 90 MB/s, after 10 to 30 ms."""
AHEAD_BYTES_MAX = 32 * MIB
"""Of records that were asked for and not yet taken, as they are stored."""
AHEAD_BLOCKS_MAX = 1024


class _Coming(NamedTuple):
    """A block that was asked for; `plan`: the last one that did."""

    reading: Future[bytes | memoryview]
    stored_bytes: int
    plan: int


class ReadAhead:
    """A ContainerSource whose records are on their way before they are asked for. For one reader; end it by `close`."""

    def __init__(self, store: ContainerStore, plans_ahead: int) -> None:
        """`plans_ahead`: when a plan is wanted, all but so many before it have been fetched."""
        self._store = store
        self._plans_ahead = plans_ahead
        self._plans = 0
        self._reader = ChunkReader(store)
        self.buffers = store.buffers
        self._threads = ThreadPoolExecutor(THREADS, "nearkin-ahead")
        self._coming: OrderedDict[BlockName, _Coming] = OrderedDict()
        """What was asked for, by the plan that did so last."""
        self._coming_bytes = 0

    def close(self) -> None:
        """Wait for what is being read, and read no more."""
        self._threads.shutdown(cancel_futures=True)

    def directories(self, containers: Iterable[ContainerId]) -> None:
        """Read directories side by side; what fails is read again when it is asked for."""
        wanted = [ContainerId(container) for container in containers if container != ZERO]
        for _ in self._threads.map(self._try_directory, wanted):
            pass

    def _try_directory(self, container: ContainerId) -> Directory | None:
        try:
            return self._store.directory(container)
        except NearkinError:
            return None

    def request(self, plan: Plan) -> bool:
        """Ask for the blocks of a plan, as far as there is room; return True: more may be asked for."""
        self._plans += 1
        self._drop_unneeded()
        try:
            for key in self._needed(plan):
                self._ask(key)
        except NearkinError:  # told when the plan is fetched
            pass
        return True

    def _needed(self, plan: Plan) -> Iterable[BlockName]:
        """Yield the blocks that are not at hand, those they lean on after them."""
        seen: set[BlockName] = set()
        level = _blocks_of(plan)
        for _ in range(DEPTH_MAX + 1):
            below: list[BlockName] = []
            for key in level:
                if key in seen or self._store.cached_blocks([key])[0] is not None:
                    continue
                seen.add(key)
                yield key
                directory = self._store.directory(key[0])
                if directory.blocks.kinds[key[1]] == container_layout.PATCH:
                    below += _blocks_of(self._reader.plan(directory.prefixes.of(key[1])))
            deltas = np.flatnonzero(plan.kinds == container_layout.XDELTA3)
            if len(deltas):
                plan = self._reader.plan(plan.bases.take(deltas))
                below += _blocks_of(plan)
            else:
                plan = plan.take(slice(0, 0))
            if not below:
                return
            level = below

    def _drop_unneeded(self) -> None:
        """Drop what no plan took that asked for it: another reader had brought it into the cache by then."""
        while self._coming:
            key, oldest = next(iter(self._coming.items()))
            if oldest.plan >= self._plans - self._plans_ahead:
                return
            oldest.reading.cancel()
            counters.AHEAD_BLOCKS.add(1, "vain")
            self._taken(key)

    def _taken(self, key: BlockName) -> Future[bytes | memoryview] | None:
        """Return the reading of a block that was asked for, and make room for others."""
        coming = self._coming.pop(key, None)
        if coming is None:
            return None
        self._coming_bytes -= coming.stored_bytes
        return coming.reading

    def _ask(self, key: BlockName) -> None:
        coming = self._coming.get(key)
        if coming is not None:
            self._coming[key] = coming._replace(plan=self._plans)
            self._coming.move_to_end(key)
            return
        if len(self._coming) >= AHEAD_BLOCKS_MAX or self._coming_bytes >= AHEAD_BYTES_MAX:
            return
        stored_bytes = int(self._store.directory(key[0]).blocks.stored[key[1]])
        self._coming[key] = _Coming(self._threads.submit(self._store.record, *key), stored_bytes, self._plans)
        self._coming_bytes += stored_bytes

    # --- as a ContainerSource ----------------------------------------------------------------------------------------

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        return self._store.directory(container)

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return blocks' bytes where they are in the cache."""
        return self._store.cached_blocks(names)

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as it is stored: one that was asked for when it is there, else read now."""
        reading = self._taken((container, block))
        counters.AHEAD_BLOCKS.add(1, "late" if reading is None else "ahead")
        if reading is None:
            return self._store.record(container, block)
        try:
            return reading.result()
        except NearkinError:
            return self._store.record(container, block)

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return memory for blocks that will be decoded and kept, undefined."""
        return self._store.room_for(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Take decoded blocks into the cache."""
        self._store.cache_blocks(names, decoded)

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | memoryview | None:
        """Return a damaged block as it was written, where parity knows."""
        return self._store.reconstruct_record(container, block, why)

    @property
    def changes(self) -> int:
        """Return how many changes of containers were noted."""
        return self._store.changes

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Look whether any of these is there in a later generation than was read."""
        return self._store.has_newer_generation(containers, since)


def _blocks_of(plan: Plan) -> list[BlockName]:
    """Return the blocks of a plan's rows, each once, in the order of the rows."""
    stored = plan.locations.containers != np.uint64(ZERO)
    pairs = zip(plan.locations.containers[stored].tolist(), plan.blocks[stored].tolist(), strict=True)
    return [(ContainerId(container), block) for container, block in dict.fromkeys(pairs)]
