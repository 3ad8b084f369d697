"""Index of one shard: entries of its range of names, found in directories.

Invariant: a chunk is found only where its container's directory has its name, and only if the name is the shard's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from nearkin_shared.formats.directory import BlockTable, ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.lmdb.entry_encoding import decode_fields, encode_fields
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.index.shards.key_ranges import owners_of_names
from nearkin_shared.index.shards.shard_messages import (
    CARRIED_BYTES_MAX,
    ROWS_A_PAGE,
    CarriedRows,
    ContainerPart,
    numbers_of,
)
from nearkin_shared.index.tablets.container_tags import tags_of_segments
from nearkin_shared.index.tablets.tablet_cache import NotCached, Tablet
from nearkin_shared.index.tablets.tablet_tables import Directories, TabletOptions, TabletTables
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, Bools, ContainerId, Locations

KEYS_AT_ONCE = {"chunks": 1 << 14, "segments": 1 << 8}
"""Keys that are looked up between two steps of the server's loop, in at most some 10 ms: names of chunks are in memory;
each segment may read a row of LMDB from the disk, super-features several."""


CARRIED_CONTAINERS_MAX = 64
"""Containers of one answer whose other names it carries."""


class OwnDirectories:
    """Directories with the names of one shard alone: the chunks of other shards are not there."""

    def __init__(self, directories: Directories, number: int, count: int) -> None:
        self._directories, self._number, self._count = directories, number, count

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises NotFound, Corrupt or StoreUnavailable."""
        found = self._directories.directory(container)
        chunks = found.chunks
        is_own = chunks.there & (owners_of_names(chunks.names, self._count) == self._number)
        names = np.where(is_own[:, None], chunks.names, np.uint8(0))
        lengths = np.where(is_own, chunks.lengths, np.uint32(0))
        return replace(found, chunks=replace(chunks, names=names, lengths=lengths))


class ShardIndex(LmdbIndex):
    """Index of one shard in a local folder. One process opens it."""

    def __init__(
        self,
        folder: Path,
        map_bytes: int,
        directories: Directories,
        options: TabletOptions,
        number: int,
        count: int,
    ) -> None:
        """Open the index of shard `number` of `count`; `directories` are those of all containers.

        Raises: IndexDamaged, FormatTooNew, StoreUnavailable.
        """
        own = OwnDirectories(directories, number, count)

        opened = list[TabletTables]()

        def tablets(databases: Mapping[str, Any]) -> TabletTables:
            opened.append(TabletTables(databases, folder, own, options, read_only=False))
            return opened[0]

        super().__init__(folder, b"", map_bytes, tables=tablets)
        self.tablets: TabletTables = opened[0]

    def load_tags(self) -> None:
        """Have all tags in memory, and a snapshot of them. Raises StoreUnavailable."""
        _ = self.report  # of the tags, which are read for it
        self.tablets.save()

    def at_once(self, table: str, keys: U8) -> tuple[Locations, Bools] | None:
        """Return what `at` does if keys are few and memory has all of it, else None."""
        if not 0 < len(keys) <= KEYS_AT_ONCE.get(table, 0):
            return None
        if table == "chunks":
            return self.tablets.locate_at_once(keys)
        with self._reading(buffers=True) as txn:
            return self.tablets.locate_at_once(keys, txn)

    def carried(self, table: str, container: int, bytes_max: int) -> CarriedRows | None:
        """Return what lookups find in a container and the next ones, of those in memory.

        The first is given also above `bytes_max`, up to the bound of an answer.
        """
        tablets, containers, used_bytes = list[Tablet](), list[int](), 0
        with self._reading(buffers=True) as txn:
            cursor = txn.cursor(self._containers)
            is_there = cursor.set_key(container.to_bytes(8, "big"))
            while is_there and len(tablets) < CARRIED_CONTAINERS_MAX:
                container = int.from_bytes(cursor.key(), "big")
                tablet = self._cached_tablet(txn, table, container)
                used_bytes += 0 if tablet is None else tablet.names.nbytes
                if tablet is None or used_bytes > (bytes_max if tablets else CARRIED_BYTES_MAX):
                    break
                tablets.append(tablet)
                containers.append(container)
                is_there = cursor.next()
        if not tablets:
            return None
        owners = np.repeat(np.array(containers, np.uint64), [len(tablet.tags) for tablet in tablets])
        is_only = self.tablets.only_in(owners, np.concatenate([tablet.tags for tablet in tablets]))
        if is_only is None:
            return None
        keys = np.concatenate([tablet.names for tablet in tablets])
        ordinals = np.concatenate([tablet.ordinals for tablet in tablets])
        return CarriedRows(keys[is_only], owners[is_only], ordinals[is_only])

    def _cached_tablet(self, txn: Any, table: str, container: int) -> Tablet | None:
        """Return the found names or segment ids of a container; None if they must be read."""
        if table == "segments":
            ids = self.tablets.segment_ids(txn, container)
            ordinals = np.flatnonzero(ids.any(axis=1)).astype(np.uint32)
            return Tablet(ids[ordinals], tags_of_segments(ids[ordinals]), ordinals)
        try:
            return self.tablets.tablets.get_cached(container)
        except NotCached:
            return None

    def add_parts(self, parts: Sequence[ContainerPart]) -> None:
        """Add the entries of durable containers in one transaction; existing entries stay."""
        rows = []
        for part in parts:
            name = part.container.to_bytes(8, "big")
            rows.append((name, encode_fields("containers", name, asdict(part.summary))))
        with self._writing_entries() as txn:
            self._tables.add(txn, [_entries_of(part) for part in parts])
            txn.cursor(self._containers).putmulti(rows)

    def summaries_after(self, container: int | None, count: int = ROWS_A_PAGE) -> list[ContainerSummary]:
        """Return the summaries of at most `count` containers after one, in stream order."""
        found: list[dict[str, Any]] = []
        start = b"" if container is None else container.to_bytes(8, "big") + b"\0"
        with self._reading() as txn:
            cursor = txn.cursor(self._containers)
            is_there = cursor.set_range(start) if start else cursor.first()
            while is_there and len(found) < count:
                found.append(decode_fields("containers", bytes(cursor.key()), bytes(cursor.value())))
                is_there = cursor.next()
        return [ContainerSummary(**{**fields, "depths": tuple(fields["depths"])}) for fields in found]

    @property
    def generation(self) -> int:
        """Return the GC generation of which all withdrawals were made."""
        return int(self.removal_token or 0)

    def record_generation(self, generation: int) -> None:
        """Record a GC generation; a lower one than recorded changes nothing."""
        if generation > self.generation:
            self.keep_removal_token(str(generation))

    def lacks_withdrawals(self, containers: Collection[int], generation: int) -> bool:
        """Return whether it may have entries of deleted data.

        So it is where it is older than the store's GC generation, or lists a container that the store lacks.
        """
        return self.generation < generation or not set(self.container_ids().tolist()).issubset(containers)


def _entries_of(part: ContainerPart) -> ContainerEntries:
    """Return entries with a directory that has the shard's own chunks alone."""
    ordinals, hidden = numbers_of(part.ordinals), numbers_of(part.hidden)
    names = np.zeros((part.chunks, NAME_BYTES), np.uint8)
    names[ordinals] = np.frombuffer(part.names, np.uint8).reshape(-1, NAME_BYTES)
    lengths = np.zeros(part.chunks, np.uint32)
    lengths[ordinals] = 1
    words, octets = np.zeros(part.chunks, np.uint32), np.zeros(part.chunks, np.uint8)
    chunks = ChunkTable(names, lengths, words, words, words, octets, Locations.empty(part.chunks), octets)
    none, no_octets = np.zeros(0, np.uint32), np.zeros(0, np.uint8)
    directory = Directory(
        ContainerId(part.container),
        part.domain,
        0,
        (),
        BlockTable(none.astype(np.uint64), none, none, no_octets, no_octets, no_octets),
        chunks,
        SegmentTable(np.zeros(1, np.uint32), no_octets, Locations.empty()),
        PrefixTable.empty(0),
        0,
        0,
        0,
    )
    ids = np.frombuffer(part.segment_ids, np.uint8).reshape(-1, SEGMENT_ID_BYTES).copy()
    features = {sketch: rows.arrays for sketch, rows in part.features.items()}
    return ContainerEntries(directory, ids, features, np.setdiff1d(ordinals, hidden))
