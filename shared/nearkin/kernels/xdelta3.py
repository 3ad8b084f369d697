"""xdelta3. Invariant: `decode_many` undoes `encode_many`, and reads what the `xdelta3 -S none` command wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON
from nearkin.kernels._xdelta3_reference import DELTA_BYTES_MAX, PAIR_BYTES_MAX

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._xdelta3 import decode_many, encode_many
else:
    from nearkin.kernels._xdelta3_reference import decode_many, encode_many

__all__ = ["DELTA_BYTES_MAX", "PAIR_BYTES_MAX", "decode_many", "encode_many"]
