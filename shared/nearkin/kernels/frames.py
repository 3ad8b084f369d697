"""zstd frames. Invariant: what is decoded fills its buffer exactly, what is encoded was decoded again and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._frames import FrameEncoder, decode_frame, decode_frames
else:
    from nearkin.kernels._frames_reference import FrameEncoder, decode_frame, decode_frames

__all__ = ["FrameEncoder", "decode_frame", "decode_frames"]
