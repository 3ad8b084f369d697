"""What stood beside the ancestors of chunks. Invariant: what a group has already is not named again.

A chunk whose ends fell elsewhere than its base's leans on several, of which only the best one is known of each chunk.
So the ancestors of a run of chunks, found by best bases alone, have holes and miss something at both ends:

    chunks      |   a   |   b    |  c  |      bases of a: A, B    of b: B, C    of c: D
    ancestors   |  A  |   B    |    C    | D |    found: A B . D;   C stands beside B

A container's chunks lie in stream order, those that were duplicates left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin.kernels.rows import numbered
from nearkin.records import U32, Locations


def group_of_rows(bounds: U32) -> NDArray[np.intp]:
    """Return for each row the number of its group: group g has rows bounds[g] to bounds[g + 1]."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def beside_replaced(asked: Locations, replaced: Locations, bounds: U32) -> tuple[Locations, NDArray[np.intp]]:
    """Return what stands beside the rows that were `replaced`, and the group of each: distinct, and new to its group.

    Locations may be of chunks that are not there. `bounds` uint32[g + 1] of fewer than 2^31 groups by containers.
    """
    moved = (replaced.containers != asked.containers) | (replaced.ordinals != asked.ordinals)
    which, containers = numbered(replaced.containers)
    of = group_of_rows(bounds) * max(1, len(containers)) + which
    ordinals = replaced.ordinals.astype(np.int64)
    both = np.concatenate([ordinals[moved] - 1, ordinals[moved] + 1])
    keys = np.unique((np.tile(of[moved], 2) << 32 | both)[both >= 0])
    keys = keys[~np.isin(keys, of << 32 | ordinals)]
    groups, of_container = np.divmod(keys >> 32, max(1, len(containers)))
    return Locations(containers[of_container], keys.astype(np.uint32)), groups
