"""Repair a container block by block.

    generation 0   block 0 | block 1 (damaged) | block 2      chunks 0 1 | 2 3 4 | 5
    generation 1   block 0 |         | block 2 | block 3: 2 4 | block 4, lost: 3, and the stored bytes of block 1

The bytes of damaged chunks come from any source with the same fingerprint: other containers, or backup files. A chunk
that no source has keeps its name in a lost block, so that a later run can continue.

Invariant: the new generation holds every readable chunk of the previous one, under the same ordinals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.optimize.container_rewriter import encode_generation
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort, BlockSlice
from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, decode_block, lost_block
from nearkin_shared.formats.block_kinds import block_roles
from nearkin_shared.formats.container import copied_block, decode_container
from nearkin_shared.formats.directory import ChunkTable, Directory, positions_in_blocks
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

REPAIRED_BLOCK_BYTES = 4 * 1024 * 1024
"""Size at which a block of recovered chunks is closed."""
FOUND_BYTES_MAX = 1 << 30
"""Maximum of recovered chunks per container: they are in memory until it is written."""
Name = bytes
"""Fingerprint of a chunk, 32 bytes."""
_NO_ROWS: U32 = np.zeros(0, np.uint32)


class ChunkSource(Protocol):
    """A source of chunks by fingerprint."""

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes) of the names it has, verified. Raises StoreUnavailable."""


@frozen
class RepairedContainer:
    """A new generation (None if nothing was found), and counts of found and lost chunks."""

    data: bytes | None
    found: int
    lost: int


@dataclass(slots=True)
class _Rows:
    """Tables of the new generation while they are filled in."""

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
        """Move chunks to a raw block with a number that was never used."""
        self.numbers[rows], self.encoded[rows], self.depths[rows] = len(self.blocks), self.old.lengths[rows], 0
        self.ranks[rows], self.bases.containers[rows], self.bases.ordinals[rows] = 0, 0, 0
        self.blocks.append(block)
        self.prefixes.append(Locations.empty())


class ContainerRepairer:
    """Makes new generations of damaged containers.

    Holds the recovered chunks of one container in memory.
    """

    def __init__(self, containers: ContainerStore, recode: BlockEncoderPort) -> None:
        self._containers = containers.of(None)
        self._recode = recode

    def repair(
        self, container: ContainerId, copies: Iterable[ChunkSource], undecodable: U32 = _NO_ROWS
    ) -> RepairedContainer:
        """Return a container whose damaged blocks are filled from `copies`.

        A block with a valid checksum stays, whatever its chunks are: dependents need exactly these bytes. But a block
        of `undecodable` deltas (a base is lost) is replaced by raw chunks if all its chunks are found.

        Raises: Corrupt if its directory is lost.
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
        """Return a copy of a container with all decodable deltas stored raw.

        Chunks stored since depend on the depths of a lost generation, which may be lower than in this copy.

        Raises: Corrupt for a damaged copy, or if no block numbers are left.
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
        except Corrupt:  # unreadable on the device: there are no bytes to keep
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
        chunks, roles = directory.chunks, block_roles(directory).tolist()
        kept = [
            copied_block(directory, number, records[number], role)
            if number in records and number not in broken
            else None
            for number, role in enumerate(roles)
        ]
        prefixes = [directory.prefixes.of(number) if kept[number] else Locations.empty() for number in range(len(kept))]
        new = _Rows(chunks, kept, prefixes)
        count = lost_count = 0
        for number in broken:
            rows = np.flatnonzero(chunks.there & (chunks.blocks == number))
            # Chunks of a reference block become ordinary raw ones.
            role = container_layout.MERGED if roles[number] == container_layout.MERGED else container_layout.ORDINARY
            there = np.array([chunks.names[row].tobytes() in found for row in rows.tolist()], np.bool_)
            for part in _portions(rows[there], chunks.lengths):
                payload = np.concatenate([found[chunks.names[row].tobytes()] for row in part.tolist()])
                none, no_bytes, no_lengths = Locations.empty(), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
                lengths = chunks.lengths[part]
                whole = BlockSlice(container_layout.RAW, 0, payload, lengths, none, none, no_bytes, no_lengths)
                new.move(part, replace(self._recode(whole).block, role=role))
            was = records[number]
            for part in _portions(rows[~there], chunks.lengths):
                lost = lost_block(int(chunks.lengths[part].sum(dtype=np.uint64)), was)
                new.move(part, replace(lost, role=role))
                was = b""  # kept in the first lost block only
            count += int(np.count_nonzero(there))
            lost_count += int(np.count_nonzero(~there))
        if len(new.blocks) > container_layout.BLOCKS_MAX:  # after some ten thousand rewrites
            raise Corrupt(
                f"{object_name(directory.container)}: not repaired, {len(new.blocks)} block numbers needed and at most "
                f"{container_layout.BLOCKS_MAX} exist; restore the container from a backup"
            )
        positions = positions_in_blocks(new.numbers, new.encoded)
        table = ChunkTable(
            chunks.names, chunks.lengths, new.numbers, positions, new.encoded, new.depths, new.bases, new.ranks
        )
        data = encode_generation(directory, new.blocks, new.prefixes, table, directory.segments, "repaired")
        return RepairedContainer(data, count, lost_count)


def _is_sound(record: bytes, what: str) -> bool:
    try:
        decode_block(record, what)
    except PermanentError:
        return False
    return True


def _portions(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    """Return the rows in runs of about REPAIRED_BLOCK_BYTES."""
    if not len(rows):
        return []
    portion = np.cumsum(lengths[rows], dtype=np.int64) // REPAIRED_BLOCK_BYTES
    return np.split(rows, np.flatnonzero(np.diff(portion)) + 1)
