"""Redis index of chunks, super-features, segments, containers and versions.

Invariant: a lookup returns a location published in the epoch in which it was read, or "not found".

Every lookup takes one round trip, whatever the batch: the epoch, a script for some partitions (in a Cluster for one),
and the end of the container table. A publish takes three; dying between two steps only repeats work, since a repeated
step changes nothing:

    1 numbers     2 entries   3 summary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import ContainerDirectories, ContainerSummary
from nearkin_shared.index.redis import catalog_encoding, key_encoding
from nearkin_shared.index.redis.connection import RETRIES, TIMEOUT_SECONDS, Command, RedisServer
from nearkin_shared.index.redis.epoch import Epoch, EpochReplaced, Epochs, NumberedContainers
from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, SEGMENTS, Keys, Table
from nearkin_shared.index.redis.memory_bound import MemoryBound
from nearkin_shared.index.redis.partition_calls import Numbered, entries_of, find_calls, insert_calls
from nearkin_shared.index.redis.redis_catalog import MEMBERS_A_PAGE, RedisCatalog
from nearkin_shared.index.redis.redis_removal import drop_containers, withdraw_entries, withdraw_missing
from nearkin_shared.index.redis.redis_shared_state import RedisSharedState
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations

PARTITIONS = 16
"""Hash slots of each table of a new index. A Cluster spreads them over its nodes."""


class RedisIndex(RedisCatalog):
    """Index of a fleet, seen from one dedup domain. Shared by threads."""

    def __init__(
        self,
        settings: RedisSettings,
        domain: bytes = b"",
        generation: Callable[[], int] = lambda: 0,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retries: int = RETRIES,
    ) -> None:
        """Connect; without a domain only the catalog and `for_domain` are usable.

        `generation` returns the GC generation of the object store
        (`nearkin_shared.storage.pending_deletes.GcGeneration`).

        Raises: StoreUnavailable. ConfigError, if settings or the server's policy are wrong.
        """
        self.server: RedisServer = RedisServer(settings, timeout_seconds=timeout_seconds, retries=retries)
        self.prefix: str = settings.prefix
        self._domain = domain
        self.epochs: Epochs = Epochs(self.server, settings.prefix, PARTITIONS, generation)
        self._memory: MemoryBound = MemoryBound(self.server, settings.bytes_max)
        self.server.begin_use()

    def for_domain(self, domain: bytes) -> RedisIndex:
        """Return the index seen from another domain (tenant).

        It shares the connections: close only one of them.
        """
        other = RedisIndex.__new__(RedisIndex)
        other.server, other.prefix, other.epochs, other._domain = self.server, self.prefix, self.epochs, domain
        other._memory = self._memory
        return other

    @property
    def state(self) -> RedisSharedState:
        """Return the state that the fleet shares."""
        return RedisSharedState(self.server, self.prefix)

    @property
    def fence_scope(self) -> str:
        """Return the epoch as last seen.

        A new one begins where Redis lost the number of the last lease.
        """
        return self.epochs.current.name

    @property
    def needs_rebuild(self) -> bool:
        """Return whether the index may lack entries, as last seen; `check` reads Redis."""
        return not self.epochs.current.whole

    def check(self) -> bool:
        """Read the epoch from Redis and return `needs_rebuild`."""
        return not self.epochs.check().whole

    def is_stale(self) -> bool:
        """Return whether entries must be checked against the store.

        Reads every server of a Cluster.
        """
        return self.epochs.is_stale() or bool(self.server.one(("EXISTS", self._suspects_key)))

    @property
    def _suspects_key(self) -> str:
        return f"{self.prefix}:{{m}}:suspects"

    def report_missing(self, container: int) -> None:
        """Report a container that an entry names and the store lacks: it triggers a check."""
        self.server.one(("SET", self._suspects_key, f"{container:016x}"))

    def take_reports(self) -> bool:
        """Remove the reports before a check of the index; return whether there was one."""
        return bool(self.server.one(("UNLINK", self._suspects_key)))

    @property
    def has_catalog(self) -> bool:
        """Return whether the catalog is complete, even if containers are missing in the index."""
        epoch = self.epochs.check()
        return epoch.whole or bool(self.server.one(("EXISTS", epoch.meta("catalog"))))

    def declare_catalog(self, epoch: Epoch) -> None:
        """Declare that the catalog of this epoch lists every version."""
        self.server.one(("SET", epoch.meta("catalog"), "1"))

    def tenants(self) -> list[str]:
        """Return all tenants that have versions in the catalog."""
        return self._in_epoch(lambda epoch: self.epochs.partitions_of(epoch).tenants())

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        return self._locate(CHUNKS, key_encoding.chunk_keys(names))

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        return self._locate(SEGMENTS, key_encoding.segment_keys(segment_ids))

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: k * n rows by rank.

        It looks up every rank, even after a lower one was found: cheaper than a round trip per rank.
        """
        ranks = enumerate(np.ascontiguousarray(super_features.T))
        parts = [key_encoding.super_feature_keys(sketch, self._domain, rank, column) for rank, column in ranks]
        locations, found = self._locate(FEATURES, Keys.join(parts))
        return locations, found & (super_features.T != 0).ravel()

    def _locate(self, table: Table, keys: Keys) -> tuple[Locations, Bools]:
        if not len(keys):
            return Locations.empty(), np.zeros(0, np.bool_)
        return self._in_epoch(partial(self._look_up, table=table, keys=keys))

    def _look_up(self, epoch: Epoch, table: Table, keys: Keys) -> tuple[Locations, Bools]:
        tables_max = 1 if self.server.clustered else epoch.partitions
        order, calls = find_calls(epoch, table, keys, tables_max, self.epochs.generation)
        known, tail = self.epochs.tail(epoch)
        value, *values, records = self.server.run([("GET", self.epochs.key), *calls, tail])
        self.epochs.compare(epoch, value)
        if None in values:
            raise EpochReplaced
        numbers = np.empty(len(keys), np.uint64)
        numbers[order] = key_encoding.numbers_of(b"".join(values))
        epoch.table.extend(known, records)
        self.epochs.cover(epoch, numbers)
        return epoch.table.locate(numbers, self._domain)

    def publish(self, claims: ContainerEntries) -> None:
        """Add a durable container's entries; existing entries stay."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Add durable containers' entries in three round trips; the first entry of a key stays.

        Near the bound of memory it leaves entries out (`memory_bound`): their chunks are then not found.
        """
        self._in_epoch(partial(self._publish, many=[self._memory.fit(claims) for claims in many]))

    def _publish(self, epoch: Epoch, many: Sequence[ContainerEntries]) -> None:
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
            rows = np.flatnonzero(claims.segment_ids.any(axis=1))
            segments.append((key_encoding.segment_keys(claims.segment_ids[rows]), first + rows.astype(np.uint64)))
            for sketch, (ordinals, super_features) in claims.super_features.items():
                for rank in range(super_features.shape[1]):
                    is_listed = np.flatnonzero(super_features[:, rank])
                    keys = key_encoding.super_feature_keys(
                        sketch, directory.domain, rank, super_features[is_listed, rank]
                    )
                    features.append((keys, first + ordinals[is_listed].astype(np.uint64)))
        calls: list[Command] = []
        for table, parts in ((CHUNKS, chunks), (SEGMENTS, segments), (FEATURES, features)):
            calls += insert_calls(epoch, table, parts)
        if None in self.server.run(calls):  # 2
            raise EpochReplaced
        packed = [(claims.directory.container, catalog_encoding.pack_summary(summarise(claims))) for claims in many]
        self.epochs.finish(epoch, packed)  # 3

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Withdraw entries by the container that they name, of all domains.

        `looked_up`: `ContainerDirectories`, with which chunks are removed by their names; without, or where a directory
        is lost, the table of chunks is read. Those of super-features and of segments are always read.
        """
        directories = looked_up if isinstance(looked_up, ContainerDirectories) else None
        self._in_epoch(
            partial(self._withdraw, chunks=chunks, segments=segments, containers=containers, directories=directories)
        )

    def _withdraw(
        self,
        epoch: Epoch,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32 | None],
        containers: Collection[int],
        directories: ContainerDirectories | None,
    ) -> None:
        self.epochs.cover_all(epoch)
        withdraw_entries(self.server, epoch, chunks, segments, directories)
        drop_containers(self.server, self.epochs.key, epoch, containers)

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation after the withdrawal of a GC run and return its number."""
        return self._in_epoch(lambda _: self.epochs.advance(at_least))

    def container_numbers(self) -> NumberedContainers:
        """Return the current numbers of containers, for `withdraw_missing`."""
        return self._in_epoch(self.epochs.container_numbers)

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries with an unassigned number, or of missing chunks or segments.

        By container of the store: a mask of its chunks, or segments; None for all. The store is listed after `numbered`
        was read: entries published meanwhile stay. Returns the number of removed entries.
        """
        epoch = self.epochs.current
        removed_count = withdraw_missing(self.server, epoch, numbered, chunks, segments)
        lost = sorted({int(container) for container in numbered.containers} - chunks.keys())
        drop_containers(self.server, self.epochs.key, epoch, lost)
        return removed_count

    def renew(self, summary: ContainerSummary) -> None:
        """Replace the summary of a container after its rewrite."""
        self._in_epoch(partial(self._renew, summary=summary))

    def _renew(self, epoch: Epoch, summary: ContainerSummary) -> None:
        name, packed = summary.container.to_bytes(8, "little"), catalog_encoding.pack_summary(summary)
        keys = [self.epochs.key, epoch.meta("containers")]
        if self.server.one(RedisServer.call("renew_summary", keys, epoch.name, name, packed)) is None:
            raise EpochReplaced

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield the summary of each completely published container of this domain, in order."""
        return (
            catalog_encoding.parse_summary(container, packed) for container, packed in self._summaries(self._domain)
        )

    def container_ids(self) -> U64:
        """Return the ids of all domains' completely published containers, in stream order."""
        return np.array([container for container, _ in self._summaries(None)], np.uint64)

    def _summaries(self, domain: bytes | None) -> Iterator[tuple[ContainerId, bytes]]:
        epoch = self.epochs.check()
        self.epochs.cover_all(epoch)
        ids = epoch.table.containers(domain).tolist()
        for at in range(0, len(ids), MEMBERS_A_PAGE):
            batch = ids[at : at + MEMBERS_A_PAGE]
            names = [container.to_bytes(8, "little") for container in batch]
            found = self.server.one(("HMGET", epoch.meta("containers"), *names))
            for container, packed in zip(batch, found, strict=True):
                if packed is not None and len(packed) > 8:
                    yield ContainerId(container), packed[8:]

    def entries(self) -> dict[str, dict[bytes, bytes]]:
        """Return every entry of every table, in memory, to compare two indexes in tests.

        Keys are as `key_encoding` makes them, after their partition's number; a location is container 8, ordinal 4.
        """
        epoch = self.epochs.check()
        self.epochs.cover_all(epoch)
        found: dict[str, dict[bytes, bytes]] = {}
        for name, table in (("chunks", CHUNKS), ("segments", SEGMENTS), ("features", FEATURES)):
            commands: list[Command] = [("HGETALL", epoch.partition(table, p)) for p in range(epoch.partitions)]
            found[name] = {}
            for partition, buckets in enumerate(self.server.run(commands)):
                found[name] |= self._decode(epoch, table, partition, entries_of(buckets, table.width))
        return found

    def _decode(self, epoch: Epoch, table: Table, partition: int, packed: U8) -> dict[bytes, bytes]:
        keys, values = np.ascontiguousarray(packed[:, : table.key_bytes]), packed[:, table.key_bytes :].tobytes()
        locations, found = epoch.table.locate(key_encoding.numbers_of(values), self._domain)
        lead, packed_locations = partition.to_bytes(2, "little"), _pack(locations)
        return {lead + keys[i].tobytes(): packed_locations[i] for i in np.flatnonzero(found)}

    def sweep(self) -> int:
        """Delete the keys of earlier epochs, left on surviving Cluster nodes; return the count."""
        epoch = self.epochs.check()
        deleted_count = 0
        keep = f"}}:{epoch.name}".encode()
        for keys in self.server.keys(f"{self.prefix}:{{"):
            old = [key for key in keys if b"}:" in key and keep not in key and len(key.split(b"}:", 1)[1]) >= 8]
            self.server.run([("UNLINK", key) for key in old])
            deleted_count += len(old)
        return deleted_count

    def close(self) -> None:
        """Close all connections."""
        self.server.close()


def _pack(locations: Locations) -> list[bytes]:
    packed = np.empty(len(locations), np.dtype([("container", "<u8"), ("ordinal", "<u4")]))
    packed["container"], packed["ordinal"] = locations.containers, locations.ordinals
    data = packed.tobytes()
    return [data[12 * i : 12 * i + 12] for i in range(len(locations))]
