"""How blocks are encoded again. Invariant: the maintenance service knows no codec; who does keeps what the delta
stage keeps.
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
"""Waits for a block that is being encoded. Raises Corrupt where it does not decode again."""


@frozen
class BlockSlice:
    """What is kept of a block: its encodings, `lengths` of each, and of a patch block each chunk's best base and all
    bases: `bases` with the bytes of each in `base_payload`.
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
    """A block as it will be stored, the bases that it leans on as a whole, and its encodings' lengths if others."""

    block: EncodedBlock
    prefix: Locations
    encoded: U32 | None


@frozen
class RebasedChunks:
    """A block of chunks that were given new bases: their `rows`, ascending, and the best base of each."""

    rows: NDArray[np.intp]
    recoded: EncodedResult
    best: Locations


class ChunkRegrouper(Protocol):
    """Gathers chunks into blocks as the delta stage would."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the blocks that are encoded, and of those that grow with their bases."""

    def add(self, rows: NDArray[np.intp], payload: U8, lengths: U32, bases: Contents, max_base_depths: U8) -> U8:
        """Take chunks, against those of `bases` that are worth it; return how deep each is at most, 0: as it is.

        `max_base_depths` uint8[n]: each takes only bases that are less deep.
        """

    def add_raw(self, rows: NDArray[np.intp], payload: U8, lengths: U32) -> None:
        """Take chunks as they are."""

    def end_patch_blocks(self) -> None:
        """Let no block go on that leans on others: what comes lies far behind. Raises Corrupt as `end` does."""

    def end(self) -> list[RebasedChunks]:
        """Return all blocks. Raises Corrupt where one does not decode again."""


class BlockEncoderPort(Protocol):
    """Encodes what is kept of a block as the delta stage would."""

    @property
    def depth_max(self) -> int:
        """Return how deep a chunk may be that is given new bases."""

    @property
    def raw_bytes(self) -> int:
        """Return how many bytes of chunks a block holds that leans on nothing."""

    @property
    def delta_bytes(self) -> int:
        """Return how many bytes of chunks a block holds that leans on others."""

    @property
    def can_merge(self) -> bool:
        """Return whether blocks are to hold what newer versions changed of their chunks."""

    def new_regrouper(self) -> ChunkRegrouper:
        """Return what encodes chunks as if they were put now."""

    def encode_merged(self, payload: U8, bases: Locations, base_payload: U8, depth: int) -> PendingBlock:
        """Begin a block of several versions' chunks, a patch of the bases where there are some: it lies at `depth`."""

    @property
    def can_recompress(self) -> bool:
        """Return whether blocks that lean on nothing come out smaller than as a put writes them."""

    def recompress(self, decoded: U8) -> PendingBlock:
        """Begin a block that leans on nothing."""

    @property
    def helpers(self) -> ThreadPool:
        """Return those that encode what is begun, and decode, beside the caller while they are at work."""

    def with_helper_thread(self) -> AbstractContextManager[None]:
        """Have the helpers at work for as long as the block runs; else what is begun is done when it is."""

    def __call__(self, part: BlockSlice) -> EncodedResult:
        """Return the smallest way to keep it. Raises Corrupt where it does not decode again."""
