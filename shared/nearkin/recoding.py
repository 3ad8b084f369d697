"""Encoding again what is kept of a block. Invariant: by the same means and checks as in the delta stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nearkin.config import Settings
from nearkin.formats.container import PATCH
from nearkin.store.chunks import offsets_of

if TYPE_CHECKING:
    from nearkin_janitor.rewrite import Part, Recoded


class BlockRecoder:
    """For the janitor, which knows no codec."""

    def __init__(self, settings: Settings) -> None:
        from nearkin_delta.blocks import BlockEncoder

        self._encoder = BlockEncoder(settings.block, settings.delta)

    def __call__(self, part: Part) -> Recoded:
        """Return the smallest way to keep it. Raises Corrupt where it does not decode again."""
        from nearkin_delta.blocks import OpenBlock, Room
        from nearkin_delta.builder import Prefixes
        from nearkin_janitor.rewrite import Recoded

        none, rows = np.zeros(0, np.uint8), np.arange(len(part.lengths))
        block = OpenBlock(0, part.kind, part.depth, len(part.payload), Room.exactly(len(part.payload)))
        if part.kind == PATCH:
            bounds = np.full(len(rows) + 1, len(part.bases), np.uint32)
            bounds[0] = 0  # the first chunk brings all bases, in their order: they fitted when the block was made
            offsets = offsets_of(part.base_lengths)
            block.lean_on(
                Prefixes(bounds, part.bases, part.base_payload, offsets, part.base_lengths), rows, part.lengths
            )
        block.append((part.payload, none), np.zeros(len(rows), np.int32), offsets_of(part.lengths), part.lengths)
        block.took(part.best)
        self._encoder.forget()  # a dry run tells what each comes to, in whatever order they are written then
        closed = self._encoder.close(block)
        return Recoded(closed.block, closed.prefix, closed.encoded)
