"""Rebase one container.

blocks without a dropped base        -> copied, with the depth that follows from their bases
merged blocks, reference blocks      -> encoded again without the dropped bases, each by itself
chunks of all other delta blocks     -> new bases or none, decided by group at one stream position

Invariant: a chunk is decided after those before it in the stream, and its depth never grows.
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
from nearkin_maintenance.optimize.rebase.replacement_bases import ReplacementBases
from nearkin_maintenance.optimize.rebase.stream_positions import StreamPositions
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import MIB
from nearkin_shared.reading.base_reader import BaseReader
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, U32, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

GROUP_CHUNKS_MAX = 128
GROUP_BYTES_MAX = MIB
"""Bounds of a group of chunks that are tried against the candidates of all: cuts may differ between versions."""
POSITION_CHUNKS = 128
"""Chunks within this many of the stream have one position.

A patch block holds chunks of one position only, or a reader needs blocks from the whole stream: without that, a restore
of the newest of 32 dumps took 30 s, and with blocks over four positions a GC run decoded three times as much.
"""


@frozen
class RebasePlan:
    """Bases to drop, their replacements, and the stream positions of all chunks."""

    dropped: Masks
    replacements: ReplacementBases
    positions: StreamPositions


class RebaseAction(Enum):
    """How the chunks of a task are encoded."""

    CHANGE_BASES = auto()
    STORE_RAW = auto()
    REUSE_BASES = auto()
    """Encode them again as one block, without the dropped bases."""
    REDUCE_DEPTH = auto()
    """Copy their block as it is; its bases may have become shallower."""


class RebaseTask(NamedTuple):
    """Chunks of one container that are decided together; tasks sort in the order of execution."""

    position: int
    container_number: int
    """Number of the container within the batch."""
    first: int
    rows: NDArray[np.intp]
    action: RebaseAction
    block: int
    """Block number, for REUSE_BASES and REDUCE_DEPTH."""


@frozen
class RebaseContext:
    """State that the containers of one batch share."""

    containers: ContainerStore
    block_writer: BlockWriter
    encoder: BlockEncoderPort
    bases: BaseReader
    rebase_plan: RebasePlan
    merged_positions: dict[tuple[int, int], int]
    """Position of each merged block that is kept as one block, by container and block number."""

    def positions_at(self, container: int, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return positions in units of POSITION_CHUNKS, none lower than that of an earlier row."""
        return (
            np.maximum.accumulate(self.rebase_plan.positions.positions_of(container, rows)).astype(np.int64)
            // POSITION_CHUNKS
        )


class ContainerRebase:
    """Builds the next generation of one container."""

    def __init__(self, context: RebaseContext, directory: Directory, removal: ContainerRemoval) -> None:
        self._context, self._directory = context, directory
        chunks, blocks, dropped = directory.chunks, directory.blocks, context.rebase_plan.dropped
        self._kept = chunks.there.copy()
        self._kept[removal.chunks] = False
        self._removal = removal
        self._new = NewGeneration(context.containers, directory, self._kept, context.encoder)
        self._reader = ChunkReader(context.containers, context.encoder.helpers)
        self._blocks = context.encoder.new_regrouper()
        self._depths = context.rebase_plan.replacements.depths(directory.container)
        self._depths_before = self._depths.copy()
        is_dependent = dependent_blocks(directory, dropped)
        whole = np.ones(len(blocks), np.bool_)
        whole[chunks.blocks[chunks.there & ~self._kept]] = False
        self._shallower_blocks = (blocks.raw > 0) & (blocks.depths > 0) & whole & ~is_dependent
        self._merged_blocks = merged_blocks(directory)
        is_rewritten = (
            blocks.depths > 0
        ) & ~self._shallower_blocks  # whole blocks, or later puts find a part at the old depth
        self._reuse_blocks = is_rewritten & (self._merged_blocks | reference_blocks(directory) & ~is_dependent)
        self._rebase_blocks = is_rewritten & ~self._reuse_blocks
        self._joined_blocks = context.block_writer.blocks_to_merge(directory, self._kept)
        self._rebased_rows = [np.zeros(0, np.intp)]
        self._position = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes encoded so far."""
        return self._blocks.held_bytes + self._new.held_bytes

    def tasks(self, container_number: int) -> Iterator[RebaseTask]:
        """Yield the tasks of this container, number `container_number` of the batch."""
        directory, chunks = self._directory, self._directory.chunks
        raw = self._joined_blocks[chunks.blocks]
        rows = np.flatnonzero(self._kept & (raw | self._rebase_blocks[chunks.blocks]))
        positions = self._context.positions_at(directory.container, rows)
        for group in _group_rows(positions, raw[rows], chunks.lengths[rows]):
            first = int(rows[group.start])
            action = RebaseAction.STORE_RAW if raw[first] else RebaseAction.CHANGE_BASES
            yield RebaseTask(int(positions[group.start]), container_number, first, rows[group], action, 0)
        for number, rows in self._blocks_of(self._reuse_blocks | self._shallower_blocks):
            at = self._context.positions_at(directory.container, rows)
            if self._reuse_blocks[number] or self._merged_blocks[number]:
                position = self._position_of_merged(number, int(at[0]))
            else:
                position = int(at[-1])
            action = RebaseAction.REUSE_BASES if self._reuse_blocks[number] else RebaseAction.REDUCE_DEPTH
            yield RebaseTask(position, container_number, int(rows[0]), rows, action, number)

    def _blocks_of(self, chosen: Bools) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield (number, rows) of the chosen blocks that keep any chunk, shallow blocks first."""
        rows = np.flatnonzero(self._kept & chosen[self._directory.chunks.blocks])
        numbers = self._directory.chunks.blocks[rows]
        order = np.argsort(numbers, kind="stable")
        found, firsts = np.unique(numbers[order], return_index=True)
        by_block = dict(zip(found.tolist(), np.split(rows[order], firsts[1:]), strict=True)) if len(rows) else {}
        depths = self._directory.blocks.depths
        yield from sorted(by_block.items(), key=lambda item: int(depths[item[0]]))

    def _position_of_merged(self, number: int, position: int) -> int:
        """Return the stream position of a block's base block, so that the base runs first."""
        known, first = self._context.merged_positions, self._directory.prefixes.of(number).take(slice(0, 1))
        if len(first) and int(first.containers[0]):
            below = self._context.containers.directory(ContainerId(int(first.containers[0]))).chunks
            block = int(below.blocks[first.ordinals[0]])
            position = known.get((int(first.containers[0]), block), position)
        known[self._directory.container, number] = position
        return position

    def execute(self, task: RebaseTask) -> int:
        """Execute a task, at once or as part of a growing block; return the bytes added.

        Raises: Corrupt.
        """
        before_bytes, rows = self.held_bytes, task.rows
        if task.action is RebaseAction.REUSE_BASES:
            block_writer, dropped = self._context.block_writer, self._context.rebase_plan.dropped
            block_writer.rewrite_shallower(self._new, self._directory, task.block, rows, dropped, self._depths_of)
            self._depths[rows] = self._new.depths[rows]
        elif task.action is RebaseAction.REDUCE_DEPTH:
            self._depths[rows] = self._new_depth(task.block, rows)
        elif task.action is RebaseAction.STORE_RAW:
            payload = self._context.block_writer.read_verified(self._directory, rows)
            self._blocks.add_raw(rows, payload, self._directory.chunks.lengths[rows])
        else:
            if task.position != self._position:
                self._blocks.end_patch_blocks()
                self._position = task.position
            self._rebase(rows)
            self._rebased_rows.append(rows)
        return self.held_bytes - before_bytes

    def _depths_of(self, plan: ReadPlan) -> U8:
        return self._context.rebase_plan.replacements.current_depths(plan.locations, plan.depths)

    def _new_depth(self, block: int, rows: NDArray[np.intp]) -> int:
        """Return the depth of a block over the current depths of its bases."""
        patch = self._directory.blocks.kinds[block] == container_layout.PATCH
        bases = self._directory.prefixes.of(block) if patch else self._directory.chunks.bases.take(rows)
        return int(self._depths_of(self._reader.plan(bases)).max(initial=0)) + 1

    def _rebase(self, rows: NDArray[np.intp]) -> None:
        """Give chunks new bases or none; chunks decided before may become bases."""
        directory, rebase_plan, encoder = self._directory, self._context.rebase_plan, self._context.encoder
        container, old, replacements = directory.container, directory.chunks, rebase_plan.replacements
        ordinals, payload = rows.astype(np.uint32), self._context.block_writer.read_verified(directory, rows)
        best_bases = old.bases.take(rows)
        kept_bases = best_bases.take((best_bases.containers != 0) & ~is_in(rebase_plan.dropped, best_bases))
        below = np.minimum(replacements.max_base_depths(container, ordinals), np.uint8(encoder.depth_max))
        candidate_bases = Locations.join([replacements.candidates(container, ordinals, below), kept_bases]).distinct()
        contents = self._context.bases.contents(candidate_bases)
        # Payloads are read from the stored generations, but depths are those of the new ones.
        contents.depths[:] = replacements.current_depths(contents.locations, contents.depths)
        self._depths[rows] = self._blocks.add(rows, payload, old.lengths[rows], contents, below)

    def encode(self) -> bytes:
        """Return the next generation. Raises Corrupt."""
        directory, new, block_writer = self._directory, self._new, self._context.block_writer
        block_writer.copy_encoded(new, directory, self._blocks.end())
        rows = np.concatenate(self._rebased_rows)
        self._depths[rows] = new.depths[rows]
        for number, whole in self._blocks_of(self._shallower_blocks):
            self._depths[whole] = self._new_depth(number, whole)  # all its bases are decided by now
            new.copy(number, int(self._depths[whole[0]]))
        block_writer.copy_remaining(
            new,
            directory,
            self._kept,
            self._rebase_blocks | self._reuse_blocks | self._shallower_blocks | self._joined_blocks,
        )
        return new.encode(self._removal.segments)

    def rollback_depths(self) -> None:
        """Restore the stored depths: this container is released and rebased in a later batch."""
        self._depths[:] = self._depths_before


def _group_rows(positions: NDArray[np.int64], raw: Bools, lengths: U32) -> list[slice]:
    """Return runs of chunks to decide together: of one position, and all raw or none."""
    bounds, held_bytes = [0], 0
    cuts = np.append(False, (np.diff(positions) != 0) | (np.diff(raw) != 0))
    for row, (cut, length_bytes) in enumerate(zip(cuts.tolist(), lengths.tolist(), strict=False)):
        if cut or row - bounds[-1] >= GROUP_CHUNKS_MAX or held_bytes + length_bytes > GROUP_BYTES_MAX:
            bounds.append(row)
            held_bytes = 0
        held_bytes += length_bytes
    bounds.append(len(lengths))
    return [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
