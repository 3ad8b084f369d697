"""Limit depth: replace the deepest bases by shallower ones where that costs little.

A chain at the maximum depth does not grow: each later chunk depends on the deepest ancestor allowed, which becomes
older with every version, so that the tenth version after stores the changes of ten versions again. So the bytes that a
chunk may take with its bases are bounded by their depth; a chunk above the bound moves a level up, and starts a branch
for the chunks after it:

    depth   0 <- 1 <- 2 <- 3 <- 4      bytes with bases of depth 3: at most FULL_REST of those without
                      ^    3 <- 4      ... of depth 2: GROWTH times that
                      +- 3 <- 4        and so on; if no level fits, nothing changes

Invariant: a base is replaced only by ancestors of itself that save enough bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.base_choice import PolicyChoice, Targets, try_bases, without_bases
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, Bools, Locations, bounds_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

FULL_REST = 0.08
"""If a chunk with bases at the maximum depth takes more than this share of its own bytes, shallower ones are tried."""
GROWTH = 2
"""The bound grows by this factor with each level."""
LEVELS_MAX = 3
"""Levels to try: one more would allow more bytes than the bound for any base."""


@frozen
class OverdeepChunks:
    """Chunks at the maximum depth that take too many bytes, and the bases to replace.

    `chunks` intp[m]: of the batch's fresh ones; chunk i has rows bounds[i] to bounds[i + 1] of `asked`, each to be
    replaced by an ancestor below `depth_below`.
    """

    chunks: NDArray[np.intp]
    ranks: U8
    bounds: U32
    asked: Locations
    max_depth: int
    level: int = 1

    @property
    def depth_below(self) -> int:
        """Return the depth below which bases are requested."""
        return self.max_depth - self.level

    def next_level(self, which: Bools) -> OverdeepChunks | None:
        """Return some of the chunks for the next level, or None at the last level."""
        if not which.any() or self.level == min(LEVELS_MAX, self.max_depth - 1):
            return None
        counts = np.diff(self.bounds)
        asked = self.asked.take(np.repeat(which, counts))
        return OverdeepChunks(
            self.chunks[which], self.ranks[which], bounds_of(counts[which]), asked, self.max_depth, self.level + 1
        )


def find_overdeep(parts: Sequence[PolicyChoice], max_depth: int) -> OverdeepChunks | None:
    """Return the chunks with bases at the maximum depth that take too many bytes, or None."""
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
    parts: Sequence[PolicyChoice],
    asked: OverdeepChunks,
    targets: Targets,
    bases: Contents,
    helpers: ThreadPool = SERIAL,
) -> tuple[list[PolicyChoice], OverdeepChunks | None]:
    """Return `parts` with shallower `bases` for the `asked` chunks that fit, and the others.

    The others are for the next level.
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
    return [*others, PolicyChoice(asked.chunks, without_bases(chosen, ~fits), bases, asked.ranks)], above
