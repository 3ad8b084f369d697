"""Foresight. Invariant: it says what stays at hand, never what is given: where it is wrong, a block is decoded again.

batches that will be read -> their blocks, and what these lean on while they are decoded: each block's last batch
a batch was read          -> blocks that no known one wants go, and their memory, warm, takes what is decoded next

A restore knows what it will read. Of the 12th of a row of dumps it decodes 436 MB for 61: the cache kept as much of it
as it may, 128 MiB, for somebody who never asked again, and each of them took a page that was never touched.
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
from nearkin_shared.reading.read_plan import BlockName, Placed, Plan, announce_upcoming
from nearkin_shared.types import U64, ZERO, ContainerId, distinct

if TYPE_CHECKING:
    from nearkin_shared.storage.containers import ContainerStore

HORIZON_PLANS = 32
"""Batches that are known before they are read, of 4 MiB: what is wanted again after more than these is decoded anew."""
HELD_MAX = 1 << 16
"""Blocks that are kept track of; of honest data there are a thousand in 128 MiB."""
BASES_MAX = 1 << 17
"""Of one container's patch blocks: 40 bytes each while they are looked into."""
EDGES_MAX = 1 << 19
"""Pairs of blocks that are kept, 40 bytes each; those of more containers are looked up again."""
KEYS_MAX = 1 << 62
NUMBER_BITS = 32
NUMBER_MASK = (1 << NUMBER_BITS) - 1


class _Unpredictable(Exception):
    """Blocks lean on others in a way, or in a number, that is not followed."""


class _BlockDependencies(NamedTuple):
    """Of a container: block i decodes to raw_bytes[i], and leans on blocks[bounds[i]] to blocks[bounds[i + 1]]."""

    raw_bytes: list[int]
    blocks: list[int]
    bounds: list[int]


class EvictionHints:
    """What one restore will want of the block cache. For one thread.

    A block is a whole number here, of its container's place among those that were met and its own number: a tuple for
    each time that one leans on another, 17,000 of the 12th dump, has Python's collector of garbage look through all
    that there is.
    """

    def __init__(self, source: ContainerStore) -> None:
        self._source = source
        self._containers: list[ContainerId] = []
        self._places: dict[int, int] = {}
        """Of the containers in that list."""
        self._leaning: dict[int, _BlockDependencies] = {}
        """By a container's place."""
        self._edges = 0
        """How many numbers that is."""
        self._last: dict[int, int] = {}
        """Of each block that will be at hand: the last known batch that wants it."""
        self._wanted: deque[list[int]] = deque()
        """The blocks of each batch that is known and was not read."""
        self._done: set[int] = set()
        """Blocks at hand that no known batch wanted when they were last used."""
        self._known = self._read = 0
        self._decoded_bytes = 0
        self._blind = False

    def track_plans(self, plans: Iterable[Placed]) -> Iterator[Placed]:
        """Yield the plans of batches, each once the HORIZON_PLANS after it are known, or nothing can be foreseen."""
        return announce_upcoming(plans, self._see, HORIZON_PLANS)

    def batch_read(self) -> None:
        """Let go of what the next batch was the last one to want: it was read.

        Where all that is decoded fits into the cache it stays for whoever reads next, and so it does while others
        restore: they may be behind this one.
        """
        if self._blind:
            return
        number, last = self._read, self._last
        self._read += 1
        self._done.update(block for block in self._wanted.popleft() if last[block] == number)
        if self._decoded_bytes > self._source.blocks.bytes_max and self._source.restores.count == 1:
            done = [block for block in self._done if last[block] <= number]
            for block in done:
                del last[block]
            self._done = set()
            self._source.blocks.give_up([self._block_number(block) for block in done])

    def _block_number(self, block: int) -> BlockName:
        return self._containers[block >> NUMBER_BITS], block & NUMBER_MASK

    def _see(self, plan: Plan) -> bool:
        """Take note of the batch after those that are known; return whether that was of any use."""
        if self._blind:
            return False
        try:
            self._wanted.append(self._blocks_needed(plan))
        except (_Unpredictable, NearkinError):  # what is broken is told when it is read
            self._blind = True
            self._last, self._done, self._leaning = {}, set(), {}
            self._wanted.clear()
        self._known += 1
        return not self._blind

    def _blocks_needed(self, plan: Plan) -> list[int]:
        """Return the blocks that a batch wants: its own, and what those lean on that will not be at hand."""
        if (
            plan.kinds == container_layout.XDELTA3
        ).any():  # their bases are rows, of which more is wanted than of these blocks
            raise _Unpredictable
        stored = plan.locations.containers != np.uint64(ZERO)
        which, containers = numbered(plan.locations.containers[stored])
        last, number, found = self._last, self._known, list[int]()
        left: list[int] = distinct(self._blocks(which, containers, plan.blocks[stored])).tolist()
        while left:
            block = left.pop()
            before = last.get(block)
            if before != number:
                last[block] = number
                found.append(block)
                if before is None:
                    left += self._base_blocks(block)
                    if len(last) > HELD_MAX:
                        raise _Unpredictable
        return found

    def _base_blocks(self, block: int) -> list[int]:
        """Return the blocks that one leans on, each once. Raises _Unforeseen, and what reading a directory raises."""
        place, number = block >> NUMBER_BITS, block & NUMBER_MASK
        leaning = self._leaning.get(place)
        if leaning is None:
            leaning = self._dependencies_in(self._containers[place])
            self._edges += len(leaning.blocks) + len(leaning.raw_bytes)
            if self._edges > EDGES_MAX:
                self._leaning.clear()
                self._edges = len(leaning.blocks) + len(leaning.raw_bytes)
            self._leaning[place] = leaning
        if number >= len(leaning.raw_bytes):  # of a later generation, which a round has written since
            raise _Unpredictable
        self._decoded_bytes += leaning.raw_bytes[number]
        return leaning.blocks[leaning.bounds[number] : leaning.bounds[number + 1]]

    def _dependencies_in(self, container: ContainerId) -> _BlockDependencies:
        directory = self._source.directory(container)
        bases, bounds = directory.prefixes.bases, directory.prefixes.bounds
        stored = np.flatnonzero(bases.containers != np.uint64(ZERO))
        if len(stored) > BASES_MAX:
            raise _Unpredictable
        which, containers = numbered(bases.containers[stored])
        ordinals, numbers = bases.ordinals[stored], np.zeros(len(stored), np.uint32)
        for place, holder in enumerate(containers.tolist()):
            rows = which == place
            blocks_of = self._source.directory(ContainerId(holder)).chunks.blocks
            if int(ordinals[rows].max()) >= len(blocks_of):
                raise _Unpredictable
            numbers[rows] = blocks_of[ordinals[rows]]
        of_rows = np.repeat(np.arange(len(directory.blocks)), np.diff(bounds))[stored]
        span = int(numbers.max(initial=0)) + 1
        if len(directory.blocks) * len(containers) * span > KEYS_MAX:
            raise _Unpredictable
        edges = distinct((of_rows * len(containers) + which) * span + numbers)  # each once, block by block
        edges, numbers = np.divmod(edges, span)
        of_edges, which = np.divmod(edges, max(1, len(containers)))
        ends = np.searchsorted(of_edges, np.arange(len(directory.blocks) + 1))
        return _BlockDependencies(
            directory.blocks.raw.tolist(), self._blocks(which, containers, numbers).tolist(), ends.tolist()
        )

    def _blocks(self, which: NDArray[np.integer], containers: U64, numbers: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return blocks: of each the number in its container, and which of `containers` that is."""
        places = np.array([self._place(container) for container in containers.tolist()], np.int64)
        blocks: NDArray[np.int64] = (places << NUMBER_BITS)[which] | numbers.astype(np.int64)
        return blocks

    def _place(self, container: int) -> int:
        place = self._places.get(container)
        if place is None:
            place = self._places[container] = len(self._containers)
            self._containers.append(ContainerId(container))
        return place
