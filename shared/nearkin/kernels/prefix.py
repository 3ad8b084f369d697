"""Prefixes of patch blocks. Invariant: a base's bytes are in a prefix once, and only whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin.kernels._select import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin.kernels._prefix import BasePrefix, BaseRows
else:
    from nearkin.kernels._prefix_reference import BasePrefix, BaseRows

__all__ = ["BasePrefix", "BaseRows"]
