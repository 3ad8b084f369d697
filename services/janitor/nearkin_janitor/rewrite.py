"""Compaction. Invariant: a container written anew keeps its id, and every number in it means what it did.

    generation 0   block 0 | block 1 | block 2          chunks 0 1 2 3 4 5 6 7 8
    generation 1   block 0 |         |         | block 3      0 1 2 . . . 6 . 8

So no recipe, base, manifest or index entry that names a chunk has to change. Blocks that stay whole are copied as they
are; of the others what is kept is decoded, compared with its name, and encoded again under a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import Corrupt
from nearkin.fingerprints import Fingerprinter
from nearkin.formats import container as fmt
from nearkin.formats.container import ChunkTable, Directory, EncodedBlock, PrefixTable, SegmentTable
from nearkin.kernels.overlap import shared_bytes
from nearkin.records import U8, U32, U64, ContainerId, Locations
from nearkin.store.chunks import ChunkReader, offsets_of
from nearkin.store.containers import ContainerStore, object_name
from nearkin_janitor.plan import Drop
from nearkin_janitor.tenants import Tenants

SHARED_BYTES_MIN = 64
"""A base that gives fewer bytes than this to what is kept of a block is not worth its place in the prefix."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Recoded:
    """A block as it will be stored, the bases that it leans on as a whole, and its encodings' lengths if others."""

    block: EncodedBlock
    prefix: Locations
    encoded: U32 | None


class Recoder(Protocol):
    """Encodes what is kept of a block as the delta stage would."""

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

    def rewritten(self, container: ContainerId, drop: Drop) -> bytes:
        """Return a container without what is dropped. Raises Corrupt where what is kept is not what its name says."""
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
        for number in np.flatnonzero(directory.blocks.raw).tolist():
            rows = np.flatnonzero(old.there & (old.blocks == number))
            rows_kept = rows[kept[rows]]
            if len(rows_kept) == len(rows):
                new.lay(number, self._copied(directory, number), directory.prefixes.of(number))
                self._fill(new, rows, number, directory)
            elif len(rows_kept):
                self._anew(new, directory, number, rows_kept, next_number)
                next_number += 1
        new.end(next_number)
        names = np.where(kept[:, None], old.names, np.uint8(0))
        positions = fmt.positions_in_blocks(new.numbers, new.encoded)
        chunks = ChunkTable(names, new.lengths, new.numbers, positions, new.encoded, new.depths, new.bases, new.ranks)
        bounds = np.cumsum([0, *(len(prefix) for prefix in new.prefixes)]).astype(np.uint32)
        data, _, _ = fmt.encode_container(
            container,
            directory.domain,
            directory.depth_max,
            directory.sketch_names,
            new.blocks,
            chunks,
            _segments(directory.segments, drop.segments),
            PrefixTable(bounds, Locations.join(new.prefixes)),
        )
        fmt.decode_container(data, f"{object_name(container)}, written anew")
        return data

    def _copied(self, directory: Directory, number: int) -> EncodedBlock:
        record = self._containers.record(directory.container, number)
        fmt.decode_block(record, f"{object_name(directory.container)} block {number}")  # its checksum, at least
        blocks, head = directory.blocks, fmt.BLOCK.size
        return EncodedBlock(
            bytes(record[:head]),
            record[head:],
            int(blocks.raw[number]),
            int(blocks.codecs[number]),
            int(blocks.kinds[number]),
            int(blocks.depths[number]),
        )

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
        if recoded.block.kind == fmt.RAW:
            new.bases.containers[rows], new.bases.ordinals[rows], new.ranks[rows] = 0, 0, 0

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
        if kind == fmt.RAW:
            return Part(kind, depth, payload, lengths, none, none, no_bytes, no_lengths)
        if kind == fmt.XDELTA3:
            record = self._containers.record(directory.container, number)
            deltas = fmt.decode_block(record, f"{object_name(directory.container)} block {number}")
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


def _used(payload: U8, lengths: U32, base_payload: U8, base_lengths: U32) -> NDArray[np.bool_]:
    """Return which bases give what is kept enough bytes."""
    one = np.array([0, len(lengths)], np.uint32)
    all_bases = np.array([0, len(base_lengths)], np.uint32)
    found = shared_bytes(
        payload, offsets_of(lengths), lengths, one, base_payload, offsets_of(base_lengths), base_lengths, all_bases
    )
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
