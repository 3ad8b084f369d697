"""Define the scatter copy in plain Python.

Invariant: every slice is checked against its buffer and its target before one byte is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer


def view_of(name: str, payload: Buffer, writable: bool = False) -> memoryview:
    """Return the bytes of a C-contiguous buffer."""
    wanted = "writable C-contiguous bytes" if writable else "C-contiguous bytes"
    try:
        view = memoryview(payload)
    except TypeError as err:
        raise BadInput(f"{name} {type(payload).__name__}: pass {wanted}") from err
    if not view.c_contiguous or (writable and view.readonly):
        raise BadInput(f"{name} {type(payload).__name__}: pass {wanted}")
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_array(name: str, values: object, dtype: type[np.generic]) -> None:
    """Refuse another dtype or more than one dimension."""
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise BadInput(f"{name} {found}: pass a one-dimensional numpy array of {np.dtype(dtype)}")


def pieces_of(
    buffers: Sequence[Buffer], which: NDArray[np.int32], offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> list[memoryview]:
    """Return the slices, each within its buffer."""
    views = [view_of(f"buffers[{i}]", buffer) for i, buffer in enumerate(buffers)]
    check_array("which", which, np.int32)
    check_array("offsets", offsets, np.uint64)
    check_array("lengths", lengths, np.uint32)
    for name, found in (("offsets", len(offsets)), ("lengths", len(lengths))):
        if found != len(which):
            raise BadInput(f"{name} has {found} entries: which has {len(which)}")
    pieces = []
    for i, (buffer, offset, length) in enumerate(
        zip(which.tolist(), offsets.tolist(), lengths.tolist(), strict=True),
    ):
        if not 0 <= buffer < len(views):
            raise BadInput(f"slice {i} names buffer {buffer}: there are {len(views)}")
        if offset + length > len(views[buffer]):
            raise BadInput(
                f"slice {i} at offset {offset}, {length} bytes: leaves buffer {buffer} of {len(views[buffer])} bytes"
            )
        pieces.append(views[buffer][offset : offset + length])
    return pieces


def gather(
    buffers: Sequence[Buffer],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    out: Buffer,
    out_offsets: NDArray[np.uint64],
) -> None:
    """Copy every slice to its target in `out`; shapes and errors as in `_scatter_copy.pyi`."""
    check_array("out_offsets", out_offsets, np.uint64)
    pieces = pieces_of(buffers, which, offsets, lengths)
    place = view_of("out", out, writable=True)
    if len(out_offsets) != len(which):
        raise BadInput(f"out_offsets has {len(out_offsets)} entries: which has {len(which)}")
    for i, (piece, offset) in enumerate(zip(pieces, out_offsets.tolist(), strict=True)):
        if offset + len(piece) > len(place):
            raise BadInput(f"slice {i} goes to offset {offset}, {len(piece)} bytes: leaves out of {len(place)} bytes")
    for piece, offset in zip(pieces, out_offsets.tolist(), strict=True):
        if piece:
            place[offset : offset + len(piece)] = piece


def gather_new(
    buffers: Sequence[Buffer],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
) -> NDArray[np.uint8]:
    """Return the slices joined, in order, in a new array; errors as in `_gather.pyi`."""
    return np.frombuffer(bytearray(b"".join(pieces_of(buffers, which, offsets, lengths))), dtype=np.uint8)
