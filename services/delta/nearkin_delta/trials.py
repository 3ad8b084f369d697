"""When neighbours are tried as bases. Invariant: it follows from the blob's own batches alone, never from the clock.

To try a chunk's old neighbours they are read and decoded. In a blob where few of them turn out to be bases (8 % in a
Debian image with other packages, 95 to 100 % in releases and dumps) most batches do without; those in between tell
when that changes. Super-features go on: they name few candidates.
"""

from __future__ import annotations

from collections.abc import Hashable

FEW = 1 / 8
"""Of a blob's fresh chunks that had neighbours to try so many at least must find a base among them."""
CHUNKS_MIN = 1024
"""Nothing is concluded from fewer: blobs below some 10 MiB of fresh data are always tried."""
CHUNKS_MEMORY = 4096
"""What was found in so many chunks, twice as many at most, is remembered."""
EVERY = 4
"""Meanwhile one batch in so many is tried."""


class Trials:
    """Whether the next batch's neighbours are tried."""

    def __init__(self, few: float = FEW) -> None:
        """`few`: below which share of finds batches are left out; 0: none ever."""
        self._few = few
        self._blob: Hashable = None
        self._tried = self._found = self._skipped = 0

    def wanted(self, blob: Hashable) -> bool:
        """Return whether to try a batch that belongs to `blob`, and to it alone; None: to several, which are tried."""
        if blob is None or blob != self._blob:
            self._blob = blob
            self._tried = self._found = self._skipped = 0
        if self._tried < CHUNKS_MIN or self._found >= self._few * self._tried or self._skipped >= EVERY - 1:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def heard(self, tried: int, found: int) -> None:
        """Take what came out for a batch that was tried: of `tried` chunks with neighbours `found` have a base."""
        self._tried += tried
        self._found += found
        if self._tried > CHUNKS_MEMORY:
            self._tried, self._found = self._tried // 2, self._found // 2
