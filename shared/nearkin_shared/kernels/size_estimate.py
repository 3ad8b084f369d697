"""Compressed size, guessed. Invariant: whichever kernel runs, a chunk has one estimate, the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._size_estimate import compressed_bytes_estimate
else:
    from nearkin_shared.kernels.reference.size_estimate_reference import compressed_bytes_estimate

__all__ = ["compressed_bytes_estimate"]
