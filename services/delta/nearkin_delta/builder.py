"""Container builder. Invariant: a chunk has its (container, ordinal) for good once it is added, and can be read back.

One open block per depth, so that a delta never makes its neighbours deeper:

    depth 0 | raw raw raw ...      |  block 0, 2, 5
    depth 1 | delta delta ...      |  block 1, 3
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

import numpy as np
from backports.zstd import CompressionParameter, ZstdCompressor
from numpy.typing import NDArray

from nearkin.claims import ContainerClaims, SealedContainer
from nearkin.config import BlockSettings
from nearkin.formats import container as fmt
from nearkin.formats.container import BlockTable, ChunkTable, Directory, EncodedBlock, SegmentTable
from nearkin.kernels.gather import gather
from nearkin.limits import SEGMENT_BYTES_MAX
from nearkin.records import SEGMENT_ID_BYTES, U8, U32, U64, ContainerId, Locations

CHUNKS_MAX = 1 << 20
"""A container is sealed before it names more chunks, whatever their size."""
BLOCKS_MAX = 1 << 15
RECIPE_CHUNKS_MAX = 1 << 22
"""Nor do its recipes: 48 MiB of them wait in memory at most, and a directory is read up to 1 << 23."""
NAMED_MAX = 1 << 15
"""Nor do its bases and recipes name more containers: the ids alone are 256 KiB then, read whenever it is opened."""
_NO_SOURCES: tuple[U8, U8] = (np.zeros(0, np.uint8), np.zeros(0, np.uint8))


def new_container_id(after: int) -> ContainerId:
    """Return an id above `after`: milliseconds since 1970 << 20, and 20 random bits against another writer's."""
    made = (time.time_ns() // 1_000_000 << 20) | secrets.randbits(20)
    return ContainerId(max(made, after + 1))


@dataclass(frozen=True, slots=True)
class Encodings:
    """Fresh chunks ready to be written, in stream order: row i's bytes are `length` or `encoded` bytes of a source.

    `sources` holds two buffers, payload and deltas; `which` int32 0 or 1 says whose `offsets` these are.
    """

    names: U8
    lengths: U32
    depths: U8
    sources: tuple[U8, U8]
    which: NDArray[np.int32]
    offsets: U64
    encoded: U32
    bases: Locations
    ranks: U8

    def __len__(self) -> int:
        return len(self.lengths)


class _OpenBlock:
    def __init__(self, number: int, limit_bytes: int) -> None:
        self.number = number
        self.limit_bytes = limit_bytes
        self.buffer = np.empty(limit_bytes + SEGMENT_BYTES_MAX, np.uint8)
        self.used = 0


class ContainerBuilder:
    """One container that grows until it is sealed; also a ContainerSource for what it holds."""

    def __init__(self, container: ContainerId, domain: bytes, block: BlockSettings, depth_max: int, kind: int) -> None:
        self.container = container
        self._domain = domain
        self._limits = int(block.raw_bytes), int(block.delta_bytes)
        self._compressor = ZstdCompressor(
            options={CompressionParameter.compression_level: block.level, CompressionParameter.content_size_flag: 1}
        )
        self._depth_max = depth_max
        self._kind = kind
        self._open: dict[int, _OpenBlock] = {}
        self._closed: dict[int, EncodedBlock] = {}
        self.blocks = 0
        self._added: list[Encodings] = []
        self._block_numbers: list[U32] = []
        self._sketch_names: list[str] = []
        self._segment_counts: list[U32] = []
        self._segment_sketches: list[U8] = []
        self._segment_ids: list[U8] = []
        self._recipes: list[Locations] = []
        self._recipe_chunks = 0
        self._named: set[int] = set()
        self._features: dict[str, list[tuple[U32, U64]]] = {}
        self._snapshot: Directory | None = None
        self.chunks = 0
        self.segments = 0

    @property
    def empty(self) -> bool:
        """Return whether nothing was added yet."""
        return not self.chunks and not self.segments

    @property
    def stored_bytes_estimate(self) -> int:
        """Return closed blocks as they are, and open ones as if they came out at the ratio of the closed ones."""
        stored = sum(block.stored_bytes for block in self._closed.values())
        raw = sum(block.raw_bytes for block in self._closed.values())
        waiting = sum(block.used for block in self._open.values())
        return stored + (waiting * stored // raw if raw else waiting // 2) + self.chunks * 30

    @property
    def full(self) -> bool:
        """Return whether the counts are near what a directory can name."""
        return (
            self.chunks > CHUNKS_MAX
            or self.blocks > BLOCKS_MAX
            or self._recipe_chunks > RECIPE_CHUNKS_MAX
            or len(self._named) > NAMED_MAX
        )

    def add(self, fresh: Encodings) -> Locations:
        """Append chunks; return where they lie from now on."""
        count = len(fresh)
        if not count:  # all-duplicate data add nothing, batch after batch: 3 kB of empty arrays each, for ever
            return Locations.empty()
        numbers = np.zeros(count, np.uint32)
        for depth in np.flatnonzero(np.bincount(fresh.depths)):
            self._append(fresh, np.flatnonzero(fresh.depths == depth), int(depth), numbers)
        ordinals = np.arange(self.chunks, self.chunks + count, dtype=np.uint32)
        # Without its sources: they are whole batches, and all-duplicate data pass through one open container for ever.
        self._added.append(replace(fresh, sources=_NO_SOURCES))
        self._block_numbers.append(numbers)
        self._named.update(np.unique(fresh.bases.containers).tolist())
        self.chunks += count
        self._snapshot = None
        return Locations(np.full(count, self.container, np.uint64), ordinals)

    def _append(self, fresh: Encodings, rows: NDArray[np.intp], depth: int, numbers: U32) -> None:
        sizes = np.cumsum(fresh.encoded[rows], dtype=np.int64)
        taken = 0
        while taken < len(rows):
            block = self._open.get(depth)
            if block is None:
                block = self._open[depth] = _OpenBlock(self.blocks, self._limits[1 if depth else 0])
                self.blocks += 1
            before = int(sizes[taken - 1]) if taken else 0
            # Up to and with the chunk that reaches the limit; the buffer has room for one chunk more than that.
            until = min(int(np.searchsorted(sizes, before + block.limit_bytes - block.used)) + 1, len(rows))
            part = rows[taken:until]
            starts = (sizes[taken:until] - fresh.encoded[part] - before + block.used).astype(np.uint64)
            gather(
                list(fresh.sources), fresh.which[part], fresh.offsets[part], fresh.encoded[part], block.buffer, starts
            )
            numbers[part] = block.number
            block.used += int(sizes[until - 1]) - before
            taken = until
            if block.used >= block.limit_bytes:
                self._close(depth)

    def _close(self, depth: int) -> None:
        block = self._open.pop(depth)
        kind = self._kind if depth else fmt.RAW
        self._closed[block.number] = fmt.encode_block(block.buffer[: block.used], kind, depth, self._compressor)

    def add_segments(self, segment_ids: U8, counts: U32, sketch: str, chunks: Locations) -> Locations:
        """Append segment recipes; return where they lie. `chunks` are the rows of all of them, `counts` of each."""
        number = len(counts)
        if not number:
            return Locations.empty()
        if sketch not in self._sketch_names:
            self._sketch_names.append(sketch)
        self._segment_ids.append(segment_ids)
        self._segment_counts.append(counts)
        self._segment_sketches.append(np.full(number, self._sketch_names.index(sketch), np.uint8))
        self._recipes.append(chunks)
        self._recipe_chunks += len(chunks)
        self._named.update(np.unique(chunks.containers).tolist())
        ordinals = np.arange(self.segments, self.segments + number, dtype=np.uint32)
        self.segments += number
        self._snapshot = None
        return Locations(np.full(number, self.container, np.uint64), ordinals)

    def add_super_features(self, sketch: str, ordinals: U32, super_features: U64) -> None:
        """Remember the super-features of chunks that may serve as bases."""
        if len(ordinals):
            self._features.setdefault(sketch, []).append((ordinals, super_features))

    def directory(self, container: ContainerId) -> Directory:
        """Return the directory as far as it goes: chunks are complete, blocks and recipes are left out."""
        assert container == self.container
        if self._snapshot is None:
            none8, none32 = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
            blocks = BlockTable(np.zeros(0, np.uint64), none32, none32, none8, none8, none8)
            segments = SegmentTable(np.zeros(1, np.uint32), none8, Locations.empty())
            self._snapshot = Directory(
                container, self._domain, self._depth_max, (), blocks, self._chunk_table(), segments, 0, 0, 0
            )
        return self._snapshot

    def block(self, container: ContainerId, block: int) -> U8:
        """Return a block's decoded bytes, open or closed."""
        assert container == self.container
        closed = self._closed.get(block)
        if closed is not None:
            return fmt.decode_block(b"".join([closed.header, closed.payload]), "open container")
        found = next(b for b in self._open.values() if b.number == block)
        return found.buffer[: found.used]

    def is_closed(self, block: int) -> bool:
        """Return whether a block will not grow any more."""
        return block in self._closed

    def _chunk_table(self) -> ChunkTable:
        added = self._added
        blocks: U32 = np.concatenate([np.zeros(0, np.uint32), *self._block_numbers])
        encoded: U32 = np.concatenate([np.zeros(0, np.uint32), *(a.encoded for a in added)])
        return ChunkTable(
            np.concatenate([np.zeros((0, 32), np.uint8), *(a.names for a in added)]),
            np.concatenate([np.zeros(0, np.uint32), *(a.lengths for a in added)]),
            blocks,
            fmt.positions_in_blocks(blocks, encoded),
            encoded,
            np.concatenate([np.zeros(0, np.uint8), *(a.depths for a in added)]),
            Locations.join([a.bases for a in added]),
            np.concatenate([np.zeros(0, np.uint8), *(a.ranks for a in added)]),
        )

    def seal(self) -> SealedContainer:
        """Close all blocks and return the container, read back once before anything depends on it."""
        for depth in list(self._open):
            self._close(depth)
        counts: U32 = np.concatenate([np.zeros(1, np.uint32), *self._segment_counts])
        segments = SegmentTable(
            np.cumsum(counts, dtype=np.uint32),
            np.concatenate([np.zeros(0, np.uint8), *self._segment_sketches]),
            Locations.join(self._recipes),
        )
        blocks = [self._closed[number] for number in range(self.blocks)]
        data, _, _ = fmt.encode_container(
            self.container, self._domain, self._depth_max, self._sketch_names, blocks, self._chunk_table(), segments
        )
        claims = ContainerClaims(
            fmt.decode_container(data, "a container just built"),
            np.concatenate([np.zeros((0, SEGMENT_ID_BYTES), np.uint8), *self._segment_ids]),
            {
                sketch: (np.concatenate([o for o, _ in parts]), np.concatenate([s for _, s in parts]))
                for sketch, parts in self._features.items()
            },
        )
        return SealedContainer(self.container, data, claims)
