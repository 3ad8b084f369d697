# size: selects the compiled kernel or its reference
"""Copy scattered slices into one buffer in one call.

Invariant: no slice reads or writes out of bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._scatter_copy import gather, gather_new
else:
    from nearkin_shared.kernels.reference.scatter_copy_reference import gather, gather_new

__all__ = ["gather", "gather_new"]
