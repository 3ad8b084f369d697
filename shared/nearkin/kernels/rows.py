"""Rows of several tables. Invariant: no row is read that its table does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._rows import numbered, rows_to_fill, take_rows
else:
    from nearkin.kernels._rows_reference import numbered, rows_to_fill, take_rows

__all__ = ["numbered", "rows_to_fill", "take_rows"]
