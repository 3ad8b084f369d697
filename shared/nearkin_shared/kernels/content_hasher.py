# size: selects the compiled kernel or its reference
"""Hash the content of a large file with a state that can be stored.

Invariant: the digest is the BLAKE3 of the bytes, however often the hasher was stored and continued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._content_hasher import ContentHasher
else:
    from nearkin_shared.kernels.reference.content_hasher_reference import ContentHasher

__all__ = ["ContentHasher"]
