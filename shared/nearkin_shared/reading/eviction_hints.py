"""Eviction hints of a restore.

Invariant: hints affect caching only, never results: after a wrong hint a block is decoded again.

    batches ahead -> their blocks and the bases of these: the last batch that needs each block
    batch read    -> blocks that no known batch needs are evicted, and their warm memory is reused

A restore knows its reads ahead. For the 12th version of a series of dumps it decodes 436 MB to return 61 MB: without
hints the cache kept 128 MiB of that for reads that never followed, each in pages touched for the first time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import NearkinError
from nearkin_shared.formats import container_layout
from nearkin_shared.kernels.table_rows import numbered
from nearkin_shared.reading.read_plan import BlockName, Placed, ReadPlan, announce_upcoming
from nearkin_shared.types import U64, ZERO, ContainerId, distinct

if TYPE_CHECKING:
    from nearkin_shared.storage.containers import ContainerStore

HORIZON_PLANS = 32
"""Batches of 4 MiB known ahead; a block needed again later than that is decoded again."""
HELD_MAX = 1 << 16
"""Bound on tracked blocks; 128 MiB of honest data have a thousand."""
BASES_MAX = 1 << 17
"""Bound on the bases of one container's patch blocks: 40 bytes each while they are analysed."""
EDGES_MAX = 1 << 19
"""Bound on kept pairs of blocks, 40 bytes each; dependencies of more containers are looked up again."""
KEYS_MAX = 1 << 62
NUMBER_BITS = 32
NUMBER_MASK = (1 << NUMBER_BITS) - 1


class _Unpredictable(Exception):
    """Block dependencies exceed the bounds, or are not followed."""


class _BlockDependencies(NamedTuple):
    """Dependencies of a container's blocks.

    Block i decodes to raw_bytes[i]; its bases are in blocks[bounds[i]] to blocks[bounds[i + 1]].
    """

    raw_bytes: list[int]
    blocks: list[int]
    bounds: list[int]


class EvictionHints:
    """Future uses of the block cache by one restore. For one thread.

    A block is one integer here: its container's index in the list of known containers, and its own number. With a tuple
    per dependency, 17,000 for the 12th dump, Python's garbage collector would scan all objects.
    """

    def __init__(self, source: ContainerStore) -> None:
        self._source = source
        self._containers: list[ContainerId] = []
        self._indexes: dict[int, int] = {}
        """Index of each container in that list."""
        self._dependencies: dict[int, _BlockDependencies] = {}
        """Dependencies by a container's index."""
        self._edges = 0
        """Number of values in it."""
        self._last: dict[int, int] = {}
        """Last known batch that needs each block that will be cached."""
        self._needed: deque[list[int]] = deque()
        """Blocks of each known batch that was not read yet."""
        self._unneeded: set[int] = set()
        """Cached blocks that no known batch needed when they were last used."""
        self._known = self._read = 0
        self._decoded_bytes = 0
        self._is_disabled = False

    def track_plans(self, plans: Iterable[Placed]) -> Iterator[Placed]:
        """Yield the plans of batches, each once HORIZON_PLANS further ones are known.

        Without predictable dependencies each is yielded at once.
        """
        return announce_upcoming(plans, self._add_batch, HORIZON_PLANS)

    def batch_read(self) -> None:
        """Give up the blocks that the batch just read was the last to need.

        They stay if all decoded blocks fit into the cache, for later readers, and during concurrent restores, which may
        follow.
        """
        if self._is_disabled:
            return
        number, last = self._read, self._last
        self._read += 1
        self._unneeded.update(block for block in self._needed.popleft() if last[block] == number)
        if self._decoded_bytes > self._source.blocks.bytes_max and self._source.restores.count == 1:
            unneeded = [block for block in self._unneeded if last[block] <= number]
            for block in unneeded:
                del last[block]
            self._unneeded = set()
            self._source.blocks.give_up([self._block_number(block) for block in unneeded])

    def _block_number(self, block: int) -> BlockName:
        return self._containers[block >> NUMBER_BITS], block & NUMBER_MASK

    def _add_batch(self, plan: ReadPlan) -> bool:
        """Add the next batch; return whether hints are still possible."""
        if self._is_disabled:
            return False
        try:
            self._needed.append(self._blocks_needed(plan))
        except (_Unpredictable, NearkinError):  # damage is reported by the read itself
            self._is_disabled = True
            self._last, self._unneeded, self._dependencies = {}, set(), {}
            self._needed.clear()
        self._known += 1
        return not self._is_disabled

    def _blocks_needed(self, plan: ReadPlan) -> list[int]:
        """Return the blocks that a batch needs: its own, and bases that will not be cached."""
        if (
            plan.kinds == container_layout.XDELTA3
        ).any():  # their bases are rows, of which more are needed than these blocks
            raise _Unpredictable
        stored = plan.locations.containers != np.uint64(ZERO)
        which, containers = numbered(plan.locations.containers[stored])
        last, number, found = self._last, self._known, list[int]()
        open_blocks: list[int] = distinct(self._blocks(which, containers, plan.blocks[stored])).tolist()
        while open_blocks:
            block = open_blocks.pop()
            last_batch = last.get(block)
            if last_batch != number:
                last[block] = number
                found.append(block)
                if last_batch is None:
                    open_blocks += self._base_blocks(block)
                    if len(last) > HELD_MAX:
                        raise _Unpredictable
        return found

    def _base_blocks(self, block: int) -> list[int]:
        """Return the distinct blocks of a block's bases.

        Raises: _Unpredictable, and the errors of reading a directory.
        """
        index, number = block >> NUMBER_BITS, block & NUMBER_MASK
        dependencies = self._dependencies.get(index)
        if dependencies is None:
            dependencies = self._dependencies_in(self._containers[index])
            self._edges += len(dependencies.blocks) + len(dependencies.raw_bytes)
            if self._edges > EDGES_MAX:
                self._dependencies.clear()
                self._edges = len(dependencies.blocks) + len(dependencies.raw_bytes)
            self._dependencies[index] = dependencies
        if number >= len(dependencies.raw_bytes):  # of a later generation, written by a GC run since
            raise _Unpredictable
        self._decoded_bytes += dependencies.raw_bytes[number]
        return dependencies.blocks[dependencies.bounds[number] : dependencies.bounds[number + 1]]

    def _dependencies_in(self, container: ContainerId) -> _BlockDependencies:
        directory = self._source.directory(container)
        bases, bounds = directory.prefixes.bases, directory.prefixes.bounds
        stored = np.flatnonzero(bases.containers != np.uint64(ZERO))
        if len(stored) > BASES_MAX:
            raise _Unpredictable
        which, containers = numbered(bases.containers[stored])
        ordinals, numbers = bases.ordinals[stored], np.zeros(len(stored), np.uint32)
        for index, holder in enumerate(containers.tolist()):
            rows = which == index
            blocks_of = self._source.directory(ContainerId(holder)).chunks.blocks
            if int(ordinals[rows].max()) >= len(blocks_of):
                raise _Unpredictable
            numbers[rows] = blocks_of[ordinals[rows]]
        block_of_row = np.repeat(np.arange(len(directory.blocks)), np.diff(bounds))[stored]
        span = int(numbers.max(initial=0)) + 1
        if len(directory.blocks) * len(containers) * span > KEYS_MAX:
            raise _Unpredictable
        edges = distinct((block_of_row * len(containers) + which) * span + numbers)  # distinct, block by block
        edges, numbers = np.divmod(edges, span)
        block_of_edge, which = np.divmod(edges, max(1, len(containers)))
        ends = np.searchsorted(block_of_edge, np.arange(len(directory.blocks) + 1))
        return _BlockDependencies(
            directory.blocks.raw.tolist(), self._blocks(which, containers, numbers).tolist(), ends.tolist()
        )

    def _blocks(self, which: NDArray[np.integer], containers: U64, numbers: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return blocks from their numbers and the index of each one's container in `containers`."""
        indexes = np.array([self._index_of(container) for container in containers.tolist()], np.int64)
        blocks: NDArray[np.int64] = (indexes << NUMBER_BITS)[which] | numbers.astype(np.int64)
        return blocks

    def _index_of(self, container: int) -> int:
        index = self._indexes.get(container)
        if index is None:
            index = self._indexes[container] = len(self._containers)
            self._containers.append(ContainerId(container))
        return index
