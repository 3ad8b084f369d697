"""Which candidates are tried as bases. Invariant: it follows from the blob's own batches alone, never from the clock.

To try a candidate it is read, and the block decoded in which it lies. In a blob where few of a kind turn out to be
bases most batches do without that kind; those in between tell when that changes. Kinds are the old neighbours of a
chunk (8 % are bases in a Debian image with other packages, 95 to 100 % in releases and dumps), and what each rank of
super-features names: of the first one nearly all, of the third, where the first two agree with nothing, 3 to 16 %.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from nearkin_shared.types import U8, Bools

FEW = 1 / 8
"""Of a blob's fresh chunks that had neighbours to try so many at least must find a base among them."""
CHUNKS_MIN = 512
"""Nothing is concluded from fewer: blobs below some 5 MiB of fresh data are always tried."""
FEW_OF_RANK = 1 / 4
"""Of the chunks for which a rank names a base so many at least must take it: each may cost a block to decode."""
RANK_CHUNKS_MIN = 64
"""Super-features name a base for one chunk in twenty of a Debian image."""
CHUNKS_MEMORY = 4096
"""What was found in so many chunks, twice as many at most, is remembered."""
EVERY = 8
"""Meanwhile one batch in so many is tried."""


class CandidateBudget:
    """Whether the next batch's candidates of one kind are tried."""

    def __init__(self, few: float = FEW, chunks_min: int = CHUNKS_MIN) -> None:
        """`few`: below which share of finds batches are left out; 0: none ever."""
        self._few = few
        self._chunks_min = chunks_min
        self._blob: Hashable = None
        self._tried = self._found = self._skipped = 0

    def should_try(self, blob: Hashable) -> bool:
        """Return whether to try a batch that belongs to `blob`, and to it alone; None: to several, which are tried."""
        if blob is None or blob != self._blob:
            self._blob = blob
            self._tried = self._found = self._skipped = 0
        if self._tried < self._chunks_min or self._found >= self._few * self._tried or self._skipped >= EVERY - 1:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def record_result(self, tried: int, found: int) -> None:
        """Take what came out for a batch that was tried: of `tried` chunks with candidates `found` have a base."""
        self._tried += tried
        self._found += found
        if self._tried > CHUNKS_MEMORY:
            self._tried, self._found = self._tried // 2, self._found // 2


class RankBudget:
    """Which ranks of super-features are tried in the next batch: each by what its own candidates came to."""

    def __init__(self, few: float = FEW_OF_RANK) -> None:
        """`few`: as of Trials, for each rank."""
        self._few = few
        self._of: dict[int, CandidateBudget] = {}

    def should_request(self, blob: Hashable, ranks: int) -> Bools:
        """Return whether a batch asks for candidates of each of so many ranks at all; `blob` as for Trials."""
        return np.array([self._trials(rank).should_try(blob) for rank in range(ranks)], np.bool_)

    def should_try(self, blob: Hashable, ranks: U8) -> Bools:
        """Return whether to try each candidate of a batch that asked for all, by its rank; `blob` as for Trials."""
        tried = np.ones(len(ranks), np.bool_)
        for rank in np.flatnonzero(np.bincount(ranks)).tolist():
            if not self._trials(rank).should_try(blob):
                tried[ranks == rank] = False
        return tried

    def _trials(self, rank: int) -> CandidateBudget:
        return self._of.setdefault(rank, CandidateBudget(self._few, RANK_CHUNKS_MIN))

    def record_result(self, ranks: U8, found: Bools) -> None:
        """Take what came out for those that were tried: which of them are bases."""
        counts, finds = np.bincount(ranks), np.bincount(ranks[found], minlength=int(ranks.max(initial=0)) + 1)
        for rank in np.flatnonzero(counts).tolist():
            self._trials(rank).record_result(int(counts[rank]), int(finds[rank]))
