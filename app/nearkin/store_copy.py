"""Copy versions from one store to another: incremental, in order, verified, resumable.

source versions of a key    1 2 3 4 5        only versions after the newest one that the target already has
target versions of a key    1 2 3       ->   4 5 are copied, oldest first

A version is identified by its content, creation time and metadata; version numbers are the target's own. A server
stamps its own creation time, so a copy to a server keeps the original time in the metadata entry CREATED_METADATA;
a copy from there to a local store restores it.

Invariant: a version is committed in the target only if its BLAKE3 is the one of the source (I8). An interrupted run
leaves complete versions only; the next run continues after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nearkin_shared.errors import Corrupt, NotFound, TenantErased
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.results import Damage, PutResult, VersionInfo
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin.blob import VersionFile
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store

    AnyStore = Store | RemoteStore

CREATED_METADATA = "nearkin-created"
"""Metadata entry with the creation time (ISO 8601, UTC) of a version that was copied to a server."""
TREE_DIGEST_METADATA = "nearkin-tree-digest"
"""Metadata entry with the digest of a tree at its first source, if the copy has another one."""
SMALL_BYTES = 1024 * 1024
"""Versions up to this size are read into memory first and committed in groups: one sync for many."""
GROUP_BYTES = 16 * 1024 * 1024
GROUP_VERSIONS = 256

Progress = Callable[[int], None]


class ReadableStore(Protocol):
    """The methods needed of a source, as `Store` and `RemoteStore` have them."""

    def versions(
        self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
    ) -> list[VersionInfo]:
        """Return versions by key."""

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> VersionFile:
        """Return a version or a range of it as a file."""

    def tree(self, key: str, version: int | None = None) -> TreeReader:
        """Return a reader of a tree."""


@frozen
class Failure:
    """A version that was not copied.

    It and all later ones of the key are missing in the target.
    """

    key: str
    version: int
    reason: str


@frozen
class KeyPlan:
    """What to copy of one key."""

    key: str
    target_key: str
    pending: tuple[VersionInfo, ...]
    """Oldest first."""
    present: int
    """Versions that the target already has, or had and deleted."""
    failure: Failure | None = None
    """Why the versions after `pending` are not copied."""


class CopiedVersion(NamedTuple):
    """A version of the source and its copy."""

    source: VersionInfo
    target: VersionInfo


def original(info: VersionInfo) -> tuple[datetime, Mapping[str, str]]:
    """Return when the content was first stored, and its metadata without CREATED_METADATA."""
    metadata = dict(info.metadata)
    try:
        moment = datetime.fromisoformat(metadata[CREATED_METADATA])
    except (KeyError, ValueError):
        return info.created.astimezone(UTC), metadata
    if moment.tzinfo is None or moment.year < 1970:  # not written by a copy
        return info.created.astimezone(UTC), metadata
    del metadata[CREATED_METADATA]
    return moment.astimezone(UTC), metadata


def source_digest(info: VersionInfo) -> str:
    """Return the digest by which a version and its copies are recognised.

    A tree on a server has another digest than in a folder: the metadata of its copies have that of the first source.
    """
    return info.metadata.get(TREE_DIGEST_METADATA, info.digest)


def identity(info: VersionInfo) -> tuple[object, ...]:
    """Return the fields that a version and its copies share; times in ms, as in HTTP."""
    created, metadata = original(info)
    named = sorted((name, value) for name, value in metadata.items() if name != TREE_DIGEST_METADATA)
    return source_digest(info), info.size_bytes, int(created.timestamp() * 1000), tuple(named)


def plan_key(
    key: str,
    target_key: str,
    source: list[VersionInfo],
    target: list[VersionInfo],
    damaged: Mapping[int, str],
    *,
    skip_damaged: bool = False,
) -> KeyPlan:
    """Return which versions of a key to copy.

    `source` and `target` ascend by version. `damaged`: reason by version of the source that cannot be listed; unless
    `skip_damaged`, copying stops before the first of them, so that a later run can still copy it.
    """
    present = Counter(map(identity, target))
    newest = 0
    for number, info in enumerate(source, 1):
        if present[identity(info)]:
            present[identity(info)] -= 1
            newest = number
    pending = source[newest:]
    done_version = source[newest - 1].version if newest else 0
    lost = min((number for number in damaged if number > done_version), default=None)
    failure = None if lost is None else Failure(key, lost, damaged[lost])
    if lost is not None and not skip_damaged:
        pending = [info for info in pending if info.version < lost]
    own = [info for info in target if present[identity(info)] > 0]
    if pending and own and own[-1].version == target[-1].version and original(own[-1])[0] > original(pending[0])[0]:
        reason = (
            f"the target has a version of its own, {own[-1].version} of {own[-1].created:%Y-%m-%dT%H:%M:%SZ}, that is "
            "newer: a copy would replace it as the newest version; copy under another --prefix"
        )
        return KeyPlan(key, target_key, (), newest, Failure(key, pending[0].version, reason))
    return KeyPlan(key, target_key, tuple(pending), newest, failure)


class Copier:
    """Copy planned keys. `failures` has unreadable versions; the rest of their key is skipped."""

    def __init__(
        self,
        source: ReadableStore,
        target: AnyStore,
        *,
        skip_damaged: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._skip_damaged = skip_damaged
        self._progress = progress
        self.failures: list[Failure] = []

    def run(self, plans: Iterable[KeyPlan]) -> Iterator[CopiedVersion]:
        """Copy and yield committed versions. Raises errors of puts and gets, except damage."""
        group: list[tuple[VersionInfo, str, bytes]] = []
        group_bytes = 0
        for plan in plans:
            if plan.failure is not None:
                self.failures.append(plan.failure)
            for info in plan.pending:
                try:
                    if info.is_tree:
                        yield from self._put_group(group)
                        group, group_bytes = [], 0
                        yield self._copy_tree(info, plan.target_key)
                    elif info.size_bytes <= SMALL_BYTES:
                        group.append((info, plan.target_key, _read(self._source, info)))
                        group_bytes += info.size_bytes
                    else:
                        yield from self._put_group(group)
                        group, group_bytes = [], 0
                        yield self._stream(info, plan.target_key)
                except (Corrupt, NotFound, TenantErased) as err:
                    self.failures.append(Failure(info.key, info.version, str(err)))
                    if not self._skip_damaged:
                        break
                if group_bytes >= GROUP_BYTES or len(group) >= GROUP_VERSIONS:
                    yield from self._put_group(group)
                    group, group_bytes = [], 0
        yield from self._put_group(group)

    def _put_group(self, group: list[tuple[VersionInfo, str, bytes]]) -> Iterator[CopiedVersion]:
        if not group:
            return
        puts = self._put_many((info, key, content) for info, key, content in group)
        for (info, _, _), result in zip(group, puts, strict=True):
            yield _check_copy(info, result)

    def _stream(self, info: VersionInfo, key: str) -> CopiedVersion:
        with self._source.get(info.key, info.version) as file:
            try:
                (result,) = self._put_many([(info, key, file)])
            except Exception as err:
                if file.failure is not None:  # the put only reports that its source failed
                    raise file.failure from err
                raise
        return _check_copy(info, result)

    def _copy_tree(self, info: VersionInfo, key: str) -> CopiedVersion:
        """Copy a tree; into a folder with the borders of its files, which backups have, too."""
        from nearkin.store import Item, Store
        from nearkin.trees.tree_copy import TreeCopy

        created, metadata = original(info)
        metadata, digest = dict(metadata), source_digest(info)
        metadata.pop(TREE_DIGEST_METADATA, None)
        if isinstance(self._target, Store):
            tree = TreeCopy(
                self._source.tree(info.key, info.version),
                lambda start, stop: self._source.get(info.key, info.version, start=start, stop=stop).pieces(),
                self._progress,
            )
            if tree.digest != digest:
                metadata[TREE_DIGEST_METADATA] = digest
            (result,) = self._target.put_many([Item(key, tree, metadata, created=created)])
            return CopiedVersion(info, result.info)
        metadata[TREE_DIGEST_METADATA] = digest
        metadata[CREATED_METADATA] = created.isoformat(timespec="microseconds")
        with self._source.get(info.key, info.version) as file:
            result = self._target.put(key, file, metadata=metadata, progress=self._progress)
        return CopiedVersion(info, result.info)

    def _put_many(self, puts: Iterable[tuple[VersionInfo, str, bytes | VersionFile]]) -> Iterator[PutResult]:
        from nearkin.store import Item, Store

        if isinstance(self._target, Store):
            yield from self._target.put_many(
                (
                    Item(key, content, original(info)[1], _sha256(info), original(info)[0])
                    for info, key, content in puts
                ),
                progress=self._progress,
            )
            return
        for info, key, content in puts:
            created, metadata = original(info)
            stamped = {**metadata, CREATED_METADATA: created.isoformat(timespec="microseconds")}
            yield self._target.put(key, content, metadata=stamped, sha256=_sha256(info), progress=self._progress)


def _read(source: ReadableStore, info: VersionInfo) -> bytes:
    with source.get(info.key, info.version) as file:
        return file.read()


def _sha256(info: VersionInfo) -> bytes | None:
    return None if info.sha256 is None else bytes.fromhex(info.sha256)


def _check_copy(info: VersionInfo, result: PutResult) -> CopiedVersion:
    if result.info.digest != info.digest:
        raise Corrupt(
            f"key {info.key!r} version {info.version}: the copy is {result.info.digest}, the source {info.digest}: "
            f"delete version {result.info.version} of {result.info.key!r} in the target and copy again"
        )
    return CopiedVersion(info, result.info)
