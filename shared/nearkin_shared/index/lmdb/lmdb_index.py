"""LMDB index. Invariant: every write is one transaction; the folder can be deleted at any time and rebuilt.

chunks      name 32                     -> container 8, ordinal 4       in sorted runs
features    namespace 8, rank 1, SF 8   -> container 8, ordinal 4       in sorted runs; first in stream order
segments    segment id 20               -> container 8, ordinal 4       in sorted runs
counts      container 8, ordinal 4      -> how many versions hold that segment, 4
containers  container 8 (big-endian)    -> check of table, key and value 8, ContainerSummary as JSON
versions    tenant 8, key..., version 8 -> manifest's bytes, ledger, times: sealed or not (version_entries.py)
meta        "mark" + key of versions    -> highest mark 4, bytes of all marks 8
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any
from weakref import WeakSet

import lmdb
import numpy as np

from nearkin_shared.errors import FormatTooNew, IndexClosed, StoreUnavailable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry, entry_of, summarise
from nearkin_shared.index.container_entries import FEATURE_KEY_BYTES, ContainerEntries, feature_keys
from nearkin_shared.index.lmdb.entry_encoding import (
    KEY_HEAD_BYTES,
    MARK_HEAD,
    MARKED,
    KeyedPlaces,
    decode_fields,
    drop_under,
    encode_fields,
    entry_from,
    fields_of,
    marks_under,
    parse_version,
    rows_of,
    segment_count_keys,
)
from nearkin_shared.index.lmdb.environments import (
    DAMAGE,
    Environment,
    acquire,
    damage_error,
    drop_after_fork,
    is_out_of_room,
    no_room,
    release,
)
from nearkin_shared.index.lmdb.lmdb_removal import RemovalLookup, by_table, is_unwanted, look_up
from nearkin_shared.index.lmdb.sorted_run_table import PLACE, FeatureShape, KeyShape, SortedRuns, places_of
from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EntryNames
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, MarkedVersion
from nearkin_shared.tenant_names import collision_of
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U32, U64, Bools, Locations
from nearkin_shared.utils.failpoints import failpoint

VERSION = 6
"""Of an index of another version the store makes a new one, as if it were lost. Before 6 its pages carried memory of
the process that wrote them, and names of an encrypted store in clear."""
TABLES = ("chunks", "features", "segments", "counts", "containers", "versions", "meta")
Entry = tuple[bytes, bytes]
Row = tuple[bytes, bytes, bytes]
"""Key and value of a version, and what is noted of its marks."""
_COUNT = Struct("<I")
_NONE = _COUNT.pack(0)
ENTRIES_A_PAGE = 1024
ENTRIES_FIRST_MIN = 16
"""Read at least at once: a key may have some versions."""
VERSION_MAX = (1 << 64) - 1
_NO_MARKS = MARKED.pack(0, 0)
_REMOVAL = b"removal"
_EXCLUDED, _ERASURE = b"excluded", Struct("<16sQ")
"""Owner of erased keys, and when they were erased, microseconds since 1970."""
_SHAPES = {
    "chunks": KeyShape(NAME_BYTES),
    "segments": KeyShape(SEGMENT_ID_BYTES),
    "features": FeatureShape(FEATURE_KEY_BYTES),
}
"""Tables of entries that come by the thousand."""

_ALL: WeakSet[LmdbIndex] = WeakSet()
"""All of this process."""


class LmdbIndex:
    """The embedded index: one folder, one writer, many readers."""

    def __init__(
        self,
        folder: Path,
        domain: bytes,
        map_bytes: int,
        *,
        read_only: bool = False,
        durable: bool = True,
        names: EntryNames = PLAIN_NAMES,
    ) -> None:
        """Not `durable`: nothing is, until `mark_complete`; for an index that counts only once it is complete.

        `names`: how versions are named in it; one that was made under others is not complete.
        """
        self._names = names
        self._whole = str(VERSION).encode() + names.marker
        self.read_only = read_only
        self._durable = durable
        self._domain = domain
        self._folder = folder
        self._write_lock = threading.Lock()
        self._users_lock = threading.Lock()
        self._users = 0
        """Who reads or writes at this moment; the last one ends what was closed meanwhile."""
        _ALL.add(self)
        self._shared: Environment | None = None
        self._shared = shared = acquire(folder, map_bytes, TABLES, writable=not read_only, durable=durable)
        self._env = shared.env
        self._databases = databases = shared.databases
        self._runs = {name: SortedRuns(databases[name], shape) for name, shape in _SHAPES.items()}
        self.removal: Callable[[], AbstractContextManager[str]] = lambda: nullcontext("")
        """Entered around each removal of entries, whose objects are deleted afterwards; gives the index's new token."""
        self._counts, self._containers, self._versions, self._meta = (databases[name] for name in TABLES[3:])
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
            raise damage_error(f"its format reads {found!r}")
        elif found is not None and int(found) > VERSION:
            raise FormatTooNew(
                f"index format {int(found)}; this Nearkin reads up to {VERSION}: upgrade, or delete index/"
            )

    @contextmanager
    def _in_use(self) -> Iterator[Environment]:
        """Keep the environment open: one that is closed under a thread that reads it kills the process (SIGSEGV).

        Raises IndexClosed.
        """
        with self._users_lock:
            shared = self._shared
            if shared is None or shared.process != os.getpid():
                raise IndexClosed("index: was closed meanwhile; run the same again")
            self._users += 1
        try:
            yield shared
        finally:
            with self._users_lock:
                self._users -= 1
                was_last = self._shared is None and not self._users
            if was_last:
                release(shared)

    @contextmanager
    def _reading(self, *, buffers: bool = False) -> Iterator[Any]:
        try:
            with self._in_use(), self._env.begin(buffers=buffers) as txn:
                yield txn
        except struct.error as err:
            raise damage_error(err) from err
        except lmdb.Error as err:
            raise _unavailable(self._folder, err) from err

    @contextmanager
    def _writing(self, *, buffers: bool = False) -> Iterator[Any]:
        try:
            with self._in_use(), self._write_lock:
                with self._env.begin(write=True, buffers=buffers) as txn:
                    yield txn
                    failpoint("index.writing")
                failpoint("index.written")
        except struct.error as err:  # a count, or what is noted of marks, of another length
            raise damage_error(err) from err
        except lmdb.Error as err:
            raise _unavailable(self._folder, err) from err

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        return self.at("chunks", names)

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        return self.at("segments", segment_ids)

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: k * n rows, all of a rank one behind the other."""
        asked = np.flatnonzero(super_features.T)
        keys = feature_keys(sketch, self._domain, super_features)[asked]
        located, there = self.at("features", keys)
        locations, found = Locations.empty(super_features.size), np.zeros(super_features.size, np.bool_)
        locations.containers[asked], locations.ordinals[asked] = located.containers, located.ordinals
        found[asked] = there
        return locations, found

    def publish(self, claims: ContainerEntries) -> None:
        """Add a durable container's entries in one transaction; an entry that is there stays."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries], *, summaries: bool = True) -> None:
        """Add durable containers' entries in one transaction; of one key the first stays.

        `summaries` off: what is known of each container as a whole stays too.
        """
        tables = ("chunks", "features", "segments")
        chunks, features, segments = found = [KeyedPlaces(_SHAPES[table].key_bytes) for table in tables]
        wholes: list[Entry] = []
        for claims in many:
            directory = claims.directory
            container = directory.container
            chunks.add(directory.chunks.names[claims.findable], container, claims.findable)
            claimed = np.flatnonzero(claims.segment_ids.any(axis=1))
            segments.add(claims.segment_ids[claimed], container, claimed)
            for sketch, (bases, super_features) in claims.super_features.items():
                rows = np.flatnonzero(super_features.T)
                if len(rows):
                    keys = feature_keys(sketch, directory.domain, super_features)[rows]
                    features.add(keys, container, bases[rows % len(super_features)])
            name = container.to_bytes(8, "big")
            wholes.append((name, encode_fields("containers", name, asdict(summarise(claims)))))
        with self._writing(buffers=True) as txn:
            for table, entries in zip(tables, found, strict=True):
                self._runs[table].add(txn, *entries.join)
            if summaries:
                txn.cursor(self._containers).putmulti(wholes)

    def renew(self, summary: ContainerSummary) -> None:
        """Replace what is known of a container as a whole."""
        with self._writing() as txn:
            name = summary.container.to_bytes(8, "big")
            txn.put(name, encode_fields("containers", name, asdict(summary)), db=self._containers)

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a version to the catalog and count its segments, once, in one transaction."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Add versions, each with its manifest's bytes, in one transaction."""
        with self._writing() as txn:
            for manifest, manifest_bytes in versions:
                key = self._names.version_key(manifest.tenant, manifest.key, manifest.version)
                entry = entry_of(manifest, manifest_bytes)
                said = self._names.encode(key, {"tenant": manifest.tenant, **fields_of(entry)})
                if not txn.put(key, said, db=self._versions, overwrite=False):
                    continue
                held = segment_count_keys(manifest)
                cursor = txn.cursor(self._counts)
                before = dict(cursor.getmulti(held))
                cursor.putmulti([(k, _COUNT.pack(_COUNT.unpack(before.get(k, _NONE))[0] + 1)) for k in held])

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog and count their segments no more, in one transaction."""
        with self._writing() as txn:
            for version in versions:
                key = self._names.version_key(version.tenant, version.key, version.version)
                name = MARK_HEAD + key
                if version.marks_bytes:
                    txn.put(name, MARKED.pack(version.sequence, version.marks_bytes), db=self._meta)
                else:
                    txn.delete(name, db=self._meta)
                if not self._is_listed(txn, key, version.tenant):
                    continue
                txn.delete(key, db=self._versions)
                if version.manifest is None:
                    continue
                held = segment_count_keys(version.manifest)
                cursor = txn.cursor(self._counts)
                before = {key: _COUNT.unpack(count)[0] for key, count in cursor.getmulti(held)}
                cursor.putmulti([(key, _COUNT.pack(count - 1)) for key, count in before.items() if count > 1])
                for key, count in before.items():
                    if count <= 1:
                        txn.delete(key, db=self._counts)

    def withdraw_tenants(self, tenants: Collection[str]) -> None:
        """Let go of tenants' versions, and of all that is known of marks, in one transaction."""
        with self._writing() as txn:
            for tenant in tenants:
                head = self._names.tenant_head(tenant)
                owners = list(self._owners_under(txn, head))
                if all(owner == tenant for _, owner in owners):
                    drop_under(txn, self._versions, head)
                    drop_under(txn, self._meta, MARK_HEAD + head)
                    continue
                for key in (key for key, owner in owners if owner == tenant):
                    txn.delete(key, db=self._versions)
                    txn.delete(MARK_HEAD + key, db=self._meta)

    def check_owner(self, tenant: str) -> None:
        """Refuse a tenant whose hash only another tenant's versions have. Raises TenantCollision."""
        with self._reading() as txn:
            first = next((owner for _, owner in self._owners_under(txn, self._names.tenant_head(tenant))), tenant)
            if first != tenant and not any(
                owner == tenant for _, owner in self._owners_under(txn, self._names.tenant_head(tenant))
            ):
                raise collision_of(tenant, "the index")

    def _owners_under(self, txn: Any, head: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield (key in `versions`, tenant) of all keys that start with `head`: tenants may share a hash."""
        cursor = txn.cursor(self._versions)
        if cursor.set_range(head):
            for key, value in cursor:
                if not key.startswith(head):
                    return
                yield bytes(key), self._names.decode(key, value)["tenant"]

    def _is_listed(self, txn: Any, key: bytes, tenant: str) -> bool:
        """Return whether a version is in the catalog, and not another tenant's under the same hash."""
        value = txn.get(key, db=self._versions)
        return value is not None and self._names.decode(key, value)["tenant"] == tenant

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Note the marks of versions in one transaction; the highest stands, whether the version is known or not."""
        with self._writing() as txn:
            for mark in marks:
                name = MARK_HEAD + self._names.version_key(mark.tenant, mark.key, mark.version)
                if (mark.sequence, mark.marks_bytes) > MARKED.unpack(txn.get(name, _NO_MARKS, db=self._meta)):
                    txn.put(name, MARKED.pack(mark.sequence, mark.marks_bytes), db=self._meta)

    def correct_marks(self, marks: Sequence[MarkedVersion]) -> None:
        """Put what is known of marks in place of what was noted, lower or not; 0 and no bytes: there are none."""
        with self._writing() as txn:
            for mark in marks:
                name = MARK_HEAD + self._names.version_key(mark.tenant, mark.key, mark.version)
                if mark.sequence or mark.marks_bytes:
                    txn.put(name, MARKED.pack(mark.sequence, mark.marks_bytes), db=self._meta)
                else:
                    txn.delete(name, db=self._meta)

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending; no tenant's of the same hash is the first or last."""
        start = self._names.version_key(tenant, key, 0)
        found: deque[bytes] = deque()
        with self._reading() as txn:
            cursor = txn.cursor(self._versions)
            if cursor.set_range(start):
                for entry in cursor.iternext(keys=True, values=False):
                    if not entry.startswith(start[:-8]):
                        break
                    found.append(entry)
            # Only at the ends: to compare the tenant of each of 30,000 versions would take 0.2 s.
            while found and not self._is_listed(txn, found[-1], tenant):
                found.pop()
            while found and not self._is_listed(txn, found[0], tenant):
                found.popleft()
        return [int.from_bytes(entry[-8:], "big") for entry in found]

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version."""
        found = self._recorded(self._names.prefix_head(tenant, prefix))
        wanted = [entry for owner, entry in found if owner == tenant and entry.key.startswith(prefix)]
        wanted.sort(key=lambda entry: (entry.key.encode(), entry.version))
        return iter(wanted)

    def catalogs(self) -> Iterator[tuple[str, CatalogEntry]]:
        """Yield (tenant, version) of all tenants, in no order that has a meaning."""
        return iter(self._recorded(b""))

    def _recorded(self, head: bytes) -> list[tuple[str, CatalogEntry]]:
        found = []
        with self._reading() as txn:
            marks = dict(marks_under(txn, self._meta, head))
            cursor = txn.cursor(self._versions)
            if cursor.set_range(head) if head else cursor.first():
                for key, value in cursor:
                    if not key.startswith(head):
                        break
                    row = parse_version(key, self._names.text(key, value))
                    found.append((row.tenant, entry_from(row, MARKED.unpack(marks.get(key, _NO_MARKS)))))
        return found

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = ENTRIES_A_PAGE
    ) -> Iterator[CatalogEntry]:
        """Yield entries as `catalog` does, only of what comes after `key`; with `version` after that version of it.

        About `count` are read at a time. Under sealed names all of the tenant's are.
        """
        after = (key.encode(), VERSION_MAX if version is None else version)
        first = self._names.group_head(tenant, max(prefix, key))
        if first is None:
            yield from (entry for entry in self.catalog(tenant, prefix) if not key or _order(entry) > after)
            return
        head = self._names.tenant_head(tenant)
        start, group, held = first if key > prefix else first[:-1], b"", list[Row]()
        count = max(ENTRIES_FIRST_MIN, min(count, ENTRIES_A_PAGE))
        while True:
            page = self._rows_from(head, start, count)
            for row in page:
                mine = row[0][: row[0].index(b"\0", len(head)) + 1]
                if mine != group:
                    yield from self._in_order(held, tenant, prefix, key, after)
                    group, held = mine, []
                held.append(row)
            if len(page) < count or (held and not self._may_follow(group, head, prefix)):
                yield from self._in_order(held, tenant, prefix, key, after)
                return
            start, count = page[-1][0] + b"\0", ENTRIES_A_PAGE

    @staticmethod
    def _may_follow(group: bytes, head: bytes, prefix: str) -> bool:
        """Return whether groups from this one on may have keys that start with `prefix`."""
        wanted = prefix.encode().partition(b"\0")[0][:KEY_HEAD_BYTES]
        return group[len(head) :][: len(wanted)] <= wanted

    def _rows_from(self, head: bytes, start: bytes, count: int) -> list[Row]:
        """Return up to `count` keys, values and marks of a tenant's versions, from `start` on."""
        found: list[Row] = []
        with self._reading() as txn:
            cursor = txn.cursor(self._versions)
            any_marks = next(marks_under(txn, self._meta, head), None) is not None
            if cursor.set_range(max(head, start)):
                for key, value in cursor:
                    if len(found) == count or not key.startswith(head):
                        break
                    mark = txn.get(MARK_HEAD + key, _NO_MARKS, db=self._meta) if any_marks else _NO_MARKS
                    found.append((key, value, mark))
        return found

    def _in_order(
        self, rows: Sequence[Row], tenant: str, prefix: str, key: str, after: tuple[bytes, int]
    ) -> list[CatalogEntry]:
        """Return the entries of one group that are wanted, by key and version."""
        wanted = []
        for name, value, mark in rows:
            row = parse_version(name, self._names.text(name, value))
            if row.tenant == tenant and row.key.startswith(prefix):
                entry = entry_from(row, MARKED.unpack(mark))
                if not key or _order(entry) > after:
                    wanted.append(entry)
        return sorted(wanted, key=_order) if len(wanted) > 1 else wanted

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) of all versions whose key starts with `prefix`, by key and version."""
        return ((entry.key, entry.version) for entry in self.catalog(tenant, prefix))

    def container_ids(self) -> U64:
        """Return the ids of all published containers, ascending."""
        with self._reading() as txn:
            keys = b"".join(txn.cursor(self._containers).iternext(keys=True, values=False))
        return np.frombuffer(keys, ">u8").astype(np.uint64)

    def look_up(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> RemovalLookup:
        """Return what `withdraw` would have to look for: a full scan of three tables, in which others may write."""
        file, containers = self.last_written[0], self.container_ids()  # before the entries
        unwanted = by_table(chunks, segments)
        keys = {table: look_up(self.rows(table), rows, _SHAPES[table].key_bytes) for table, rows in unwanted.items()}
        return RemovalLookup(file, containers, keys)

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Let go of entries that name what is lost or broken, in one transaction: a full scan of three tables.

        `chunks` and `segments` by container: ordinals, or None for all (of `chunks`: of its segments too); `containers`
        are gone as a whole and no longer counted. `looked_up`: what `look_up` found for these, or for more: it spares
        the scan.
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
        """Do `withdraw`; the index has `token` from the same transaction on."""
        unwanted = by_table(chunks, segments)
        found = looked_up if isinstance(looked_up, RemovalLookup) else None
        if found is not None and not found.holds(self.last_written[0], self.container_ids(), unwanted):
            found = None
        with self._writing(buffers=True) as txn:
            for table, rows in unwanted.items():
                if rows:
                    keys = None if found is None else found.keys[table]
                    self._runs[table].drop(txn, partial(is_unwanted, unwanted=rows), keys)
            for container in containers:
                txn.delete(container.to_bytes(8, "big"), db=self._containers)
                drop_under(txn, self._counts, container.to_bytes(8, "little"))
            if token:
                txn.put(_REMOVAL, token.encode(), db=self._meta)

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield what is known of each published container, in stream order."""
        with self._reading() as txn:
            summaries = [decode_fields("containers", name, value) for name, value in txn.cursor(self._containers)]
        return (ContainerSummary(**{**fields, "depths": tuple(fields["depths"])}) for fields in summaries)

    def rows(self, table: str) -> Iterator[tuple[U8, Locations]]:
        """Yield (keys, locations) of a table that has these, run by run: none is missed, some may come twice."""
        name = b""
        while True:
            with self._reading(buffers=True) as txn:
                found = self._runs[table].after(txn, name)
            if found is None:
                return
            name, keys, locations = found
            yield keys, locations

    def at(self, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys of a table, uint8[n, width]."""
        if not len(keys):
            return Locations.empty(), np.zeros(0, np.bool_)
        with self._reading(buffers=True) as txn:
            return self._runs[table].locate(txn, keys)

    def entries(self) -> dict[str, dict[bytes, bytes]]:
        """Return every entry of every table: for comparing two indexes in tests.

        Versions are opened: sealed values begin with a random nonce, those of equal fields differ. Raises IndexDamaged.
        """
        tables: dict[str, dict[bytes, bytes]] = {name: {} for name in _SHAPES}
        for name, shape in _SHAPES.items():
            for keys, locations in self.rows(name):
                places = places_of(locations.containers, locations.ordinals)
                tables[name].update(
                    zip(rows_of(keys, shape.key_bytes), rows_of(places.view(np.uint8), PLACE.itemsize), strict=True)
                )
        with self._reading() as txn:
            for name in ("counts", "containers", "versions"):
                tables[name] = {bytes(k): bytes(v) for k, v in txn.cursor(self._databases[name])}
            for key, value in tables["versions"].items():
                tables["versions"][key] = json.dumps(self._names.decode(key, value), sort_keys=True).encode()
            return {**tables, "marks": dict(marks_under(txn, self._meta, b""))}

    @property
    def complete(self) -> bool:
        """Return whether the index was once in step with the store; one of an older version, or cut short, is not."""
        with self._reading() as txn:
            return bool(txn.get(b"complete", db=self._meta) == self._whole)

    @property
    def is_outdated(self) -> bool:
        """Return whether an older version made the index, or one made it under other names."""
        with self._reading() as txn:
            return txn.get(b"complete", db=self._meta) not in (None, self._whole)

    def mark_complete(self) -> None:
        """Say that the index holds all that the store does."""
        with self._writing() as txn:
            txn.put(b"complete", self._whole, db=self._meta)
            txn.put(b"version", str(VERSION).encode(), db=self._meta)
        if not self._durable:
            try:
                with self._in_use():
                    self._env.sync(True)
            except lmdb.Error as err:
                raise _unavailable(self._folder, err) from err

    def record_excluded(self, erasures: Collection[tuple[bytes, int]]) -> None:
        """Record the erasures (owner, time) that came before the index was made: its file holds nothing of them."""
        with self._writing() as txn:
            txn.put(_EXCLUDED, b"".join(_ERASURE.pack(*one) for one in sorted(erasures)), db=self._meta)

    @property
    def excluded(self) -> frozenset[tuple[bytes, int]]:
        """Return what `record_excluded` recorded when the index was made."""
        with self._reading() as txn:
            found = txn.get(_EXCLUDED, b"", db=self._meta)
        return frozenset(_ERASURE.iter_unpack(found))

    @property
    def has_pending_updates(self) -> bool:
        """Return whether a writer began and has not said that the index holds all it stored: it is at work, or died."""
        with self._reading() as txn:
            return txn.get(b"behind", db=self._meta) is not None

    def set_pending_updates(self, behind: bool) -> None:
        """Say that the store may come to hold more than the index, or that it does not any more."""
        with self._writing() as txn:
            if behind:
                txn.put(b"behind", b"1", db=self._meta)
            else:
                txn.delete(b"behind", db=self._meta)

    @property
    def tokens(self) -> list[str]:
        """Return the tokens of the store's states that the index has (`nearkin.local.index_location`)."""
        with self._reading() as txn:
            return bytes(txn.get(b"tokens", b"", db=self._meta)).decode(errors="replace").split()

    def keep_tokens(self, tokens: Sequence[str]) -> None:
        """Replace the tokens, durably as every transaction."""
        with self._writing() as txn:
            txn.put(b"tokens", " ".join(tokens).encode(), db=self._meta)

    @property
    def removal_token(self) -> str:
        """Return the token of the last removal from the index, "" before the first (`nearkin.local.index_location`)."""
        with self._reading() as txn:
            return bytes(txn.get(_REMOVAL, b"", db=self._meta)).decode(errors="replace")

    def keep_removal_token(self, token: str) -> None:
        """Set the token of the last removal of an index that was made from all that is stored."""
        with self._writing() as txn:
            txn.put(_REMOVAL, token.encode(), db=self._meta)

    @property
    def last_written(self) -> tuple[tuple[int, int], int]:
        """Return the file, and the number of the last transaction that wrote it, by whichever process."""
        with self._in_use() as shared:
            return shared.file, int(self._env.info()["last_txnid"])

    def close(self) -> None:
        """Let go of the environment, once whoever is at work in it has ended; again is fine."""
        with self._users_lock:
            shared, self._shared = self._shared, None
            busy = self._users > 0
        if shared is not None and not busy:
            release(shared)

    @property
    def current(self) -> bool:
        """Return whether this is the index that lies in its folder; a rebuild, by whom ever, puts a new one there."""
        shared = self._shared
        return shared is not None and shared.is_at(self._folder)

    @property
    def at_work(self) -> Any:
        """Return LMDB's environment where it is read or written at this moment, else None."""
        return self._env if self._users else None


def _order(entry: CatalogEntry) -> tuple[bytes, int]:
    return entry.key.encode(), entry.version


def _after_fork() -> None:
    drop_after_fork([env for index in list(_ALL) if (env := index.at_work) is not None])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _unavailable(folder: Path, err: lmdb.Error) -> StoreUnavailable:
    if isinstance(err, DAMAGE):
        return damage_error(err)
    if isinstance(err, lmdb.MapFullError):
        return StoreUnavailable(f"index {folder}: full; raise index.map_bytes and run the same again")
    if is_out_of_room(folder, err):
        return no_room(folder)
    return StoreUnavailable(f"index {folder}: {err}; all before is as it was: run the same again")
