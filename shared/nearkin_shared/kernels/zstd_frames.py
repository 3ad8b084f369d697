# size: selects the compiled kernel or its reference
"""Encode and decode zstd frames.

Invariant: decoded bytes fill their buffer exactly; an encoded frame was decoded again and compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._zstd_frames import FrameEncoder, decode_frame, decode_frames
else:
    from nearkin_shared.kernels.reference.zstd_frames_reference import FrameEncoder, decode_frame, decode_frames

__all__ = ["FrameEncoder", "decode_frame", "decode_frames"]
