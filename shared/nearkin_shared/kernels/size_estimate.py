# size: selects the compiled kernel or its reference
"""Estimate compressed sizes.

Invariant: every kernel and machine computes the same estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._size_estimate import compressed_bytes_estimate
else:
    from nearkin_shared.kernels.reference.size_estimate_reference import compressed_bytes_estimate

__all__ = ["compressed_bytes_estimate"]
