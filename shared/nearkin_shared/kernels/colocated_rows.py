# size: selects the compiled kernel or its reference
"""Find the chunks stored next to the ancestors of chunks.

Invariant: a row that a group has already is not returned again.

A chunk with other ends than its base depends on several bases, of which only the best one is known for each chunk.
So the ancestors of a run of chunks, found by best bases alone, have holes and miss something at both ends:

    chunks      |   a   |   b    |  c  |      bases of a: A, B    of b: B, C    of c: D
    ancestors   |  A  |   B    |    C    | D |    found: A B . D;   C is stored next to B

A container's chunks lie in stream order, those that were duplicates left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._colocated_rows import rows_beside
else:
    from nearkin_shared.kernels.reference.colocated_rows_reference import rows_beside

__all__ = ["rows_beside"]
