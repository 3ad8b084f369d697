"""Blocks that a round gathered. Invariant: told by the directory alone, and a wrong guess costs bytes, never chunks.

gathered    holds chunks of several versions, some of them behind all that the container's own recipes name
referring   is nothing but the bytes of a chunk that lies in a gathered block
"""

from __future__ import annotations

import numpy as np

from nearkin.formats import layout
from nearkin.formats.directory import Directory
from nearkin.records import Bools


def referring(directory: Directory) -> Bools:
    """Return which blocks are nothing but the bytes of what they lean on."""
    chunks = directory.chunks
    found = np.zeros(len(directory.blocks), np.bool_)
    found[chunks.blocks[chunks.there & (chunks.ranks == layout.GATHERED_RANK)]] = True
    return found


def gathered(directory: Directory) -> Bools:
    """Return which blocks hold what was taken in: chunks behind all those that the container's own recipes name.

    Where some of these recipes are gone: blocks whose chunks do not lie one behind the other among those of their
    depth. What is put lies so, what was taken in behind all else.
    """
    segments, chunks = directory.segments, directory.chunks
    found = np.zeros(len(directory.blocks), np.bool_)
    if len(segments) and np.all(np.diff(segments.bounds) > 0):
        own = segments.chunks
        ordinals = own.ordinals[own.containers == np.uint64(directory.container)]
        behind = np.arange(len(chunks)) > (int(ordinals.max()) if len(ordinals) else -1)
        found[chunks.blocks[behind & chunks.there]] = True
        return found
    rows = np.flatnonzero(chunks.there)
    rows = rows[np.argsort(chunks.depths[rows], kind="stable")]
    blocks = chunks.blocks[rows]
    first = np.ones(len(rows), np.bool_)
    first[1:] = blocks[1:] != blocks[:-1]
    found[np.bincount(blocks[first], minlength=len(found)) > 1] = True
    return found & ~referring(directory)
