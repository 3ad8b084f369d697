"""Decide which base candidates are tried.

A trial reads a candidate and decodes its block. If few candidates of one kind become bases in a blob, most of its
batches skip that kind; the others detect a change. Kinds are locality candidates (8 % become bases in a Debian image
with other packages, 95 to 100 % in releases and dumps), and each rank of super-features: nearly all of the first, 3 to
16 % of the third where the first two have no match.

Invariant: the decision depends on the blob's own batches only, never on the clock.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from nearkin_shared.types import U8, Bools

FEW = 1 / 8
"""Minimum share of fresh chunks with locality candidates that must find a base among them."""
CHUNKS_MIN = 512
"""Chunks before the first decision: blobs below about 5 MiB of fresh data are always tried."""
FEW_OF_RANK = 1 / 4
"""Minimum share for each rank: every trial may decode a block."""
RANK_CHUNKS_MIN = 64
"""Chunks before the first decision on a rank: super-features match one chunk in twenty of a Debian image."""
CHUNKS_MEMORY = 4096
"""Window of remembered results, in chunks; at most twice as many."""
EVERY = 8
"""While a kind is skipped, one batch in this many is tried."""


class CandidateBudget:
    """Decides whether the next batch tries candidates of one kind."""

    def __init__(self, few: float = FEW, chunks_min: int = CHUNKS_MIN) -> None:
        """`few`: share of successes below which batches are skipped; 0: never."""
        self._few = few
        self._chunks_min = chunks_min
        self._blob: Hashable = None
        self._tried = self._found = self._skipped = 0

    def should_try(self, blob: Hashable) -> bool:
        """Return whether to try a batch of `blob`; None: of several blobs, which is always tried."""
        if blob is None or blob != self._blob:
            self._blob = blob
            self._tried = self._found = self._skipped = 0
        if self._tried < self._chunks_min or self._found >= self._few * self._tried or self._skipped >= EVERY - 1:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def record_result(self, tried: int, found: int) -> None:
        """Record a tried batch: of `tried` chunks with candidates, `found` have a base."""
        self._tried += tried
        self._found += found
        if self._tried > CHUNKS_MEMORY:
            self._tried, self._found = self._tried // 2, self._found // 2


class RankBudget:
    """Decides which ranks of super-features the next batch tries, each by its own results."""

    def __init__(self, few: float = FEW_OF_RANK) -> None:
        """`few`: as of CandidateBudget, for each rank."""
        self._few = few
        self._of: dict[int, CandidateBudget] = {}

    def should_request(self, blob: Hashable, ranks: int) -> Bools:
        """Return bool[ranks]: whether a batch requests candidates of a rank.

        `blob` as of CandidateBudget.
        """
        return np.array([self._trials(rank).should_try(blob) for rank in range(ranks)], np.bool_)

    def should_try(self, blob: Hashable, ranks: U8) -> Bools:
        """Return bool[n]: whether to try each requested candidate, by its rank.

        `blob` as of CandidateBudget.
        """
        tried = np.ones(len(ranks), np.bool_)
        for rank in np.flatnonzero(np.bincount(ranks)).tolist():
            if not self._trials(rank).should_try(blob):
                tried[ranks == rank] = False
        return tried

    def _trials(self, rank: int) -> CandidateBudget:
        return self._of.setdefault(rank, CandidateBudget(self._few, RANK_CHUNKS_MIN))

    def record_result(self, ranks: U8, found: Bools) -> None:
        """Record which of the tried candidates became bases."""
        counts, finds = np.bincount(ranks), np.bincount(ranks[found], minlength=int(ranks.max(initial=0)) + 1)
        for rank in np.flatnonzero(counts).tolist():
            self._trials(rank).record_result(int(counts[rank]), int(finds[rank]))
