"""Compaction. Invariant: a container written anew keeps its id, and every number in it means what it did.

    generation 0   block 0 | block 1 | block 2          chunks 0 1 2 3 4 5 6 7 8
    generation 1   block 0 |         |         | block 3      0 1 2 . . . 6 . 8

So no recipe, base, manifest or index entry that names a chunk has to change. Blocks that stay whole are copied as they
are; of the others what is kept is decoded, compared with its name, and encoded again under a number of its own.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin.fingerprints import Fingerprinter
from nearkin.formats import layout
from nearkin.formats.directory import Directory
from nearkin.frozen import frozen
from nearkin.records import U32, Bools, ContainerId, Locations
from nearkin.store.bases import BaseReader
from nearkin.store.containers import ContainerStore
from nearkin_janitor.gathered import Gatherer
from nearkin_janitor.generation import NewGeneration, VerifiedReader
from nearkin_janitor.heirs import Heirs
from nearkin_janitor.laying import Laying
from nearkin_janitor.plan import Drop
from nearkin_janitor.reach import Masks, blocks_leaning, is_in
from nearkin_janitor.recoder import Recoder
from nearkin_janitor.settled import gathered, referring
from nearkin_janitor.tenants import Tenants

GROUP_CHUNKS_MAX = 32
GROUP_BYTES_MAX = 1 << 20
"""Chunks that are tried together against all that any of them is offered: what was cut elsewhere finds both sides."""


@frozen
class Rebasing:
    """Chunks on which nothing is to lean any more, and where those that do find others."""

    given_up: Masks
    heirs: Heirs


class Rewriter:
    """Makes new generations of containers. Reads one container's blocks, and what they lean on, at a time."""

    def __init__(
        self, containers: ContainerStore, tenants: Tenants, any_fingerprinter: Fingerprinter, recode: Recoder
    ) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._recode = recode
        verified = VerifiedReader(self._containers, tenants, any_fingerprinter)
        self._laying = Laying(self._containers, verified, recode)
        self._bases = BaseReader(self._containers)
        self.gatherer = Gatherer(self._containers, tenants, verified, recode)
        """Makes the generations that hold what was gathered."""

    def over(self, containers: ContainerStore) -> Rewriter:
        """Return what does the same for the containers of another store, such as one that is a preview's."""
        return Rewriter(containers, self._tenants, self._any_fingerprinter, self._recode)

    def rewritten(self, container: ContainerId, drop: Drop, rebasing: Rebasing | None = None) -> bytes:
        """Return a container without what is dropped. Blocks that lean on what is given up lean on other chunks then.

        Raises Corrupt where what is kept is not what its name says.
        """
        directory = self._containers.directory(container)
        old = directory.chunks
        kept = old.there.copy()
        kept[drop.chunks] = False
        new = NewGeneration(self._containers, directory, kept)
        again = blocks_leaning(directory, {} if rebasing is None else rebasing.given_up)
        joined = self._joined(directory, kept)
        raw = kept & joined[old.blocks]
        if rebasing is not None:
            settled = self._lay_settled(new, directory, kept, rebasing)
            again |= directory.blocks.depths > 0  # what leans on living ones too, or newer puts find it as deep as ever
            rows = np.flatnonzero(kept & again[old.blocks] & ~settled[old.blocks])
            raw[self._lay_rebased(new, directory, rows, rebasing)] = True
        for number in np.flatnonzero((directory.blocks.raw > 0) & ~again & ~joined).tolist():
            rows = np.flatnonzero(old.there & (old.blocks == number))
            rows_kept = rows[kept[rows]]
            if len(rows_kept) == len(rows):
                new.copy(number)
            elif len(rows_kept):
                self._laying.some_of(new, directory, number, rows_kept)
        self._laying.raw(new, directory, np.flatnonzero(raw))
        return new.encoded(drop.segments)

    def _lay_settled(self, new: NewGeneration, directory: Directory, kept: Bools, rebasing: Rebasing) -> Bools:
        """Lay blocks again that lean on others and are gathered, or refer to such; return which these are."""
        given_up, depths = rebasing.given_up, rebasing.heirs.depths(directory.container)
        settled = (directory.blocks.depths > 0) & gathered(directory)
        settled |= referring(directory) & ~blocks_leaning(directory, given_up)
        for number in np.flatnonzero(settled).tolist():
            rows = np.flatnonzero(kept & (directory.chunks.blocks == number))
            if len(rows):
                self._laying.less_deep(new, directory, number, rows, given_up)
                depths[rows] = new.depths[rows]
        return settled

    def _joined(self, directory: Directory, kept: Bools) -> Bools:
        """Return which raw blocks become one: those of which little is kept, if there are several.

        Apart they took 50 % of their bytes, together 43 (30 days of small edits, bench/gc_days.py).
        """
        blocks = directory.blocks
        left = np.bincount(directory.chunks.blocks, directory.chunks.lengths * kept, len(blocks))
        small: Bools = (
            (blocks.raw > 0) & (blocks.kinds == layout.RAW) & (left > 0) & (left * 2 < self._recode.raw_bytes)
        )
        return small if np.count_nonzero(small) > 1 else np.zeros(len(blocks), np.bool_)

    def _lay_rebased(
        self, new: NewGeneration, directory: Directory, rows: NDArray[np.intp], rebasing: Rebasing
    ) -> NDArray[np.intp]:
        """Give chunks other bases, in stream order; return the rows that find none.

        Decided group by group: each may lean on what was decided before.
        """
        container, old, heirs = directory.container, directory.chunks, rebasing.heirs
        depths, blocks = heirs.depths(container), self._recode.fresh()
        without = [np.zeros(0, np.intp)]
        for group in _groups(heirs.family(container, rows.astype(np.uint32)), old.lengths[rows]):
            some = rows[group]
            ordinals, payload = some.astype(np.uint32), self._laying.verified(directory, some)
            best = old.bases.take(some)
            stay = best.take((best.containers != 0) & ~is_in(rebasing.given_up, best))
            below = np.minimum(heirs.depths_below(container, ordinals), np.uint8(self._recode.depth_max))
            offered = Locations.join([heirs.offered(container, ordinals, below), stay]).distinct()
            contents = self._bases.contents(offered)
            mine = offered.containers == container  # read from what is there, and as deep as they are going to be
            contents.depths[mine] = depths[offered.ordinals[mine]]
            depths[some] = blocks.add(some, payload, old.lengths[some], contents, below)
            without.append(some[depths[some] == 0])
        self._laying.made(new, directory, blocks.end())
        depths[rows] = new.depths[rows]
        return np.concatenate(without)


def _groups(family: NDArray[np.int32], lengths: U32) -> list[slice]:
    """Return the runs of chunks that are tried together: none holds two of one family, in case one leans on another."""
    bounds, seen, held_bytes = [0], set[int](), 0
    for row, (of, length_bytes) in enumerate(zip(family.tolist(), lengths.tolist(), strict=True)):
        if row - bounds[-1] >= GROUP_CHUNKS_MAX or held_bytes + length_bytes > GROUP_BYTES_MAX or of in seen:
            bounds.append(row)
            seen, held_bytes = set(), 0
        seen.add(of)
        held_bytes += length_bytes
    bounds.append(len(family))
    return [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
