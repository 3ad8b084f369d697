"""Gather. Invariant: scattered slices become one buffer in one call, and no slice reads or writes out of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._gather import gather, gather_new
else:
    from nearkin.kernels._gather_reference import gather, gather_new

__all__ = ["gather", "gather_new"]
