"""One container of which chunks get other bases. Invariant: a chunk is decided after those before it, and never deeper.

blocks that lean on nothing which goes -> copied, as deep as their bases lie by then
gathered ones, and what refers to them -> without what goes, by themselves
chunks of all others                   -> other bases, or none: group by group of one place
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.gc.mark import Masks, dependent_blocks, is_in
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rewriter import NewGeneration
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort
from nearkin_maintenance.optimize.replacement_bases import ReplacementBases
from nearkin_maintenance.optimize.stream_positions import StreamPositions
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import MIB
from nearkin_shared.reading.base_reader import BaseReader
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import Plan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, U32, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

GROUP_CHUNKS_MAX = 128
GROUP_BYTES_MAX = MIB
"""Chunks that are tried together against all that any of them is offered: what was cut elsewhere finds both sides."""
POSITION_CHUNKS = 128
"""What lies among so many chunks of the stream counts as one place.

A block of patches holds what lies at one, or reading it needs stretches all over: without that the newest of 32 dumps
took 30 s, and with blocks of four places a round decoded three times as much.
"""


@frozen
class RebasePlan:
    """Chunks on which nothing is to lean any more, where those that do find others, and where in the stream all lie."""

    given_up: Masks
    heirs: ReplacementBases
    places: StreamPositions


class RebaseAction(Enum):
    """What becomes of chunks."""

    CHANGE_BASES = auto()
    STORE_RAW = auto()
    REUSE_BASES = auto()
    """They stay one block, which is encoded again without some of its bases."""
    REDUCE_DEPTH = auto()
    """They stay one block as it is, whose bases may lie less deep."""


class RebaseTask(NamedTuple):
    """Chunks of one container that are decided together, in the order of what is done."""

    place: int
    which: int
    """Of the containers that are made side by side."""
    first: int
    rows: NDArray[np.intp]
    action: RebaseAction
    block: int
    """If they stay one."""


@frozen
class RebaseContext:
    """What containers that are made side by side have in common."""

    containers: ContainerStore
    laying: BlockWriter
    recode: BlockEncoderPort
    bases: BaseReader
    rebasing: RebasePlan
    settled_places: dict[tuple[int, int], int]
    """Of each block that stays one, by container and number."""

    def places_at(self, container: int, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return where chunks of a container lie, in places of PLACE_CHUNKS: none before an earlier one of `rows`."""
        return np.maximum.accumulate(self.rebasing.places.at(container, rows)).astype(np.int64) // POSITION_CHUNKS


class ContainerRebase:
    """A container while its next generation is made."""

    def __init__(self, means: RebaseContext, directory: Directory, drop: ContainerRemoval) -> None:
        self._means, self._directory = means, directory
        chunks, blocks, given_up = directory.chunks, directory.blocks, means.rebasing.given_up
        self._kept = chunks.there.copy()
        self._kept[drop.chunks] = False
        self._drop = drop
        self._new = NewGeneration(means.containers, directory, self._kept, means.recode)
        self._reader = ChunkReader(means.containers, means.recode.helpers)
        self._blocks = means.recode.new_regrouper()
        self._depths = means.rebasing.heirs.depths(directory.container)
        self._depths_before = self._depths.copy()
        leaning = dependent_blocks(directory, given_up)
        whole = np.ones(len(blocks), np.bool_)
        whole[chunks.blocks[chunks.there & ~self._kept]] = False
        self._lowered = (blocks.raw > 0) & (blocks.depths > 0) & whole & ~leaning
        self._gathered = merged_blocks(directory)
        again = (blocks.depths > 0) & ~self._lowered  # all of it, or newer puts find a part as deep as ever
        self._settled = again & (self._gathered | reference_blocks(directory) & ~leaning)
        self._rewrite = again & ~self._settled
        self._joined = means.laying.blocks_to_merge(directory, self._kept)
        self._laid = [np.zeros(0, np.intp)]
        self._place = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes that were encoded so far."""
        return self._blocks.held_bytes + self._new.held_bytes

    def tasks(self, which: int) -> Iterator[RebaseTask]:
        """Yield what is to be done, `which` being the number of this container."""
        directory, chunks = self._directory, self._directory.chunks
        raw = self._joined[chunks.blocks]
        rows = np.flatnonzero(self._kept & (raw | self._rewrite[chunks.blocks]))
        places = self._means.places_at(directory.container, rows)
        for group in _groups(places, raw[rows], chunks.lengths[rows]):
            first = int(rows[group.start])
            how = RebaseAction.STORE_RAW if raw[first] else RebaseAction.CHANGE_BASES
            yield RebaseTask(int(places[group.start]), which, first, rows[group], how, 0)
        for number, rows in self._blocks_of(self._settled | self._lowered):
            at = self._means.places_at(directory.container, rows)
            if self._settled[number] or self._gathered[number]:
                place = self._position_of_merged(number, int(at[0]))
            else:
                place = int(at[-1])
            how = RebaseAction.REUSE_BASES if self._settled[number] else RebaseAction.REDUCE_DEPTH
            yield RebaseTask(place, which, int(rows[0]), rows, how, number)

    def _blocks_of(self, chosen: Bools) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield some blocks of which something is kept, those that are less deep first, with the rows that are."""
        rows = np.flatnonzero(self._kept & chosen[self._directory.chunks.blocks])
        numbers = self._directory.chunks.blocks[rows]
        order = np.argsort(numbers, kind="stable")
        found, firsts = np.unique(numbers[order], return_index=True)
        by_block = dict(zip(found.tolist(), np.split(rows[order], firsts[1:]), strict=True)) if len(rows) else {}
        depths = self._directory.blocks.depths
        yield from sorted(by_block.items(), key=lambda item: int(depths[item[0]]))

    def _position_of_merged(self, number: int, place: int) -> int:
        """Return where a block lies: where the one on which it leans does, which comes before it so."""
        known, first = self._means.settled_places, self._directory.prefixes.of(number).take(slice(0, 1))
        if len(first) and int(first.containers[0]):
            below = self._means.containers.directory(ContainerId(int(first.containers[0]))).chunks
            block = int(below.blocks[first.ordinals[0]])
            place = known.get((int(first.containers[0]), block), place)
        known[self._directory.container, number] = place
        return place

    def execute(self, task: RebaseTask) -> int:
        """Encode some chunks again, or take them for what is encoded then; return the bytes more. Raises Corrupt."""
        before_bytes, rows = self.held_bytes, task.rows
        if task.action is RebaseAction.REUSE_BASES:
            laying, given_up = self._means.laying, self._means.rebasing.given_up
            laying.rewrite_shallower(self._new, self._directory, task.block, rows, given_up, self._depths_of)
            self._depths[rows] = self._new.depths[rows]
        elif task.action is RebaseAction.REDUCE_DEPTH:
            self._depths[rows] = self._lowest(task.block, rows)
        elif task.action is RebaseAction.STORE_RAW:
            payload = self._means.laying.read_verified(self._directory, rows)
            self._blocks.add_raw(rows, payload, self._directory.chunks.lengths[rows])
        else:
            if task.place != self._place:
                self._blocks.end_patch_blocks()
                self._place = task.place
            self._rebase(rows)
            self._laid.append(rows)
        return self.held_bytes - before_bytes

    def _depths_of(self, plan: Plan) -> U8:
        return self._means.rebasing.heirs.current_depths(plan.locations, plan.depths)

    def _lowest(self, block: int, rows: NDArray[np.intp]) -> int:
        """Return how deep a block lies on its bases as they lie now."""
        patch = self._directory.blocks.kinds[block] == container_layout.PATCH
        bases = self._directory.prefixes.of(block) if patch else self._directory.chunks.bases.take(rows)
        return int(self._depths_of(self._reader.plan(bases)).max(initial=0)) + 1

    def _rebase(self, rows: NDArray[np.intp]) -> None:
        """Give chunks other bases, or none; each may lean on what was decided before."""
        directory, rebasing, recode = self._directory, self._means.rebasing, self._means.recode
        container, old, heirs = directory.container, directory.chunks, rebasing.heirs
        ordinals, payload = rows.astype(np.uint32), self._means.laying.read_verified(directory, rows)
        best = old.bases.take(rows)
        stay = best.take((best.containers != 0) & ~is_in(rebasing.given_up, best))
        below = np.minimum(heirs.max_base_depths(container, ordinals), np.uint8(recode.depth_max))
        offered = Locations.join([heirs.candidates(container, ordinals, below), stay]).distinct()
        contents = self._means.bases.contents(offered)
        # Read from what is there, and as deep as they are going to be.
        contents.depths[:] = heirs.current_depths(contents.locations, contents.depths)
        self._depths[rows] = self._blocks.add(rows, payload, old.lengths[rows], contents, below)

    def encode(self) -> bytes:
        """Return the next generation. Raises Corrupt."""
        directory, new, laying = self._directory, self._new, self._means.laying
        laying.copy_encoded(new, directory, self._blocks.end())
        rows = np.concatenate(self._laid)
        self._depths[rows] = new.depths[rows]
        for number, whole in self._blocks_of(self._lowered):
            self._depths[whole] = self._lowest(number, whole)  # all that it leans on is decided by now
            new.copy(number, int(self._depths[whole[0]]))
        laying.copy_remaining(new, directory, self._kept, self._rewrite | self._settled | self._lowered | self._joined)
        return new.encode(self._drop.segments)

    def rollback_depths(self) -> None:
        """Let chunks be as deep as they are again: this container is not made yet."""
        self._depths[:] = self._depths_before


def _groups(places: NDArray[np.int64], raw: Bools, lengths: U32) -> list[slice]:
    """Return the runs of chunks that are decided together: of one place, and all of one are to be raw, or none."""
    bounds, held_bytes = [0], 0
    cuts = np.append(False, (np.diff(places) != 0) | (np.diff(raw) != 0))
    for row, (cut, length_bytes) in enumerate(zip(cuts.tolist(), lengths.tolist(), strict=False)):
        if cut or row - bounds[-1] >= GROUP_CHUNKS_MAX or held_bytes + length_bytes > GROUP_BYTES_MAX:
            bounds.append(row)
            held_bytes = 0
        held_bytes += length_bytes
    bounds.append(len(lengths))
    return [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
