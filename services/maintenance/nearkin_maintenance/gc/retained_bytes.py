"""Sum up the bytes that a GC run leaves, by the reason that retains them.

    undelete        needed only by deleted versions that can be undeleted
    bases           read by no version, but bases of chunks that stay
    pending_delete  needed by no chunk: waits for the end of the grace
    shared_blocks   needed by no chunk, but stored in a block or container with needed chunks

Invariant: a byte is counted once, under the first reason that applies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nearkin_maintenance.gc.mark import LiveSet, Masks, mask_of
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.pending_delete_record import Record
from nearkin_shared.types import Bools

NAME_AND_ROW_BYTES = 31
"""Bytes of a chunk in a directory: its name, 28 bytes, and 3.4 of all tables (docs/adr/0001)."""


def retained_bytes_by_reason(
    live_set: LiveSet, readable_set: LiveSet, ids: Iterable[int], record: Record
) -> dict[str, int]:
    """Return the bytes of chunks that no readable version names, by reason.

    Shares of blocks are estimates.
    """
    by_recipe = readable_set.chunks
    needed = readable_set.transitive_closure(by_recipe)
    closure = live_set.transitive_closure(live_set.chunks)
    sums = dict.fromkeys(("undelete", "bases", "pending_delete", "shared_blocks"), 0)
    for container in ids:
        directory = live_set.readable(container)
        if directory is None:
            continue
        shares = bytes_of_chunks(directory)
        is_read, is_needed, is_kept = (_mask(masks, container, directory) for masks in (by_recipe, needed, closure))
        is_pending = np.zeros(len(shares), np.bool_)
        if container in record:
            is_pending[record[container].chunks] = True
        sums["bases"] += int(shares[is_needed & ~is_read].sum())
        sums["undelete"] += int(shares[is_kept & ~is_needed].sum())
        sums["pending_delete"] += int(shares[is_pending & ~is_kept].sum())
        sums["shared_blocks"] += int(shares[~is_kept & ~is_pending].sum())
    return sums


def bytes_of_chunks(directory: Directory) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return float64[n]: each chunk's share of its stored block and of the directory."""
    blocks, chunks = directory.blocks, directory.chunks
    ratio = (blocks.stored + float(container_layout.BLOCK.size)) / np.maximum(blocks.raw, 1)
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = chunks.encoded * ratio[chunks.blocks] + NAME_AND_ROW_BYTES
    shares[~chunks.there] = 0
    return shares


def _mask(masks: Masks, container: int, directory: Directory) -> Bools:
    return mask_of(masks.get(container, np.zeros(0, np.bool_)), len(directory.chunks))
