"""Base choice. Invariant: a base is kept only where a trial shows that it takes enough off its chunk.

    locality    what lay between the same neighbours when these were stored (gap_alignment.py)
    first-fit   the first chunk stored with one of the super-features (Finesse, section 5.1)

The trial counts what chunk and base share (`kernels/shared_bytes.py`) and prices the rest as the block compressor
would.
"""

from __future__ import annotations

from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.delta_or_raw import RAW_CONTEXT
from nearkin_shared.formats.container_layout import LOCALITY_RANK
from nearkin_shared.kernels.shared_bytes import shared_bytes
from nearkin_shared.kernels.size_estimate import compressed_bytes_estimate
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, U64, Bools, Locations, Pieces, bounds_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

GAIN = 0.6
"""With its bases a chunk must be estimated at this share of what it takes without, or it stays without."""
MATCH_BYTES = 5
"""What zstd writes for a match, lengths and offset, on average."""
SAVING_BYTES_MIN = 64
"""A base that saves less is not worth the bytes it adds to the prefix, 3 of them in the directory."""
DEEP_SHARE = 0.1
"""The deepest bases of a chunk are dropped where they make up less than this of what all save."""
BASES_MAX = 8
"""A chunk's bases at most: those that save most."""
PRICE_MIN = 0.05
"""No estimate is made where the bases are worth it even if a byte takes this little after compression."""
PRICE_TRIED = 16
"""Of such chunks one in sixteen is estimated, for what a byte of the others takes; 0.15 where there is none."""
PRICE = 0.15


@frozen
class BaseChoice:
    """For fresh chunks: `found` bool[f]; chunk i has rows bounds[i] to bounds[i + 1] of `rows`, the best base first.

    `rows` index the contents tried; `depths` uint8[f] of the deepest base of each; `rest` uint32[f] the estimate of
    what each takes with them, `alone` float64[f] without.
    """

    found: Bools
    bounds: U32
    rows: NDArray[np.intp]
    depths: U8
    rest: U32
    ranks: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    alone: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


@frozen
class Targets:
    """Fresh chunks to try, cut out of their batch's payload."""

    payload: U8
    offsets: U64
    lengths: U32

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: NDArray[np.intp]) -> Targets:
        """Return some of them."""
        return Targets(self.payload, self.offsets[rows], self.lengths[rows])


def try_bases(
    targets: Targets, target_bounds: U32, bases: Contents, base_bounds: U32, helpers: ThreadPool = SERIAL
) -> BaseChoice:
    """Return the bases that are worth it, of those in each target's group (`shared_bytes` says what a group is)."""
    return _chosen(targets, bases, _shared_bytes(targets, target_bounds, bases.pieces, base_bounds, helpers), helpers)


def try_shallower(targets: Targets, bases: Contents, max_base_depths: U8) -> BaseChoice:
    """Return the bases that are worth it for each target, of those that are less deep than its `max_base_depths`."""
    limits, counts = np.unique(max_base_depths, return_counts=True)
    order = np.argsort(max_base_depths, kind="stable")
    rows = [np.flatnonzero(bases.depths < limit) for limit in limits]
    target_bounds = np.append(0, np.cumsum(counts)).astype(np.uint32)
    base_bounds = np.append(0, np.cumsum([len(some) for some in rows])).astype(np.uint32)
    # Apart, not sorted out afterwards: what two bases share with a target is counted for one of them.
    mine = np.concatenate([np.zeros(0, np.intp), *rows])
    shared = _shared_bytes(targets.take(order), target_bounds, bases.pieces.take(mine), base_bounds)
    shared[:, 0], shared[:, 1] = order[shared[:, 0].astype(np.intp)], mine[shared[:, 1].astype(np.intp)]
    return _chosen(targets, bases, shared)


def _shared_bytes(
    targets: Targets, target_bounds: U32, bases: Pieces, base_bounds: U32, helpers: ThreadPool = SERIAL
) -> U32:
    """Return what `shared_bytes` does, some groups at a time."""
    ends = np.append(0, np.cumsum(targets.lengths, dtype=np.int64))

    def shared(groups: slice) -> U32:
        bounds = slice(groups.start, groups.stop + 1)
        mine, theirs = target_bounds[bounds], base_bounds[bounds]
        rows, base_rows = slice(mine[0], mine[-1]), slice(theirs[0], theirs[-1])
        found = shared_bytes(
            targets.payload,
            targets.offsets[rows],
            targets.lengths[rows],
            mine - mine[0],
            bases.buffers,
            bases.which[base_rows],
            bases.offsets[base_rows],
            bases.lengths[base_rows],
            theirs - theirs[0],
        )
        found[:, 0] += mine[0]
        found[:, 1] += theirs[0]
        return found

    return np.concatenate(helpers.map(shared, helpers.parts(np.diff(ends[target_bounds]))))


def _chosen(targets: Targets, bases: Contents, shared: U32, helpers: ThreadPool = SERIAL) -> BaseChoice:
    of = shared[:, 0].astype(np.intp)
    count = len(targets)
    covered: NDArray[np.float64] = np.bincount(of, shared[:, 2], count).astype(np.float64)
    written = np.bincount(of, shared[:, 3], count) * MATCH_BYTES
    lengths = targets.lengths.astype(np.float64)
    clear = written <= PRICE_MIN * (GAIN * lengths - (lengths - covered))
    alone = _bytes_without_base(targets, clear, covered, helpers)
    saving = shared[:, 2] * (alone / np.maximum(lengths, 1))[of] - shared[:, 3].astype(np.float64) * MATCH_BYTES
    depths = bases.depths[shared[:, 1].astype(np.intp)].astype(np.int64)
    kept = _best(of, saving, count)
    kept = _without_deep_ones(of, saving, depths, kept, alone)
    saved = np.bincount(of[kept], saving[kept], count)
    found = (saved > 0) & (clear | (alone - saved <= GAIN * alone))
    kept = kept[found[of[kept]]]
    order = kept[np.lexsort((-saving[kept], of[kept]))]
    bounds = bounds_of(np.bincount(of[order], minlength=count))
    deepest = np.zeros(count, np.int64)
    np.maximum.at(deepest, of[order], depths[order])
    rest = np.clip(alone - saved, 1, lengths).astype(np.uint32)
    return BaseChoice(found, bounds, shared[order, 1].astype(np.intp), deepest.astype(np.uint8), rest, alone=alone)


def _bytes_without_base(
    targets: Targets, clear: Bools, covered: NDArray[np.float64], helpers: ThreadPool
) -> NDArray[np.float64]:
    """Return what each chunk takes without a base, bytes; about, where it is clear that bases are worth it."""
    lengths = targets.lengths.astype(np.float64)
    tried = ~clear & (covered >= SAVING_BYTES_MIN)
    sample = np.flatnonzero(clear)[::PRICE_TRIED]
    tried[sample] = True
    rows = np.flatnonzero(tried)
    mine = targets.take(rows)

    def estimates(part: slice) -> U32:
        return compressed_bytes_estimate(mine.payload, mine.offsets[part], mine.lengths[part])

    estimated = np.concatenate(helpers.map(estimates, helpers.parts(mine.lengths))) * RAW_CONTEXT
    exact = np.zeros(len(targets))
    exact[rows] = estimated
    price = exact[sample].sum() / lengths[sample].sum() if len(sample) else PRICE
    return np.where(tried, exact, lengths * price)


def _best(of: NDArray[np.intp], saving: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the rows that save enough, BASES_MAX of each target at most."""
    kept = np.flatnonzero(saving > SAVING_BYTES_MIN)
    order = kept[np.lexsort((-saving[kept], of[kept]))]
    first = np.searchsorted(of[order], np.arange(count))
    return order[np.arange(len(order)) - first[of[order]] < BASES_MAX]


def _without_deep_ones(
    of: NDArray[np.intp],
    saving: NDArray[np.float64],
    depths: NDArray[np.int64],
    kept: NDArray[np.intp],
    alone: NDArray[np.float64],
) -> NDArray[np.intp]:
    """Return `kept` without the deepest bases of targets that do nearly as well with the others."""
    count = len(alone)
    while True:
        saved = np.bincount(of[kept], saving[kept], count)
        deepest = np.full(count, -1, np.int64)
        np.maximum.at(deepest, of[kept], depths[kept])
        deep = depths[kept] == deepest[of[kept]]
        lost = np.bincount(of[kept][deep], saving[kept][deep], count)
        little = (lost > 0) & (lost < DEEP_SHARE * saved) & (alone - (saved - lost) <= GAIN * alone)
        dropped = deep & little[of[kept]]
        if not dropped.any():
            return kept
        kept = kept[~dropped]


def choose_untried(bases: Contents, max_depth: int) -> BaseChoice:
    """Return a choice that takes base i for chunk i wherever it can be read and is less deep than `max_depth`."""
    found = bases.available & (bases.depths < max_depth) & (bases.pieces.lengths > 0)
    return BaseChoice(found, bounds_of(found), np.flatnonzero(found), bases.depths, np.zeros(len(found), np.uint32))


@frozen
class Part:
    """What one policy chose: for the fresh chunks `chunks`, bases out of `bases`, found as `ranks` uint8[c] say."""

    chunks: NDArray[np.intp]
    chosen: BaseChoice
    bases: Contents
    ranks: U8


def join_choices(count: int, parts: list[Part]) -> tuple[BaseChoice, Contents]:
    """Return the choice for `count` chunks and one Contents. A chunk has bases of one part only."""
    if len(parts) > 1:
        parts = [part for part in parts if part.chosen.found.any()]
    found, depths, rest = np.zeros(count, np.bool_), np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    ranks, sizes = np.zeros(count, np.uint8), np.zeros(count, np.int64)
    owners = [np.zeros(0, np.intp)]
    for part in parts:
        chunks, chosen = part.chunks, part.chosen
        mine = chunks[chosen.found]
        found[mine], depths[mine], rest[mine] = True, chosen.depths[chosen.found], chosen.rest[chosen.found]
        ranks[mine], sizes[mine] = part.ranks[chosen.found], np.diff(chosen.bounds)[chosen.found]
        owners.append(np.repeat(chunks, np.diff(chosen.bounds)))
    order = np.argsort(np.concatenate(owners), kind="stable")
    bounds = bounds_of(sizes)
    if len(parts) == 1:
        return BaseChoice(found, bounds, parts[0].chosen.rows[order], depths, rest, ranks), parts[0].bases
    return BaseChoice(found, bounds, order, depths, rest, ranks), _join_contents(
        [(p.bases, p.chosen.rows) for p in parts]
    )


def _join_contents(parts: list[tuple[Contents, NDArray[np.intp]]]) -> Contents:
    """Return some rows of each of several Contents, one part's behind those of the part before."""
    return Contents(
        Locations.join([bases.locations.take(rows) for bases, rows in parts]),
        Pieces.join([bases.pieces.take(rows) for bases, rows in parts]),
        np.concatenate([np.zeros(0, np.uint8), *(bases.depths[rows] for bases, rows in parts)]),
        np.concatenate([np.zeros(0, np.bool_), *(bases.available[rows] for bases, rows in parts)]),
    )


def local_ranks(count: int) -> U8:
    """Return the ranks of `count` bases that locality found."""
    return np.full(count, LOCALITY_RANK, np.uint8)


def without_bases(chosen: BaseChoice, unwanted: Bools) -> BaseChoice:
    """Return the choices for the same chunks, some of them without a base now."""
    counts = np.diff(chosen.bounds)
    bounds = bounds_of(np.where(unwanted, 0, counts))
    rows = chosen.rows[np.repeat(~unwanted, counts)]
    return replace(chosen, found=chosen.found & ~unwanted, bounds=bounds, rows=rows)


def only(chosen: BaseChoice, wanted: Bools) -> BaseChoice:
    """Return the choices of the wanted chunks alone."""
    of_row = np.repeat(wanted, np.diff(chosen.bounds))
    return replace(
        chosen,
        found=chosen.found[wanted],
        bounds=bounds_of(np.diff(chosen.bounds)[wanted]),
        rows=chosen.rows[of_row],
        depths=chosen.depths[wanted],
        rest=chosen.rest[wanted],
        ranks=chosen.ranks[wanted],
    )
