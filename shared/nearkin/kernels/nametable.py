"""Names to places, in memory. Invariant: the first place put for a name stays until its container is discarded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._nametable import NameTable, first_occurrence
else:
    from nearkin.kernels._nametable_reference import NameTable, first_occurrence

__all__ = ["NameTable", "first_occurrence"]
