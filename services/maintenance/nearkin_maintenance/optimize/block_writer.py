"""Write the blocks of a rewritten container.

some chunks of a block -> decode, verify -> encode as one block, with the bases that these chunks use
chunks without bases   -> decode, verify -> encode as raw blocks

Invariant: a chunk's bytes are verified against its fingerprint before they are encoded again.
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
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, Bools, Locations, offsets_of

READ_BYTES = 8 * 1024 * 1024
"""Raw chunks are read in portions of this many bytes."""
SHARED_BYTES_MIN = 64
"""A base that shares fewer bytes with the kept chunks of a block costs more in the prefix than it saves."""


class BlockWriter:
    """Encode, copy and verify the blocks of new container generations."""

    def __init__(self, containers: ContainerStore, verified: VerifiedReader, encoder: BlockEncoderPort) -> None:
        self._containers = containers
        self._reader = ChunkReader(containers, encoder.helpers)
        self._verified = verified
        self._encoder = encoder

    def read_verified(self, directory: Directory, rows: NDArray[np.intp]) -> U8:
        """Return the bytes of chunks of a container, concatenated. Raises Corrupt."""
        here = Locations(np.full(len(rows), directory.container, np.uint64), rows.astype(np.uint32))
        return self._verified.read(directory.domain, here)

    def blocks_to_merge(self, directory: Directory, kept: Bools) -> Bools:
        """Return a mask of raw blocks to write as one: those with little left, if several.

        Not merged blocks.

        Written separately they kept 50 % of their bytes, together 43 % (30 days of small edits,
        benchmarks/gc_days.py).
        """
        blocks = directory.blocks
        kept_bytes = np.bincount(directory.chunks.blocks, directory.chunks.lengths * kept, len(blocks))
        is_small: Bools = (blocks.raw > 0) & (blocks.kinds == container_layout.RAW) & ~merged_blocks(directory)
        is_small &= (kept_bytes > 0) & (kept_bytes * 2 < self._encoder.raw_bytes)
        return is_small if np.count_nonzero(is_small) > 1 else np.zeros(len(blocks), np.bool_)

    def copy_remaining(self, new: NewGeneration, directory: Directory, kept: Bools, others: Bools) -> None:
        """Write the kept chunks of all blocks but `others`; copy a block that is kept whole.

        Raises: Corrupt.
        """
        old = directory.chunks
        for number in np.flatnonzero((directory.blocks.raw > 0) & ~others).tolist():
            rows = np.flatnonzero(old.there & (old.blocks == number))
            rows_kept = rows[kept[rows]]
            if len(rows_kept) == len(rows):
                new.copy(number)
            elif len(rows_kept):
                self.write_some(new, directory, number, rows_kept)

    def write_some(self, new: NewGeneration, directory: Directory, number: int, rows: NDArray[np.intp]) -> None:
        """Encode the chunks `rows` of a block again. Raises Corrupt."""
        block_slice = self._slice_of(directory, number, rows, self.read_verified(directory, rows))
        result = self._encoder(block_slice)
        encoded = block_slice.lengths if result.encoded is None else result.encoded
        new.write(rows, result, encoded, int(new.roles[number]))
        if result.block.kind == container_layout.RAW:
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
        depths_of: Callable[[ReadPlan], U8],
    ) -> None:
        """Encode `rows` of a block against its bases at their current depths.

        Bases in `without` are dropped; `depths_of` returns the current depths of bases. For merged blocks and
        reference blocks, whose chunks are near each other in the stream. Raises Corrupt.
        """
        prefix = directory.prefixes.of(number)
        plan = self._reader.plan(prefix.take(~is_in(without, prefix)))
        if int(plan.lengths.sum(dtype=np.int64)) < PREFIX_BYTES_MIN:
            plan = self._reader.plan(Locations.empty())
        bases = plan.locations
        depth = int(depths_of(plan).max(initial=0)) + 1 if len(bases) else 0
        base_payload, payload = self._reader.fetch(plan), self.read_verified(directory, rows)
        best_bases, lengths = directory.chunks.bases.take(rows), directory.chunks.lengths[rows]
        kind = container_layout.PATCH if len(bases) else container_layout.RAW
        block_slice = BlockSlice(kind, depth, payload, lengths, best_bases, bases, base_payload, plan.lengths)
        role = int(new.roles[number])
        result = self._write_merged(block_slice) if role == container_layout.MERGED else self._encoder(block_slice)
        new.write(rows, result, lengths if result.encoded is None else result.encoded, role)
        if result.block.kind == container_layout.RAW:
            new.clear_bases(rows)
            return
        is_dropped = is_in(without, best_bases)
        best_bases.containers[is_dropped], best_bases.ordinals[is_dropped] = bases.containers[-1], bases.ordinals[-1]
        new.set_bases(rows, best_bases, container_layout.LOCALITY_RANK)
        new.keep_ranks(rows)

    def _write_merged(self, block_slice: BlockSlice) -> EncodedResult:
        block = self._encoder.encode_merged(
            block_slice.payload, block_slice.bases, block_slice.base_payload, block_slice.depth
        )()
        return EncodedResult(
            block, block_slice.bases if block.kind == container_layout.PATCH else Locations.empty(), None
        )

    def write_raw(self, new: NewGeneration, directory: Directory, rows: NDArray[np.intp]) -> None:
        """Write chunks as raw blocks. Raises Corrupt."""
        blocks, lengths = self._encoder.new_regrouper(), directory.chunks.lengths
        portion = np.cumsum(lengths[rows], dtype=np.int64) // READ_BYTES
        for portion_rows in np.split(rows, np.flatnonzero(np.diff(portion)) + 1) if len(rows) else []:
            blocks.add_raw(portion_rows, self.read_verified(directory, portion_rows), lengths[portion_rows])
        self.copy_encoded(new, directory, blocks.end())

    def copy_encoded(self, new: NewGeneration, directory: Directory, blocks: list[RebasedChunks]) -> None:
        """Write blocks that a regrouper encoded.

        A raw block with chunks of a merged block is a merged block again.
        """
        is_merged = new.roles == container_layout.MERGED
        for one in blocks:
            rows, result = one.rows, one.result
            has_merged = result.block.kind == container_layout.RAW and is_merged[directory.chunks.blocks[rows]].any()
            role = container_layout.MERGED if has_merged else container_layout.ORDINARY
            encoded = directory.chunks.lengths[rows] if result.encoded is None else result.encoded
            new.write(rows, result, encoded, role)
            if result.block.kind != container_layout.RAW:
                new.set_bases(rows, one.best, container_layout.LOCALITY_RANK)

    def _slice_of(self, directory: Directory, number: int, rows: NDArray[np.intp], payload: U8) -> BlockSlice:
        old, kind = directory.chunks, int(directory.blocks.kinds[number])
        lengths, best_bases = old.lengths[rows], old.bases.take(rows)
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
            return BlockSlice(
                kind, depth, np.concatenate(pieces), old.encoded[rows], best_bases, none, no_bytes, no_lengths
            )
        plan = self._reader.plan(directory.prefixes.of(number))
        base_payload = self._reader.fetch(plan)
        used = _used_bases(payload, lengths, base_payload, plan.lengths) | plan.locations.is_in(best_bases)
        offsets = offsets_of(plan.lengths)
        used_rows = np.flatnonzero(used)
        pieces = [base_payload[int(offsets[i]) : int(offsets[i]) + int(plan.lengths[i])] for i in used_rows.tolist()]
        return BlockSlice(
            kind,
            depth,
            payload,
            lengths,
            best_bases,
            plan.locations.take(used_rows),
            np.concatenate([no_bytes, *pieces]),
            plan.lengths[used_rows],
        )


def _used_bases(payload: U8, lengths: U32, base_payload: U8, base_lengths: U32) -> NDArray[np.bool_]:
    """Return a mask of the bases that share enough bytes with the kept chunks."""
    one = np.array([0, len(lengths)], np.uint32)
    all_bases = np.array([0, len(base_lengths)], np.uint32)
    bases = (base_payload,), np.zeros(len(base_lengths), np.int32), offsets_of(base_lengths), base_lengths
    found = shared_bytes(payload, offsets_of(lengths), lengths, one, *bases, all_bases)
    shared = np.zeros(len(base_lengths), np.uint64)
    np.add.at(shared, found[:, 1].astype(np.intp), found[:, 2].astype(np.uint64))
    used: NDArray[np.bool_] = shared >= SHARED_BYTES_MIN
    return used
