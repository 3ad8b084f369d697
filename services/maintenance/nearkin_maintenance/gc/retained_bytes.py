"""What holds the rest. Invariant: a byte is counted once, under the first reason that holds it.

undelete        only versions that are deleted, and can be brought back, need it
bases           no version reads it, but blocks that stay lean on it
pending_delete  no block needs it: it waits for the grace to pass
shared_blocks   no block needs it, but its block or container holds needed chunks too
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
"""A chunk's share of a directory: its name, 28 bytes, and 3.4 of all tables (docs/adr/0001)."""


def retained_bytes_by_reason(
    reach: LiveSet, without_undeletable: LiveSet, ids: Iterable[int], record: Record
) -> dict[str, int]:
    """Return the bytes of chunks that no readable version names, by what holds them; shares of blocks are estimates."""
    read = without_undeletable.chunks
    needed = without_undeletable.transitive_closure(read)
    kept = reach.transitive_closure(reach.chunks)
    sums = dict.fromkeys(("undelete", "bases", "pending_delete", "shared_blocks"), 0)
    for container in ids:
        directory = reach.readable(container)
        if directory is None:
            continue
        shares = bytes_of_chunks(directory)
        by_version, by_base, by_any = (_mask(masks, container, directory) for masks in (read, needed, kept))
        condemned = np.zeros(len(shares), np.bool_)
        if container in record:
            condemned[record[container].chunks] = True
        sums["bases"] += int(shares[by_base & ~by_version].sum())
        sums["undelete"] += int(shares[by_any & ~by_base].sum())
        sums["pending_delete"] += int(shares[condemned & ~by_any].sum())
        sums["shared_blocks"] += int(shares[~by_any & ~condemned].sum())
    return sums


def bytes_of_chunks(directory: Directory) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return float64[n]: each chunk's share of its block as stored, and of the directory."""
    blocks, chunks = directory.blocks, directory.chunks
    ratio = (blocks.stored + float(container_layout.BLOCK.size)) / np.maximum(blocks.raw, 1)
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = chunks.encoded * ratio[chunks.blocks] + NAME_AND_ROW_BYTES
    shares[~chunks.there] = 0
    return shares


def _mask(masks: Masks, container: int, directory: Directory) -> Bools:
    return mask_of(masks.get(container, np.zeros(0, np.bool_)), len(directory.chunks))
