"""Index of a fleet in shards, as its clients see it.

    a batch of keys -> those that earlier answers carried (`held_names`)
                    -> one request to each shard that has some of the others -> one answer, in the order of the batch

The first shard has the catalog too. A container is published in the other shards first, so that one which the first
shard lists has all its entries.

Invariant: a call that one shard did not answer fails as a whole and may be repeated; it is never answered "not found".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nearkin_shared.errors import ConfigError
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry, entry_of
from nearkin_shared.index.container_entries import ContainerEntries, feature_keys
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, MarkedVersion
from nearkin_shared.index.shards import shard_messages as messages
from nearkin_shared.index.shards.held_names import HeldNames, now_seconds
from nearkin_shared.index.shards.key_ranges import SHARDS_MAX, owners_of_keys, part_of, rows_by_owner
from nearkin_shared.index.shards.shard_connection import RETRIES, TIMEOUT_SECONDS, ShardCall, ShardConnection
from nearkin_shared.index.shards.shard_messages import KEYS_A_REQUEST, ROWS_A_PAGE, bytes_of
from nearkin_shared.index.shards.shard_shared_state import SCOPE, STATE_TIMEOUT_SECONDS, ShardSharedState
from nearkin_shared.observability import metrics
from nearkin_shared.types import U8, U32, U64, Bools, Locations

CHUNKS_A_REQUEST = 1 << 18
"""Chunks of the containers in one request: at most 14 MB of entries for one shard."""
CALLS_A_SHARD = 4
"""Requests to a shard that one call of the client has under way."""
ROWS_FIRST_MIN = 16
"""Least number of versions read at once: a key may have several."""
ROWS_A_REQUEST = 1000
"""Versions in one request: each at most 10 KB."""


class ShardedIndex:
    """Index whose entries are in several processes. Shared by threads.

    It is seen from one dedup domain.
    """

    def __init__(
        self,
        urls: Sequence[str],
        store_id: str,
        domain: bytes = b"",
        token: str = "",
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retries: int = RETRIES,
    ) -> None:
        """Prepare connections to all shards, in the order of their numbers.

        Raises: ConfigError.
        """
        if not 1 <= len(urls) <= SHARDS_MAX:
            raise ConfigError(f"index shards: {len(urls)} URLs; give 1 to {SHARDS_MAX}, one a shard in their order")
        self._domain = domain
        self._held = HeldNames(len(urls))
        self._shards = [
            ShardConnection(
                url, f"{number}/{len(urls)}/{store_id}", token, timeout_seconds=timeout_seconds, retries=retries
            )
            for number, url in enumerate(urls)
        ]
        seconds = min(timeout_seconds, STATE_TIMEOUT_SECONDS)
        first = ShardConnection(urls[0], f"0/{len(urls)}/{store_id}", token, timeout_seconds=seconds, retries=retries)
        self.state: ShardSharedState = ShardSharedState(first)

    def for_domain(self, domain: bytes) -> ShardedIndex:
        """Return the index seen from another domain.

        It shares the connections and the held names: close only one of them.
        """
        other = ShardedIndex.__new__(ShardedIndex)
        other._domain, other._shards, other._held = domain, self._shards, self._held
        other.state = self.state
        return other

    @property
    def fence_scope(self) -> str:
        """Return the name of the file that counts the leases. Raises StoreUnavailable."""
        return (self.state.get(SCOPE) or b"").decode()

    def check(self) -> bool:
        """Return whether some shard is not complete. Raises StoreUnavailable, if one is away."""
        is_complete = all(self._call_all("ready", messages.ReadyRequest()))
        metrics.INDEX_WHOLE.labels("shards").set(is_complete)
        return not is_complete

    @property
    def has_catalog(self) -> bool:
        """Return whether the first shard is complete. Raises StoreUnavailable, if it is away."""
        return bool(self._shards[0].call("ready", messages.ReadyRequest()))

    def report_missing(self, container: int) -> None:
        """Report a container that the store lacks: shards that list it are rebuilt."""
        self._call_all("report", messages.MissingContainer(int(container)))

    # --- lookups -----------------------------------------------------------------------------------------------------

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names."""
        return self._locate("chunks", names)

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids."""
        return self._locate("segments", segment_ids)

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: k * n rows by rank."""
        nonzero = np.flatnonzero(super_features.T)
        located, is_found = self._locate("features", feature_keys(sketch, self._domain, super_features)[nonzero])
        locations, found = Locations.empty(super_features.size), np.zeros(super_features.size, np.bool_)
        locations.containers[nonzero], locations.ordinals[nonzero] = located.containers, located.ordinals
        found[nonzero] = is_found
        return locations, found

    def _locate(self, table: messages.Table, keys: U8) -> tuple[Locations, Bools]:
        count = len(self._shards)
        if self._held.is_empty(table):
            locations, found = Locations.empty(len(keys)), np.zeros(len(keys), np.bool_)
            by_owner = rows_by_owner(table, keys, count)
        else:
            locations, found = self._held.find(table, keys, owners_of_keys(table, keys, count))
            missing = np.flatnonzero(~found)
            by_owner = [missing[rows] for rows in rows_by_owner(table, keys[missing], count)]
        asked = [
            (number, own[at : at + KEYS_A_REQUEST])
            for number, own in enumerate(by_owner)
            for at in range(0, len(own), KEYS_A_REQUEST)
        ]
        requests = [
            (number, messages.Lookup(table, keys[rows].tobytes(), self._held.budget(table, number)))
            for number, rows in asked
        ]
        requested_at = now_seconds()
        for (number, rows), answer in zip(asked, self._call_many("locate", requests), strict=True):
            locations.containers[rows], locations.ordinals[rows], found[rows] = answer.columns(len(rows))
            if answer.carried is not None:
                self._held.note(number, table, answer.carried, requested_at)
        return locations, found

    # --- entries -----------------------------------------------------------------------------------------------------

    def publish(self, claims: ContainerEntries) -> None:
        """Add a durable container's entries; existing entries stay."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Add durable containers' entries, in order; the first entry of a key stays."""
        first, chunks = 0, 0
        for at, claims in enumerate(many):
            chunks += claims.entries
            if chunks >= CHUNKS_A_REQUEST or at + 1 == len(many):
                self._publish(many[first : at + 1])
                first, chunks = at + 1, 0

    def _publish(self, many: Sequence[ContainerEntries]) -> None:
        count = len(self._shards)

        def request(number: int) -> tuple[int, object]:
            return number, messages.Publication([part_of(claims, number, count) for claims in many])

        self._call_many("publish", [request(number) for number in range(1, count)])
        self._call_many("publish", [request(0)])

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Withdraw entries by the container that they name, in every shard.

        `looked_up` is not used.
        """
        request = messages.Withdrawal(
            {int(one): None if ordinals is None else bytes_of(ordinals) for one, ordinals in chunks.items()},
            {int(one): bytes_of(ordinals) for one, ordinals in segments.items()},
            [int(one) for one in containers],
        )
        self._call_all("withdraw", request)

    def renew(self, summary: ContainerSummary) -> None:
        """Replace a container's summary after its rewrite."""
        self._call_all("renew", summary)

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation in every shard and return its number."""
        recorded = max(self._call_all("generation", messages.Generation()))
        generation = max(at_least, int(recorded) + 1)
        self._call_all("generation", messages.Generation(generation))
        return generation

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield the summary of each completely published container, in stream order."""
        after: int | None = None
        while page := self._shards[0].call("containers", messages.ContainerPage(after)):
            yield from page
            after = page[-1].container

    def container_ids(self) -> U64:
        """Return the ids of all completely published containers, ascending."""
        return np.array([summary.container for summary in self.containers()], np.uint64)

    # --- catalog -----------------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a durable version to the catalog."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Commit several versions, each with its manifest's size in bytes."""
        entries = [(manifest.tenant, entry_of(manifest, size_bytes)) for manifest, size_bytes in versions]
        self._by_rows(entries, lambda rows: self._shards[0].call("commit", messages.Commits(rows)))

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Record the marks of versions; the highest wins."""
        self._by_rows(marks, lambda rows: self._shards[0].call("mark", messages.Marks(rows)))

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog."""
        self._by_rows(versions, lambda rows: self._shards[0].call("collect", messages.Collection(rows)))

    @staticmethod
    def _by_rows(rows: Sequence[Any], call: Callable[[list[Any]], object]) -> None:
        for at in range(0, len(rows), ROWS_A_REQUEST):
            call(list(rows[at : at + ROWS_A_REQUEST]))

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending."""
        found: list[int] = self._shards[0].call("versions", messages.Versions(tenant, key))
        return found

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version."""
        return self._entries(messages.CatalogPage(tenant, prefix))

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = ROWS_A_PAGE
    ) -> Iterator[CatalogEntry]:
        """Yield the entries of `catalog` after `key`; with `version`, after that version of it.

        The first request is for `count` entries.
        """
        first_count = max(ROWS_FIRST_MIN, min(count, ROWS_A_PAGE))
        return self._entries(messages.CatalogPage(tenant, prefix, key, version, first_count))

    def _entries(self, request: messages.CatalogPage) -> Iterator[CatalogEntry]:
        while page := self._shards[0].call("catalog", request):
            yield from page
            if len(page) < request.count:
                return
            request = messages.CatalogPage(request.tenant, request.prefix, page[-1].key, page[-1].version)

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) as `catalog` orders them."""
        return ((entry.key, entry.version) for entry in self.catalog(tenant, prefix))

    # --- connections -------------------------------------------------------------------------------------------------

    def _call_all(self, name: str, request: object) -> list[Any]:
        return self._call_many(name, [(number, request) for number in range(len(self._shards))])

    def _call_many(self, name: str, requests: Sequence[tuple[int, object]]) -> list[Any]:
        """Return the answers to requests of (shard, request).

        The shards work at once, in one thread here.
        """
        answers, at_once = list[Any](), CALLS_A_SHARD * len(self._shards)
        for at in range(0, len(requests), at_once):
            calls = list[ShardCall]()
            try:
                for number, request in requests[at : at + at_once]:
                    calls.append(self._shards[number].start(name, request))
                answers += [call.answer() for call in calls]
            finally:
                for call in calls:
                    call.abandon()
        return answers

    def close(self) -> None:
        """Close all connections."""
        for shard in self._shards:
            shard.close()
        self.state.close()
