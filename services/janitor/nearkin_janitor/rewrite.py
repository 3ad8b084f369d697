"""Compaction. Invariant: a container written anew keeps its id, and every number in it means what it did.

    generation 0   block 0 | block 1 | block 2          chunks 0 1 2 3 4 5 6 7 8
    generation 1   block 0 |         |         | block 3      0 1 2 . . . 6 . 8

So no recipe, base, manifest or index entry that names a chunk has to change. Blocks that stay whole are copied as they
are; of the others what is kept is decoded, compared with its name, and encoded again under a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import Corrupt
from nearkin.fingerprints import Fingerprinter
from nearkin.formats import layout
from nearkin.formats.block import EncodedBlock, decode_block
from nearkin.formats.container import copied_block, decode_container, encode_container
from nearkin.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable, positions_in_blocks
from nearkin.frozen import frozen
from nearkin.kernels.overlap import shared_bytes
from nearkin.records import U8, U32, U64, Bools, ContainerId, Locations, offsets_of
from nearkin.stage import Contents
from nearkin.store.bases import BaseReader
from nearkin.store.chunks import ChunkReader
from nearkin.store.containers import ContainerStore, object_name
from nearkin_janitor.heirs import Heirs
from nearkin_janitor.plan import Drop
from nearkin_janitor.reach import Masks, blocks_leaning, is_in
from nearkin_janitor.tenants import Tenants

READ_BYTES = 8 * 1024 * 1024
"""Chunks that lean on nothing are read so many bytes at a time."""
GROUP_CHUNKS_MAX = 32
GROUP_BYTES_MAX = 1 << 20
"""Chunks that are tried together against all that any of them is offered: what was cut elsewhere finds both sides."""
SHARED_BYTES_MIN = 64
"""A base that gives fewer bytes than this to what is kept of a block is not worth its place in the prefix."""


@frozen
class Part:
    """What is kept of a block: its encodings, `lengths` of each, and of a patch block each chunk's best base and all
    bases: `bases` with the bytes of each in `base_payload`.
    """

    kind: int
    depth: int
    payload: U8
    lengths: U32
    best: Locations
    bases: Locations
    base_payload: U8
    base_lengths: U32


@frozen
class Recoded:
    """A block as it will be stored, the bases that it leans on as a whole, and its encodings' lengths if others."""

    block: EncodedBlock
    prefix: Locations
    encoded: U32 | None


@frozen
class Anew:
    """A block of chunks that were given new bases: their `rows`, ascending, and the best base of each."""

    rows: NDArray[np.intp]
    recoded: Recoded
    best: Locations


@frozen
class Rebasing:
    """Chunks on which nothing is to lean any more, and where those that do find others."""

    given_up: Masks
    heirs: Heirs


class FreshBlocks(Protocol):
    """Gathers chunks into blocks as the delta stage would."""

    def add(self, rows: NDArray[np.intp], payload: U8, lengths: U32, bases: Contents, depths_below: U8) -> U8:
        """Take the chunks that one of `bases` is worth it for; return how deep each is at most, 0 for the others.

        `depths_below` uint8[n]: each takes only bases that are less deep.
        """

    def add_raw(self, rows: NDArray[np.intp], payload: U8, lengths: U32) -> None:
        """Take chunks as they are."""

    def end(self) -> list[Anew]:
        """Return all blocks. Raises Corrupt where one does not decode again."""


class Recoder(Protocol):
    """Encodes what is kept of a block as the delta stage would."""

    @property
    def depth_max(self) -> int:
        """Return how deep a chunk may be that is given new bases."""

    @property
    def raw_bytes(self) -> int:
        """Return how many bytes of chunks a block holds that leans on nothing."""

    def fresh(self) -> FreshBlocks:
        """Return what encodes chunks as if they were put now."""

    def __call__(self, part: Part) -> Recoded:
        """Return the smallest way to keep it. Raises Corrupt where it does not decode again."""


@dataclass(slots=True)
class _Tables:
    """The rows of the new generation while they are filled in."""

    blocks: list[EncodedBlock | None]
    prefixes: list[Locations]
    numbers: U32
    lengths: U32
    encoded: U32
    depths: U8
    bases: Locations
    ranks: U8

    def lay(self, number: int, block: EncodedBlock, prefix: Locations) -> None:
        self.end(number + 1)
        self.blocks[number], self.prefixes[number] = block, prefix

    def end(self, count: int) -> None:
        """Make room for blocks up to `count`: those that are not laid are gone, and their numbers stay taken."""
        while len(self.blocks) < count:
            self.blocks.append(None)
            self.prefixes.append(Locations.empty())


class Rewriter:
    """Makes new generations of containers. Reads one container's blocks, and what they lean on, at a time."""

    def __init__(
        self, containers: ContainerStore, tenants: Tenants, any_fingerprinter: Fingerprinter, recode: Recoder
    ) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._recode = recode
        self._reader = ChunkReader(self._containers)
        self._bases = BaseReader(self._containers)

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
        count = len(old)
        new = _Tables(
            [],
            [],
            np.zeros(count, np.uint32),
            np.where(kept, old.lengths, 0).astype(np.uint32),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint8),
            Locations.empty(count),
            np.zeros(count, np.uint8),
        )
        next_number = len(directory.blocks)
        again = blocks_leaning(directory, {} if rebasing is None else rebasing.given_up)
        joined = self._joined(directory, kept)
        raw = kept & joined[old.blocks]
        if rebasing is not None:
            again |= directory.blocks.depths > 0  # what leans on living ones too, or newer puts find it as deep as ever
            rows = np.flatnonzero(kept & again[old.blocks])
            raw_too, next_number = self._lay_rebased(new, directory, rows, rebasing, next_number)
            raw[raw_too] = True
        for number in np.flatnonzero((directory.blocks.raw > 0) & ~again & ~joined).tolist():
            rows = np.flatnonzero(old.there & (old.blocks == number))
            rows_kept = rows[kept[rows]]
            if len(rows_kept) == len(rows):
                new.lay(number, self._copied(directory, number), directory.prefixes.of(number))
                self._fill(new, rows, number, directory)
            elif len(rows_kept):
                self._anew(new, directory, number, rows_kept, next_number)
                next_number += 1
        next_number = self._lay_raw(new, directory, np.flatnonzero(raw), next_number)
        new.end(next_number)
        names = np.where(kept[:, None], old.names, np.uint8(0))
        positions = positions_in_blocks(new.numbers, new.encoded)
        chunks = ChunkTable(names, new.lengths, new.numbers, positions, new.encoded, new.depths, new.bases, new.ranks)
        bounds = np.cumsum([0, *(len(prefix) for prefix in new.prefixes)]).astype(np.uint32)
        data = encode_container(
            container,
            directory.domain,
            directory.depth_max,
            directory.sketch_names,
            new.blocks,
            chunks,
            _segments(directory.segments, drop.segments),
            PrefixTable(bounds, Locations.join(new.prefixes)),
        ).data
        decode_container(data, f"{object_name(container)}, written anew")
        return data

    def _copied(self, directory: Directory, number: int) -> EncodedBlock:
        record = self._containers.record(directory.container, number)
        decode_block(record, f"{object_name(directory.container)} block {number}")  # its checksum, at least
        return copied_block(directory, number, record)

    def _fill(self, new: _Tables, rows: NDArray[np.intp], number: int, directory: Directory) -> None:
        old = directory.chunks
        new.numbers[rows], new.encoded[rows], new.depths[rows] = number, old.encoded[rows], old.depths[rows]
        new.bases.containers[rows], new.bases.ordinals[rows] = old.bases.containers[rows], old.bases.ordinals[rows]
        new.ranks[rows] = old.ranks[rows]

    def _anew(self, new: _Tables, directory: Directory, number: int, rows: NDArray[np.intp], next_number: int) -> None:
        """Encode some chunks of a block again, under the next number."""
        payload = self._verified(directory, rows)
        part = self._part(directory, number, rows, payload)
        recoded = self._recode(part)
        new.lay(next_number, recoded.block, recoded.prefix)
        self._fill(new, rows, next_number, directory)
        new.depths[rows] = recoded.block.depth
        new.encoded[rows] = part.lengths if recoded.encoded is None else recoded.encoded
        if recoded.block.kind == layout.RAW:
            new.bases.containers[rows], new.bases.ordinals[rows], new.ranks[rows] = 0, 0, 0

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
        self, new: _Tables, directory: Directory, rows: NDArray[np.intp], rebasing: Rebasing, next_number: int
    ) -> tuple[NDArray[np.intp], int]:
        """Give chunks other bases, in stream order.

        Decided group by group: each may lean on what was decided before. Returns the rows that find none, and the
        number after the last block.
        """
        container, old, heirs = directory.container, directory.chunks, rebasing.heirs
        depths, blocks = heirs.depths(container), self._recode.fresh()
        without = [np.zeros(0, np.intp)]
        for group in _groups(heirs.family(container, rows.astype(np.uint32)), old.lengths[rows]):
            some = rows[group]
            ordinals, payload = some.astype(np.uint32), self._verified(directory, some)
            best = old.bases.take(some)
            stay = best.take((best.containers != 0) & ~is_in(rebasing.given_up, best))
            below = np.minimum(heirs.depths_below(container, ordinals), np.uint8(self._recode.depth_max))
            offered = _each_once(Locations.join([heirs.offered(container, ordinals, below), stay]))
            contents = self._bases.contents(offered)
            mine = offered.containers == container  # read from what is there, and as deep as they are going to be
            contents.depths[mine] = depths[offered.ordinals[mine]]
            depths[some] = blocks.add(some, payload, old.lengths[some], contents, below)
            without.append(some[depths[some] == 0])
        next_number = self._lay_all(new, directory, blocks.end(), next_number)
        depths[rows] = new.depths[rows]
        return np.concatenate(without), next_number

    def _lay_raw(self, new: _Tables, directory: Directory, rows: NDArray[np.intp], next_number: int) -> int:
        """Put chunks into blocks that lean on nothing; return the number after these."""
        blocks, lengths = self._recode.fresh(), directory.chunks.lengths
        portion = np.cumsum(lengths[rows], dtype=np.int64) // READ_BYTES
        for some in np.split(rows, np.flatnonzero(np.diff(portion)) + 1) if len(rows) else []:
            blocks.add_raw(some, self._verified(directory, some), lengths[some])
        return self._lay_all(new, directory, blocks.end(), next_number)

    def _lay_all(self, new: _Tables, directory: Directory, made: list[Anew], next_number: int) -> int:
        for one in made:
            rows, recoded = one.rows, one.recoded
            new.lay(next_number, recoded.block, recoded.prefix)
            new.numbers[rows], new.depths[rows] = next_number, recoded.block.depth
            new.encoded[rows] = directory.chunks.lengths[rows] if recoded.encoded is None else recoded.encoded
            if recoded.block.kind != layout.RAW:
                new.bases.containers[rows], new.bases.ordinals[rows] = one.best.containers, one.best.ordinals
                new.ranks[rows] = layout.LOCALITY_RANK
            next_number += 1
        return next_number

    def _verified(self, directory: Directory, rows: NDArray[np.intp]) -> U8:
        """Return the bytes of chunks, each compared with its name; only SHA-1 where no tenant is known."""
        plan = self._reader.plan(Locations(np.full(len(rows), directory.container, np.uint64), rows.astype(np.uint32)))
        payload = self._reader.fetch(plan)
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        found = (fingerprinter or self._any_fingerprinter).name_chunks(payload, offsets_of(plan.lengths), plan.lengths)
        compared = np.ones(32, np.bool_)
        compared[20:28] = fingerprinter is not None
        if np.any((found != plan.names)[:, compared]):
            raise Corrupt(
                f"{object_name(directory.container)}: chunks are not what their names say, so it is not written anew: "
                "run `nearkin verify`"
            )
        return payload

    def _part(self, directory: Directory, number: int, rows: NDArray[np.intp], payload: U8) -> Part:
        old, kind = directory.chunks, int(directory.blocks.kinds[number])
        lengths, best = old.lengths[rows], old.bases.take(rows)
        none, no_bytes, no_lengths = Locations.empty(), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        depth = int(directory.blocks.depths[number])
        if kind == layout.RAW:
            return Part(kind, depth, payload, lengths, none, none, no_bytes, no_lengths)
        if kind == layout.XDELTA3:
            record = self._containers.record(directory.container, number)
            deltas = decode_block(record, f"{object_name(directory.container)} block {number}")
            pieces = [
                deltas[start : start + length]
                for start, length in zip(old.positions[rows].tolist(), old.encoded[rows].tolist(), strict=True)
            ]
            return Part(kind, depth, np.concatenate(pieces), old.encoded[rows], best, none, no_bytes, no_lengths)
        plan = self._reader.plan(directory.prefixes.of(number))
        base_payload = self._reader.fetch(plan)
        used = _used(payload, lengths, base_payload, plan.lengths) | _among(plan.locations, best)
        offsets = offsets_of(plan.lengths)
        wanted = np.flatnonzero(used)
        pieces = [base_payload[int(offsets[i]) : int(offsets[i]) + int(plan.lengths[i])] for i in wanted.tolist()]
        return Part(
            kind,
            depth,
            payload,
            lengths,
            best,
            plan.locations.take(wanted),
            np.concatenate([no_bytes, *pieces]),
            plan.lengths[wanted],
        )


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


def _each_once(locations: Locations) -> Locations:
    pairs = sorted(set(zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True)))
    return Locations(np.array([c for c, _ in pairs], np.uint64), np.array([o for _, o in pairs], np.uint32))


def _used(payload: U8, lengths: U32, base_payload: U8, base_lengths: U32) -> NDArray[np.bool_]:
    """Return which bases give what is kept enough bytes."""
    one = np.array([0, len(lengths)], np.uint32)
    all_bases = np.array([0, len(base_lengths)], np.uint32)
    bases = (base_payload,), np.zeros(len(base_lengths), np.int32), offsets_of(base_lengths), base_lengths
    found = shared_bytes(payload, offsets_of(lengths), lengths, one, *bases, all_bases)
    shared = np.zeros(len(base_lengths), np.uint64)
    np.add.at(shared, found[:, 1].astype(np.intp), found[:, 2].astype(np.uint64))
    used: NDArray[np.bool_] = shared >= SHARED_BYTES_MIN
    return used


def _among(locations: Locations, wanted: Locations) -> NDArray[np.bool_]:
    pairs = set(zip(wanted.containers.tolist(), wanted.ordinals.tolist(), strict=True))
    keys = zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True)
    return np.array([key in pairs for key in keys], np.bool_)


def _segments(table: SegmentTable, dropped: U32) -> SegmentTable:
    """Return the table without some recipes; the others keep their ordinals."""
    kept = np.ones(len(table), np.bool_)
    kept[dropped] = False
    counts = np.diff(table.bounds)
    rows = np.repeat(kept, counts)
    bounds: U64 = np.cumsum(np.concatenate([np.zeros(1, np.uint64), np.where(kept, counts, 0)]))
    return SegmentTable(
        bounds.astype(np.uint32), np.where(kept, table.sketches, 0).astype(np.uint8), table.chunks.take(rows)
    )
