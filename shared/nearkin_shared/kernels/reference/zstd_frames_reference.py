"""Define zstd frames by the Python interface of `backports.zstd`.

The frames are the same; it copies, and has a context for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from backports.zstd import ZstdCompressor, ZstdDecompressor, ZstdDict, ZstdError, get_frame_info

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.kernels.reference.scatter_copy_reference import check_array, pieces_of
from nearkin_shared.limits import PREFIX_BYTES_MIN

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer


def decode_frame(frame: Buffer, out: Buffer, what: str, prefix: Buffer | None = None) -> None:
    """Decode one zstd frame into `out`: see `_frames.pyi`."""
    data, target = memoryview(frame), memoryview(out).cast("B")
    decoder = ZstdDecompressor(zstd_dict=dictionary(prefix).as_prefix if is_known(prefix) else None)
    try:
        # The announced size bounds what libzstd writes.
        announced = get_frame_info(data).decompressed_size
        raw = decoder.decompress(data) if announced == len(target) else b""
    except ZstdError as err:
        raise Corrupt(f"{what}: {err}") from err
    if len(raw) != len(target) or not decoder.eof:
        raise Corrupt(f"{what}: its frame does not hold the {len(target)} bytes that were announced")
    if decoder.unused_data:
        raise Corrupt(f"{what}: {len(decoder.unused_data)} bytes follow its frame")
    target[:] = raw


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
    """Decode frames, each with a prefix of slices: see `_frames.pyi`."""
    check_slices(which, offsets, lengths, bounds, len(frames))
    check_slots(slots, there, len(frames), len(buffers))
    looked_into = slices_looked_into(slots, there, which)
    pieces_of(buffers, which[looked_into], offsets[looked_into], lengths[looked_into])
    found, at_hand, left = np.zeros(len(frames), np.bool_), there.copy(), iter(range(len(frames)))
    one = threading.Lock()

    def work() -> None:
        with one:
            for i in left:
                mine = slice(int(bounds[i]), int(bounds[i + 1]))
                if not at_hand[which[mine]].all():
                    continue
                prefix = b"".join(pieces_of(buffers, which[mine], offsets[mine], lengths[mine]))
                with suppress(Corrupt):
                    decode_frame(frames[i], buffers[slots[i]], "a frame", prefix)
                    found[i] = at_hand[slots[i]] = True

    work() if share is None else share(work)
    return found


def slices_looked_into(
    slots: NDArray[np.int32], there: NDArray[np.bool_], which: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which slices are in existing or future buffers. Raises BadInput for others."""
    if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(there):
        wrong = int(np.flatnonzero((which < 0) | (which >= len(there)))[0])
        raise BadInput(f"slice {wrong} names buffer {which[wrong]}: there are {len(there)}")
    filled = there.copy()
    filled[slots] = True
    return filled[which]


def check_slots(slots: NDArray[np.int32], there: NDArray[np.bool_], frames: int, buffers: int) -> None:
    """Raise BadInput unless each frame has a buffer of its own, of those that are not there."""
    check_array("slots", slots, np.int32)
    check_array("there", there, np.bool_)
    if len(slots) != frames or len(there) != buffers:
        raise BadInput(f"{len(slots)} slots for {frames} frames, there has {len(there)} entries for {buffers} buffers")
    if not frames:
        return
    if int(slots.min()) < 0 or int(slots.max()) >= buffers:
        raise BadInput(f"slots {int(slots.min())} to {int(slots.max())}: there are {buffers} buffers")
    filled = np.bincount(slots, minlength=buffers)
    if filled.max() > 1 or there[slots].any():
        raise BadInput("slots: a buffer is filled twice, or is there already")


def check_slices(
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    bounds: NDArray[np.uint32],
    frames: int,
) -> None:
    """Raise BadInput for arrays of other types, or bounds that do not cover the slices."""
    check_array("which", which, np.int32)
    check_array("offsets", offsets, np.uint64)
    check_array("lengths", lengths, np.uint32)
    check_array("bounds", bounds, np.uint32)
    for name, column in (("offsets", offsets), ("lengths", lengths)):
        if len(column) != len(which):
            raise BadInput(f"{name} has {len(column)} entries: which has {len(which)}")
    if len(bounds) != frames + 1 or bounds[0] or bounds[-1] != len(which) or np.any(bounds[1:] < bounds[:-1]):
        raise BadInput(f"bounds {bounds.tolist()[:4]} ...: want {frames + 1}, ascending from 0 to {len(which)}")


class FrameEncoder:
    """Writes frames: see `_frames.pyi`."""

    def __init__(self, options: Mapping[int, int], take: Callable[[int], Buffer] | None = None) -> None:
        self._options = dict(options)
        self._take = take

    def encode(
        self, raw: Buffer, prefix: Buffer | None = None, options: Mapping[int, int] | None = None
    ) -> bytes | memoryview:
        """Return `raw` as one frame; verified if it is shorter than `raw` or has a prefix."""
        data, frame = memoryview(raw).cast("B"), self.unchecked(raw, prefix, options)
        if prefix is not None or len(frame) < len(data):
            back = bytearray(len(data))
            decode_frame(frame, back, "block", prefix)
            if back != data:
                raise Corrupt("a block just compressed does not decompress to what it was: check this machine's memory")
        return frame

    def unchecked(
        self, raw: Buffer, prefix: Buffer | None = None, options: Mapping[int, int] | None = None
    ) -> bytes | memoryview:
        """Return `raw` as one frame that nothing has decoded yet."""
        frame = self._written(raw, prefix, options)
        if self._take is None:
            return frame
        memory = memoryview(self._take(len(frame))).cast("B")
        if len(memory) != len(frame):
            raise MemoryError(f"take({len(frame)}) gave {len(memory)} bytes")
        memory[:] = frame
        return memory

    def encoded_bytes(self, raw: Buffer, options: Mapping[int, int] | None = None) -> int:
        """Return how many bytes `raw` takes as a frame, without a prefix."""
        return len(self._written(raw, None, options))

    def _written(self, raw: Buffer, prefix: Buffer | None, options: Mapping[int, int] | None) -> bytes:
        chosen = self._options if options is None else dict(options)
        try:
            compressor = ZstdCompressor(
                options=chosen, zstd_dict=dictionary(prefix).as_prefix if is_known(prefix) else None
            )
        except ZstdError as err:
            raise ValueError(f"zstd parameters {chosen}: {err}") from err
        return compressor.compress(memoryview(raw).cast("B"), ZstdCompressor.FLUSH_FRAME)


def is_known(prefix: Buffer | None) -> bool:
    """Return whether a frame can refer to a prefix: libzstd ignores one that is too short."""
    return prefix is not None and memoryview(prefix).nbytes >= PREFIX_BYTES_MIN


def dictionary(prefix: Buffer | None) -> ZstdDict:
    """Return the prefix as zstd takes it here: a copy."""
    return ZstdDict(bytes(memoryview(b"" if prefix is None else prefix)), is_raw=True)
