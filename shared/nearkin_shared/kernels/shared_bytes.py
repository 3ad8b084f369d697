# size: selects the compiled kernel or its reference
"""Count the bytes that chunks share with bases.

Invariant: every kernel and machine counts the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._shared_bytes import shared_bytes
else:
    from nearkin_shared.kernels.reference.shared_bytes_reference import shared_bytes

__all__ = ["shared_bytes"]
