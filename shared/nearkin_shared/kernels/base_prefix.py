# size: selects the compiled kernel or its reference
"""Assemble the prefixes of patch blocks.

Invariant: a base's bytes are in a prefix once, and only whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._base_prefix import BasePrefix, BaseRows
else:
    from nearkin_shared.kernels.reference.base_prefix_reference import BasePrefix, BaseRows

__all__ = ["BasePrefix", "BaseRows"]
