"""Bytes shared with bases. Invariant: whichever kernel runs, the same chunks share the same bytes, on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._overlap import shared_bytes
else:
    from nearkin.kernels._overlap_reference import shared_bytes

__all__ = ["shared_bytes"]
