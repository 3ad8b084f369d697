# size: needs Directory, which formats of blocks do not import
"""Return the roles of blocks: the container's own record, or in formats before 5 a guess.

merged      a GC run added chunks of other versions, which follow all chunks that the container's own recipes name
reference   contains nothing but slices of a chunk in a merged block

Invariant: only the directory is read, and a wrong guess costs bytes, never chunks.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.formats.container_layout import (
    MERGED,
    MERGED_RANK,
    ORDINARY,
    PATCH,
    RAW,
    REFERENCE,
    REFERENCE_RANK,
)
from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import U8, Bools


def block_roles(directory: Directory) -> U8:
    """Return the role of each block; ORDINARY for a removed one."""
    roles = directory.blocks.roles
    return _guessed_roles(directory) if roles is None else roles


def reference_blocks(directory: Directory) -> Bools:
    """Return a mask of blocks that are slices of chunks in merged blocks."""
    is_reference: Bools = block_roles(directory) == REFERENCE
    return is_reference


def merged_blocks(directory: Directory) -> Bools:
    """Return a mask of merged blocks."""
    is_merged: Bools = block_roles(directory) == MERGED
    return is_merged


def _guessed_roles(directory: Directory) -> U8:
    """Return the roles of blocks in a format that does not record them.

    Patch blocks are recognised by the rank of their chunks. Raw blocks are recognised indirectly: they contain chunks
    after all those that the container's own recipes name. If some recipes were removed, they are those whose chunks
    are not consecutive among chunks at depth 0, as a put writes them.
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
    is_raw, is_patch = directory.blocks.kinds == RAW, directory.blocks.kinds == PATCH
    roles = np.full(len(directory.blocks), ORDINARY, np.uint8)
    roles[is_merged & is_raw | _with_rank(directory, MERGED_RANK) & is_patch] = MERGED
    roles[_with_rank(directory, REFERENCE_RANK) & is_patch] = REFERENCE
    return roles


def _with_rank(directory: Directory, rank: int) -> Bools:
    chunks = directory.chunks
    has_rank = np.zeros(len(directory.blocks), np.bool_)
    has_rank[chunks.blocks[chunks.there & (chunks.ranks == rank)]] = True
    return has_rank
