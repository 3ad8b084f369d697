# size: selects the compiled kernel or its reference
"""Look up keys in sorted runs of an index.

Invariant: no byte outside a run is read, whatever its content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.reference.sorted_runs_reference import CHILDREN_BYTES, DEPTH_MAX, FAN_BITS, HEAD_BYTES, NAME
from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._sorted_runs import find_in_runs
else:
    from nearkin_shared.kernels.reference.sorted_runs_reference import find_in_runs

__all__ = ["CHILDREN_BYTES", "DEPTH_MAX", "FAN_BITS", "HEAD_BYTES", "NAME", "find_in_runs"]
