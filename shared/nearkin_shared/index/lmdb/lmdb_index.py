"""LMDB index of chunks, super-features, segments, containers and versions.

Invariant: every write is one transaction; the folder can be deleted at any time and rebuilt.

    chunks, features, segments              many entries a container: entry_tables.py
    containers  container 8 (big-endian)    -> check of table, key and value 8, ContainerSummary as JSON
    meta        state of the index

The tables of versions are described in lmdb_catalog.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from nearkin_shared.errors import FormatTooNew
from nearkin_shared.formats.columns import CHECK_BYTES
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries, feature_keys
from nearkin_shared.index.lmdb.entry_encoding import (
    decode_fields,
    encode_fields,
    marks_under,
    rows_of,
)
from nearkin_shared.index.lmdb.entry_tables import SHAPES, TABLETS_MARKER, EntryTables, ExactTables
from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.index.lmdb.lmdb_catalog import NO_MARKS, LmdbCatalog
from nearkin_shared.index.lmdb.lmdb_removal import RemovalLookup, removals_by_table
from nearkin_shared.index.lmdb.sorted_run_table import PACKED_LOCATION, pack_locations
from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EntryNames
from nearkin_shared.index.protocols import ContainerSummary, IndexSnapshot
from nearkin_shared.limits import MIB
from nearkin_shared.results import IndexReport
from nearkin_shared.types import U8, U32, U64, Bools, Locations

RESIDENT_BYTES_MAX = 16 * MIB
"""Size of the file from which its resident pages are released after each publication."""
VERSION = 6
"""Format of the index; the store rebuilds an index of an older one, as if it were lost.

Before 6 its pages contained memory of the process that wrote them, and names of an encrypted store in clear.
"""
Entry = tuple[bytes, bytes]
_REMOVAL = b"removal"
_EXCLUDED, _ERASURE = b"excluded", Struct("<16sQ")
"""Owner of erased keys, and when they were erased, microseconds since 1970."""


class LmdbIndex(LmdbCatalog):
    """Embedded index: one folder, one writer, many readers."""

    def __init__(
        self,
        folder: Path,
        domain: bytes,
        map_bytes: int,
        *,
        read_only: bool = False,
        durable: bool = True,
        names: EntryNames = PLAIN_NAMES,
        tables: Callable[[Mapping[str, Any]], EntryTables] = ExactTables,
    ) -> None:
        """Open the index.

        Without `durable` no write is durable before `mark_complete`; for an index that is used only once it is
        complete. `names` translates the names of versions, `tables` opens the tables of many entries; an index made
        under other names or with other tables is not complete.
        """
        super().__init__(folder, map_bytes, names, read_only=read_only, durable=durable)
        self._tables: EntryTables = tables(self._databases)
        self._complete_marker = str(VERSION).encode() + names.marker + self._tables.marker
        self._domain = domain
        self.removal: Callable[[], AbstractContextManager[str]] = lambda: nullcontext("")
        """Context of each removal of entries, whose objects are deleted afterwards; yields the index's new token."""
        try:
            self._check_version(read_only)
        except BaseException:
            self.close()
            raise

    def _check_version(self, read_only: bool) -> None:
        with self._reading() as txn:
            found = txn.get(b"version", db=self._meta)
        if found is None and not read_only:
            with self._writing() as txn:
                txn.put(b"version", str(VERSION).encode(), db=self._meta)
        elif found is not None and not found.isdigit():
            raise damage_error(f"its format is {found!r}")
        elif found is not None and int(found) > VERSION:
            raise FormatTooNew(
                f"index: format {int(found)} is newer than this Nearkin reads ({VERSION}); upgrade, or delete index/"
            )

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        return self.at("chunks", names)

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        return self.at("segments", segment_ids)

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: k * n rows by rank."""
        nonzero = np.flatnonzero(super_features.T)
        keys = feature_keys(sketch, self._domain, super_features)[nonzero]
        located, is_found = self.at("features", keys)
        locations, found = Locations.empty(super_features.size), np.zeros(super_features.size, np.bool_)
        locations.containers[nonzero], locations.ordinals[nonzero] = located.containers, located.ordinals
        found[nonzero] = is_found
        return locations, found

    @property
    def report(self) -> IndexReport:
        """Return memory and expected loss of the index."""
        with self._reading(buffers=True) as txn:
            return self._tables.report(txn)

    def publish(self, claims: ContainerEntries) -> None:
        """Add a durable container's entries in one transaction; existing entries stay."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries], *, summaries: bool = True) -> None:
        """Add durable containers' entries in one transaction; the first entry of a key stays.

        With `summaries` False the container summaries stay too.
        """
        summary_rows: list[Entry] = []
        for claims in many:
            name = claims.directory.container.to_bytes(8, "big")
            summary_rows.append((name, encode_fields("containers", name, asdict(summarise(claims)))))
        with self._writing_entries() as txn:
            self._tables.add(txn, many)
            if summaries:
                txn.cursor(self._containers).putmulti(summary_rows)
        self._release_pages(RESIDENT_BYTES_MAX)

    @contextmanager
    def _writing_entries(self) -> Iterator[Any]:
        """Give a transaction that changes tables of entries too."""
        try:
            with self._writing(buffers=True) as txn:
                yield txn
        except BaseException:
            self._tables.on_aborted()
            raise
        self._tables.on_written()

    def renew(self, summary: ContainerSummary) -> None:
        """Replace a container's summary."""
        with self._writing_entries() as txn:
            name = summary.container.to_bytes(8, "big")
            txn.put(name, encode_fields("containers", name, asdict(summary)), db=self._containers)
            self._tables.on_renewed(txn, summary.container)

    def container_ids(self) -> U64:
        """Return the ids of all published containers, ascending."""
        with self._reading() as txn:
            keys = b"".join(txn.cursor(self._containers).iternext(keys=True, values=False))
        return np.frombuffer(keys, ">u8").astype(np.uint64)

    def snapshot(self) -> IndexSnapshot:
        """Return all versions with marks, and all containers with checks of their summaries."""
        with self._reading() as txn:
            marks = dict(marks_under(txn, self._meta, b""))
            versions = dict.fromkeys(txn.cursor(self._versions).iternext(keys=True, values=False), NO_MARKS)
            versions.update((key, packed) for key, packed in marks.items() if key in versions)
            containers = {
                int.from_bytes(name): bytes(value[:CHECK_BYTES]) for name, value in txn.cursor(self._containers)
            }
        return IndexSnapshot(versions, containers)

    def look_up(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> RemovalLookup:
        """Return the lookup for `withdraw`: a full scan of three tables, while others may write."""
        file, containers = self.last_written[0], self.container_ids()  # before the entries
        keys = self._tables.find_removed(self.rows, removals_by_table(chunks, segments))
        return RemovalLookup(file, containers, keys)

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Withdraw entries by the container that they name, in one transaction.

        Without `looked_up`, the result of `look_up` for these removals or more, it is a full scan of three tables.
        `chunks` and `segments` map a container to ordinals, or to None for all its chunks (its segments too);
        `containers` were deleted as a whole and are no longer counted.
        """
        with self.removal() as token:
            self._withdraw(chunks, segments, containers, looked_up, token)

    def _withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object,
        token: str,
    ) -> None:
        """Withdraw entries; the same transaction stores `token`."""
        removals = removals_by_table(chunks, segments)
        found = looked_up if isinstance(looked_up, RemovalLookup) else None
        if found is not None and not found.covers(self.last_written[0], self.container_ids(), removals):
            found = None
        with self._writing_entries() as txn:
            self._tables.drop(txn, removals, containers, None if found is None else found.keys)
            for container in containers:
                txn.delete(container.to_bytes(8, "big"), db=self._containers)
            if token:
                txn.put(_REMOVAL, token.encode(), db=self._meta)

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield the summary of each published container, in stream order."""
        with self._reading() as txn:
            summaries = [decode_fields("containers", name, value) for name, value in txn.cursor(self._containers)]
        return (ContainerSummary(**{**fields, "depths": tuple(fields["depths"])}) for fields in summaries)

    def rows(self, table: str) -> Iterator[tuple[U8, Locations]]:
        """Yield (keys, locations) of a table of sorted runs, run by run.

        No entry is missed; some may be repeated.
        """
        name = b""
        while True:
            with self._reading(buffers=True) as txn:
                found = self._tables.next_rows(txn, table, name)
            if found is None:
                return
            name, keys, locations = found
            yield keys, locations

    def at(self, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys of a table, uint8[n, width]."""
        if not len(keys):
            return Locations.empty(), np.zeros(0, np.bool_)
        with self._reading(buffers=True) as txn:
            return self._tables.locate(txn, table, keys)

    def entries(self) -> dict[str, dict[bytes, bytes]]:
        """Return every entry of every table, to compare two indexes in tests.

        Versions are decrypted: an encrypted value begins with a random nonce. Raises IndexDamaged.
        """
        tables: dict[str, dict[bytes, bytes]] = {name: {} for name in SHAPES}
        for name, shape in SHAPES.items():
            for keys, locations in self.rows(name):
                packed = pack_locations(locations.containers, locations.ordinals)
                found = zip(
                    rows_of(keys, shape.key_bytes),
                    rows_of(packed.view(np.uint8), PACKED_LOCATION.itemsize),
                    strict=True,
                )
                for key, location in found:
                    tables[name].setdefault(key, location)  # a sampled index may have a chunk in several containers
        with self._reading() as txn:
            for name in ("containers", "versions"):
                tables[name] = {bytes(k): bytes(v) for k, v in txn.cursor(self._databases[name])}
            for key, value in tables["versions"].items():
                tables["versions"][key] = json.dumps(self._names.decode(key, value), sort_keys=True).encode()
            return {**tables, "marks": dict(marks_under(txn, self._meta, b""))}

    @property
    def complete(self) -> bool:
        """Return whether the index has been complete; an outdated or interrupted one has not."""
        with self._reading() as txn:
            return bool(txn.get(b"complete", db=self._meta) == self._complete_marker)

    @property
    def is_outdated(self) -> bool:
        """Return whether the index has an older format, or was made under other names."""
        with self._reading() as txn:
            return txn.get(b"complete", db=self._meta) not in (None, self._complete_marker)

    @property
    def has_tablets(self) -> bool:
        """Return whether it was completed with the tables of `tablets` and `sampled`."""
        with self._reading() as txn:
            return bool(txn.get(b"complete", b"", db=self._meta).endswith(TABLETS_MARKER))

    def mark_complete(self) -> None:
        """Record that the index has all entries of the store."""
        with self._writing() as txn:
            txn.put(b"complete", self._complete_marker, db=self._meta)
            txn.put(b"version", str(VERSION).encode(), db=self._meta)
        if not self._durable:
            self._sync()

    def record_excluded(self, erasures: Collection[tuple[bytes, int]]) -> None:
        """Record the erasures (owner, time) before the creation of the index.

        Its file contains nothing of the erased data.
        """
        with self._writing() as txn:
            txn.put(_EXCLUDED, b"".join(_ERASURE.pack(*erasure) for erasure in sorted(erasures)), db=self._meta)

    @property
    def excluded(self) -> frozenset[tuple[bytes, int]]:
        """Return the erasures recorded when the index was made."""
        with self._reading() as txn:
            found = txn.get(_EXCLUDED, b"", db=self._meta)
        return frozenset(_ERASURE.iter_unpack(found))

    @property
    def has_pending_updates(self) -> bool:
        """Return whether a writer has begun and not yet ended: it is running, or died."""
        with self._reading() as txn:
            return txn.get(b"behind", db=self._meta) is not None

    def set_pending_updates(self, behind: bool) -> None:
        """Record that the store may have objects that the index lacks, or that it has none."""
        with self._writing() as txn:
            if behind:
                txn.put(b"behind", b"1", db=self._meta)
            else:
                txn.delete(b"behind", db=self._meta)

    @property
    def tokens(self) -> list[str]:
        """Return the tokens of the store states that the index has.

        See `nearkin.local.index_location`.
        """
        with self._reading() as txn:
            return bytes(txn.get(b"tokens", b"", db=self._meta)).decode(errors="replace").split()

    def keep_tokens(self, tokens: Sequence[str]) -> None:
        """Replace the tokens, durably like every transaction."""
        with self._writing() as txn:
            txn.put(b"tokens", " ".join(tokens).encode(), db=self._meta)

    @property
    def removal_token(self) -> str:
        """Return the token of the last removal, "" before the first.

        See `nearkin.local.index_location`.
        """
        with self._reading() as txn:
            return bytes(txn.get(_REMOVAL, b"", db=self._meta)).decode(errors="replace")

    def close(self) -> None:
        """Release tables and environment. Idempotent."""
        super().close()
        self._tables.close()

    def keep_removal_token(self, token: str) -> None:
        """Set the token of the last removal, in an index made from all objects."""
        with self._writing() as txn:
            txn.put(_REMOVAL, token.encode(), db=self._meta)
