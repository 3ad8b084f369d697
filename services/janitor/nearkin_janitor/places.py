"""Places in the stream. Invariant: what leans on a chunk lies at about its place, whatever container it is in.

    c1   0   1   2   3   4      a place for every few chunks: where the best bases of most of them lie
    c2   0   1   1   2   4      of those of which none leans on another container: between the places around them
    c9   5   6                  a container of which none does begins behind all others

Memory: 8 bytes for every 16 chunks, and 4 for each chunk of a container that took something in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin.formats.directory import Directory
from nearkin.records import grouped
from nearkin_janitor.order import leaning_last
from nearkin_janitor.reach import Masks, Reach
from nearkin_janitor.settled import gathered

EVERY_CHUNKS = 16
AROUND = 2
"""Places are the medians of those around, so many on each side: what resembles something far away is no move."""

F64 = NDArray[np.float64]


class Places:
    """Where in the stream the chunks of some containers lie, in chunks of those that lean on no other."""

    def __init__(self) -> None:
        self._of: dict[int, F64] = {}
        self._stands_at: dict[int, NDArray[np.int32]] = {}
        """By container and ordinal, of those that took something in: the chunk at whose place each stands."""

    def __contains__(self, container: int) -> bool:
        return container in self._of

    def put(self, container: int, of: F64, stands_at: NDArray[np.int32]) -> None:
        """Add a container: the places of every few of its chunks, and at which of these each stands."""
        self._of[container] = of
        if np.any(stands_at != np.arange(len(stands_at))):
            self._stands_at[container] = stands_at

    def at(self, container: int, ordinals: NDArray[np.integer]) -> F64:
        """Return float64[n]: the places of some chunks of a container that is known."""
        known, stands_at = self._of[container], self._stands_at.get(container)
        chunks = ordinals if stands_at is None else stands_at[ordinals]
        found: F64 = np.interp(chunks / EVERY_CHUNKS, np.arange(len(known)) + 0.5, known)
        return found


def places_of(reach: Reach, needed: Masks) -> Places:
    """Return the places of all containers of which something is `needed`. Raises Corrupt."""
    places, end = Places(), 0
    for container in leaning_last(sorted(needed), lambda c: reach.directory(c).leans_on()):
        directory = reach.directory(container)
        stands_at, of_bases = _stands_at(directory), _of_bases(directory, places)
        of_bases[stands_at != np.arange(len(stands_at))] = np.nan
        found = _medians(of_bases)
        if np.isnan(found).all():
            found = np.arange(0.5, len(found)) * EVERY_CHUNKS + end
            end += len(stands_at)
        places.put(container, _smoothed(_filled(found)), stands_at)
    return places


def _stands_at(directory: Directory) -> NDArray[np.int32]:
    """Return for each chunk itself, for one that was taken in the first one of its block."""
    chunks = directory.chunks
    found = np.arange(len(chunks), dtype=np.int32)
    some = np.flatnonzero(gathered(directory)[chunks.blocks] & chunks.there)
    rows = some[np.argsort(chunks.blocks[some], kind="stable")]
    if len(rows):
        begins = np.flatnonzero(np.append(True, np.diff(chunks.blocks[rows]) != 0))
        begun_at = np.repeat(begins, np.diff(np.append(begins, len(rows))))
        behind = rows - rows[begun_at] != np.arange(len(rows)) - begun_at
        found[rows[behind]] = rows[begun_at][behind]
    return found


def _of_bases(directory: Directory, places: Places) -> F64:
    """Return the places of the best bases of chunks, nan where they lie in the same container, or there are none."""
    bases = directory.chunks.bases
    found = np.full(len(bases), np.nan)
    for other, rows in grouped(bases.containers):
        if other in places:
            found[rows] = places.at(other, bases.ordinals[rows])
    return found


def _medians(of_chunks: F64) -> F64:
    """Return the median of every few, nan where there is none."""
    padded = np.full((-(-len(of_chunks) // EVERY_CHUNKS), EVERY_CHUNKS), np.nan)
    padded.reshape(-1)[: len(of_chunks)] = of_chunks
    some = ~np.isnan(padded).all(axis=1)
    found = np.full(len(padded), np.nan)
    found[some] = np.nanmedian(padded[some], axis=1)
    return found


def _filled(found: F64) -> F64:
    """Return places with what lies between those in place of nan."""
    known = np.flatnonzero(~np.isnan(found))
    return np.interp(np.arange(len(found)), known, found[known]).astype(np.float64)


def _smoothed(found: F64) -> F64:
    around = np.lib.stride_tricks.sliding_window_view(np.pad(found, AROUND, mode="edge"), 2 * AROUND + 1)
    smoothed: F64 = np.median(around, axis=1)
    return smoothed
