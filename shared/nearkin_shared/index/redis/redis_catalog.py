"""Catalog of a Redis index: versions and their marks, by tenant.

A commit takes one round trip, a collection two: which versions are listed, then their removal. Repeating one changes
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry, entry_of
from nearkin_shared.index.protocols import CollectedVersion, MarkedVersion
from nearkin_shared.index.redis import catalog_encoding
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.epoch import EPOCH_TRIES_MAX, Epoch, EpochReplaced, Epochs
from nearkin_shared.index.redis.partitions import VERSIONS_LETTER
from nearkin_shared.tenant_names import collision_of

VERSIONS_A_COMMIT = 256
MEMBERS_A_PAGE = 1000
MEMBERS_FIRST_MIN = 16
"""Least number of members read at once: a key may have several versions."""
FOREIGN = -1
"""Script reply if the tag of a tenant belongs to another tenant's name."""
_log = logging.getLogger("nearkin.redis")

Answer = TypeVar("Answer")


class RedisCatalog:
    """Versions of all tenants in a Redis index. Shared by threads."""

    server: RedisServer
    epochs: Epochs

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a version to the catalog, once."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Add versions, each with its manifest's size; VERSIONS_A_COMMIT per batch."""
        for at in range(0, len(versions), VERSIONS_A_COMMIT):
            batch = versions[at : at + VERSIONS_A_COMMIT]
            self._in_epoch(partial(self._commit, versions=batch))

    def _commit(self, epoch: Epoch, versions: Sequence[tuple[Manifest, int]]) -> None:
        calls = []
        for manifest, manifest_bytes in versions:
            start = catalog_encoding.member_start(manifest.key, manifest.version)
            rest = catalog_encoding.member_rest(entry_of(manifest, manifest_bytes))
            owner = catalog_encoding.tenant_tag(manifest.tenant), manifest.tenant
            calls.append(RedisServer.call("commit", self._home(epoch, manifest.tenant), start, rest, *owner))
        replies = self.server.run(calls)
        if None in replies:
            raise EpochReplaced
        for tenant in {versions[row][0].tenant for row, reply in enumerate(replies) if reply == FOREIGN}:
            _log.error("not listed: %s", collision_of(tenant, "the index"))

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Record the marks of versions, VERSIONS_A_COMMIT per round trip; the highest wins."""
        for at in range(0, len(marks), VERSIONS_A_COMMIT):
            self._in_epoch(partial(self._mark, marks=marks[at : at + VERSIONS_A_COMMIT]))

    def _mark(self, epoch: Epoch, marks: Sequence[MarkedVersion]) -> None:
        calls = []
        for mark in marks:
            partition, versions = self._home(epoch, mark.tenant)
            start = catalog_encoding.member_start(mark.key, mark.version)
            calls.append(
                RedisServer.call("mark", [partition, _marks_key(versions)], start, mark.sequence, mark.marks_bytes)
            )
        if None in self.server.run(calls):
            raise EpochReplaced

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog.

        VERSIONS_A_COMMIT versions share their round trips.
        """
        for at in range(0, len(versions), VERSIONS_A_COMMIT):
            self._in_epoch(partial(self._collect, versions=versions[at : at + VERSIONS_A_COMMIT]))

    def _collect(self, epoch: Epoch, versions: Sequence[CollectedVersion]) -> None:
        starts = [catalog_encoding.member_start(version.key, version.version) for version in versions]
        homes = [self._home(epoch, version.tenant) for version in versions]
        known = self._are_committed(homes, starts, [version.tenant for version in versions])
        if None in known:
            raise EpochReplaced
        removals = [
            RedisServer.call("collect", [*home, _marks_key(home[1])], start, version.sequence, version.marks_bytes)
            for version, home, start, is_listed in zip(versions, homes, starts, known, strict=True)
            if is_listed != FOREIGN
        ]
        if None in self.server.run(removals):
            raise EpochReplaced

    def _are_committed(
        self, homes: Sequence[list[str]], starts: Sequence[bytes], tenants: Sequence[str]
    ) -> list[int | None]:
        """Return 1 for each version in the catalog, 0 for others, FOREIGN, or None.

        None means that the partition was lost.
        """
        owners = ((catalog_encoding.tenant_tag(tenant), tenant) for tenant in tenants)
        rows = zip(homes, starts, owners, strict=True)
        found: list[int | None] = self.server.run(
            [RedisServer.call("committed", home, start, *owner) for home, start, owner in rows]
        )
        return found

    def _home(self, epoch: Epoch, tenant: str) -> list[str]:
        """Return the keys of the partition of a tenant's versions, and of the versions."""
        tag = catalog_encoding.tenant_tag(tenant)
        partition = epoch.partition(VERSIONS_LETTER, int(tag[:4], 16) % epoch.partitions)
        return [partition, f"{partition}:{tag}"]

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending."""
        start = catalog_encoding.escape_key(key) + b"\0"
        return [entry.version for entry in self._entries(tenant, start + b"\0", start + b"\1")]

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version.

        Reads MEMBERS_A_PAGE at a time.
        """
        start = catalog_encoding.escape_key(prefix)
        return self._entries(tenant, start, start + b"\xff" if start else None)  # no UTF-8 holds 255; NUL 255 is NUL

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = MEMBERS_A_PAGE
    ) -> Iterator[CatalogEntry]:
        """Yield the entries of `catalog` after `key`; with `version`, after that version of it.

        Reads about `count` entries at a time.
        """
        start = catalog_encoding.escape_key(prefix)
        start_after = b"" if not key else catalog_encoding.member_end(key)
        if version is not None:
            start_after = catalog_encoding.member_start(key, version) + b"\xff"
        return self._entries(tenant, max(start, start_after), start + b"\xff" if start else None, count)

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
        """Return members and the marks of each, which are read only if any version has some."""
        partition, versions = self._home(epoch, tenant)
        marks = _marks_key(versions)
        commands: list[Command] = [
            ("GET", self.epochs.key),
            ("ZRANGEBYLEX", versions, above, below, "LIMIT", 0, count),
            ("EXISTS", partition),
            ("EXISTS", marks),
            ("HGET", partition, catalog_encoding.tenant_tag(tenant)),
        ]
        value, page, is_listed, any_marks, owner = self.server.run(commands)
        self.epochs.compare(epoch, value)
        if not is_listed:
            raise EpochReplaced
        if owner is not None and owner.decode() != tenant:
            raise collision_of(tenant, "the index")
        found: list[bytes] = page
        if not found or not any_marks:
            return found, [None] * len(found)
        return found, self.server.one(("HMGET", marks, *(member[: member.find(b"\0\0") + 10] for member in found)))

    def _in_epoch(self, work: Callable[[Epoch], Answer]) -> Answer:
        """Call `work` with the current epoch; repeat it in the next one if that epoch ended."""
        for _ in range(EPOCH_TRIES_MAX):
            epoch = self.epochs.current
            try:
                return work(epoch)
            except EpochReplaced:
                self.epochs.renew(epoch)
        raise StoreUnavailable(f"{self.server.name}: {EPOCH_TRIES_MAX} epochs ended within one call; try again later")


def _marks_key(versions: str) -> str:
    """Return the key of a tenant's marks, in the slot of its versions."""
    return f"{versions}:marks"
