# size: one decision, imported by every kernel module
"""Select compiled kernels or references.

Invariant: a missing kernel is an error; a silent fallback would measure the wrong code.
"""

from __future__ import annotations

import os

from nearkin_shared.errors import choose

_KNOWN = ("cython", "python")
CHOSEN: str = os.environ.get("NEARKIN_KERNELS", "cython")
if CHOSEN not in _KNOWN:
    raise choose("NEARKIN_KERNELS", CHOSEN, _KNOWN)

USE_CYTHON: bool = CHOSEN == "cython"
"""True unless `NEARKIN_KERNELS=python` selects the plain-Python references."""
