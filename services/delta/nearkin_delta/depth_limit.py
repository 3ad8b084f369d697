"""Depth as a budget. Invariant: a base is given up only for shallower ones of its own, and where these are worth it.

A chain that is full stays full: each chunk after it leans on the deepest ancestor that still may be leaned on, which
grows older with every version, and the tenth version behind the cap tells again what changed in ten. So how much a
chunk may leave over with its bases is bounded by how deep they lie, and what leaves more goes a level up, where it
begins a branch that those after it lean on:

    depth   0 <- 1 <- 2 <- 3 <- 4      what is left over beside bases of depth 3: at most FULL_REST
                      ^    3 <- 4      ... of depth 2: GROWTH times that
                      +- 3 <- 4        and so on; where nothing fits all stays as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.base_choice import Part, Targets, try_bases, without_bases
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, Bools, Locations, bounds_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

FULL_REST = 0.08
"""With bases as deep as they may be a chunk takes this share of what it takes alone, or shallower ones are tried."""
GROWTH = 2
"""Each level up may leave so many times as much over."""
LEVELS_MAX = 3
"""Levels that are tried: one more would allow more than a base is worth at all."""


@frozen
class OverdeepChunks:
    """Chunks at the end of a full chain that leave too much over, and what may serve them so many levels up.

    `chunks` intp[m] of the batch's fresh ones; chunk i has rows bounds[i] to bounds[i + 1] of what is `asked`, each to
    be replaced by an ancestor less deep than `depth_below`.
    """

    chunks: NDArray[np.intp]
    ranks: U8
    bounds: U32
    asked: Locations
    max_depth: int
    level: int = 1

    @property
    def depth_below(self) -> int:
        """Return below which depth bases are wanted."""
        return self.max_depth - self.level

    def next_level(self, which: Bools) -> OverdeepChunks | None:
        """Return some of the chunks for the next level up, None where there is none."""
        if not which.any() or self.level == min(LEVELS_MAX, self.max_depth - 1):
            return None
        counts = np.diff(self.bounds)
        asked = self.asked.take(np.repeat(which, counts))
        return OverdeepChunks(
            self.chunks[which], self.ranks[which], bounds_of(counts[which]), asked, self.max_depth, self.level + 1
        )


def find_overdeep(parts: Sequence[Part], max_depth: int) -> OverdeepChunks | None:
    """Return the chunks whose bases are as deep as they may be and leave too much over, None where there are none."""
    if max_depth < 2:
        return None
    chunks, ranks, counts, asked = [], [], [], []
    for part in parts:
        chosen = part.chosen
        full = chosen.found & (chosen.depths >= max_depth - 1) & (chosen.rest > FULL_REST * chosen.alone)
        chunks.append(part.chunks[full])
        ranks.append(part.ranks[full])
        counts.append(np.diff(chosen.bounds)[full])
        asked.append(part.bases.locations.take(chosen.rows[np.repeat(full, np.diff(chosen.bounds))]))
    if not sum(map(len, chunks)):
        return None
    bounds = bounds_of(np.concatenate(counts))
    return OverdeepChunks(np.concatenate(chunks), np.concatenate(ranks), bounds, Locations.join(asked), max_depth)


def reduce_depth(
    parts: Sequence[Part], asked: OverdeepChunks, targets: Targets, bases: Contents, helpers: ThreadPool = SERIAL
) -> tuple[list[Part], OverdeepChunks | None]:
    """Return `parts` with shallower `bases` for those of the `asked` chunks that leave little enough over with them.

    And the others, for the level above.
    """
    each = np.arange(len(asked.chunks) + 1, dtype=np.uint32)
    theirs = asked.bounds if bases.bounds is None else bases.bounds
    chosen = try_bases(targets.take(asked.chunks), each, bases, theirs, helpers)
    fits = chosen.found & (chosen.rest <= FULL_REST * GROWTH**asked.level * chosen.alone)
    above = asked.next_level(~fits)
    if not fits.any():
        return list(parts), above
    moved = np.zeros(len(targets), np.bool_)
    moved[asked.chunks[fits]] = True
    others = [replace(part, chosen=without_bases(part.chosen, moved[part.chunks])) for part in parts]
    return [*others, Part(asked.chunks, without_bases(chosen, ~fits), bases, asked.ranks)], above
