"""Redis index. Invariant: an answer is a location that was published in the epoch it was read in, or "not found".

Every lookup is one round trip, whatever the batch: the epoch, a script for some partitions (in a Cluster for one), and
the end of the container table.
A publish is three: a container's numbers, its entries, its summary. A commit is three: is it there, counts, catalog.

    publish   1 numbers  2 entries  3 summary       dying between any two only repeats work:
    commit    1 known?   2 counts   3 catalog       each step is found done when it is done again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry, entry_of, summarise
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, MarkedVersion
from nearkin_shared.index.redis import catalog_encoding, key_encoding
from nearkin_shared.index.redis.connection import Command, Server
from nearkin_shared.index.redis.epoch import EPOCH_TRIES_MAX, Epoch, EpochReplaced, Epochs, NumberedContainers
from nearkin_shared.index.redis.key_encoding import CHUNKS, COUNTS, FEATURES, SEGMENTS, U16, Keys, Table
from nearkin_shared.index.redis.partitions import VERSIONS_LETTER
from nearkin_shared.index.redis.redis_removal import drop_containers, withdraw_entries, withdraw_missing
from nearkin_shared.tenant_names import collision_of
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations

KEYS_A_SCRIPT = 512
"""A script holds up everyone else: some 2 ms for so many keys."""
VERSIONS_A_COMMIT = 256
MEMBERS_A_PAGE = 1000
MEMBERS_FIRST_MIN = 16
"""Read at least at once: a key may have some versions."""
COUNTED_SECONDS = 3600
"""How long it is remembered that a version's segments were counted, should its commit have to be repeated midway."""
FOREIGN = -1
"""Answer of a script where the tag of a tenant is that of another tenant's name."""
_log = logging.getLogger("nearkin.redis")

Answer = TypeVar("Answer")
Numbered = tuple[Keys, U64]
"""Keys, and the number that each stands for."""


class RedisIndex:
    """The index of several workers, seen from one dedup domain. Shared by threads."""

    def __init__(self, settings: RedisSettings, domain: bytes = b"", generation: Callable[[], int] = lambda: 0) -> None:
        """Connect; without a domain only the catalog and `for_domain` are of use.

        `generation` returns the GC generation of the object store
        (`nearkin_shared.storage.pending_deletes.GcGeneration`). Raises StoreUnavailable, or ConfigError where settings
        or the server's policy are wrong.
        """
        self.server = Server(settings)
        self.prefix = settings.prefix
        self._domain = domain
        self.epochs = Epochs(self.server, settings.prefix, settings.partitions, generation)
        self.server.begin_use()

    def for_domain(self, domain: bytes) -> RedisIndex:
        """Return the same index seen from another domain (tenant); it shares connections: close only one."""
        other = RedisIndex.__new__(RedisIndex)
        other.server, other.prefix, other.epochs, other._domain = self.server, self.prefix, self.epochs, domain
        return other

    @property
    def needs_rebuild(self) -> bool:
        """Whether the index may hold less than the store, as last seen; `check` asks Redis."""
        return not self.epochs.current.whole

    def check(self) -> bool:
        """Ask whether Redis is still the one it was; return `needs_rebuild`."""
        return not self.epochs.check().whole

    def is_stale(self) -> bool:
        """Return whether entries have to be checked against the store; asks every server of a Cluster."""
        return self.epochs.is_stale() or bool(self.server.one(("EXISTS", self._suspects_key)))

    # --- containers that the store lacks -----------------------------------------------------------------------------

    @property
    def _suspects_key(self) -> str:
        return f"{self.prefix}:{{m}}:suspects"

    def report_missing(self, container: int) -> None:
        """Report a container that an entry names and the store lacks: the maintenance service checks the index soon."""
        self.server.one(("SET", self._suspects_key, f"{container:016x}"))

    def take_reports(self) -> bool:
        """Remove the reports, since the index is about to be checked; return whether there was one."""
        return bool(self.server.one(("UNLINK", self._suspects_key)))

    # --- listings while the index is being checked -------------------------------------------------------------------

    @property
    def has_catalog(self) -> bool:
        """Return whether the catalog lists every version, although containers may still be missing in the index."""
        epoch = self.epochs.check()
        return epoch.whole or bool(self.server.one(("EXISTS", epoch.meta("catalog"))))

    def declare_catalog(self, epoch: Epoch) -> None:
        """Declare that the catalog of this epoch lists every version."""
        self.server.one(("SET", epoch.meta("catalog"), "1"))

    def tenants(self) -> list[str]:
        """Return all tenants that have versions in the catalog."""
        return self._in_epoch(lambda epoch: self.epochs.partitions_of(epoch).tenants())

    # --- lookups -----------------------------------------------------------------------------------------------------

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        return self._locate(CHUNKS, key_encoding.chunk_keys(names))

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        return self._locate(SEGMENTS, key_encoding.segment_keys(segment_ids))

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: k * n rows, all of a rank one behind the other.

        Asks for those too that a lower rank has found already: cheaper than a round trip a rank.
        """
        ranks = enumerate(np.ascontiguousarray(super_features.T))
        parts = [key_encoding.super_feature_keys(sketch, self._domain, rank, column) for rank, column in ranks]
        locations, found = self._locate(FEATURES, Keys.join(parts))
        return locations, found & (super_features.T != 0).ravel()

    def _locate(self, table: Table, keys: Keys) -> tuple[Locations, Bools]:
        if not len(keys):
            return Locations.empty(), np.zeros(0, np.bool_)
        return self._in_epoch(partial(self._located, table=table, keys=keys))

    def _located(self, epoch: Epoch, table: Table, keys: Keys) -> tuple[Locations, Bools]:
        tables_max = 1 if self.server.clustered else epoch.partitions
        order, calls = _finds(epoch, table, keys, tables_max, self.epochs.generation)
        known, tail = self.epochs.tail(epoch)
        value, *values, records = self.server.run([("GET", self.epochs.key), *calls, tail])
        self.epochs.seen(epoch, value)
        if None in values:
            raise EpochReplaced
        numbers = np.empty(len(keys), np.uint64)
        numbers[order] = key_encoding.numbers_of(b"".join(values))
        epoch.table.extend(known, records)
        self.epochs.cover(epoch, numbers)
        return epoch.table.locate(numbers, self._domain)

    # --- publishing --------------------------------------------------------------------------------------------------

    def publish(self, claims: ContainerEntries) -> None:
        """Add a durable container's entries; one that is there stays."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Add durable containers' entries; of one key the first stays. They share their three round trips."""
        self._in_epoch(partial(self._published, many=many))

    def _published(self, epoch: Epoch, many: Sequence[ContainerEntries]) -> None:
        spans = [
            (found.container, max(len(found.chunks), len(found.segments)), found.domain)
            for found in (claims.directory for claims in many)
        ]
        chunks: list[Numbered] = []
        segments: list[Numbered] = []
        features: list[Numbered] = []
        for claims, number in zip(many, self.epochs.first_numbers(epoch, spans), strict=True):  # 1
            first, directory, findable = np.uint64(number), claims.directory, claims.findable
            chunks.append(
                (key_encoding.chunk_keys(directory.chunks.names[findable]), first + findable.astype(np.uint64))
            )
            claimed = np.flatnonzero(claims.segment_ids.any(axis=1))
            segments.append((key_encoding.segment_keys(claims.segment_ids[claimed]), first + claimed.astype(np.uint64)))
            for sketch, (ordinals, super_features) in claims.super_features.items():
                for rank in range(super_features.shape[1]):
                    there = np.flatnonzero(super_features[:, rank])
                    keys = key_encoding.super_feature_keys(sketch, directory.domain, rank, super_features[there, rank])
                    features.append((keys, first + ordinals[there].astype(np.uint64)))
        calls: list[Command] = []
        for table, parts in ((CHUNKS, chunks), (SEGMENTS, segments), (FEATURES, features)):
            calls += _inserts(epoch, table, parts)
        if None in self.server.run(calls):  # 2
            raise EpochReplaced
        packed = [(claims.directory.container, catalog_encoding.pack_summary(summarise(claims))) for claims in many]
        self.epochs.finish(epoch, packed)  # 3

    # --- versions ----------------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a version to the catalog and count its segments, once."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Add versions, each with its manifest's bytes; VERSIONS_A_COMMIT share their round trips."""
        for at in range(0, len(versions), VERSIONS_A_COMMIT):
            some = versions[at : at + VERSIONS_A_COMMIT]
            self._in_epoch(partial(self._committed, versions=some))

    def _committed(self, epoch: Epoch, versions: Sequence[tuple[Manifest, int]]) -> None:
        starts = [catalog_encoding.member_start(manifest.key, manifest.version) for manifest, _ in versions]
        homes = [self._home(epoch, manifest.tenant) for manifest, _ in versions]
        tenants = [manifest.tenant for manifest, _ in versions]
        known = self._are_committed(homes, starts, tenants)  # 1
        if None in known:
            raise EpochReplaced
        for tenant in {tenant for tenant, there in zip(tenants, known, strict=True) if there == FOREIGN}:
            _log.error("not listed: %s", collision_of(tenant, "the index"))
        new = [row for row, there in enumerate(known) if not there]
        calls: list[Command] = []
        for row in new:
            calls += _counts(epoch, versions[row][0], starts[row])
        if None in self.server.run(calls):  # 2
            raise EpochReplaced
        adding = []
        for row in new:
            manifest, manifest_bytes = versions[row]
            entry = entry_of(manifest, manifest_bytes)
            owner = catalog_encoding.tenant_tag(manifest.tenant), manifest.tenant
            adding.append(Server.call("commit", homes[row], starts[row], catalog_encoding.member_rest(entry), *owner))
        if None in self.server.run(adding):  # 3
            raise EpochReplaced

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Note the marks of versions, VERSIONS_A_COMMIT in a round trip; the highest stands."""
        for at in range(0, len(marks), VERSIONS_A_COMMIT):
            self._in_epoch(partial(self._marked, marks=marks[at : at + VERSIONS_A_COMMIT]))

    def _marked(self, epoch: Epoch, marks: Sequence[MarkedVersion]) -> None:
        calls = []
        for mark in marks:
            partition, versions = self._home(epoch, mark.tenant)
            start = catalog_encoding.member_start(mark.key, mark.version)
            calls.append(Server.call("mark", [partition, _marks_of(versions)], start, mark.sequence, mark.marks_bytes))
        if None in self.server.run(calls):
            raise EpochReplaced

    # --- letting go --------------------------------------------------------------------------------------------------

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Let go of entries by the container they name, of all domains; reads the whole index."""
        self._in_epoch(partial(self._withdraw, chunks=chunks, segments=segments, containers=containers))

    def _withdraw(
        self,
        epoch: Epoch,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32 | None],
        containers: Collection[int],
    ) -> None:
        self.epochs.cover_all(epoch)
        withdraw_entries(self.server, epoch, chunks, segments)
        drop_containers(self.server, self.epochs.key, epoch, containers)

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation, once `withdraw` has removed what a GC run withdraws; return its number."""
        return self._in_epoch(lambda _: self.epochs.advance(at_least))

    def container_numbers(self) -> NumberedContainers:
        """Return which numbers containers have by now, for `withdraw_missing`."""
        return self._in_epoch(self.epochs.container_numbers)

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries whose number no container has, or whose chunk or segment is not there; return how many.

        By container of the store: a mask of its chunks, or segments; None for all of them. The store is listed after
        `numbered` was read: what is published meanwhile stays.
        """
        epoch = self.epochs.current
        gone = withdraw_missing(self.server, epoch, numbered, chunks, segments)
        lost = sorted({int(container) for container in numbered.containers} - chunks.keys())
        drop_containers(self.server, self.epochs.key, epoch, lost)
        return gone

    def renew(self, summary: ContainerSummary) -> None:
        """Replace what `containers` tells of a container: it was written anew."""
        self._in_epoch(partial(self._renewed, summary=summary))

    def _renewed(self, epoch: Epoch, summary: ContainerSummary) -> None:
        name, packed = summary.container.to_bytes(8, "little"), catalog_encoding.pack_summary(summary)
        keys = [self.epochs.key, epoch.meta("containers")]
        if self.server.one(Server.call("anew", keys, epoch.name, name, packed)) is None:
            raise EpochReplaced

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog and count their segments no more; VERSIONS_A_COMMIT share round trips."""
        for at in range(0, len(versions), VERSIONS_A_COMMIT):
            self._in_epoch(partial(self._collected, versions=versions[at : at + VERSIONS_A_COMMIT]))

    def _collected(self, epoch: Epoch, versions: Sequence[CollectedVersion]) -> None:
        starts = [catalog_encoding.member_start(version.key, version.version) for version in versions]
        homes = [self._home(epoch, version.tenant) for version in versions]
        known = self._are_committed(homes, starts, [version.tenant for version in versions])  # 1
        counts: list[Command] = []
        for version, start, there in zip(versions, starts, known, strict=True):
            if there == 1 and version.manifest is not None:
                counts += _counts(epoch, version.manifest, start, "uncount")
        if None in known or None in self.server.run(counts):  # 2
            raise EpochReplaced
        going = [
            Server.call("collect", [*home, _marks_of(home[1])], start, version.sequence, version.marks_bytes)
            for version, home, start, there in zip(versions, homes, starts, known, strict=True)
            if there != FOREIGN
        ]
        if None in self.server.run(going):  # 3
            raise EpochReplaced

    def _are_committed(
        self, homes: Sequence[list[str]], starts: Sequence[bytes], tenants: Sequence[str]
    ) -> list[int | None]:
        """Return for each version 1 where it is in the catalog, else 0, FOREIGN, or None for a partition lost."""
        owners = ((catalog_encoding.tenant_tag(tenant), tenant) for tenant in tenants)
        rows = zip(homes, starts, owners, strict=True)
        found: list[int | None] = self.server.run(
            [Server.call("committed", home, start, *owner) for home, start, owner in rows]
        )
        return found

    def _home(self, epoch: Epoch, tenant: str) -> list[str]:
        """Return the keys of the partition that holds a tenant's versions, and of the versions themselves."""
        tag = catalog_encoding.tenant_tag(tenant)
        partition = epoch.partition(VERSIONS_LETTER, int(tag[:4], 16) % epoch.partitions)
        return [partition, f"{partition}:{tag}"]

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending."""
        start = catalog_encoding.escape_key(key) + b"\0"
        return [entry.version for entry in self._entries(tenant, start + b"\0", start + b"\1")]

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version, MEMBERS_A_PAGE at a time."""
        start = catalog_encoding.escape_key(prefix)
        return self._entries(tenant, start, start + b"\xff" if start else None)  # no UTF-8 holds 255; NUL 255 is NUL

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = MEMBERS_A_PAGE
    ) -> Iterator[CatalogEntry]:
        """Yield entries as `catalog` does, only of what comes after `key`; with `version` after that version of it.

        About `count` are wanted, so that few are read where few are.
        """
        start = catalog_encoding.escape_key(prefix)
        after = b"" if not key else catalog_encoding.member_end(key)
        if version is not None:
            after = catalog_encoding.member_start(key, version) + b"\xff"
        return self._entries(tenant, max(start, after), start + b"\xff" if start else None, count)

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) of all versions whose key starts with `prefix`, by key and version."""
        return ((entry.key, entry.version) for entry in self.catalog(tenant, prefix))

    def _entries(
        self, tenant: str, start: bytes, end: bytes | None, count: int = MEMBERS_A_PAGE
    ) -> Iterator[CatalogEntry]:
        count = max(MEMBERS_FIRST_MIN, min(count, MEMBERS_A_PAGE))
        below = b"+" if end is None else b"(" + end
        above = b"[" + start
        while True:
            page, marks = self._in_epoch(partial(self._page, tenant=tenant, above=above, below=below, count=count))
            yield from map(catalog_encoding.with_marks, map(catalog_encoding.parse_member, page), marks)
            if len(page) < count:
                return
            above, count = b"(" + page[-1], MEMBERS_A_PAGE

    def _page(
        self, epoch: Epoch, tenant: str, above: bytes, below: bytes, count: int
    ) -> tuple[list[bytes], Sequence[bytes | None]]:
        """Return members, and what is noted of the marks of each: asked for only where any version has some."""
        partition, versions = self._home(epoch, tenant)
        marks = _marks_of(versions)
        asked: list[Command] = [
            ("GET", self.epochs.key),
            ("ZRANGEBYLEX", versions, above, below, "LIMIT", 0, count),
            ("EXISTS", partition),
            ("EXISTS", marks),
            ("HGET", partition, catalog_encoding.tenant_tag(tenant)),
        ]
        value, page, there, any_marks, owner = self.server.run(asked)
        self.epochs.seen(epoch, value)
        if not there:
            raise EpochReplaced
        if owner is not None and owner.decode() != tenant:
            raise collision_of(tenant, "the index")
        found: list[bytes] = page
        if not found or not any_marks:
            return found, [None] * len(found)
        return found, self.server.one(("HMGET", marks, *(member[: member.find(b"\0\0") + 10] for member in found)))

    # --- the index as a whole ----------------------------------------------------------------------------------------

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield what is known of each container of this domain whose entries are all there, in stream order."""
        return (
            catalog_encoding.parse_summary(container, packed) for container, packed in self._summaries(self._domain)
        )

    def container_ids(self) -> U64:
        """Return the ids of all domains' containers whose entries are all there, in stream order."""
        return np.array([container for container, _ in self._summaries(None)], np.uint64)

    def _summaries(self, domain: bytes | None) -> Iterator[tuple[ContainerId, bytes]]:
        epoch = self.epochs.check()
        self.epochs.cover_all(epoch)
        ids = epoch.table.containers(domain).tolist()
        for at in range(0, len(ids), MEMBERS_A_PAGE):
            some = ids[at : at + MEMBERS_A_PAGE]
            names = [container.to_bytes(8, "little") for container in some]
            found = self.server.one(("HMGET", epoch.meta("containers"), *names))
            for container, packed in zip(some, found, strict=True):
                if packed is not None and len(packed) > 8:
                    yield ContainerId(container), packed[8:]

    def entries(self) -> dict[str, dict[bytes, bytes]]:
        """Return every entry of every table, in memory: for comparing two indexes in tests.

        Keys are as `rows` makes them, after their partition's number; a location is container 8, ordinal 4.
        """
        epoch = self.epochs.check()
        self.epochs.cover_all(epoch)
        found: dict[str, dict[bytes, bytes]] = {}
        for name, table in (("chunks", CHUNKS), ("segments", SEGMENTS), ("features", FEATURES), ("counts", COUNTS)):
            asked: list[Command] = [("HGETALL", epoch.partition(table, p)) for p in range(epoch.partitions)]
            found[name] = {}
            for partition, buckets in enumerate(self.server.run(asked)):
                found[name] |= self._decoded(epoch, table, partition, _flat(buckets, table.width))
        return found

    def _decoded(self, epoch: Epoch, table: Table, partition: int, held: U8) -> dict[bytes, bytes]:
        keys, values = np.ascontiguousarray(held[:, : table.key_bytes]), held[:, table.key_bytes :].tobytes()
        if table is COUNTS:
            names = _pack(key_encoding.locations_of(keys))
            return {names[i]: values[4 * i : 4 * i + 4] for i in range(len(keys))}
        locations, found = epoch.table.locate(key_encoding.numbers_of(values), self._domain)
        lead, places = partition.to_bytes(2, "little"), _pack(locations)
        return {lead + keys[i].tobytes(): places[i] for i in np.flatnonzero(found)}

    def sweep(self) -> int:
        """Delete what earlier epochs left behind, in parts of a Cluster that outlived them; return how many keys."""
        epoch = self.epochs.check()
        swept = 0
        keep = f"}}:{epoch.name}".encode()
        for keys in self.server.keys(f"{self.prefix}:{{"):
            old = [key for key in keys if b"}:" in key and keep not in key and len(key.split(b"}:", 1)[1]) >= 8]
            self.server.run([("UNLINK", key) for key in old])
            swept += len(old)
        return swept

    def close(self) -> None:
        """Close all connections."""
        self.server.close()

    def _in_epoch(self, work: Callable[[Epoch], Answer]) -> Answer:
        """Do work in the epoch in force; once more in the next one where that is gone."""
        for _ in range(EPOCH_TRIES_MAX):
            epoch = self.epochs.current
            try:
                return work(epoch)
            except EpochReplaced:
                self.epochs.renew(epoch)
        raise StoreUnavailable(
            f"{self.server.name}: {EPOCH_TRIES_MAX} epochs were gone within one call; try again later"
        )


def _finds(
    epoch: Epoch, table: Table, keys: Keys, tables_max: int, generation: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], list[Command]]:
    """Return (order, calls) that look keys up: `order` says in which order the values come.

    A call asks up to `tables_max` partitions for at most KEYS_A_SCRIPT keys: a command costs the client 20 us or more,
    which for a hundred keys in sixteen partitions was more than the lookup itself.
    """
    order, bounds = key_encoding.order_by_partition(keys.partitions, epoch.partitions)
    data, width, starts = keys.rows[order].tobytes(), table.key_bytes, bounds.tolist()
    calls: list[Command] = []
    names: list[str] = []
    counts: list[int] = []
    began = at = 0

    def ask() -> None:
        part = data[began * width : at * width]
        sizes = (width, table.width, table.bucket_entries)
        calls.append(Server.call("find", names, part, *sizes, generation, *counts))

    for partition in np.flatnonzero(np.diff(bounds)).tolist():
        while at < starts[partition + 1]:
            if len(names) == tables_max or at - began == KEYS_A_SCRIPT:
                ask()
                names, counts, began = [], [], at
            count = min(starts[partition + 1] - at, KEYS_A_SCRIPT - (at - began))
            names.append(epoch.partition(table, partition))
            counts.append(count)
            at += count
    ask()
    return order, calls


def _calls(
    epoch: Epoch, script: str, table: Table, packed: U8, partitions: U16, *more: Any
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], list[Command]]:
    """Return (order, calls): the rows by partition, at most KEYS_A_SCRIPT a call, and in which order they are."""
    order, bounds = key_encoding.order_by_partition(partitions, epoch.partitions)
    data, width = packed[order].tobytes(), packed.shape[1]
    calls = []
    for partition in np.flatnonzero(np.diff(bounds)).tolist():
        key = epoch.partition(table, partition)
        start, stop = int(bounds[partition]), int(bounds[partition + 1])
        for at in range(start, stop, KEYS_A_SCRIPT):
            part = data[at * width : min(at + KEYS_A_SCRIPT, stop) * width]
            calls.append(Server.call(script, [key], part, table.key_bytes, table.width, table.bucket_entries, *more))
    return order, calls


def _marks_of(versions: str) -> str:
    """Return the key of a tenant's marks, in the slot of its versions."""
    return f"{versions}:marks"


def _inserts(epoch: Epoch, table: Table, parts: Sequence[Numbered]) -> list[Command]:
    """Return the calls that add all parts, joined: the fuller a script, the fewer times a bucket is written."""
    if not parts:
        return []
    keys, numbers = Keys.join([keys for keys, _ in parts]), np.concatenate([numbers for _, numbers in parts])
    highest = int(numbers.max()) if len(numbers) else 0
    return _calls(epoch, "insert", table, key_encoding.with_numbers(keys, numbers), keys.partitions, highest)[1]


def _counts(epoch: Epoch, manifest: Manifest, start: bytes, script: str = "count") -> list[Command]:
    """Return the calls that count a version's segments, or count them no more ("uncount").

    Each carries a mark that says whether it was done before.
    """
    # with return_index, or np.unique imports numpy.ma: 15 ms of a worker's start
    pairs = np.stack([manifest.segments.containers, manifest.segments.ordinals.astype(np.uint64)], axis=1)
    distinct, _ = np.unique(pairs, axis=0, return_index=True)
    keys = key_encoding.count_keys(Locations(distinct[:, 0].copy(), distinct[:, 1].astype(np.uint32)))
    version = blake2b(catalog_encoding.tenant_tag(manifest.tenant).encode() + start, digest_size=12).hexdigest()
    calls = _calls(epoch, script, COUNTS, keys.rows, keys.partitions, COUNTED_SECONDS)[1]
    marked: list[Command] = []
    mark = "" if script == "count" else "-"
    for number, (command, sha, _, key, *arguments) in enumerate(calls):
        marked.append((command, sha, 2, key, f"{key}:{version}:{number:x}{mark}", *arguments))
    return marked


def _flat(buckets: Any, width: int) -> U8:
    """Return all whole entries of a partition's reply to HGETALL."""
    pairs = buckets.items() if isinstance(buckets, dict) else zip(buckets[::2], buckets[1::2], strict=True)
    held = b"".join(bucket for number, bucket in pairs if len(number) == 3 and len(bucket) % width == 0)
    return np.frombuffer(held, np.uint8).reshape(-1, width)


def _pack(locations: Locations) -> list[bytes]:
    packed = np.empty(len(locations), np.dtype([("container", "<u8"), ("ordinal", "<u4")]))
    packed["container"], packed["ordinal"] = locations.containers, locations.ordinals
    data = packed.tobytes()
    return [data[12 * i : 12 * i + 12] for i in range(len(locations))]
