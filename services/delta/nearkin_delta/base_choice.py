"""Choose the bases of fresh chunks from their candidates.

    locality    chunks stored between the same neighbours before (gap_alignment.py)
    first-fit   the first chunk stored with one of the super-features (Finesse, section 5.1)

A trial counts the bytes that chunk and candidate share (`kernels/shared_bytes.py`) and estimates what the block
compressor makes of the rest.

Invariant: a base is kept only if its trial saves enough bytes.
"""

from __future__ import annotations

from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.codecs import RAW_CONTEXT
from nearkin_shared.formats.container_layout import LOCALITY_RANK
from nearkin_shared.kernels.shared_bytes import shared_bytes
from nearkin_shared.kernels.size_estimate import compressed_bytes_estimate
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import U8, U32, U64, Bools, Locations, Pieces, bounds_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

GAIN = 0.6
"""A chunk gets bases if it is estimated to take at most this share of its bytes without them."""
MATCH_BYTES = 5
"""Bytes that zstd writes for a match, lengths and offset, on average."""
SAVING_BYTES_MIN = 64
"""A base that saves less costs more: it lengthens the prefix, and the directory by 3 bytes."""
DEEP_SHARE = 0.1
"""The deepest bases of a chunk are dropped if they contribute less than this share of the saving."""
BASES_MAX = 8
"""Maximum of bases per chunk: those that save most."""
PRICE_MIN = 0.05
"""No estimate is made if bases pay off even when a byte compresses to as little as this."""
PRICE_TRIED = 16
"""Of such chunks one in sixteen is estimated, and gives the price of a byte for the others."""
PRICE = 0.15


@frozen
class BaseChoice:
    """Chosen bases of fresh chunks: `found` bool[f].

    Chunk i has rows bounds[i] to bounds[i + 1].

    `rows` index the contents that were tried, the best base first; `depths` uint8[f]: the deepest base of each chunk;
    `rest` uint32[f]: estimated bytes of each chunk with its bases; `alone` float64[f]: without.
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
    """Fresh chunks to try, as slices of their batch's payload."""

    payload: U8
    offsets: U64
    lengths: U32

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: NDArray[np.intp]) -> Targets:
        """Return the chunks `rows`."""
        return Targets(self.payload, self.offsets[rows], self.lengths[rows])


def try_bases(
    targets: Targets, target_bounds: U32, bases: Contents, base_bounds: U32, helpers: ThreadPool = SERIAL
) -> BaseChoice:
    """Return the bases that save enough, from each target's group (see `shared_bytes`)."""
    return _chosen(targets, bases, _shared_bytes(targets, target_bounds, bases.pieces, base_bounds, helpers), helpers)


def try_shallower(targets: Targets, bases: Contents, max_base_depths: U8) -> BaseChoice:
    """Return the bases that save enough, each below its target's `max_base_depths`."""
    limits, counts = np.unique(max_base_depths, return_counts=True)
    order = np.argsort(max_base_depths, kind="stable")
    rows = [np.flatnonzero(bases.depths < limit) for limit in limits]
    target_bounds = np.append(0, np.cumsum(counts)).astype(np.uint32)
    base_bounds = np.append(0, np.cumsum([len(some) for some in rows])).astype(np.uint32)
    # In separate calls, not filtered afterwards: bytes that two bases share with a target count for one of them.
    mine = np.concatenate([np.zeros(0, np.intp), *rows])
    shared = _shared_bytes(targets.take(order), target_bounds, bases.pieces.take(mine), base_bounds)
    shared[:, 0], shared[:, 1] = order[shared[:, 0].astype(np.intp)], mine[shared[:, 1].astype(np.intp)]
    return _chosen(targets, bases, shared)


def _shared_bytes(
    targets: Targets, target_bounds: U32, bases: Pieces, base_bounds: U32, helpers: ThreadPool = SERIAL
) -> U32:
    """Return the result of `shared_bytes`, computed for several groups at a time."""
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
    """Return the bytes of each chunk without a base.

    Estimated roughly if bases clearly pay off.
    """
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
    """Return the rows that save enough, at most BASES_MAX of each target."""
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
    """Return `kept` without the deepest bases of targets that do nearly as well without them."""
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
    """Return a choice of base i for chunk i wherever it is available and below `max_depth`."""
    found = bases.available & (bases.depths < max_depth) & (bases.pieces.lengths > 0)
    return BaseChoice(found, bounds_of(found), np.flatnonzero(found), bases.depths, np.zeros(len(found), np.uint32))


@frozen
class PolicyChoice:
    """The choice of one policy for the fresh chunks `chunks`, from `bases`.

    `ranks` uint8[c] record how found.
    """

    chunks: NDArray[np.intp]
    chosen: BaseChoice
    bases: Contents
    ranks: U8


def join_choices(count: int, parts: list[PolicyChoice]) -> tuple[BaseChoice, Contents]:
    """Return the choice for `count` chunks and one Contents.

    Each chunk has bases of one part only.
    """
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
    """Return the chosen rows of several Contents, concatenated."""
    return Contents(
        Locations.join([bases.locations.take(rows) for bases, rows in parts]),
        Pieces.join([bases.pieces.take(rows) for bases, rows in parts]),
        np.concatenate([np.zeros(0, np.uint8), *(bases.depths[rows] for bases, rows in parts)]),
        np.concatenate([np.zeros(0, np.bool_), *(bases.available[rows] for bases, rows in parts)]),
    )


def local_ranks(count: int) -> U8:
    """Return the ranks of `count` bases found by locality."""
    return np.full(count, LOCALITY_RANK, np.uint8)


def without_bases(chosen: BaseChoice, unwanted: Bools) -> BaseChoice:
    """Return the choice with the bases of some chunks removed."""
    counts = np.diff(chosen.bounds)
    bounds = bounds_of(np.where(unwanted, 0, counts))
    rows = chosen.rows[np.repeat(~unwanted, counts)]
    return replace(chosen, found=chosen.found & ~unwanted, bounds=bounds, rows=rows)


def only(chosen: BaseChoice, wanted: Bools) -> BaseChoice:
    """Return the choice of the wanted chunks."""
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
