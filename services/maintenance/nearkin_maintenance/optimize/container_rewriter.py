"""Build the next generation of a container, and read verified chunks.

old rows; blocks copied under their numbers; blocks with new numbers; rows appended after the last -> bytes

Invariant: the container keeps its id, and every chunk, segment and block number keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, EncodedResult, PendingBlock
from nearkin_shared.errors import Corrupt
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, decode_block
from nearkin_shared.formats.block_kinds import block_roles
from nearkin_shared.formats.container import copied_block, decode_container, encode_container
from nearkin_shared.formats.container_layout import ORDINARY, RAW, REFERENCE
from nearkin_shared.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable, positions_in_blocks
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations, offsets_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

INCOMPRESSIBLE = 0.95
"""A block that a fast search compresses to no less than this share is incompressible for a slow one too."""


class NewGeneration:
    """Rows and blocks of a new generation while it is filled."""

    def __init__(
        self, containers: ContainerStore, directory: Directory, kept: Bools, encoder: BlockEncoderPort
    ) -> None:
        """`kept` is bool[n]: the chunks that stay; the rows of all others become zeros.

        `encoder` recompresses the raw blocks of a generation 0, once.
        """
        count = len(directory.chunks)
        self._containers = containers
        self._directory = directory
        self.roles: U8 = block_roles(directory)
        """Roles of the blocks of the previous generation."""
        first = containers.generation(directory.container) == 0
        self._recompress = encoder.recompress
        self._to_recompress = may_compress_further(directory) & (first and encoder.can_recompress)
        """Mask of blocks to recompress when they are copied."""
        self._blocks: list[PendingBlock | None] = []
        self._prefixes: list[Locations] = []
        self._names = np.where(kept[:, None], directory.chunks.names, np.uint8(0))
        self.lengths: U32 = np.where(kept, directory.chunks.lengths, 0).astype(np.uint32)
        self._numbers, self._encoded = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        self.depths = np.zeros(count, np.uint8)
        self._bases = Locations.empty(count)
        self._ranks = np.zeros(count, np.uint8)
        self._next = len(directory.blocks)
        self._written_rows: list[tuple[NDArray[np.intp], U32]] = []
        """Rows of each written block in payload order, and the encoded length of each."""
        self.held_bytes = 0
        """Bytes of the blocks that are encoded."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def blocks_used(self) -> int:
        """Return the number of block numbers in use, empty ones included."""
        return self._next

    def copy(self, number: int, depth: int | None = None) -> None:
        """Copy a block, recompressed if eligible.

        `depth` is its new depth if its bases became shallower.

        Raises: Corrupt if its checksum fails.
        """
        directory = self._directory
        record = self._containers.record(directory.container, number)
        decoded = decode_block(record, f"{object_name(directory.container)} block {number}")  # verifies the checksum
        block = copied_block(directory, number, record, int(self.roles[number]))
        block = block if depth is None else replace(block, depth=depth)
        pending = _ready(block)
        if self._to_recompress[number]:  # a raw block, and so is its recompressed form
            pending = partial(_wait_for_smaller, self._recompress(decoded), block)
        self._set_block(number, pending, directory.prefixes.of(number))
        rows = np.flatnonzero(directory.chunks.there & (directory.chunks.blocks == number))
        self.keep_bases(rows)
        self._numbers[rows], self._encoded[rows] = number, directory.chunks.encoded[rows]
        self.depths[rows] = block.depth

    def keep_bases(self, rows: NDArray[np.intp]) -> None:
        """Keep the stored best bases of rows."""
        old = self._directory.chunks
        self._bases.containers[rows], self._bases.ordinals[rows] = old.bases.containers[rows], old.bases.ordinals[rows]
        self._ranks[rows] = old.ranks[rows]

    def keep_ranks(self, rows: NDArray[np.intp]) -> None:
        """Keep the stored ranks of rows, which record how their bases were found."""
        self._ranks[rows] = self._directory.chunks.ranks[rows]

    def set_bases(self, rows: NDArray[np.intp], best: Locations, ranks: U8 | int) -> None:
        """Set the best bases of rows; `ranks` records how they were found."""
        self._bases.containers[rows], self._bases.ordinals[rows] = best.containers, best.ordinals
        self._ranks[rows] = ranks

    def clear_bases(self, rows: NDArray[np.intp]) -> None:
        """Remove the bases of rows."""
        self.set_bases(rows, Locations.empty(len(rows)), 0)

    def write(self, rows: NDArray[np.intp], result: EncodedResult, encoded: U32, role: int) -> None:
        """Write chunks `rows`, in payload order, of `encoded` bytes each, as the next block.

        `role` is that of the block which contained them. A reference block that became raw is an ordinary one.
        """
        is_ordinary = role == REFERENCE and result.block.kind == RAW
        block = replace(result.block, role=ORDINARY if is_ordinary else role)
        self.write_pending(rows, _ready(block), block.depth, result.prefix, encoded)
        self.held_bytes += len(result.block.payload)

    def write_pending(
        self, rows: NDArray[np.intp], block: PendingBlock, depth: int, prefix: Locations, encoded: U32
    ) -> None:
        """Write a block that is still being encoded: all but its payload is known."""
        self._written_rows.append((rows, encoded))
        number = self._next
        self._next += 1
        self._set_block(number, block, prefix)
        self._numbers[rows], self._encoded[rows], self.depths[rows] = number, encoded, depth

    def append(self, names: U8, lengths: U32) -> NDArray[np.intp]:
        """Append chunks after the last row, `names` uint8[m, 32]; return their rows."""
        first, more = len(self), len(lengths)
        self._names = np.concatenate([self._names, names])
        self.lengths = np.concatenate([self.lengths, lengths])
        no_numbers, no_bytes = np.zeros(more, np.uint32), np.zeros(more, np.uint8)
        self._numbers = np.concatenate([self._numbers, no_numbers])
        self._encoded = np.concatenate([self._encoded, no_numbers])
        self.depths, self._ranks = np.concatenate([self.depths, no_bytes]), np.concatenate([self._ranks, no_bytes])
        self._bases = Locations.join([self._bases, Locations.empty(more)])
        return np.arange(first, first + more)

    def _set_block(self, number: int, block: PendingBlock, prefix: Locations) -> None:
        self._extend_blocks(number + 1)
        self._blocks[number], self._prefixes[number] = block, prefix

    def _extend_blocks(self, count: int) -> None:
        """Extend the block list to `count`; numbers that are not written stay reserved and empty."""
        while len(self._blocks) < count:
            self._blocks.append(None)
            self._prefixes.append(Locations.empty())

    def encode(self, dropped_segments: U32) -> bytes:
        """Return the container bytes without some recipes, once all blocks are encoded.

        Chunks were verified and blocks decoded again as they were written; the remaining check is that the rows give
        the offsets at which the chunks were written.

        Raises: Corrupt if a block does not decode again, an offset differs, or the container does not parse.
        """
        self._extend_blocks(self._next)
        directory = self._directory
        positions = positions_in_blocks(self._numbers, self._encoded)
        for rows, encoded in self._written_rows:
            if not np.array_equal(positions[rows], offsets_of(encoded)):
                raise Corrupt(
                    f"{object_name(directory.container)}: rewrite aborted, verification of chunk offsets failed (bug); "
                    "container left unchanged; report this"
                )
        chunks = ChunkTable(
            self._names,
            self.lengths,
            self._numbers,
            positions,
            self._encoded,
            self.depths,
            self._bases,
            self._ranks,
        )
        segments = _without_segments(directory.segments, dropped_segments)
        blocks = [None if block is None else block() for block in self._blocks]
        return encode_generation(directory, blocks, self._prefixes, chunks, segments, "rewritten")


def _ready(block: EncodedBlock) -> PendingBlock:
    return lambda: block


def _wait_for_smaller(recompressed: PendingBlock, block: EncodedBlock) -> EncodedBlock:
    found = recompressed()
    return replace(found, role=block.role) if found.stored_bytes < block.stored_bytes else block


def may_compress_further(directory: Directory) -> Bools:
    """Return a mask of raw blocks that a slower search may shrink: those that compress at all."""
    blocks = directory.blocks
    raw: Bools = (blocks.raw > 0) & (blocks.kinds == container_layout.RAW) & (blocks.codecs == container_layout.ZSTD)
    return raw & (blocks.stored < blocks.raw * INCOMPRESSIBLE)


def encode_generation(
    directory: Directory,
    blocks: Sequence[EncodedBlock | None],
    prefixes: Sequence[Locations],
    chunks: ChunkTable,
    segments: SegmentTable,
    what: str,
) -> bytes:
    """Return a container with other blocks (None: removed) and their prefixes.

    Raises: Corrupt, with `what` in its text, if the result does not parse.
    """
    bounds = np.cumsum([0, *(len(prefix) for prefix in prefixes)]).astype(np.uint32)
    data = encode_container(
        directory.container,
        directory.domain,
        directory.depth_max,
        directory.sketch_names,
        blocks,
        chunks,
        segments,
        PrefixTable(bounds, Locations.join(list(prefixes))),
    ).data
    decode_container(data, f"{object_name(directory.container)}, {what}")
    return data


class VerifiedReader:
    """Read chunks and verify each against its fingerprint."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`helpers` decode concurrently with the caller."""
        self._reader = ChunkReader(containers, helpers)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter

    def read(self, domain: bytes, locations: Locations) -> U8:
        """Return the bytes of chunks, concatenated; without a known tenant only SHA-1 is compared.

        Raises: Corrupt if a chunk does not match its fingerprint.
        """
        plan = self._reader.plan(locations)
        payload = self._reader.fetch(plan)
        fingerprinter = self._tenants.fingerprinter(domain)
        found = (fingerprinter or self._any_fingerprinter).name_chunks(payload, offsets_of(plan.lengths), plan.lengths)
        is_compared = np.ones(32, np.bool_)
        is_compared[20:28] = fingerprinter is not None
        wrong = np.flatnonzero(np.any((found != plan.names)[:, is_compared], axis=1))
        if len(wrong):
            container_name = object_name(ContainerId(int(locations.containers[wrong[0]])))
            raise Corrupt(
                f"{container_name}: {len(wrong)} chunks failed fingerprint verification; container left unchanged: "
                "run `nearkin verify`"
            )
        return payload


def _without_segments(table: SegmentTable, dropped: U32) -> SegmentTable:
    """Return the table with the recipes `dropped` emptied; the others keep their ordinals."""
    kept = np.ones(len(table), np.bool_)
    kept[dropped] = False
    counts = np.diff(table.bounds)
    rows = np.repeat(kept, counts)
    bounds: U64 = np.cumsum(np.concatenate([np.zeros(1, np.uint64), np.where(kept, counts, 0)]))
    return SegmentTable(
        bounds.astype(np.uint32), np.where(kept, table.sketches, 0).astype(np.uint8), table.chunks.take(rows)
    )
