"""Re-encode blocks for maintenance, with the methods and checks of the delta stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.container_layout import PATCH, RAW
from nearkin_shared.kernels.base_prefix import BaseRows
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, U64, Locations, Pieces, offsets_of
from nearkin_shared.utils.buffers import BufferPool
from nearkin_shared.utils.thread_pool import ThreadPool

if TYPE_CHECKING:
    from nearkin_delta.block_encoder import BlockEncoder, OpenBlock
    from nearkin_maintenance.optimize.encoder_port import BlockSlice, EncodedResult, PendingBlock, RebasedChunks
    from nearkin_shared.formats.block import EncodedBlock

HELPERS_MAX = 1
"""Threads that encode concurrently with the caller. Each has tables of 20 to 40 MB, and up to 60 MB with its data: a
process that puts and collects peaked at 474 MiB with one.
"""


class BlockRecoder:
    """For the maintenance service, which knows no codec."""

    def __init__(self, settings: Settings) -> None:
        from nearkin_delta.block_encoder import BlockEncoder

        self._settings = settings
        put, again = settings.block.level, settings.gc.recompress_level
        self._raw_level = again if again > put else 0
        """Level for blocks without bases; 0: the level of a put."""
        self._encoder = BlockEncoder(settings.block, raw_level=self._raw_level)
        self.helpers: ThreadPool = ThreadPool()
        """Encodes and decodes concurrently with the caller."""
        self._frames = deque[FrameEncoder]()
        """Those that no thread uses."""
        self._room = BufferPool().take

    @property
    def depth_max(self) -> int:
        """Return the depth limit of a chunk that is given new bases."""
        return 0 if self._settings.delta.codec == "none" else self._settings.delta.max_depth

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of chunks in a block without bases."""
        return int(self._settings.block.raw_bytes)

    @property
    def delta_bytes(self) -> int:
        """Return the bytes of chunks in a block with bases."""
        return int(self._settings.block.delta_bytes)

    @property
    def can_merge(self) -> bool:
        """Return whether blocks are to hold what newer versions changed of their chunks."""
        return self._settings.delta.codec == "patch"

    def encode_merged(self, payload: U8, bases: Locations, base_payload: U8, depth: int) -> PendingBlock:
        """Begin a block at `depth` with chunks of several versions, as patch of any bases."""
        from nearkin_delta.block_encoder import encode_merged

        level = max(self._settings.block.level, self._raw_level)
        return self._begin(partial(encode_merged, payload, base_payload if len(bases) else None, depth, level))

    @property
    def can_recompress(self) -> bool:
        """Return whether blocks without bases become smaller than a put writes them."""
        return self._raw_level > 0

    def recompress(self, decoded: U8) -> PendingBlock:
        """Begin a block without bases."""
        from nearkin_delta.block_encoder import encode_again

        return self._begin(partial(encode_again, decoded, self._raw_level))

    @contextmanager
    def with_helper_thread(self) -> Iterator[None]:
        """Run the helper thread, and keep tables between blocks, inside the `with` block."""
        try:
            with self.helpers.on_other_cores("nearkin-recode", HELPERS_MAX):
                yield
        finally:
            self._frames.clear()

    def _begin(self, encode: Callable[[FrameEncoder], EncodedBlock]) -> PendingBlock:
        return self.helpers.begin(partial(self._encode, encode))

    def _encode(self, encode: Callable[[FrameEncoder], EncodedBlock]) -> EncodedBlock:
        try:
            encoder = self._frames.pop()
        except IndexError:
            encoder = FrameEncoder({})
        block = encode(encoder)
        self._frames.append(encoder)
        return block

    def new_regrouper(self) -> EncodingRegrouper:
        """Return what encodes chunks as if they were put now."""
        return EncodingRegrouper(self._settings, self._encoder)

    def __call__(self, part: BlockSlice) -> EncodedResult:
        """Return the smallest way to keep it. Raises Corrupt where it does not decode again."""
        from nearkin_delta.block_encoder import OpenBlock
        from nearkin_delta.container_builder import Prefixes
        from nearkin_maintenance.optimize.encoder_port import EncodedResult

        none, rows = np.zeros(0, np.uint8), np.arange(len(part.lengths))
        block = OpenBlock(0, part.kind, part.depth, len(part.payload), self._room)
        if part.kind == PATCH:
            bounds = np.full(len(rows) + 1, len(part.bases), np.uint32)
            bounds[0] = 0  # the first chunk brings all bases, in their order: they fitted when the block was made
            offsets = offsets_of(part.base_lengths)
            pieces = Pieces.of(part.base_payload, offsets, part.base_lengths)
            bases = Prefixes(bounds, part.bases, pieces).validate()
            block.add_bases(bases, rows, part.lengths)
        block.append((part.payload, none), np.zeros(len(rows), np.int32), offsets_of(part.lengths), part.lengths)
        block.record_bases(part.best)
        self._encoder.forget()  # a dry run predicts the size of each block, in whatever order blocks are written then
        closed = self._encoder.close(block)
        return EncodedResult(closed.block, closed.prefix, closed.encoded)


class EncodingRegrouper:
    """Group chunks with new bases into blocks, one open block for each depth, in stream order."""

    def __init__(self, settings: Settings, encoder: BlockEncoder) -> None:
        self._encoder = encoder
        self._limits = int(settings.block.raw_bytes), int(settings.block.delta_bytes)
        self._growing: dict[int, tuple[OpenBlock, list[NDArray[np.intp]]]] = {}
        self._ended: list[RebasedChunks] = []
        self._ended_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of encoded blocks, and of open blocks with their bases."""
        growing = sum(block.used + len(block.prefix) for block, _ in self._growing.values())
        return self._ended_bytes + growing

    def add(self, rows: NDArray[np.intp], payload: U8, lengths: U32, bases: Contents, max_base_depths: U8) -> U8:
        """Add chunks with useful `bases`; return the largest depth of each, 0: unchanged.

        `max_base_depths` uint8[n]: each chunk takes only bases of smaller depth. Chunks are contiguous in `payload`.
        Raises Corrupt if a block does not decode again.
        """
        from nearkin_delta.base_choice import Targets, try_shallower
        from nearkin_delta.container_builder import Prefixes

        count, offsets = len(rows), offsets_of(lengths)
        best, depths = Locations.empty(count), np.zeros(count, np.uint8)
        rows_of_bases: BaseRows | None = None
        if bases.available.any():
            chosen = try_shallower(Targets(payload, offsets, lengths), bases, max_base_depths)
            mine, used = np.flatnonzero(chosen.found), chosen.rows
            depths[mine] = chosen.depths[mine] + 1
            first = chosen.rows[chosen.bounds[mine]]
            best.containers[mine] = bases.locations.containers[first]
            best.ordinals[mine] = bases.locations.ordinals[first]
            rows_of_bases = Prefixes(chosen.bounds, bases.locations.take(used), bases.pieces.take(used)).validate()
        for depth in np.flatnonzero(np.bincount(depths)).tolist():
            mine = np.flatnonzero(depths == depth)
            self._append(mine, rows, (payload, offsets, lengths), best, depth, rows_of_bases if depth else None)
        return depths

    def add_raw(self, rows: NDArray[np.intp], payload: U8, lengths: U32) -> None:
        """Take chunks as they are. Raises Corrupt where a block does not decode again."""
        chunks, none = (payload, offsets_of(lengths), lengths), Locations.empty(len(rows))
        self._append(np.arange(len(rows)), rows, chunks, none, 0, None)

    def _append(
        self,
        mine: NDArray[np.intp],
        rows: NDArray[np.intp],
        chunks: tuple[U8, U64, U32],
        best: Locations,
        depth: int,
        bases: BaseRows | None,
    ) -> None:
        from nearkin_delta.block_encoder import OpenBlock

        payload, offsets, lengths = chunks
        taken = 0
        while taken < len(mine):
            if depth not in self._growing:
                kind, limit_bytes = (PATCH, self._limits[1]) if depth else (RAW, self._limits[0])
                self._growing[depth] = OpenBlock(0, kind, depth, limit_bytes), []
            block, held = self._growing[depth]
            if depth:
                assert bases is not None
                part = block.add_bases(bases, mine[taken:], lengths)
            else:
                part = block.fitting(mine[taken:], lengths)
            if len(part):
                sources = payload, np.zeros(0, np.uint8)
                block.append(sources, np.zeros(len(part), np.int32), offsets[part], lengths[part])
                block.record_bases(best.take(part))
                held.append(rows[part])
                taken += len(part)
            if block.full or not len(part):
                self._close(depth)

    def end_patch_blocks(self) -> None:
        """Close the open patch blocks: later chunks are far behind and use other regions.

        Raises Corrupt.
        """
        for depth in [depth for depth in self._growing if depth]:
            self._close(depth)

    def end(self) -> list[RebasedChunks]:
        """Return all blocks. Raises Corrupt where one does not decode again."""
        for depth in list(self._growing):
            self._close(depth)
        return self._ended

    def _close(self, depth: int) -> None:
        from nearkin_maintenance.optimize.encoder_port import EncodedResult, RebasedChunks

        block, held = self._growing.pop(depth)
        self._encoder.forget()  # as above
        closed = self._encoder.close(block)
        recoded = EncodedResult(closed.block, closed.prefix, closed.encoded)
        self._ended_bytes += len(recoded.block.payload)
        self._ended.append(RebasedChunks(np.concatenate(held), recoded, Locations.join(block.bases)))
