"""Which kernels run. Invariant: a kernel name is a demand; a silent fallback would measure the wrong code."""

from __future__ import annotations

import os

from nearkin.errors import choose

_KNOWN = ("cython", "python")
_demand = os.environ.get("NEARKIN_KERNELS", "cython")
if _demand not in _KNOWN:
    raise choose("NEARKIN_KERNELS", _demand, _KNOWN)

USE_CYTHON: bool = _demand == "cython"
"""True unless `NEARKIN_KERNELS=python` asks for the plain-Python references."""
