"""Arenas into segments. Invariant: what a batch holds follows from the bytes alone, never from how a source gave them.

arena   |      carry | new bytes of this batch ... |      filled from CARRY_BYTES_MAX on by the caller's thread
               ^ the uncut tail of the batch before, put here by the cutting thread
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from nearkin import tally
from nearkin.config import Settings
from nearkin.fingerprints import Fingerprinter
from nearkin.limits import SEGMENT_BYTES_MAX
from nearkin.memory import mapped
from nearkin.records import U8, SegmentBatch
from nearkin.stage import Facts
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns

CARRY_BYTES_MAX = 2 * SEGMENT_BYTES_MAX
"""A segment and a chunk at their bounds, and a chunk may be a segment: what a batch may leave for the next one."""


@dataclass(frozen=True, slots=True)
class Filled:
    """An arena and whose bytes its runs are. Where the arena before ended inside a blob, the first run goes on."""

    arena: U8
    runs: tuple[BlobRun, ...]


class Arenas:
    """Arenas of one size. A fresh 5 MiB costs 1,300 page faults, so those that are no longer read come back."""

    def __init__(self, batch_bytes: int) -> None:
        self.bytes = CARRY_BYTES_MAX + batch_bytes
        self._spares: SimpleQueue[U8] = SimpleQueue()

    def take(self) -> U8:
        """Return one that is no longer read, or a new one."""
        try:
            return self._spares.get_nowait()
        except Empty:
            return mapped(self.bytes)

    def give_back(self, payload: U8) -> None:
        """Take back the arena that `payload` is a slice of, if it is one."""
        arena = payload if len(payload) == self.bytes else payload.base
        if isinstance(arena, np.ndarray) and len(arena) == self.bytes:
            self._spares.put(arena)


class Cutter:
    """Cuts, names and groups; keeps the uncut tail between batches. For one thread."""

    def __init__(
        self, settings: Settings, fingerprinter: Fingerprinter, arenas: Arenas, hand_on: Callable[[SegmentBatch], None]
    ) -> None:
        self._stage = ChunkerStage(settings, fingerprinter)
        self._arenas = arenas
        self._hand_on = hand_on
        self._carry: U8 = np.zeros(0, np.uint8)

    def cut(self, filled: Filled) -> None:
        """Hand all certain segments on."""
        arena, runs = filled.arena, list(filled.runs)
        carried = len(self._carry)
        if carried:
            first = runs[0]
            assert carried <= CARRY_BYTES_MAX <= first.start, carried
            arena[first.start - carried : first.start] = self._carry
            runs[0] = BlobRun(first.blob, first.start - carried, first.stop, first.final)
        with tally.STAGE_SECONDS.time("chunker"):
            chunked = self._stage.decide(FrameRuns(arena[: runs[-1].stop], tuple(runs)), Facts())
        last = runs[-1]
        left = 0 if last.final else last.stop - max(chunked.consumed, last.start)
        self._carry = arena[last.stop - left : last.stop].copy()
        if chunked.segments.segments:
            self._hand_on(chunked.segments)
        else:
            self._arenas.give_back(arena)
