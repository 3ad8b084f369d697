"""The next generation of a container. Invariant: it keeps its id, and every number in it means what it did.

old rows, blocks copied under their numbers, others under numbers of their own, rows behind the last one -> bytes
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
from nearkin_shared.formats.container import copied_block, decode_container, encode_container
from nearkin_shared.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable, positions_in_blocks
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations, offsets_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

INCOMPRESSIBLE = 0.95
"""A block that a quick search brings to no less than this share is packed already: a deep one finds no more."""


class NewGeneration:
    """The rows of the new generation while they are filled in."""

    def __init__(self, containers: ContainerStore, directory: Directory, kept: Bools, recode: BlockEncoderPort) -> None:
        """`kept` bool[n]: the chunks that stay; the others' rows will be of zeros.

        `recode` compresses again, once, what a put compressed.
        """
        count = len(directory.chunks)
        self._containers = containers
        self._directory = directory
        first = containers.generation(directory.container) == 0
        self._recompressed = recode.recompress
        self._smaller = may_compress_further(directory) & (first and recode.can_recompress)
        """Blocks that are compressed again when they are copied."""
        self._blocks: list[PendingBlock | None] = []
        self._prefixes: list[Locations] = []
        self._names = np.where(kept[:, None], directory.chunks.names, np.uint8(0))
        self.lengths: U32 = np.where(kept, directory.chunks.lengths, 0).astype(np.uint32)
        self._numbers, self._encoded = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        self.depths = np.zeros(count, np.uint8)
        self._bases = Locations.empty(count)
        self._ranks = np.zeros(count, np.uint8)
        self._next = len(directory.blocks)
        self._laid: list[tuple[NDArray[np.intp], U32]] = []
        """The rows of each block that was laid, in the order of their bytes in it, and how many bytes each has."""
        self.held_bytes = 0
        """Of what was laid, and is encoded."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def blocks_used(self) -> int:
        """Return how many numbers of blocks are taken."""
        return self._next

    def copy(self, number: int, depth: int | None = None) -> None:
        """Take a block as it is, or compressed again; at another `depth` where its bases lie less deep.

        Raises Corrupt where its checksum disagrees.
        """
        directory = self._directory
        record = self._containers.record(directory.container, number)
        decoded = decode_block(record, f"{object_name(directory.container)} block {number}")  # its checksum, at least
        block = copied_block(directory, number, record)
        block = block if depth is None else replace(block, depth=depth)
        later = _now(block)
        if self._smaller[number]:  # it leans on nothing, and so does what comes of it
            later = partial(_smallest, self._recompressed(decoded), block)
        self._put(number, later, directory.prefixes.of(number))
        rows = np.flatnonzero(directory.chunks.there & (directory.chunks.blocks == number))
        self.keep_bases(rows)
        self._numbers[rows], self._encoded[rows] = number, directory.chunks.encoded[rows]
        self.depths[rows] = block.depth

    def keep_bases(self, rows: NDArray[np.intp]) -> None:
        """Let rows have the best bases that they had."""
        old = self._directory.chunks
        self._bases.containers[rows], self._bases.ordinals[rows] = old.bases.containers[rows], old.bases.ordinals[rows]
        self._ranks[rows] = old.ranks[rows]

    def keep_ranks(self, rows: NDArray[np.intp]) -> None:
        """Let rows say that their bases were found as ever."""
        self._ranks[rows] = self._directory.chunks.ranks[rows]

    def set_bases(self, rows: NDArray[np.intp], best: Locations, ranks: U8 | int) -> None:
        """Let rows have other best bases, found by what `ranks` says."""
        self._bases.containers[rows], self._bases.ordinals[rows] = best.containers, best.ordinals
        self._ranks[rows] = ranks

    def clear_bases(self, rows: NDArray[np.intp]) -> None:
        """Let rows have no bases."""
        self.set_bases(rows, Locations.empty(len(rows)), 0)

    def write(self, rows: NDArray[np.intp], recoded: EncodedResult, encoded: U32) -> None:
        """Take a block of `rows` under the next number; `encoded` the lengths of their encodings, bytes.

        In the block they lie in the order in which they are given.
        """
        self.write_pending(rows, _now(recoded.block), recoded.block.depth, recoded.prefix, encoded)
        self.held_bytes += len(recoded.block.payload)

    def write_pending(
        self, rows: NDArray[np.intp], block: PendingBlock, depth: int, prefix: Locations, encoded: U32
    ) -> None:
        """Take a block that is being encoded, as `write` does: all is known of it but its bytes."""
        self._laid.append((rows, encoded))
        number = self._next
        self._next += 1
        self._put(number, block, prefix)
        self._numbers[rows], self._encoded[rows], self.depths[rows] = number, encoded, depth

    def append(self, names: U8, lengths: U32) -> NDArray[np.intp]:
        """Add chunks behind all others, `names` uint8[m, 32]; return their rows."""
        first, more = len(self), len(lengths)
        self._names = np.concatenate([self._names, names])
        self.lengths = np.concatenate([self.lengths, lengths])
        no_numbers, no_bytes = np.zeros(more, np.uint32), np.zeros(more, np.uint8)
        self._numbers = np.concatenate([self._numbers, no_numbers])
        self._encoded = np.concatenate([self._encoded, no_numbers])
        self.depths, self._ranks = np.concatenate([self.depths, no_bytes]), np.concatenate([self._ranks, no_bytes])
        self._bases = Locations.join([self._bases, Locations.empty(more)])
        return np.arange(first, first + more)

    def _put(self, number: int, block: PendingBlock, prefix: Locations) -> None:
        self._end(number + 1)
        self._blocks[number], self._prefixes[number] = block, prefix

    def _end(self, count: int) -> None:
        """Make room for blocks up to `count`: those that are not laid are gone, and their numbers stay taken."""
        while len(self._blocks) < count:
            self._blocks.append(None)
            self._prefixes.append(Locations.empty())

    def encode(self, dropped_segments: U32) -> bytes:
        """Return the container, without some of its recipes, once all its blocks are there.

        Raises Corrupt where one of them does not decode again, or the container does not read as one.
        What was laid was compared with its names, and encoded and decoded as it was laid: what is left to be seen is
        that the rows say just that of where it lies.
        """
        self._end(self._next)
        directory = self._directory
        positions = positions_in_blocks(self._numbers, self._encoded)
        for rows, encoded in self._laid:
            if not np.array_equal(positions[rows], offsets_of(encoded)):
                raise Corrupt(
                    f"{object_name(directory.container)}: written anew, its chunks would not lie where its rows say; "
                    "it stays as it is: report this"
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
        segments = _segments(directory.segments, dropped_segments)
        blocks = [None if block is None else block() for block in self._blocks]
        return encode_generation(directory, blocks, self._prefixes, chunks, segments, "written anew")


def _now(block: EncodedBlock) -> PendingBlock:
    return lambda: block


def _smallest(again: PendingBlock, block: EncodedBlock) -> EncodedBlock:
    found = again()
    return found if found.stored_bytes < block.stored_bytes else block


def may_compress_further(directory: Directory) -> Bools:
    """Return which blocks a deeper search may make smaller: they lean on nothing, and compress."""
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
    """Return a container with other blocks, None: gone, and all that they lean on. Raises Corrupt where it does not
    read as one, and says `what` it is.
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
    """Bytes of chunks, each compared with its name."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`helpers` decode beside the caller."""
        self._reader = ChunkReader(containers, helpers)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter

    def read(self, domain: bytes, locations: Locations) -> U8:
        """Return the bytes of chunks, one behind the other; only SHA-1 is compared where no tenant is known.

        Raises Corrupt where one is not what its name says.
        """
        plan = self._reader.plan(locations)
        payload = self._reader.fetch(plan)
        fingerprinter = self._tenants.fingerprinter(domain)
        found = (fingerprinter or self._any_fingerprinter).name_chunks(payload, offsets_of(plan.lengths), plan.lengths)
        compared = np.ones(32, np.bool_)
        compared[20:28] = fingerprinter is not None
        wrong = np.flatnonzero(np.any((found != plan.names)[:, compared], axis=1))
        if len(wrong):
            broken = object_name(ContainerId(int(locations.containers[wrong[0]])))
            raise Corrupt(
                f"{broken}: chunks are not what their names say, so it is not written anew: run `nearkin verify`"
            )
        return payload


def _segments(table: SegmentTable, dropped: U32) -> SegmentTable:
    """Return the table without some recipes; the others keep their ordinals."""
    kept = np.ones(len(table), np.bool_)
    kept[dropped] = False
    counts = np.diff(table.bounds)
    rows = np.repeat(kept, counts)
    bounds: U64 = np.cumsum(np.concatenate([np.zeros(1, np.uint64), np.where(kept, counts, 0)]))
    return SegmentTable(
        bounds.astype(np.uint32), np.where(kept, table.sketches, 0).astype(np.uint8), table.chunks.take(rows)
    )
