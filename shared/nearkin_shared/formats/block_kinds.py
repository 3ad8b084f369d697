"""Blocks that a round gathered. Invariant: told by the directory alone, and a wrong guess costs bytes, never chunks.

gathered    holds chunks of several versions, some of them behind all that the container's own recipes name
referring   is nothing but the bytes of a chunk that lies in a gathered block
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import Bools


def reference_blocks(directory: Directory) -> Bools:
    """Return which blocks are nothing but the bytes of what they lean on."""
    return _with_rank(directory, container_layout.REFERENCE_RANK)


def merged_blocks(directory: Directory) -> Bools:
    """Return which blocks hold what was taken in. Of those that lean on others their chunks tell.

    Of those that lean on nothing: chunks behind all those that the container's own recipes name; where some of these
    are gone, blocks whose chunks do not lie one behind the other among those that lean on nothing. What is put lies so.
    """
    chunks, own_rows = directory.chunks, directory.own_rows
    found = np.zeros(len(directory.blocks), np.bool_)
    rows = np.flatnonzero(chunks.there & (chunks.depths == 0))
    blocks = chunks.blocks[rows]
    if own_rows is not None:
        found[blocks[rows >= own_rows]] = True
    elif len(rows):
        first = np.append(True, blocks[1:] != blocks[:-1])
        found[np.bincount(blocks[first], minlength=len(found)) > 1] = True
    raw: Bools = directory.blocks.kinds == container_layout.RAW
    return (found & raw) | _with_rank(directory, container_layout.MERGED_RANK)


def _with_rank(directory: Directory, rank: int) -> Bools:
    chunks = directory.chunks
    found = np.zeros(len(directory.blocks), np.bool_)
    found[chunks.blocks[chunks.there & (chunks.ranks == rank)]] = True
    return found
