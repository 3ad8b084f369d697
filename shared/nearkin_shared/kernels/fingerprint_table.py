# size: selects the compiled kernel or its reference
"""Map chunk names to locations, in memory.

Invariant: the first location put for a name stays until its container is discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._fingerprint_table import NameTable, first_occurrence
else:
    from nearkin_shared.kernels.reference.fingerprint_table_reference import NameTable, first_occurrence

__all__ = ["NameTable", "first_occurrence"]
