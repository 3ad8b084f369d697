# size: selects the compiled kernel or its reference
"""Compute super-features of chunks.

Invariant: every kernel computes the same super-features, so that stored ones stay comparable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._features import (
        cpu_path,
        finesse,
        finesse_scalar,
        ntransform,
        ntransform_scalar,
        odess,
    )
else:
    from nearkin_shared.kernels.reference.features_reference import (
        cpu_path,
        finesse,
        finesse_scalar,
        ntransform,
        ntransform_scalar,
        odess,
    )

__all__ = ["cpu_path", "finesse", "finesse_scalar", "ntransform", "ntransform_scalar", "odess"]
