"""Healing. Invariant: the new generation holds all that could be read of the one before, under the same numbers.

    generation 0   block 0 | block 1 (broken) | block 2      chunks 0 1 | 2 3 4 | 5
    generation 1   block 0 |         | block 2 | block 3: 2 4 | block 4, lost: 3, and block 1 as it lies on the disk

Bytes of broken chunks come from wherever the same name is found and agrees with them: other containers, or files that
somebody gives. What is found nowhere keeps its name in a lost block, so that a later run can go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.optimize.container_rewriter import encode_generation
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice
from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, decode_block, lost_block
from nearkin_shared.formats.container import copied_block, decode_container
from nearkin_shared.formats.directory import ChunkTable, Directory, positions_in_blocks
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

REPAIRED_BLOCK_BYTES = 4 * 1024 * 1024
"""Blocks of chunks that were found again are closed at this."""
FOUND_BYTES_MAX = 1 << 30
"""Of chunks found for one container, at most: they are held in memory until it is written."""
Name = bytes
"""Of a chunk, 32 bytes."""
_NO_ROWS: U32 = np.zeros(0, np.uint32)


class ChunkSource(Protocol):
    """Where bytes of chunks may be found by their names."""

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes) of some of the names, each as it should be. Raises StoreUnavailable."""


@frozen
class RepairedContainer:
    """A new generation of a container, None where nothing was found; chunks found, and chunks that are lost still."""

    data: bytes | None
    found: int
    lost: int


@dataclass(slots=True)
class _Rows:
    """The tables of the new generation while they are filled in."""

    old: ChunkTable
    blocks: list[EncodedBlock | None]
    prefixes: list[Locations]
    numbers: U32 = field(init=False)
    encoded: U32 = field(init=False)
    depths: U8 = field(init=False)
    ranks: U8 = field(init=False)
    bases: Locations = field(init=False)

    def __post_init__(self) -> None:
        old = self.old
        self.numbers, self.encoded = old.blocks.copy(), old.encoded.copy()
        self.depths, self.ranks = old.depths.copy(), old.ranks.copy()
        self.bases = Locations(old.bases.containers.copy(), old.bases.ordinals.copy())

    def move(self, rows: NDArray[np.intp], block: EncodedBlock) -> None:
        """Let chunks lie raw in a block of a number never used before."""
        self.numbers[rows], self.encoded[rows], self.depths[rows] = len(self.blocks), self.old.lengths[rows], 0
        self.ranks[rows], self.bases.containers[rows], self.bases.ordinals[rows] = 0, 0, 0
        self.blocks.append(block)
        self.prefixes.append(Locations.empty())


class ContainerRepairer:
    """Makes new generations of containers with broken blocks. Holds what is found for one container in memory."""

    def __init__(self, containers: ContainerStore, recode: BlockEncoderPort) -> None:
        self._containers = containers.of(None)
        self._recode = recode

    def repair(
        self, container: ContainerId, copies: Iterable[ChunkSource], undecodable: U32 = _NO_ROWS
    ) -> RepairedContainer:
        """Return a container whose broken blocks were filled from copies. Raises Corrupt where its directory is lost.

        A block whose checksum agrees is left as it is, whatever its chunks are: others may lean on just these bytes.
        But one of `undecodable` deltas (a base is lost) is replaced by raw chunks if all its chunks are found.
        """
        directory = self._containers.directory(container)
        chunks, name = directory.chunks, object_name(container)
        records = {number: self._record(container, number) for number in np.flatnonzero(directory.blocks.raw).tolist()}
        broken = [number for number, record in records.items() if not _is_sound(record, f"{name} block {number}")]
        stranded = sorted(set(chunks.blocks[undecodable].tolist()) - set(broken))
        rows = np.flatnonzero(chunks.there & np.isin(chunks.blocks, np.array(broken + stranded, np.uint32)))
        names = {row: chunks.names[row].tobytes() for row in rows.tolist()}
        found = self._find_chunks(directory.domain, frozenset(names.values()), copies) if names else {}
        missing = {int(chunks.blocks[row]) for row, name in names.items() if name not in found}
        moved = [number for number in stranded if number not in missing]
        if not moved and not any(names[row] in found for row in rows.tolist() if chunks.blocks[row] in broken):
            return RepairedContainer(None, 0, len(rows))
        healed = self._rewrite(directory, records, broken + moved, found)
        stays = int(np.isin(chunks.blocks[undecodable], list(missing.difference(broken))).sum())
        return RepairedContainer(healed.data, healed.found, healed.lost + stays)

    def raw(self, data: bytes, copies: Iterable[ChunkSource]) -> bytes:
        """Return a copy of a container with all deltas raw that can be decoded: how deep they were later nobody knows.

        What was put since leans on them as they lay in a generation that is lost, perhaps less deep than in this one.
        Raises Corrupt for a broken copy, and where no numbers of blocks are left.
        """
        directory = decode_container(data, "a copy of a container")
        blocks, chunks = directory.blocks, directory.chunks
        records = {}
        for number in np.flatnonzero(blocks.raw).tolist():
            records[number] = bytes(data[directory.block_rows[number].place])
        rows = np.flatnonzero(chunks.there & (chunks.depths > 0))
        names = {row: chunks.names[row].tobytes() for row in rows.tolist()}
        found = self._find_chunks(directory.domain, frozenset(names.values()), copies) if names else {}
        moved = sorted({int(chunks.blocks[row]) for row, name in names.items() if name in found})
        healed = self._rewrite(directory, records, moved, found).data if moved else None
        return data if healed is None else healed

    def _record(self, container: ContainerId, number: int) -> bytes:
        try:
            return bytes(self._containers.record(container, number))
        except Corrupt:  # the device cannot read it: nothing of it is there to be kept
            return b""

    def _find_chunks(self, domain: bytes, wanted: frozenset[Name], copies: Iterable[ChunkSource]) -> dict[Name, U8]:
        found: dict[Name, U8] = {}
        found_bytes = 0
        for source in copies:
            missing = wanted - found.keys()
            if not missing or found_bytes > FOUND_BYTES_MAX:
                break
            for name, content in source.find(domain, missing):
                found[name] = content
                found_bytes += len(content)
                if found_bytes > FOUND_BYTES_MAX:
                    break
        return found

    def _rewrite(
        self,
        directory: Directory,
        records: Mapping[int, bytes],
        broken: list[int],
        found: Mapping[Name, U8],
    ) -> RepairedContainer:
        blocks, chunks = directory.blocks, directory.chunks
        kept = [
            copied_block(directory, number, records[number]) if number in records and number not in broken else None
            for number in range(len(blocks))
        ]
        prefixes = [directory.prefixes.of(number) if kept[number] else Locations.empty() for number in range(len(kept))]
        new = _Rows(chunks, kept, prefixes)
        count = lost_count = 0
        for number in broken:
            rows = np.flatnonzero(chunks.there & (chunks.blocks == number))
            there = np.array([chunks.names[row].tobytes() in found for row in rows.tolist()], np.bool_)
            for part in _portions(rows[there], chunks.lengths):
                payload = np.concatenate([found[chunks.names[row].tobytes()] for row in part.tolist()])
                none, no_bytes, no_lengths = Locations.empty(), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
                lengths = chunks.lengths[part]
                whole = BlockSlice(container_layout.RAW, 0, payload, lengths, none, none, no_bytes, no_lengths)
                new.move(part, self._recode(whole).block)
            was = records[number]
            for part in _portions(rows[~there], chunks.lengths):
                new.move(part, lost_block(int(chunks.lengths[part].sum(dtype=np.uint64)), was))
                was = b""  # kept once
            count += int(np.count_nonzero(there))
            lost_count += int(np.count_nonzero(~there))
        if len(new.blocks) > container_layout.BLOCKS_MAX:  # one that was written anew some ten thousand times
            raise Corrupt(f"{object_name(directory.container)}: no numbers of blocks are left, so it is not healed")
        positions = positions_in_blocks(new.numbers, new.encoded)
        table = ChunkTable(
            chunks.names, chunks.lengths, new.numbers, positions, new.encoded, new.depths, new.bases, new.ranks
        )
        data = encode_generation(directory, new.blocks, new.prefixes, table, directory.segments, "healed")
        return RepairedContainer(data, count, lost_count)


def _is_sound(record: bytes, what: str) -> bool:
    try:
        decode_block(record, what)
    except PermanentError:
        return False
    return True


def _portions(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    """Return the rows cut into runs of about REPAIRED_BLOCK_BYTES."""
    if not len(rows):
        return []
    portion = np.cumsum(lengths[rows], dtype=np.int64) // REPAIRED_BLOCK_BYTES
    return np.split(rows, np.flatnonzero(np.diff(portion)) + 1)
