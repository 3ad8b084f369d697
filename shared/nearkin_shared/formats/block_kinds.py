# size: needs Directory, which formats of blocks do not import
"""Recognise merged blocks and reference blocks by the directory.

merged      contains chunks of several versions; some follow all chunks that the container's own recipes name
reference   contains nothing but a slice of a chunk in a merged block

Invariant: only the directory is read, and a wrong guess costs bytes, never chunks.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import Bools


def reference_blocks(directory: Directory) -> Bools:
    """Return a mask of blocks that are slices of chunks in merged blocks."""
    return _with_rank(directory, container_layout.REFERENCE_RANK)


def merged_blocks(directory: Directory) -> Bools:
    """Return a mask of merged blocks.

    Delta blocks are recognised by the rank of their chunks. Raw blocks are recognised indirectly: they contain chunks
    after
    all those that the container's own recipes name. If some recipes were removed, they are those whose chunks are not
    consecutive among chunks at depth 0, as a put writes them.
    """
    chunks, own_rows = directory.chunks, directory.own_rows
    is_merged = np.zeros(len(directory.blocks), np.bool_)
    rows = np.flatnonzero(chunks.there & (chunks.depths == 0))
    blocks = chunks.blocks[rows]
    if own_rows is not None:
        is_merged[blocks[rows >= own_rows]] = True
    elif len(rows):
        starts_run = np.append(True, blocks[1:] != blocks[:-1])
        is_merged[np.bincount(blocks[starts_run], minlength=len(is_merged)) > 1] = True
    raw: Bools = directory.blocks.kinds == container_layout.RAW
    return (is_merged & raw) | _with_rank(directory, container_layout.MERGED_RANK)


def _with_rank(directory: Directory, rank: int) -> Bools:
    chunks = directory.chunks
    is_merged = np.zeros(len(directory.blocks), np.bool_)
    is_merged[chunks.blocks[chunks.there & (chunks.ranks == rank)]] = True
    return is_merged
