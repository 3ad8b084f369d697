"""Compressed size, guessed. Invariant: whichever kernel runs, a chunk has one estimate, the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._estimate import compressed_bytes_estimate
else:
    from nearkin.kernels._estimate_reference import compressed_bytes_estimate

__all__ = ["compressed_bytes_estimate"]
