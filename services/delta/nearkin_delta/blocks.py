"""Blocks. Invariant: what a closed block holds has been decoded and compared; a base's bytes are in a prefix once.

chunks and their bases gather -> close -> the smallest of: raw | zstd | zstd with the bases as prefix | zstd over VCDIFF
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from backports.zstd import CompressionParameter
from numpy.typing import NDArray

from nearkin.config import BlockSettings, DeltaSettings
from nearkin.formats import container as fmt
from nearkin.formats.columns import PREFIX_BYTES_MIN
from nearkin.formats.container import EncodedBlock
from nearkin.kernels.frames import FrameEncoder
from nearkin.kernels.gather import gather
from nearkin.limits import MIB, SEGMENT_BYTES_MAX
from nearkin.records import U8, U32, U64, Locations
from nearkin_delta.codecs import Deltas, Pairs, check_round_trip, xdelta3_encoder
from nearkin_delta.searches import Searches, deeper

if TYPE_CHECKING:
    from nearkin_delta.builder import Prefixes

PREFIX_BYTES_MAX = 2 * MIB
"""A block closes before its bases exceed this, whatever its own size: what one read of a chunk may cost besides."""
PREFIX_BASES_MAX = 4096
SPAN_BYTES_MAX = 16 * MIB
"""A patch block closes when the stream has gone on so far: what lay close together then leans on what lay close
together, and a restore meets the blocks that it needs one behind the other."""
DEPTH_COSTS = 0.9
"""Bases must take a tenth off a block, or it is kept without them: nothing is then ever read for it."""
PLAIN_TRIED = 4
VCDIFF_TRIED = 16
"""Other ways are tried where a patch is more than 1/4, 1/16 of its chunks: below that none was ever smaller."""
SPARES_MAX = 2
"""Buffers of closed blocks kept for the next ones, of each limit."""
FAST_LEVEL_MAX = 3
FAST_HASH_LOG = 18
WINDOW_LOG_MAX = 27
"""What any zstd decoder takes unasked."""


class OpenBlock:
    """A block that still grows, and the bases gathered for it."""

    def __init__(self, number: int, kind: int, depth: int, limit_bytes: int, buffer: U8 | None = None) -> None:
        """`buffer`: that of a closed block of the same limit, to be used again."""
        self.number = number
        self.kind = kind
        self.depth = depth
        self.limit_bytes = limit_bytes
        self.used = 0
        self.buffer: U8 = np.empty(limit_bytes + SEGMENT_BYTES_MAX, np.uint8) if buffer is None else buffer
        self._places: dict[tuple[int, int], int] = {}
        """Of each base: where its bytes start in the prefix."""
        self._prefix = bytearray()
        self.span_bytes = 0
        """How far the stream has gone on since the block was opened, duplicates included."""
        self.lengths: list[U32] = []
        self.bases: list[Locations] = []

    @property
    def full(self) -> bool:
        """Return whether it must take no more."""
        return self.used >= self.limit_bytes

    @property
    def bytes_so_far(self) -> U8:
        """Return the encodings that it holds; a view."""
        return self.buffer[: self.used]

    @property
    def prefix(self) -> bytearray:
        """Return the bytes of all bases, in order."""
        return self._prefix

    @property
    def prefix_bases(self) -> Locations:
        """Return the bases in the order of their bytes."""
        places = self._places
        containers = np.fromiter((container for container, _ in places), np.uint64, len(places))
        return Locations(containers, np.fromiter((ordinal for _, ordinal in places), np.uint32, len(places)))

    def place_of(self, bases: Locations) -> U64:
        """Return where in the prefix the bytes of each base start."""
        pairs = zip(bases.containers.tolist(), bases.ordinals.tolist(), strict=True)
        return np.array([self._places[pair] for pair in pairs], np.uint64)

    def fitting(self, rows: NDArray[np.intp], encoded: U32) -> NDArray[np.intp]:
        """Return the first of the rows, up to and with the one that fills the block; it has room for one such more."""
        sizes = np.cumsum(encoded[rows], dtype=np.int64)
        return rows[: int(np.searchsorted(sizes, self.limit_bytes - self.used)) + 1]

    def lean_on(self, prefixes: Prefixes, rows: NDArray[np.intp], encoded: U32) -> NDArray[np.intp]:
        """Gather the bases of rows as far as these fit with them; return which do."""
        fit = self.fitting(rows, encoded)
        places, prefix, payload = self._places, self._prefix, prefixes.payload.data
        starts, ends = prefixes.bounds[fit].tolist(), prefixes.bounds[fit + 1].tolist()
        for number, (first, end) in enumerate(zip(starts, ends, strict=True)):
            new = {key: piece for key, piece in prefixes.pieces[first:end] if key not in places}
            added = sum(stop - start for start, stop in new.values())
            too_much = len(prefix) + added > PREFIX_BYTES_MAX or len(places) + len(new) > PREFIX_BASES_MAX
            if too_much and places:
                return fit[:number]
            for key, (start, stop) in new.items():
                places[key] = len(prefix)
                prefix += payload[start:stop]
        return fit

    def append(self, sources: tuple[U8, U8], which: NDArray[np.int32], offsets: U64, encoded: U32) -> None:
        """Copy encodings behind what is there."""
        sizes = np.cumsum(encoded, dtype=np.int64)
        gather(list(sources), which, offsets, encoded, self.buffer, (sizes - encoded + self.used).astype(np.uint64))
        self.used += int(sizes[-1])
        self.lengths.append(encoded)

    def took(self, bases: Locations) -> None:
        """Remember the best base of each chunk that was appended."""
        self.bases.append(bases)


@dataclass(frozen=True, slots=True)
class ClosedBlock:
    """A block as it will be stored. `encoded` where its encodings have other lengths than those that were appended."""

    block: EncodedBlock
    chunk_bytes: int
    """What was appended to it."""
    prefix: Locations
    encoded: U32 | None = None


class BlockEncoder:
    """Decides, by real sizes, how a block is kept."""

    def __init__(self, block: BlockSettings, delta: DeltaSettings) -> None:
        self._level, self._far = block.level, block.far_matches
        options: dict[int, int] = {
            CompressionParameter.compression_level: block.level,
            CompressionParameter.content_size_flag: 1,
        }
        self._encoder = FrameEncoder(options)
        self._searches = Searches(options, block.far_matches)
        self._encode_deltas = xdelta3_encoder(delta.level)

    def close(self, open_block: OpenBlock) -> ClosedBlock:
        """Return the smallest of the ways to keep a block. Raises Corrupt where it does not decode again."""
        raw, none = open_block.bytes_so_far, Locations.empty()
        if open_block.kind != fmt.PATCH or len(open_block.prefix) < PREFIX_BYTES_MIN:
            kind = fmt.RAW if open_block.kind == fmt.PATCH else open_block.kind
            if kind == fmt.RAW:
                return ClosedBlock(self._searches.encode(raw, self._encoder), len(raw), none)
            return ClosedBlock(fmt.encode_block(raw, kind, open_block.depth, self._encoder), len(raw), none)
        patch = fmt.encode_patch(raw, open_block.prefix, open_block.depth, self._encoder, self._options(open_block))
        found = ClosedBlock(patch, len(raw), open_block.prefix_bases)
        if patch.stored_bytes * VCDIFF_TRIED > len(raw):
            found = self._as_deltas(open_block, raw, found)
        if patch.stored_bytes * PLAIN_TRIED > len(raw):
            plain = fmt.encode_block(raw, fmt.RAW, 0, self._encoder)
            if plain.stored_bytes * DEPTH_COSTS <= found.block.stored_bytes:
                found = ClosedBlock(plain, len(raw), none)
        return found

    def _options(self, open_block: OpenBlock) -> dict[int, int]:
        """Return zstd's, with a window that reaches from the block's end to the prefix's start.

        What matters in a patch is that all of the prefix is in the tables: up to level 3 the fast strategy with a table
        of 2^18 writes as few bytes as level 3 by itself (botocore +2.6 %, the dumps -2.3 %) at 1.5 times the speed.

        """
        reach = len(open_block.prefix) + open_block.used
        options: dict[int, int] = {
            CompressionParameter.compression_level: self._level,
            CompressionParameter.content_size_flag: 1,
            CompressionParameter.window_log: min(WINDOW_LOG_MAX, max(10, (reach - 1).bit_length())),
        }
        if self._far:
            options |= deeper(self._level)
        if self._level <= FAST_LEVEL_MAX:
            options[CompressionParameter.compression_level] = 1
            options[CompressionParameter.hash_log] = FAST_HASH_LOG
        return options

    def _as_deltas(self, open_block: OpenBlock, raw: U8, patch: ClosedBlock) -> ClosedBlock:
        """Return the block as deltas of each chunk's best base if these are smaller, else the patch."""
        lengths, bases = np.concatenate(open_block.lengths), Locations.join(open_block.bases)
        keys = {pair: i for i, pair in enumerate(zip(*_lists(open_block.prefix_bases), strict=True))}
        starts = open_block.place_of(open_block.prefix_bases)
        ends = np.append(starts[1:], np.uint64(len(open_block.prefix)))
        rows = np.array([keys[pair] for pair in zip(*_lists(bases), strict=True)], np.intp)
        offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
        prefix = np.frombuffer(open_block.prefix, np.uint8)
        base_lengths = (ends - starts)[rows].astype(np.uint32)
        pairs = Pairs(raw, offsets, lengths, prefix, starts[rows], base_lengths)
        deltas: Deltas = self._encode_deltas(pairs, lengths)
        if not deltas.lengths.all():
            return patch
        check_round_trip(pairs, deltas, np.arange(len(pairs)))
        block = fmt.encode_block(deltas.payload, fmt.XDELTA3, open_block.depth, self._encoder)
        if block.stored_bytes >= patch.block.stored_bytes:
            return patch
        return ClosedBlock(block, len(raw), Locations.empty(), deltas.lengths)


class BlockCloser:
    """Begins blocks and has them encoded, in order; keeps what closed ones leave for the next."""

    def __init__(self, block: BlockSettings, delta: DeltaSettings, thread: Executor | None = None) -> None:
        """`thread` encodes while the caller goes on: one thread, or the frames' contexts get mixed up."""
        self._encoder = BlockEncoder(block, delta)
        self._thread = thread
        self._spares: dict[int, list[U8]] = {}

    def begin(self, number: int, kind: int, depth: int, limit_bytes: int) -> OpenBlock:
        """Return a new block."""
        spares = self._spares.get(limit_bytes)
        buffer = spares.pop() if spares else None  # a new one of 5 MiB costs 1,200 page faults
        return OpenBlock(number, kind, depth, limit_bytes, buffer)

    def close(self, block: OpenBlock) -> Future[ClosedBlock]:
        """Return what the block will be; it must not be changed until that is known."""
        if self._thread is not None:
            return self._thread.submit(self._encoder.close, block)
        done: Future[ClosedBlock] = Future()
        done.set_result(self._encoder.close(block))
        return done

    def give_back(self, block: OpenBlock) -> None:
        """Take the buffer of a block that is closed."""
        spares = self._spares.setdefault(block.limit_bytes, [])
        if len(spares) < SPARES_MAX:
            spares.append(block.buffer)


def _lists(locations: Locations) -> tuple[list[int], list[int]]:
    return locations.containers.tolist(), locations.ordinals.tolist()
