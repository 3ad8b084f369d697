"""Levels of containers: which of their tags are hooks.

    level k     a tag is a hook with probability 2^-k, the same tags in each container; 0: all
    stable      a batch has found names in the container: fewer hooks lead to it (Sungem, section 3.3)

A stream is followed from container to container, so one hook is enough to find all its names.

Invariant: a level never falls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.tag_table import LEVEL_MAX, tag_mixes
from nearkin_shared.types import U8, U64

LEVEL_FIRST = 0
"""Level of the first containers of a sampled index; tests and measurements set a higher one."""
STABLE_LEVELS = 2
"""By so many levels hooks of stable containers are rarer."""
_RAISED_SHARE = 8
"""One in so many hooks is removed at least when there are too many."""
RUN_CHUNKS = 256
"""Chunks of one container that follow each other in a later version, where the loss is estimated."""
_STABLE = np.uint8(0x80)
_LEVEL = np.uint8(0x0F)


class HookLevels:
    """Level of each container number."""

    def __init__(self, start: int = 0, saved: U8 | None = None, *, is_fixed: bool = False) -> None:
        """Create the levels; with `is_fixed` none is ever raised."""
        self._is_fixed = is_fixed
        self.start: int = start
        """Level of the next container."""
        self._marks: U8 = np.zeros(64, np.uint8) if saved is None else saved.copy()
        self._count = 0 if saved is None else len(saved)
        self._highest = 0
        self._note_highest()

    def _note_highest(self) -> None:
        levels = self.levels
        self._highest = max(self.start, int(levels.max(initial=0)))

    @property
    def marks(self) -> U8:
        """Return level and stability of each number, as they are saved."""
        return self._marks[: self._count]

    @property
    def levels(self) -> U8:
        """Return the level of each number."""
        return self.marks & _LEVEL

    @property
    def are_zero(self) -> bool:
        """Return whether all tags are hooks."""
        return self._highest == 0

    def loss(self, is_live: NDArray[np.bool_]) -> float:
        """Return the share of runs of RUN_CHUNKS chunks of live containers that have no hook."""
        levels = self.levels[is_live].astype(np.float64)
        return float(((1 - 0.5**levels) ** RUN_CHUNKS).mean()) if len(levels) else 0.0

    def append(self) -> None:
        """Give the next number the level of new containers."""
        if self._count == len(self._marks):
            self._marks = np.concatenate([self._marks, np.zeros(max(64, self._count), np.uint8)])
        self._marks[self._count] = self.start
        self._count += 1

    def hooks(self, number: int, tags: U64) -> U64:
        """Return those tags of a container that are hooks."""
        level = int(self._marks[number] & _LEVEL)
        return tags if level == 0 else tags[tag_mixes(tags) >> np.uint32(32 - level) == 0]

    def mark_stable(self, number: int) -> None:
        """Note that names were found in a container."""
        self._marks[number] |= _STABLE

    def raise_lowest(self, is_live: NDArray[np.bool_]) -> bool:
        """Raise levels so that one in eight hooks is removed; return whether any could be raised.

        The lowest first: those of stable containers, then those of older ones.
        """
        if self._is_fixed:
            return False
        levels = self.levels.astype(np.int16)
        ranks = levels - np.where(self.marks & _STABLE, STABLE_LEVELS, 0)
        open_numbers = np.flatnonzero(is_live & (levels < LEVEL_MAX))
        if not len(open_numbers):
            return False
        order = open_numbers[np.argsort(ranks[open_numbers], kind="stable")]
        removed = np.cumsum(0.5 ** (levels[order] + 1))
        total = (0.5 ** levels[is_live]).sum()
        raised = order[: int(np.searchsorted(removed, total / _RAISED_SHARE)) + 1]
        self._marks[raised] += np.uint8(1)
        ranks[raised] += 1
        self.start = max(self.start, int(ranks[open_numbers].min()))
        self._note_highest()
        return True
