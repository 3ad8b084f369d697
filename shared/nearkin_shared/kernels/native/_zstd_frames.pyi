"""Types and contracts of the compiled frames."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def decode_frame(frame: Buffer, out: Buffer, what: str, prefix: Buffer | None = None) -> None:
    """Decode one zstd frame into `out`, which it fills exactly; never writes or allocates more.

    `prefix`: the bytes that the frame refers to before its own; zstd knows none shorter than 8. All are C-contiguous
    bytes, `out` is writable. Raises Corrupt, naming `what`, for anything but one whole frame that announces and holds
    `len(out)` bytes; `out` then holds anything. The GIL is released.
    """

def decode_frames(
    frames: Sequence[Buffer],
    slots: NDArray[np.int32],
    buffers: Sequence[Buffer],
    there: NDArray[np.bool_],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    bounds: NDArray[np.uint32],
    share: Callable[[Callable[[], None]], None] | None = None,
) -> NDArray[np.bool_]:
    """Return bool[f]: which of f frames were decoded, frame i into buffers[slots[i]], which it fills exactly.

    Frame i refers to slices bounds[i] to bounds[i + 1], one behind the other: of slice j `lengths[j]` bytes of
    buffers[which[j]] from `offsets[j]` on; slices that lie so in their buffer are not copied. They may lie in buffers
    that are `there` bool[b], and in those that frames before it have filled. `slots` int32[f], each once and none that
    is there; `which` int32[s], `offsets` uint64[s], `lengths` uint32[s], `bounds` uint32[f + 1].

    The others refer to what is not there, or are refused for what `decode_frame` raises Corrupt for; their buffers hold
    anything. Raises BadInput for slices that leave their buffer, if that is there or filled, and for arrays that do not
    agree. The GIL is released once for all of them; the caller must not change the arrays meanwhile.

    `share` calls what it is given, from as many threads as it likes, and returns once all calls have: each call
    decodes frames that no other has begun, until none is left. None: the caller's thread decodes them.
    """

class FrameEncoder:
    """Writes frames. For one thread at a time; keeps a context and a buffer of the largest frame so far."""

    def __init__(self, options: Mapping[int, int], take: Callable[[int], Buffer] | None = None) -> None:
        """`options` are zstd's parameters by number, for frames that are given none of their own.

        `take` returns writable memory of so many bytes, in which frames are then returned; None: they are bytes.
        """

    def encode(
        self, raw: Buffer, prefix: Buffer | None = None, options: Mapping[int, int] | None = None
    ) -> bytes | memoryview:
        """Return `raw` as one frame, decoded and compared where it is shorter than `raw`, or refers to a prefix (I7).

        A frame that is not shorter is discarded. `prefix`: the bytes that the frame may refer to, used where they are,
        8 at least or none.
        Raises Corrupt when the decoded bytes differ, ValueError for an option that zstd refuses, MemoryError. The GIL
        is released.
        """

    def unchecked(
        self, raw: Buffer, prefix: Buffer | None = None, options: Mapping[int, int] | None = None
    ) -> bytes | memoryview:
        """Return `raw` as one frame that nothing has decoded yet; else as `encode`."""

    def encoded_bytes(self, raw: Buffer, options: Mapping[int, int] | None = None) -> int:
        """Return how many bytes `raw` takes as a frame, without a prefix; nothing is kept of it. Errors as `encode`."""
