"""Build blocks and encode them in the smallest way.

chunks and bases -> close -> the smallest of: raw | zstd | zstd with the bases as prefix | zstd over VCDIFF

Invariant: a closed block has been decoded and compared; a base's bytes are in a prefix once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol

import numpy as np
from backports.zstd import CompressionParameter
from numpy.typing import NDArray

from nearkin_delta.codecs import DeltaPairs, Deltas, check_round_trip, encode_xdelta3
from nearkin_delta.compression_params import AdaptiveSearch, deepen, gc_options, log_of
from nearkin_shared.config.reduction import BlockSettings
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, encode_block, encode_patch
from nearkin_shared.kernels.base_prefix import BasePrefix, BaseRows
from nearkin_shared.kernels.scatter_copy import gather
from nearkin_shared.kernels.table_rows import rows_to_fill
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.limits import KIB, MIB, PREFIX_BYTES_MIN
from nearkin_shared.types import U8, U32, U64, ContainerId, Locations, offsets_of
from nearkin_shared.utils.buffers import BufferPool, SlabAllocator
from nearkin_shared.utils.frozen import frozen

PREFIX_BYTES_MAX = 2 * MIB
"""A block closes before its bases exceed this, whatever its own size: it bounds the extra cost of reading a chunk."""
PREFIX_BASES_MAX = 4096
SPAN_BYTES_MAX = 4 * MIB
"""A patch block closes after this many bytes of the stream (of a batch, its fresh bytes): its chunks and their bases
are then near each other, and a restore needs the blocks one after another."""
MERGED_SPAN_BYTES_MAX = 512 * KIB
"""The same for the fresh bytes of a batch with bases in merged blocks: one such block holds the versions of 512 KiB of
a stream in 4 MiB, and a patch block that spans 4 MiB needs several chains of them before any of its chunks is read."""
DEPTH_COSTS = 0.9
"""Bases must save a tenth of a block, or it is stored without them: no base is then ever read for it."""
PLAIN_TRIED = 4
VCDIFF_TRIED = 16
"""Alternatives are tried if a patch exceeds 1/4 or 1/16 of its chunks. Plain zstd is never smaller below that; VCDIFF
would save there half of what it costs later, since no patch has a VCDIFF delta as base (botocore: 20 kB saved, 173
lost)."""
VCDIFF_BASES_SHARE_MAX = 7 / 8
"""VCDIFF is tried only if bases are at most this share of the chunks, as when several chunks have one base: it takes
one base per chunk. It was smaller for 24 of 706 blocks of botocore, whose bases were 0.75 of their chunks in the median
(1.0 for all others), and for none of 1,816 of the dumps (1.3)."""
LAST_CHUNK_BYTES = 64 * KIB
"""Default size of the largest chunk: it may exceed a block's limit."""
SLACK_SHARE = 16
"""Initial room for it is at most this fraction of a block, and grows on demand: with full room, a fifth of the memory
of 256 KiB patch blocks was unused. Large blocks, which are expensive to copy, have full room."""
SPARE_BYTES_MAX = 16 * MIB
"""Maximum of prefix memory kept for the next blocks, and of block memory if there is no cache."""
FAST_LEVEL_MAX = 3
FAST_HASH_LOG = 18
ENCODERS_MAX = 4
"""Each has contexts, a slab of frames and decoding memory: about 15 MB. A batch fills four blocks of 4 MiB."""
SMALL_LEVEL_MAX = 9
SMALL_RAW_BYTES_MAX = 8 * MIB
"""Above either bound an encoder takes 50 to 390 MB: only one is used."""
MERGED_LEVEL_MIN = 5
"""Minimum level of merged blocks, whatever the settings: a fast search finds little among many versions."""
MERGED_TABLE_LOG_MAX = 22
"""Tables have as many entries as a merged block has bytes, up to 4 million: 16 MiB each."""


class DecodedBlockCache(Protocol):
    """Keeps blocks just written in decoded form, for their future dependents."""

    def room(self, size_bytes: int) -> U8:
        """Return uint8[size_bytes], its content undefined."""

    def cache_written(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Add the decoded bytes of a block that was just encoded and compared."""


class SparePrefixes:
    """Pool of prefix buffers. Blocks begin on one thread and are encoded on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spares: deque[tuple[BasePrefix, int]] = deque()
        self._held_bytes = 0

    def take(self) -> BasePrefix:
        """Return an empty prefix."""
        with self._lock:
            if self._spares:
                prefix, held_bytes = self._spares.pop()
                self._held_bytes -= held_bytes
                return prefix
        return BasePrefix(PREFIX_BYTES_MAX, PREFIX_BASES_MAX)

    def give_back(self, prefix: BasePrefix) -> None:
        """Return an unused prefix to the pool, which releases it if it is full."""
        held_bytes = prefix.room_bytes
        if not held_bytes:
            return
        prefix.clear()
        with self._lock:
            if self._held_bytes + held_bytes <= SPARE_BYTES_MAX:
                self._spares.append((prefix, held_bytes))
                self._held_bytes += held_bytes


class OpenBlock:
    """A block that still grows, and its bases."""

    def __init__(
        self,
        number: int,
        kind: int,
        depth: int,
        limit_bytes: int,
        take: Callable[[int], U8] | None = None,
        prefix: BasePrefix | None = None,
        last_chunk_bytes: int = LAST_CHUNK_BYTES,
    ) -> None:
        """`take`: allocates memory, undefined.

        `prefix`: an empty one; `last_chunk_bytes`: the largest chunk.
        """
        self.number = number
        self.kind = kind
        self.depth = depth
        self.limit_bytes = limit_bytes
        self.used = 0
        self.rest_bytes = 0
        """Estimated bytes of its chunks with their bases."""
        self._take = BufferPool(0).take if take is None else take
        self.room = self._take(limit_bytes + min(last_chunk_bytes, limit_bytes // SLACK_SHARE))
        self.bases_so_far = BasePrefix(PREFIX_BYTES_MAX, PREFIX_BASES_MAX) if prefix is None else prefix
        self.span_bytes = 0
        """Bytes of the stream, duplicates included, since the block was opened."""
        self.lengths: list[U32] = []
        self.bases: list[Locations] = []

    @property
    def full(self) -> bool:
        """Return whether it takes no more chunks."""
        return self.used >= self.limit_bytes

    @property
    def bytes_so_far(self) -> U8:
        """Return a view of its encodings."""
        return self.room[: self.used]

    @property
    def is_filled(self) -> bool:
        """Return whether its memory is mostly used, so that it may be cached as the decoded block."""
        return self.used * 4 >= len(self.room) * 3

    @property
    def prefix(self) -> memoryview:
        """Return a view of the bytes of all bases, in order."""
        return self.bases_so_far.content

    def without_prefix(self) -> BasePrefix:
        """Detach and return the prefix for reuse, once the block is encoded."""
        prefix = self.bases_so_far
        del self.bases_so_far
        return prefix

    @property
    def prefix_bases(self) -> Locations:
        """Return the bases in the order of their bytes."""
        containers, ordinals, _ = self.bases_so_far.bases()
        return Locations(containers, ordinals)

    def fitting(self, rows: NDArray[np.intp], encoded: U32) -> NDArray[np.intp]:
        """Return the first rows up to and including the one that fills the block."""
        return rows[: rows_to_fill(rows, encoded, self.limit_bytes - self.used)]

    def add_bases(self, bases: BaseRows, rows: NDArray[np.intp], encoded: U32) -> NDArray[np.intp]:
        """Add the bases of as many rows as fit; return these rows."""
        fit = self.fitting(rows, encoded)
        return fit[: self.bases_so_far.add(fit, bases)]

    def append(self, sources: tuple[U8, U8], which: NDArray[np.int32], offsets: U64, encoded: U32) -> None:
        """Append encodings."""
        sizes = np.cumsum(encoded, dtype=np.int64)
        wanted = self.used + int(sizes[-1])
        if wanted > len(self.room):
            grown = self._take(wanted)
            grown[: self.used] = self.bytes_so_far
            self.room = grown
        gather(list(sources), which, offsets, encoded, self.room, (sizes - encoded + self.used).astype(np.uint64))
        self.used += int(sizes[-1])
        self.lengths.append(encoded)

    def record_bases(self, bases: Locations) -> None:
        """Record the best base of each appended chunk."""
        self.bases.append(bases)


@frozen
class ClosedBlock:
    """An encoded block.

    `encoded` has the lengths of its encodings if they differ from the appended ones.
    """

    block: EncodedBlock
    chunk_bytes: int
    """Bytes appended to it."""
    prefix: Locations
    encoded: U32 | None = None
    decoded: U8 | None = None
    """The decoded bytes, if they were requested."""

    def with_decoded(self, decoded: U8 | None) -> ClosedBlock:
        """Return a copy with other decoded bytes."""
        return ClosedBlock(self.block, self.chunk_bytes, self.prefix, self.encoded, decoded)


@frozen
class Encoding:
    """A block in the course of encoding: number `place` of a group that is encoded together."""

    together: Future[list[ClosedBlock]] | list[ClosedBlock]
    place: int

    def result(self) -> ClosedBlock:
        """Wait for the block and return it. Raises the errors of encoding."""
        all_of = self.together if isinstance(self.together, list) else self.together.result()
        return all_of[self.place]


class BlockEncoder:
    """Chooses the encoding of a block by real sizes."""

    def __init__(
        self,
        block: BlockSettings,
        room: Callable[[int], U8] | None = None,
        *,
        keep: bool = False,
        raw_level: int = 0,
    ) -> None:
        """`room`: allocates memory for frames (None: malloc) and, if `keep`, for decoded blocks.

        `raw_level`: level of a GC run for raw blocks; 0: that of a put.
        """
        self._level, self._far = block.level, block.thorough
        options: dict[int, int] = {
            CompressionParameter.compression_level: block.level,
            CompressionParameter.content_size_flag: 1,
        }
        self._encoder = FrameEncoder(options, None if room is None else SlabAllocator(room).allocate)
        self._searches = AdaptiveSearch(options, block.thorough)
        self._raw_level = raw_level
        self._keep_in = room if keep else None

    def forget(self) -> None:
        """Forget previous blocks, so that the next result depends on the next block only."""
        self._searches.forget()

    def close(self, open_block: OpenBlock) -> ClosedBlock:
        """Return the smallest encoding of a block. Raises Corrupt if it does not decode again."""
        closed = self._smallest(open_block)
        if self._keep_in is None or closed.block.kind == container_layout.XDELTA3:
            return closed
        if open_block.is_filled:
            return closed.with_decoded(open_block.bytes_so_far)
        decoded = self._keep_in(open_block.used)
        decoded[:] = open_block.bytes_so_far
        return closed.with_decoded(decoded)

    def raw(self, chunks: U8) -> EncodedBlock:
        """Return a raw block. Raises Corrupt if it does not decode again."""
        if self._raw_level:
            return encode_again(chunks, self._raw_level, self._encoder)
        return self._searches.encode(chunks, self._encoder)

    def _smallest(self, open_block: OpenBlock) -> ClosedBlock:
        raw, none = open_block.bytes_so_far, Locations.empty()
        if open_block.kind != container_layout.PATCH or len(open_block.prefix) < PREFIX_BYTES_MIN:
            kind = container_layout.RAW if open_block.kind == container_layout.PATCH else open_block.kind
            if kind == container_layout.RAW:
                return ClosedBlock(self.raw(raw), len(raw), none)
            return ClosedBlock(encode_block(raw, kind, open_block.depth, self._encoder), len(raw), none)
        patch = encode_patch(raw, open_block.prefix, open_block.depth, self._encoder, self._options(open_block))
        found = ClosedBlock(patch, len(raw), open_block.prefix_bases)
        few = len(open_block.prefix) <= VCDIFF_BASES_SHARE_MAX * len(raw)
        if few and patch.stored_bytes * VCDIFF_TRIED > len(raw):
            found = self._as_deltas(open_block, raw, found)
        if patch.stored_bytes * PLAIN_TRIED > len(raw):
            plain = encode_block(raw, container_layout.RAW, 0, self._encoder)
            if plain.stored_bytes * DEPTH_COSTS <= found.block.stored_bytes:
                found = ClosedBlock(plain, len(raw), none)
        return found

    def _options(self, open_block: OpenBlock) -> dict[int, int]:
        """Return zstd options whose window reaches from the block's end to the prefix's start.

        A patch needs all of its prefix in the tables: up to level 3 the fast strategy with a table of 2^18 writes as
        few bytes as level 3 by itself (botocore +2.6 %, the dumps -2.3 %) at 1.5 times the speed.
        """
        reach = len(open_block.prefix) + open_block.used
        options: dict[int, int] = {
            CompressionParameter.compression_level: self._level,
            CompressionParameter.content_size_flag: 1,
            CompressionParameter.window_log: log_of(reach),
        }
        if self._far:
            options |= deepen(self._level)
        if self._level <= FAST_LEVEL_MAX:
            options[CompressionParameter.compression_level] = 1
            options[CompressionParameter.hash_log] = FAST_HASH_LOG
        return options

    def _as_deltas(self, open_block: OpenBlock, raw: U8, patch: ClosedBlock) -> ClosedBlock:
        """Return the block as VCDIFF deltas against best bases if smaller, else the patch."""
        lengths, bases = np.concatenate(open_block.lengths), Locations.join(open_block.bases)
        containers, ordinals, starts = open_block.bases_so_far.bases()
        keys = {pair: i for i, pair in enumerate(zip(containers.tolist(), ordinals.tolist(), strict=True))}
        ends = np.append(starts[1:], np.uint64(len(open_block.prefix)))
        mine = zip(bases.containers.tolist(), bases.ordinals.tolist(), strict=True)
        rows = np.array([keys[pair] for pair in mine], np.intp)
        offsets = offsets_of(lengths)
        prefix = np.frombuffer(open_block.prefix, np.uint8)
        base_lengths = (ends - starts)[rows].astype(np.uint32)
        pairs = DeltaPairs(raw, offsets, lengths, prefix, starts[rows], base_lengths)
        deltas: Deltas = encode_xdelta3(pairs, lengths)
        if not deltas.lengths.all():
            return patch
        check_round_trip(pairs, deltas, np.arange(len(pairs)))
        block = encode_block(deltas.payload, container_layout.XDELTA3, open_block.depth, self._encoder)
        if block.stored_bytes >= patch.block.stored_bytes:
            return patch
        return ClosedBlock(block, len(raw), Locations.empty(), deltas.lengths)


def encode_again(chunks: U8, level: int, encoder: FrameEncoder) -> EncodedBlock:
    """Return a raw block as a GC run writes it. Raises Corrupt if it does not decode again."""
    return encode_block(chunks, container_layout.RAW, 0, encoder, gc_options(level, len(chunks)))


def encode_merged(raw: U8, prefix: U8 | None, depth: int, level: int, encoder: FrameEncoder) -> EncodedBlock:
    """Return a merged block as a patch of `prefix`, or raw.

    One search covers the whole block. Maintenance writes it concurrently with other work, once for many versions: so at
    a deeper level than a put. The `encoder` keeps its tables for the next block: to touch 40 MB of new ones takes 5 to
    20 ms.

    Raises: Corrupt if it does not decode again.
    """
    reach = len(raw) + (0 if prefix is None else len(prefix))
    log = log_of(reach)
    options: dict[int, int] = {
        CompressionParameter.compression_level: max(level, MERGED_LEVEL_MIN),
        CompressionParameter.content_size_flag: 1,
        CompressionParameter.window_log: log,
        CompressionParameter.hash_log: min(log, MERGED_TABLE_LOG_MAX),
        CompressionParameter.chain_log: min(log, MERGED_TABLE_LOG_MAX),
    }
    if prefix is None:
        return encode_block(raw, container_layout.RAW, 0, encoder, options)
    return encode_patch(raw, prefix, depth, encoder, options)


def encoders_max(block: BlockSettings) -> int:
    """Return how many blocks may be encoded concurrently.

    One if the search adapts from block to block, or if an encoder takes much memory.
    """
    small = block.level <= SMALL_LEVEL_MAX and block.raw_bytes <= SMALL_RAW_BYTES_MAX
    return ENCODERS_MAX if small and not block.thorough else 1


class BlockCloser:
    """Opens blocks, encodes closed ones, and caches decoded blocks in order."""

    def __init__(
        self,
        block: BlockSettings,
        threads: Executor | None = None,
        keeper: DecodedBlockCache | None = None,
        prefixes: SparePrefixes | None = None,
        last_chunk_bytes: int = LAST_CHUNK_BYTES,
    ) -> None:
        """`threads` encode concurrently with the caller, at most `encoders_max`.

        `prefixes`: prefix memory of earlier puts. `last_chunk_bytes`: may exceed a block's limit.
        """
        self._last_chunk_bytes = last_chunk_bytes
        self.room: Callable[[int], U8] = BufferPool(SPARE_BYTES_MAX).take if keeper is None else keeper.room
        """Allocates memory, undefined: from the cache, or from memory that encoded blocks released."""
        self._new_encoder = partial(BlockEncoder, block, self.room, keep=keeper is not None)
        self._encoders: deque[BlockEncoder] = deque()
        """Idle encoders."""
        self._threads = threads
        self._keeper = keeper
        self._prefixes = prefixes or SparePrefixes()

    def begin(self, number: int, kind: int, depth: int, limit_bytes: int) -> OpenBlock:
        """Return a new block."""
        prefix = self._prefixes.take() if kind == container_layout.PATCH else None
        return OpenBlock(number, kind, depth, limit_bytes, self.room, prefix, self._last_chunk_bytes)

    @property
    def chunk_bytes_max(self) -> int:
        """Return the bytes of the largest chunk of a stream."""
        return self._last_chunk_bytes

    @property
    def is_synchronous(self) -> bool:
        """Return whether `close` encodes before it returns."""
        return self._threads is None

    def close(self, blocks: Sequence[OpenBlock]) -> list[Encoding]:
        """Start to encode blocks on one thread.

        Neither they nor their prefixes may change until then.
        """
        together = self._all(blocks) if self._threads is None else self._threads.submit(self._all, blocks)
        return [Encoding(together, place) for place in range(len(blocks))]

    def _all(self, blocks: Sequence[OpenBlock]) -> list[ClosedBlock]:
        try:
            encoder = self._encoders.pop()
        except IndexError:
            encoder = self._new_encoder()
        closed = [self._encode(encoder, block) for block in blocks]
        self._encoders.append(encoder)
        return closed

    def _encode(self, encoder: BlockEncoder, block: OpenBlock) -> ClosedBlock:
        closed = encoder.close(block)
        prefix = block.without_prefix()
        if block.kind == container_layout.PATCH:  # only patch blocks use their prefix
            self._prefixes.give_back(prefix)
        return closed

    def await_encoding(self, container: ContainerId, block: OpenBlock, closed: ClosedBlock) -> ClosedBlock:
        """Move the decoded bytes of a closed block into the cache; return the block without them."""
        if self._keeper is None or closed.decoded is None:
            return closed
        self._keeper.cache_written(container, block.number, closed.decoded)
        return closed.with_decoded(None)
