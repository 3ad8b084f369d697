"""Fill arenas with the bytes of blobs, and note whose they are.

begin -> window, advance, ... | end_chunk | take_over -> end      full arenas, and STEP_BYTES of others, are passed on

Invariant: the runs cover the filled bytes; those of an arena that ends inside a blob go on in the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nearkin_chunker import STEP_BYTES, BlobRun
from nearkin_chunker.splitter import CARRY_BYTES_MAX, Arenas, FilledArena
from nearkin_shared.types import StoredChunks


class ArenaFiller:
    """Fills one arena after another. For one thread."""

    def __init__(
        self, arenas: Arenas, pass_on: Callable[[FilledArena], None], pass_on_part: Callable[[FilledArena], None]
    ) -> None:
        """`pass_on` receives filled arenas, `pass_on_part` growing ones."""
        self._arenas = arenas
        self._pass_on, self._pass_on_part = pass_on, pass_on_part
        self._arena = arenas.take()
        self._used = self._handed = CARRY_BYTES_MAX
        """Up to where the arena is filled, and may be cut."""
        self._runs: list[BlobRun] = []

    def begin(self, blob: int) -> None:
        """Start a blob."""
        self._runs.append(BlobRun(blob, self._used, self._used, False))

    def window(self) -> memoryview:
        """Return where the next bytes may be written; never empty."""
        if self._used == len(self._arena):
            self.fill()
        return self._arena.data[self._used :]

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written to the window."""
        self._used += count
        run = self._runs[-1]
        self._runs[-1] = BlobRun(run.blob, run.start, self._used, False)
        if self._used - self._handed >= STEP_BYTES and self._used < len(self._arena):
            self._pass_on_part(FilledArena(self._arena, tuple(self._runs), full=False))
            self._handed = self._used

    def end_chunk(self, *, ends_segment: bool = False) -> None:
        """End a chunk of the blob in transfer; with `ends_segment` a segment as well."""
        run = self._runs[-1]
        self._runs[-1] = BlobRun(run.blob, run.start, run.stop, True, ends_segment)
        self._runs.append(BlobRun(run.blob, run.stop, run.stop, False))

    def take_over(self, chunks: StoredChunks) -> None:
        """Append stored chunks; a chunk ends before and after them.

        An arena has room for their bytes, which stays as it is.
        """
        self.end_chunk()
        ends, first = np.cumsum(chunks.lengths, dtype=np.int64), 0
        while first < len(chunks):
            done_bytes = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, done_bytes + len(self._arena) - self._used, side="right"))
            if last == first:  # it does not fit
                self.fill()
                continue
            run = self._runs[-1]
            self._used += int(ends[last - 1]) - done_bytes
            part = chunks.take(slice(first, last))
            self._runs[-1] = BlobRun(run.blob, run.start, self._used, True, ends_segment=False, stored=part)
            self.begin(run.blob)
            first = last

    def end(self) -> None:
        """End the blob in transfer."""
        run = self._runs[-1]
        self._runs[-1] = BlobRun(run.blob, run.start, run.stop, True)

    def switch(self, blob: int) -> None:
        """Give the next bytes to another blob, where a segment has ended."""
        self._runs.pop()
        self.begin(blob)

    def fill(self) -> None:
        """Pass the arena on and start the next."""
        last = self._runs[-1]
        self._pass_on(FilledArena(self._arena, tuple(self._runs)))
        self._arena, self._used, self._handed = self._arenas.take(), CARRY_BYTES_MAX, CARRY_BYTES_MAX
        self._runs = []
        if not last.final:
            self.begin(last.blob)

    def flush(self) -> None:
        """Pass on what there is."""
        if self._runs:
            self.fill()

    def close(self) -> None:
        """Give the arena back."""
        self._arenas.give_back(self._arena)
