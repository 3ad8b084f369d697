# size: selects the compiled kernel or its reference
"""Map tags of chunk names to the numbers of the containers that may hold them.

Invariant: a container that was put for a tag is among the tag's candidates until it is removed, or it was counted as
dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._tag_table import (
        FILTER_BITS_MAX,
        FILTER_BITS_MIN,
        LEVEL_MAX,
        NUMBER_MAX,
        PARTITIONS,
        TagTable,
        tag_mixes,
    )
else:
    from nearkin_shared.kernels.reference.tag_table_reference import (
        FILTER_BITS_MAX,
        FILTER_BITS_MIN,
        LEVEL_MAX,
        NUMBER_MAX,
        PARTITIONS,
        TagTable,
        tag_mixes,
    )

__all__ = ["FILTER_BITS_MAX", "FILTER_BITS_MIN", "LEVEL_MAX", "NUMBER_MAX", "PARTITIONS", "TagTable", "tag_mixes"]
