"""Blocks of what is kept. Invariant: a chunk's bytes are compared with its name before they are encoded again.

some chunks of a block -> decoded, compared -> a block of them that leans on what they use of its bases
chunks that are to lean on nothing -> blocks of them
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import Masks, is_in
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice, EncodedResult, RebasedChunks
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.block_kinds import merged_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.kernels.shared_bytes import shared_bytes
from nearkin_shared.limits import PREFIX_BYTES_MIN
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import Plan
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, Bools, Locations, offsets_of

READ_BYTES = 8 * 1024 * 1024
"""Chunks that lean on nothing are read so many bytes at a time."""
SHARED_BYTES_MIN = 64
"""A base that gives fewer bytes than this to what is kept of a block is not worth its place in the prefix."""


class BlockWriter:
    """Lays blocks into new generations."""

    def __init__(self, containers: ContainerStore, verified: VerifiedReader, recode: BlockEncoderPort) -> None:
        self._containers = containers
        self._reader = ChunkReader(containers, recode.helpers)
        self._verified = verified
        self._recode = recode

    def read_verified(self, directory: Directory, rows: NDArray[np.intp]) -> U8:
        """Return the bytes of chunks of a container, one behind the other. Raises Corrupt."""
        here = Locations(np.full(len(rows), directory.container, np.uint64), rows.astype(np.uint32))
        return self._verified.read(directory.domain, here)

    def blocks_to_merge(self, directory: Directory, kept: Bools) -> Bools:
        """Return which raw blocks become one: those of which little is kept, if there are several; gathered ones stay.

        Apart they took 50 % of their bytes, together 43 (30 days of small edits, benchmarks/gc_days.py).
        """
        blocks = directory.blocks
        left = np.bincount(directory.chunks.blocks, directory.chunks.lengths * kept, len(blocks))
        small: Bools = (blocks.raw > 0) & (blocks.kinds == container_layout.RAW) & ~merged_blocks(directory)
        small &= (left > 0) & (left * 2 < self._recode.raw_bytes)
        return small if np.count_nonzero(small) > 1 else np.zeros(len(blocks), np.bool_)

    def copy_remaining(self, new: NewGeneration, directory: Directory, kept: Bools, others: Bools) -> None:
        """Lay what is kept of all blocks but `others`: as it is where it is all of one. Raises Corrupt."""
        old = directory.chunks
        for number in np.flatnonzero((directory.blocks.raw > 0) & ~others).tolist():
            rows = np.flatnonzero(old.there & (old.blocks == number))
            rows_kept = rows[kept[rows]]
            if len(rows_kept) == len(rows):
                new.copy(number)
            elif len(rows_kept):
                self.some_of(new, directory, number, rows_kept)

    def some_of(self, new: NewGeneration, directory: Directory, number: int, rows: NDArray[np.intp]) -> None:
        """Encode some chunks of a block again. Raises Corrupt."""
        part = self._part(directory, number, rows, self.read_verified(directory, rows))
        recoded = self._recode(part)
        new.write(rows, recoded, part.lengths if recoded.encoded is None else recoded.encoded)
        if recoded.block.kind == container_layout.RAW:
            new.clear_bases(rows)
        else:
            new.keep_bases(rows)

    def rewrite_shallower(
        self,
        new: NewGeneration,
        directory: Directory,
        number: int,
        rows: NDArray[np.intp],
        without: Masks,
        depths_of: Callable[[Plan], U8],
    ) -> None:
        """Encode chunks of a block again that leans on its bases as deep as these lie now, and on none of `without`.

        `depths_of` tells how deep. One that is gathered, or refers: what it holds is near to what it holds besides.
        Raises Corrupt.
        """
        prefix = directory.prefixes.of(number)
        plan = self._reader.plan(prefix.take(~is_in(without, prefix)))
        if int(plan.lengths.sum(dtype=np.int64)) < PREFIX_BYTES_MIN:
            plan = self._reader.plan(Locations.empty())
        bases = plan.locations
        depth = int(depths_of(plan).max(initial=0)) + 1 if len(bases) else 0
        base_payload, payload = self._reader.fetch(plan), self.read_verified(directory, rows)
        best, lengths = directory.chunks.bases.take(rows), directory.chunks.lengths[rows]
        kind = container_layout.PATCH if len(bases) else container_layout.RAW
        part = BlockSlice(kind, depth, payload, lengths, best, bases, base_payload, plan.lengths)
        recoded = self._write_merged(part) if merged_blocks(directory)[number] else self._recode(part)
        new.write(rows, recoded, lengths if recoded.encoded is None else recoded.encoded)
        if recoded.block.kind == container_layout.RAW:
            new.clear_bases(rows)
            return
        gone = is_in(without, best)
        best.containers[gone], best.ordinals[gone] = bases.containers[-1], bases.ordinals[-1]
        new.set_bases(rows, best, container_layout.LOCALITY_RANK)
        new.keep_ranks(rows)

    def _write_merged(self, part: BlockSlice) -> EncodedResult:
        block = self._recode.encode_merged(part.payload, part.bases, part.base_payload, part.depth)()
        return EncodedResult(block, part.bases if block.kind == container_layout.PATCH else Locations.empty(), None)

    def raw(self, new: NewGeneration, directory: Directory, rows: NDArray[np.intp]) -> None:
        """Put chunks into blocks that lean on nothing. Raises Corrupt."""
        blocks, lengths = self._recode.new_regrouper(), directory.chunks.lengths
        portion = np.cumsum(lengths[rows], dtype=np.int64) // READ_BYTES
        for some in np.split(rows, np.flatnonzero(np.diff(portion)) + 1) if len(rows) else []:
            blocks.add_raw(some, self.read_verified(directory, some), lengths[some])
        self.copy_encoded(new, directory, blocks.end())

    def copy_encoded(self, new: NewGeneration, directory: Directory, blocks: list[RebasedChunks]) -> None:
        """Lay blocks that are encoded."""
        for one in blocks:
            rows, recoded = one.rows, one.recoded
            new.write(rows, recoded, directory.chunks.lengths[rows] if recoded.encoded is None else recoded.encoded)
            if recoded.block.kind != container_layout.RAW:
                new.set_bases(rows, one.best, container_layout.LOCALITY_RANK)

    def _part(self, directory: Directory, number: int, rows: NDArray[np.intp], payload: U8) -> BlockSlice:
        old, kind = directory.chunks, int(directory.blocks.kinds[number])
        lengths, best = old.lengths[rows], old.bases.take(rows)
        none, no_bytes, no_lengths = Locations.empty(), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        depth = int(directory.blocks.depths[number])
        if kind == container_layout.RAW:
            return BlockSlice(kind, depth, payload, lengths, none, none, no_bytes, no_lengths)
        if kind == container_layout.XDELTA3:
            record = self._containers.record(directory.container, number)
            deltas = decode_block(record, f"{object_name(directory.container)} block {number}")
            pieces = [
                deltas[start : start + length]
                for start, length in zip(old.positions[rows].tolist(), old.encoded[rows].tolist(), strict=True)
            ]
            return BlockSlice(kind, depth, np.concatenate(pieces), old.encoded[rows], best, none, no_bytes, no_lengths)
        plan = self._reader.plan(directory.prefixes.of(number))
        base_payload = self._reader.fetch(plan)
        used = _used_bases(payload, lengths, base_payload, plan.lengths) | plan.locations.is_in(best)
        offsets = offsets_of(plan.lengths)
        wanted = np.flatnonzero(used)
        pieces = [base_payload[int(offsets[i]) : int(offsets[i]) + int(plan.lengths[i])] for i in wanted.tolist()]
        return BlockSlice(
            kind,
            depth,
            payload,
            lengths,
            best,
            plan.locations.take(wanted),
            np.concatenate([no_bytes, *pieces]),
            plan.lengths[wanted],
        )


def _used_bases(payload: U8, lengths: U32, base_payload: U8, base_lengths: U32) -> NDArray[np.bool_]:
    """Return which bases give what is kept enough bytes."""
    one = np.array([0, len(lengths)], np.uint32)
    all_bases = np.array([0, len(base_lengths)], np.uint32)
    bases = (base_payload,), np.zeros(len(base_lengths), np.int32), offsets_of(base_lengths), base_lengths
    found = shared_bytes(payload, offsets_of(lengths), lengths, one, *bases, all_bases)
    shared = np.zeros(len(base_lengths), np.uint64)
    np.add.at(shared, found[:, 1].astype(np.intp), found[:, 2].astype(np.uint64))
    used: NDArray[np.bool_] = shared >= SHARED_BYTES_MIN
    return used
