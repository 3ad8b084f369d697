"""Declare the encoder that maintenance needs. The delta service implements it.

Invariant: maintenance knows no codec; the implementation keeps the bounds of the delta stage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats.block import EncodedBlock
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, Locations
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import ThreadPool

PendingBlock = Callable[[], EncodedBlock]
"""Wait for a block that is being encoded. Raises Corrupt if it does not decode again."""


@frozen
class BlockSlice:
    """The kept chunks of one block, as encodings of `lengths` bytes each.

    For a patch block: the best base of each chunk, all `bases`, and their bytes concatenated in `base_payload`.
    """

    kind: int
    depth: int
    payload: U8
    lengths: U32
    best: Locations
    bases: Locations
    base_payload: U8
    base_lengths: U32


@frozen
class EncodedResult:
    """A block to store, its prefix bases, and encoded lengths (None: the chunks' own)."""

    block: EncodedBlock
    prefix: Locations
    encoded: U32 | None


@frozen
class RebasedChunks:
    """A block of rebased chunks: their `rows`, ascending, and the best base of each."""

    rows: NDArray[np.intp]
    result: EncodedResult
    best: Locations


class ChunkRegrouper(Protocol):
    """Collects chunks into blocks as the delta stage would."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the encoded blocks and of those that still grow, bases included."""

    def add(self, rows: NDArray[np.intp], payload: U8, lengths: U32, bases: Contents, max_base_depths: U8) -> U8:
        """Add chunks, encoded against those of `bases` that save bytes.

        Return the depth bound of each (0: raw).

        `max_base_depths` is uint8[n]: a chunk takes only bases below its bound.
        """

    def add_raw(self, rows: NDArray[np.intp], payload: U8, lengths: U32) -> None:
        """Add chunks without bases."""

    def end_patch_blocks(self) -> None:
        """Close all growing patch blocks: the next chunks are far away in the stream.

        Raises: Corrupt.
        """

    def end(self) -> list[RebasedChunks]:
        """Return all blocks. Raises Corrupt if one does not decode again."""


class BlockEncoderPort(Protocol):
    """Encodes the kept chunks of a block as the delta stage would."""

    @property
    def depth_max(self) -> int:
        """Return the maximum depth of a rebased chunk."""

    @property
    def raw_bytes(self) -> int:
        """Return the chunk bytes that a raw block holds."""

    @property
    def delta_bytes(self) -> int:
        """Return the chunk bytes that a delta block holds."""

    @property
    def can_merge(self) -> bool:
        """Return whether the configured format writes merged blocks."""

    def new_regrouper(self) -> ChunkRegrouper:
        """Return a regrouper that encodes chunks as a put would."""

    def encode_merged(self, payload: U8, bases: Locations, base_payload: U8, depth: int) -> PendingBlock:
        """Start to encode a merged block at `depth`: a patch of `bases`, or raw if there are none."""

    @property
    def can_recompress(self) -> bool:
        """Return whether recompression shrinks raw blocks, compared with a put."""

    def recompress(self, decoded: U8) -> PendingBlock:
        """Start to encode a raw block."""

    @property
    def helpers(self) -> ThreadPool:
        """Return the threads that encode and decode concurrently with the caller."""

    def with_helper_thread(self) -> AbstractContextManager[None]:
        """Run the helper threads for as long as the `with` block runs.

        Else encoding is synchronous.
        """

    def __call__(self, part: BlockSlice) -> EncodedResult:
        """Return the smallest encoding of the slice. Raises Corrupt if it does not decode again."""
