"""Recover deltas whose base is lost, and remove lost chunks that nothing refers to.

    base lost, content of its deltas found   -> the deltas are stored raw, in a new generation of their container
    lost chunk without recipe and dependents -> it is removed, in a new generation of its container

The content of a joined chunk (merge_writer.py) is found nowhere once a GC run has removed some of the chunks that it
was made of; the content of the chunks that still refer to it may be found all the same.

Invariant: a chunk is removed only if its bytes are lost, and every directory of the store could be read.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nearkin_maintenance.optimize.container_rewriter import encode_generation
from nearkin_shared.errors import PermanentError
from nearkin_shared.formats.block import EncodedBlock, decode_block
from nearkin_shared.formats.block_kinds import block_roles
from nearkin_shared.formats.container import copied_block
from nearkin_shared.formats.directory import ChunkTable, Directory, positions_in_blocks
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U32, Bools, Locations


def undecodable_rows(containers: ContainerStore, directory: Directory, rows: U32) -> U32:
    """Return those of `rows` whose deltas cannot be decoded in an undamaged block."""
    chunks, reader = directory.chunks, ChunkReader(containers.of(directory.domain))
    found = []
    for row in rows[rows < len(chunks)].tolist():
        if not chunks.depths[row]:
            continue
        here = Locations(np.array([directory.container], np.uint64), np.array([row], np.uint32))
        try:
            reader.fetch(reader.plan(here))
        except PermanentError:
            found.append(row)
    return np.array(found, np.uint32)


def lost_rows(containers: ContainerStore, directory: Directory) -> U32:
    """Return the chunks whose block is unreadable or stands for lost bytes.

    Raises: StoreUnavailable.
    """
    name = object_name(directory.container)
    lost = np.zeros(len(directory.blocks), np.bool_)
    for number in np.flatnonzero(directory.blocks.raw).tolist():
        try:
            decode_block(containers.record(directory.container, number), f"{name} block {number}")
        except PermanentError:
            lost[number] = True
    return np.flatnonzero(directory.chunks.there & lost[directory.chunks.blocks]).astype(np.uint32)


def referenced_rows(containers: ContainerStore, wanted: Iterable[int]) -> dict[int, U32] | None:
    """Return by container the referenced ordinals, or None if a directory is unreadable."""
    everyones = containers.of(None)
    found: dict[int, list[U32]] = {container: [] for container in wanted}
    for container, _ in everyones.ids():
        try:
            directory = everyones.directory(container)
        except PermanentError:
            return None
        there = directory.chunks.there
        used = Locations.join([directory.segments.chunks, directory.chunks.bases.take(there), directory.prefixes.bases])
        for one, ordinals in found.items():
            ordinals.append(used.ordinals[used.containers == np.uint64(one)])
    return {container: np.unique(np.concatenate(ordinals)) for container, ordinals in found.items()}


def encode_without(containers: ContainerStore, directory: Directory, removed: U32) -> bytes:
    """Return a container without some chunks that are lost.

    Raises: Corrupt if a block cannot be copied.
    """
    chunks, blocks = directory.chunks, directory.blocks
    stays: Bools = chunks.there.copy()
    stays[removed] = False
    used = np.zeros(len(blocks), np.bool_)
    used[chunks.blocks[stays]] = True
    used &= blocks.raw > 0
    roles = block_roles(directory).tolist()
    kept: list[EncodedBlock | None] = []
    for number in range(len(blocks)):
        record = bytes(containers.record(directory.container, number)) if used[number] else b""
        kept.append(copied_block(directory, number, record, roles[number]) if used[number] else None)
    numbers, encoded = (np.where(stays, column, 0).astype(np.uint32) for column in (chunks.blocks, chunks.encoded))
    table = ChunkTable(
        np.where(stays[:, None], chunks.names, np.uint8(0)),
        np.where(stays, chunks.lengths, 0).astype(np.uint32),
        numbers,
        positions_in_blocks(numbers, encoded),
        encoded,
        np.where(stays, chunks.depths, 0).astype(np.uint8),
        Locations(
            np.where(stays, chunks.bases.containers, 0).astype(np.uint64),
            np.where(stays, chunks.bases.ordinals, 0).astype(np.uint32),
        ),
        np.where(stays, chunks.ranks, 0).astype(np.uint8),
    )
    prefixes = [directory.prefixes.of(number) if used[number] else Locations.empty() for number in range(len(blocks))]
    return encode_generation(directory, kept, prefixes, table, directory.segments, "without lost chunks")
