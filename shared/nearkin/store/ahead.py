"""Reading ahead. Invariant: records that wait are bounded in bytes and number; what failed is read again when asked.

plans, in recipe order ->  blocks not at hand, and the blocks these lean on  ->  read side by side  ->  taken, once

For stores that answer slowly: a block at a time, a restore from S3 would wait once for each of some hundred.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from nearkin.errors import Corrupt, NearkinError
from nearkin.formats import container as fmt
from nearkin.formats.container import Directory
from nearkin.limits import DEPTH_MAX, MIB
from nearkin.records import U8, ZERO, ContainerId
from nearkin.store.chunks import ChunkReader, Plan
from nearkin.store.containers import ContainerStore

THREADS = 8
"""Reads at a time. S3 gives one connection some 50 to 90 MB/s, after 10 to 30 ms."""
AHEAD_BYTES_MAX = 32 * MIB
"""Of records that were asked for and not yet taken, as they are stored."""
AHEAD_BLOCKS_MAX = 1024

BlockKey = tuple[ContainerId, int]


class ReadAhead:
    """A ContainerSource whose records are on their way before they are asked for. For one reader; end it by `close`."""

    def __init__(self, store: ContainerStore) -> None:
        self._store = store
        self._reader = ChunkReader(store)
        self.buffers = store.buffers
        self._threads = ThreadPoolExecutor(THREADS, "nearkin-ahead")
        self._coming: OrderedDict[BlockKey, tuple[Future[bytes | memoryview], int]] = OrderedDict()
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

    def want(self, plan: Plan) -> None:
        """Ask for the blocks of a plan, as far as there is room."""
        try:
            for key in self._needed(plan):
                self._ask(key)
        except NearkinError:  # told when the plan is fetched
            return

    def _needed(self, plan: Plan) -> Iterable[BlockKey]:
        """Yield the blocks that are not at hand, those they lean on after them."""
        seen: set[BlockKey] = set()
        level = _blocks_of(plan)
        for _ in range(DEPTH_MAX + 1):
            below: list[BlockKey] = []
            for key in level:
                if key in seen or self._store.decoded(*key) is not None:
                    continue
                seen.add(key)
                yield key
                directory = self._store.directory(key[0])
                if directory.blocks.kinds[key[1]] == fmt.PATCH:
                    below += _blocks_of(self._reader.plan(directory.prefixes.of(key[1])))
            deltas = np.flatnonzero(plan.kinds == fmt.XDELTA3)
            if len(deltas):
                plan = self._reader.plan(plan.bases.take(deltas))
                below += _blocks_of(plan)
            else:
                plan = plan.take(slice(0, 0))
            if not below:
                return
            level = below

    def _ask(self, key: BlockKey) -> None:
        if key in self._coming or len(self._coming) >= AHEAD_BLOCKS_MAX or self._coming_bytes >= AHEAD_BYTES_MAX:
            return
        stored_bytes = int(self._store.directory(key[0]).blocks.stored[key[1]])
        self._coming[key] = self._threads.submit(self._store.record, *key), stored_bytes
        self._coming_bytes += stored_bytes

    # --- as a ContainerSource ----------------------------------------------------------------------------------------

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        return self._store.directory(container)

    def decoded(self, container: ContainerId, block: int) -> U8 | None:
        """Return a block's bytes where they are in the cache."""
        return self._store.decoded(container, block)

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as it is stored: one that was asked for when it is there, else read now."""
        coming = self._coming.pop((container, block), None)
        if coming is None:
            return self._store.record(container, block)
        reading, stored_bytes = coming
        self._coming_bytes -= stored_bytes
        try:
            return reading.result()
        except NearkinError:
            return self._store.record(container, block)

    def keep(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Take a decoded block into the cache."""
        self._store.keep(container, block, decoded)

    def mended_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | None:
        """Return a damaged block as it was written, where parity knows."""
        return self._store.mended_record(container, block, why)


def _blocks_of(plan: Plan) -> list[BlockKey]:
    """Return the blocks of a plan's rows, each once, in the order of the rows."""
    stored = plan.locations.containers != np.uint64(ZERO)
    pairs = zip(plan.locations.containers[stored].tolist(), plan.blocks[stored].tolist(), strict=True)
    return [(ContainerId(container), block) for container, block in dict.fromkeys(pairs)]
