"""Types and contracts of the compiled prefix."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class BaseRows:
    """The bases of a batch's chunks, checked once for all prefixes that take some of them.

    Chunk i has rows bounds[i] to bounds[i + 1] of `containers`, `ordinals` and the others, the best one first. The
    bytes of row r are lengths[r] bytes of buffers[which[r]] from offsets[r] on. None may change while this lives.
    """

    def __init__(
        self,
        bounds: NDArray[np.uint32],
        containers: NDArray[np.uint64],
        ordinals: NDArray[np.uint32],
        buffers: Sequence[Buffer],
        which: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> None:
        """Raises BadInput for arrays of another type or length, and for what leaves them or a buffer."""

    def __len__(self) -> int:
        """Return how many chunks there are."""

class BasePrefix:
    """Bytes of bases, one behind the other, each base once. For one thread at a time."""

    def __init__(self, bytes_max: int, bases_max: int) -> None:
        """Both are passed only by the bases of one chunk, where these are the first. Raises BadInput below 1."""

    def __len__(self) -> int:
        """Return how many bases it holds."""

    @property
    def content(self) -> memoryview:
        """Return a read-only view of the bytes of all bases, in order; while it lives `add` and `clear` are refused."""

    @property
    def room_bytes(self) -> int:
        """Return how much memory it has for bytes of bases, also where it holds few now."""

    def add(self, rows: NDArray[np.intp], bases: BaseRows) -> int:
        """Take the bases of chunks `rows`, chunk by chunk, until one's do not fit; return how many chunks' did.

        Those that are there already are not taken again. An empty prefix takes the first chunk's whatever they are.
        Raises BadInput for rows that are not among the chunks, BufferError while `content` is looked at, MemoryError;
        nothing was taken then.
        """

    def bases(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64]]:
        """Return (containers, ordinals, where the bytes start) of all bases, in the order of their bytes."""

    def clear(self) -> None:
        """Forget all bases; the memory stays. Raises BufferError as `add` does."""
