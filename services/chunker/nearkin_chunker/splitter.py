"""Cut arenas of source bytes into segments.

arena   |      carry | new bytes of this batch ... |      filled from CARRY_BYTES_MAX on as the source returns them
               ^ the uncut tail of the previous batch

Invariant: the content of a batch depends on the bytes alone, never on the sizes in which the source returned them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from nearkin_chunker import BlobRun, ChunkerStage, CutState, FrameRuns, SegmentCutter
from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.observability import counters
from nearkin_shared.types import U8, SegmentBatch
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.memory import mapped

CARRY_BYTES_MAX = 2 * SEGMENT_BYTES_MAX
"""Uncut tail of a batch: a segment and a chunk at their bounds, and a chunk may be a segment."""
SPARES_MAX = 3
"""Idle arenas to keep, as many as are in use: one being filled, one cut and one reduced."""


@frozen
class FilledArena:
    """An arena and the blobs of its bytes.

    If the previous arena ended inside a blob, the first run continues it.

    Unless `full`, more bytes follow after the last run.
    """

    arena: U8
    runs: tuple[BlobRun, ...]
    full: bool = True


class Arenas:
    """Pool of arenas of one size. Thread-safe.

    Of a put of 60 MB of known data, fresh memory takes 5 ms of 80: idle arenas are reused, the last used first.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.bytes = CARRY_BYTES_MAX + batch_bytes
        self._spares: deque[U8] = deque()

    def take(self) -> U8:
        """Return an idle arena or a new one."""
        try:
            return self._spares.pop()
        except IndexError:
            return mapped(self.bytes)

    def give_back(self, payload: U8) -> None:
        """Return to the pool the arena of which `payload` is a slice, if it is one."""
        arena = payload if len(payload) == self.bytes else payload.base
        if isinstance(arena, np.ndarray) and len(arena) == self.bytes and len(self._spares) < SPARES_MAX:
            self._spares.append(arena)


class Cutter:
    """Cuts, fingerprints and groups; keeps the uncut tail between batches. For one thread."""

    def __init__(
        self, settings: Settings, fingerprinter: Fingerprinter, arenas: Arenas, hand_on: Callable[[SegmentBatch], None]
    ) -> None:
        self._stage = ChunkerStage(settings, fingerprinter)
        self._arenas = arenas
        self._pass_on_container = hand_on
        self._carry: U8 = np.empty(CARRY_BYTES_MAX, np.uint8)
        """Buffer for the tail: a new copy per batch would touch new pages per batch."""
        self._carried = 0
        self._open_runs: list[BlobRun] = []
        """Runs of the carried bytes, counted from the first of these."""
        self._cutting: SegmentCutter | None = None
        self._state: CutState | None = None
        """State at the first of the carried bytes."""

    def cut(self, filled: FilledArena) -> None:
        """Cut the new bytes; pass on the complete segments of a full arena."""
        arena, (first, *others) = filled.arena, filled.runs
        start = first.start - self._carried
        if self._cutting is None:
            assert self._carried <= CARRY_BYTES_MAX <= first.start, self._carried
            arena[start : first.start] = self._carry[: self._carried]
            self._cutting = SegmentCutter(self._stage, start, self._state)
        runs = (*self._carried_runs(first), *others)
        last = runs[-1]
        with counters.STAGE_SECONDS.time("chunker"):
            self._cutting.extend(FrameRuns(arena[: last.stop], runs))
            if not filled.full:
                return
            chunked = self._cutting.finish()
        self._carry_on(arena, runs, chunked.consumed)
        self._cutting = None
        if chunked.segments.segments:
            self._pass_on_container(chunked.segments)
        else:
            self._arenas.give_back(arena)

    def _carried_runs(self, first: BlobRun) -> list[BlobRun]:
        """Return the runs of the carried bytes, joined with the first run of the arena."""
        if not self._open_runs:
            return [first]
        runs = [run.moved(first.start - self._carried) for run in self._open_runs]
        if runs[-1].final:
            return [*runs, first]
        return [*runs[:-1], replace(first, start=runs[-1].start)]

    def _carry_on(self, arena: U8, runs: Sequence[BlobRun], consumed: int) -> None:
        """Keep the bytes of the last, unfinished segment, and where its chunks must end."""
        last = runs[-1]
        self._open_runs, self._state = [], None
        if last.final and last.ends_segment:
            self._carried = 0
            return
        first = len(runs) - 1
        while first and runs[first - 1].blob == last.blob and not _ends_segment(runs[first - 1]):
            first -= 1
        start = max(consumed, runs[first].start)
        self._carried = last.stop - start
        assert self._cutting is not None
        self._state = self._cutting.state_at(start)
        self._carry[: self._carried] = arena[start : last.stop]
        self._open_runs = [run.clipped(start) for run in runs[first:] if run.stop > start or run is last]


def _ends_segment(run: BlobRun) -> bool:
    return run.final and run.ends_segment
