# size: selects the compiled kernel or its reference
"""Encode and decode VCDIFF deltas.

Invariant: `decode_many` undoes `encode_many`, and reads the output of the `xdelta3 -S none` command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.reference.xdelta3_reference import DELTA_BYTES_MAX, PAIR_BYTES_MAX
from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._xdelta3 import decode_many, encode_many
else:
    from nearkin_shared.kernels.reference.xdelta3_reference import decode_many, encode_many

__all__ = ["DELTA_BYTES_MAX", "PAIR_BYTES_MAX", "decode_many", "encode_many"]
