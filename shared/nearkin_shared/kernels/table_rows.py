# size: selects the compiled kernel or its reference
"""Rows of several tables. Invariant: no row is read that its table does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._table_rows import numbered, rows_to_fill, take_rows
else:
    from nearkin_shared.kernels.reference.table_rows_reference import numbered, rows_to_fill, take_rows

__all__ = ["numbered", "rows_to_fill", "take_rows"]
