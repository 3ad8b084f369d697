"""Open, read and change a store in a folder.

Invariant: a put either ends as a committed version or changes nothing that a reader can see.

root/nearkin.json   containers/   manifests/      the authoritative data
root/index/         lock          tmp/            rebuildable, transient
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.blob import Blob
from nearkin.local.index_location import check_index_path
from nearkin.local.source_feed import PutItem, TreeSource
from nearkin_shared.config.loader import explicit_names, load
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.errors import (
    BadInput,
    NotFound,
    PermanentError,
    StoreUnavailable,
)
from nearkin_shared.formats.manifest import Manifest, us_of
from nearkin_shared.objectstore.base import AlreadyExists, check_tenant
from nearkin_shared.objectstore.factory import as_set, local_objects, no_store
from nearkin_shared.objectstore.local import sync_folder
from nearkin_shared.objectstore.read_only import ReadOnlyObjectStore
from nearkin_shared.preconditions import Precondition, precondition_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.results import (
    Damage,
    Deletion,
    Explanation,
    GcReport,
    PutResult,
    VersionInfo,
)
from nearkin_shared.retention import Decision, decisions, forget, min_age_seconds, policy_of
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.chunking_record import ChunkingGuard
from nearkin_shared.storage.committed_origins import BlobOrigin, local_origin
from nearkin_shared.storage.deletions import REQUEST_BYTES, Deletions, user_and_host
from nearkin_shared.storage.manifests import key_digest
from nearkin_shared.storage.version_listing import check_newest, list_from_index, list_from_manifests
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.memory import give_back_free
from nearkin_shared.utils.private_files import make_private_folders
from nearkin_shared.validation import (
    RESERVED_PREFIX,
    Progress,
    Source,
    check_bound,
    check_key,
    check_prefix,
    check_version,
    is_listed_key,
)

if TYPE_CHECKING:
    from nearkin.salvage import SalvagedBlob
    from nearkin_shared.formats.tombstone import Mark
    from nearkin_shared.index.catalog import CatalogEntry

from nearkin.store_folder import check_only_store_files, has_store, store_path
from nearkin.store_trees import TreeStorage

__all__ = ["Item", "Progress", "Source", "Store", "create_store", "open_store"]

FORGET_REASON = "forget"
_log = logging.getLogger("nearkin")


@frozen
class Item:
    """A blob for `put_many` with options; the fields are those of `Store.put`."""

    key: str
    source: Source | TreeSource
    metadata: Mapping[str, str] = field(default_factory=dict)
    sha256: bytes | None = None
    created: datetime | None = None
    """Creation time of a version that is copied from another store; None: the moment of the commit."""
    precondition: Precondition | None = None
    origin: BlobOrigin | None = None
    """Of a blob that is stored once, however often it is put; None: each put makes a version."""
    is_checkpoint: bool = False
    """Whether it is a checkpoint of a backup, whose key is reserved."""

    def as_put(self) -> PutItem:
        """Return the tuple that `LocalPuts.put` takes."""
        created_us = None if self.created is None else us_of(self.created)
        return PutItem(
            self.key,
            self.source,
            self.metadata,
            self.sha256,
            created_us,
            self.precondition,
            self.origin,
            self.is_checkpoint,
        )


def open_store(
    path: str | Path,
    *,
    settings: Settings | None = None,
    create: bool = False,
    read_only: bool = False,
    fingerprint_bits: int = descriptor.FINGERPRINT_BITS,
    clock: Callable[[], float] = time.time,
    explicit: Collection[str] | None = None,
    force: bool = False,
) -> Store:
    """Open the store in a folder; with `create`, create it first if the folder has none.

    A missing store is an error by default: an unmounted disk must not get a second, empty store.

    If the caller set no `chunker.*` and no profile, the settings that the store's first writer recorded are used
    (`Store.settings`). `explicit`: dotted names of the settings that the caller set; None: those that differ from the
    defaults. A put with set values that differ from the store's raises ConfigError; with `force` it warns.

    `read_only`: calls that would change an object of the store raise BadInput; the index may still be made or
    recovered.

    `clock` returns the seconds since 1970 that date versions and that deletion and retention use. `fingerprint_bits`
    below 160 is for tests of collisions.

    Raises NotFound (no store there), BadInput (`create` in a folder with other files), ConfigError (`index.path` is
    inside the store), FormatTooNew, Corrupt, StoreUnavailable.
    """
    chosen = settings
    if chosen is None:
        chosen, origins = load()
        explicit = explicit_names(origins)
    root = store_path(path)
    if not has_store(root):
        if not create or read_only:
            raise no_store(str(root))
        with suppress(AlreadyExists):  # another process has just created it: open that one
            return _create(root, chosen, fingerprint_bits, clock)
    objects = local_objects(root, chosen)
    covered = as_set(ReadOnlyObjectStore(root) if read_only else objects, chosen)
    found = descriptor.read(covered, fingerprint_bits)
    guard = ChunkingGuard(covered, chosen, explicit, force=force)
    return Store(root, objects, covered, found, guard, clock, read_only=read_only)


def create_store(
    path: str | Path, *, settings: Settings | None = None, clock: Callable[[], float] = time.time
) -> Store:
    """Create a store in a new or empty folder and open it.

    Raises BadInput (a store or other files are there), Corrupt (a store without its descriptor), StoreUnavailable.
    """
    root = store_path(path)
    exists = BadInput(f"store {root}: already exists; choose another folder, or use the existing store")
    if has_store(root):
        raise exists
    try:
        return _create(root, settings if settings is not None else load()[0], descriptor.FINGERPRINT_BITS, clock)
    except AlreadyExists as err:
        raise exists from err


def _create(root: Path, settings: Settings, fingerprint_bits: int, clock: Callable[[], float]) -> Store:
    """Create and open a store. Raises AlreadyExists if another process creates it first."""
    check_index_path(root, settings.index.path)  # before anything is made
    check_only_store_files(root)
    try:
        if not root.is_dir():
            make_private_folders(root)
        sync_folder(root.parent)
    except OSError as err:
        raise StoreUnavailable(f"store {root}: {err.strerror}") from err
    objects = local_objects(root, settings)
    covered = as_set(objects, settings)
    found = descriptor.create(covered, fingerprint_bits)
    chunking_record.create_record(covered, settings)
    return Store(root, objects, covered, found, ChunkingGuard(covered, settings), clock)


class Store(TreeStorage):
    """An open store: one writer, any number of readers.

    The first write takes the lock, `close` releases it. In a forked process the store is open too, without the lock
    and the running put of its parent.
    """

    # --- put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        source: Source,
        *,
        metadata: Mapping[str, str] | None = None,
        sha256: bytes | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store a new version of `key`. Returns once it is committed and durable.

        `source` is the path of a file, a file-like object open for reading bytes (from its position on), or bytes.
        `sha256` is what the caller holds the content to be. `if_match`: only over a newest version with this digest
        (`VersionInfo.digest`), or `*` for any; `if_none_match`: only where the newest version has another digest, or
        with `*` where there is none. Both are decided at the commit: of several puts that rely on the same state one
        succeeds. Raises PreconditionFailed (nothing stored), BadInput (nothing stored), StoreLocked, StoreUnavailable
        (nothing visible stored; the same put may be tried again).
        """
        self._check_writable("put")
        precondition = precondition_of(if_match, if_none_match)
        if precondition is not None:  # before a large source is read in vain; the commit decides
            check_key(key)
            newest = self._manifests.newest(self.settings.tenant, key)
            precondition.check(key, None if newest is None else newest.info)
        item = Item(key, source, metadata or {}, sha256, precondition=precondition)
        (result,) = self.put_many([item], progress=progress)
        return result

    def put_many(
        self, items: Iterable[tuple[str, Source] | Item], *, progress: Progress | None = None
    ) -> Iterator[PutResult]:
        """Store many blobs, committed in groups with few syncs; yield results as groups commit.

        Raises PreconditionFailed at the first item whose precondition does not hold; others of its group are
        committed.
        """
        for outcome in self.put_outcomes(items, progress=progress):
            if isinstance(outcome, PermanentError):
                raise outcome
            yield outcome

    def put_outcomes(
        self, items: Iterable[tuple[str, Source] | Item], *, progress: Progress | None = None
    ) -> Iterator[PutResult | PermanentError]:
        """Store many blobs as `put_many` does; yield the error of a refused one as its result."""
        self._check_writable("put")
        self._chunking.prepare_put()
        return self._puts.put(((item if isinstance(item, Item) else Item(*item)).as_put() for item in items), progress)

    def _put_tree(self, key: str, source: TreeSource, metadata: Mapping[str, str]) -> PutResult:
        (result,) = self.put_many([Item(key, source, metadata)])
        return result

    def find_origin(self, key: str, origin: BlobOrigin) -> PutResult | None:
        """Return the result of an earlier put with this origin, or None. Raises StoreUnavailable."""
        tenant = self.settings.tenant
        histories = self._manifests.histories(tenant, key)
        manifest = self._manifests.find_origin(tenant, key, histories, local_origin(origin))
        return None if manifest is None else PutResult(manifest.info, manifest.ledger, manifest.seconds)

    # --- get ---------------------------------------------------------------------------------------------------------

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> Blob:
        """Return a version (the newest by default) or its bytes [start, stop).

        Raises NotFound, Corrupt, BadInput, TenantErased, StoreUnavailable.
        """
        manifest = self._manifest(key, version)
        check_bound("start", start)
        if stop is not None:
            check_bound("stop", stop)
        end = manifest.size_bytes if stop is None else min(stop, manifest.size_bytes)
        if not 0 <= start <= end:
            raise BadInput(f"range {start} to {stop}: {key!r} has {manifest.size_bytes} bytes")
        source = self._containers.counting()
        return Blob(VersionReader(manifest.info, manifest, source, self._fingerprinter, start, end))

    def salvage(self, key: str, version: int | None = None) -> SalvagedBlob:
        """Return a damaged version with zeros and a list of holes for lost chunks.

        Raises NotFound, TenantErased, StoreUnavailable, and Corrupt if the manifest itself cannot be read.
        """
        from nearkin.salvage import SalvagedBlob

        return SalvagedBlob(self._manifest(key, version), self._containers.counting(), self._fingerprinter)

    def info(self, key: str, version: int | None = None) -> VersionInfo:
        """Return what is known of a version, the newest by default. Raises as `get` does."""
        return self._manifests.info(self._manifest(key, version))

    def explain(self, key: str, version: int | None = None) -> Explanation:
        """Return how each chunk of a version is kept. Raises as `get` does."""
        from nearkin_shared.explain import explain

        manifest = self._manifest(key, version)
        return explain(manifest.info, manifest, self._containers)

    def versions(
        self,
        prefix: str = "",
        *,
        all_versions: bool = False,
        broken: Callable[[Damage], None] | None = None,
        read_manifests: bool = False,
    ) -> list[VersionInfo]:
        """Return the newest version, or all, of each key that starts with `prefix`, by key.

        Deleted versions are not among them. One whose manifest is missing or of another size is omitted and passed
        to `broken`, by default with a warning in the log; an older one never replaces it. Manifests are
        read of versions with a tombstone or retention record only, unless `read_manifests` is set: then a manifest
        that is damaged within is reported as well. Raises BadInput, StoreUnavailable.
        """
        check_prefix(prefix)
        tenant = self.settings.tenant
        check_tenant(self._covered, tenant)
        if read_manifests:
            names = self._index.read(lambda index: index.manifest_names(tenant, prefix))
            entries = list_from_manifests(self._manifests, tenant, names, all_versions=all_versions)
        else:
            entries = list_from_index(self._manifests, tenant, self.catalog(tenant, prefix), all_versions=all_versions)
        found = []
        for entry in entries:
            if isinstance(entry, Damage):
                (broken or _warn)(entry)
            elif is_listed_key(entry.key, prefix):
                found.append(entry)
        return found

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the index entries of any tenant's versions, deleted ones too, by key and version."""
        return self._index.read(lambda index: index.catalog(tenant, prefix))

    def catalog_after(self, tenant: str, prefix: str, key: str, version: int | None, count: int) -> list[CatalogEntry]:
        """Return up to `count` entries as `catalog` does, after `key` or after one version of it."""
        return self._index.read(
            lambda index: list(islice(index.catalog_after(tenant, prefix, key, version, count), count))
        )

    # --- delete ------------------------------------------------------------------------------------------------------

    def delete(self, key: str, version: int | None = None, *, reason: str = "", who: str | None = None) -> int:
        """Delete a version, or all current versions of the key; return how many.

        They are deleted for every reader when this returns, and stay deleted after any failure; their bytes are freed
        later, and `undelete` restores them for `deletion.undelete_seconds`; checkpoints of backups, which are of no use
        then, only until the next GC run. Version numbers are not reused. A version that is committed meanwhile is
        kept. Raises NotFound, BadInput, RetentionActive
        (retention.min_age_seconds: none is deleted), TenantErased, StoreLocked, StoreUnavailable (some may be
        deleted: repeat the call).
        """
        self._check_writable("delete")
        is_checkpoint = key.startswith(RESERVED_PREFIX)
        return self._deletions.delete(
            self.settings.tenant,
            key,
            version,
            undelete_seconds=0 if is_checkpoint else self.settings.deletion.undelete_seconds,
            who=user_and_host() if who is None else who,
            reason=reason,
        )

    def undelete(self, key: str, version: int | None = None, *, reason: str = "", who: str | None = None) -> int:
        """Undelete a version, or all that the latest `delete` of the key took; return how many.

        Raises NotFound (no version of it is deleted, or the time to undelete has passed), BadInput, TenantErased,
        StoreLocked, StoreUnavailable.
        """
        self._check_writable("undelete")
        who = user_and_host() if who is None else who
        return self._deletions.undelete(self.settings.tenant, key, version, who=who, reason=reason)

    def retain(
        self, key: str, until: datetime, version: int | None = None, *, reason: str = "", who: str | None = None
    ) -> VersionInfo:
        """Retain a version, the newest by default, until a time; return it.

        Until then it cannot be deleted. A retention is extended, never shortened. Raises NotFound, BadInput (the time
        is earlier than the current retention, in the past, or over 100 years away), Corrupt, TenantErased,
        StoreLocked, StoreUnavailable.
        """
        self._check_writable("retain")
        who = user_and_host() if who is None else who
        until_us = us_of(until)
        return self._deletions.extend_retention(self.settings.tenant, key, version, until_us, who=who, reason=reason)

    def list_deleted(self, prefix: str = "", *, broken: Callable[[Damage], None] | None = None) -> list[Deletion]:
        """Return the deleted, not yet collected versions of keys with `prefix`, by key.

        A version with an unreadable tombstone is passed to `broken`, by default logged as a warning.
        """
        check_prefix(prefix)
        tenant = self.settings.tenant
        check_tenant(self._covered, tenant)
        marked: dict[str, list[CatalogEntry]] = {}
        for entry in self.catalog(tenant, prefix):
            if entry.sequence and is_listed_key(entry.key, prefix):
                marked.setdefault(entry.key, []).append(entry)
        return list(self._deletions.list_deleted(tenant, marked, broken or _warn, entries=marked.__getitem__))

    def purge(
        self,
        key: str | None = None,
        version: int | None = None,
        *,
        wait_seconds: float = 0.0,
        steps: Callable[[int, int, str], None] | None = None,
    ) -> GcReport:
        """Remove deleted versions at once, of one key or all, with all their unshared data.

        For leaked secrets and full disks: neither `deletion.undelete_seconds` nor `gc.grace_seconds` applies. The
        writer lock is held throughout; concurrent restores may fail and must be repeated. The index is rebuilt, so
        that its free pages hold no removed data. `get` of other versions is not affected. Raises BadInput (services
        write this store), Corrupt (a needed chunk is damaged: repair first; nothing needed was removed), NotFound (no
        such version is deleted), GcPaused, StoreLocked (a put, a GC run or another process is active),
        StoreUnavailable (`purge()` continues).
        """
        self._check_writable("purge")
        self._puts.check_none()
        tenant = self.settings.tenant
        if key is not None:
            self._check_deleted(key, version)

        def ends(mark: Mark) -> bool:
            return key is None or (mark.tenant == tenant and mark.key == key and version in (None, mark.version))

        try:
            report = self.reserve.run(lambda: self._collection().purge(wait_seconds, ends, steps))
        finally:
            self._puts.limit_memory_for_reading()
            give_back_free()
        self.reserve.run(self._rebuild_index)
        self._finish_erasures()
        self.reserve.restore(self._container_bytes, grow=True)
        return report

    def _check_deleted(self, key: str, version: int | None) -> None:
        """Raise NotFound, with the reason, if no such version of the key can be purged."""
        if any(one.key == key and version in (None, one.version) for one in self.list_deleted(key)):
            return
        histories = self._manifests.histories(self.settings.tenant, key)
        highest = max(histories, default=0)
        if not highest:
            raise NotFound(f"key {key!r}: no blob {key!r}; `nearkin ls` and `nearkin ls --deleted` list the keys")
        if version is not None and version > highest:
            raise NotFound(f"key {key!r} version {version}: no such version; the newest was {highest}")
        if any(history.committed and version in (None, number) for number, history in histories.items()):
            raise NotFound(f"key {key!r}: no such version is deleted; `nearkin rm` deletes it first")
        which = f"key {key!r}" if version is None else f"key {key!r} version {version}"
        raise NotFound(f"{which}: removed for good by an earlier GC run or purge; nothing of it is left to free")

    def rolled_back_keys(self) -> int:
        """Return how many keys of all tenants had lost their newest version at the last GC run.

        Raises StoreUnavailable.
        """
        known = {
            (bytes.fromhex(key_digest(tenant, entry.key)), entry.version)
            for tenant, entry in self._index.listed_versions()
        }
        return len(self._heads.find_rolled_back(self._manifests, known))

    def keys_without_records(self) -> int:
        """Return how many keys lost a tombstone or retention record that a GC run has listed.

        Raises StoreUnavailable.
        """
        return len(self._heads.find_keys_without_records())

    def forget(
        self,
        prefix: str = "",
        policy: RetentionPolicy | None = None,
        *,
        min_age: int = 0,
        dry_run: bool = False,
        broken: Callable[[Damage], None] | None = None,
        matches: Callable[[str], bool] = lambda _key: True,
    ) -> list[Decision]:
        """Delete versions that no rule keeps, of keys with `prefix` that match.

        The decisions are returned. Rules are those of `policy`, or of the settings; without one for a key all its
        versions are kept. Versions are kept for at least `min_age` seconds, and the minimum of the settings. Raises as
        `delete` does: repeat the call to continue.
        """
        retention, tenant = self.settings.retention, self.settings.tenant
        if not dry_run:
            self._check_writable("forget")
            self._collection().check_clock()
        found = list(
            decisions(
                partial(self.versions, read_manifests=True),
                prefix,
                lambda key: policy or policy_of(retention, tenant, key),
                lambda key: max(min_age, min_age_seconds(retention, tenant, key)),
                self._clock(),
                broken or _warn,
                0 if policy is not None else retention.superseded_seconds,
                matches,
            )
        )
        delete = partial(
            self._deletions.delete,
            tenant,
            undelete_seconds=self.settings.deletion.undelete_seconds,
            who=user_and_host(),
            reason=FORGET_REASON,
            request=secrets.token_bytes(REQUEST_BYTES),  # of all these versions, so that `undelete` finds them
        )
        return found if dry_run else forget(delete, found)

    @property
    def chunking(self) -> chunking_record.ChunkingRecord | None:
        """Return the chunker settings of the store; None before the first put by this release."""
        return self._chunking.record

    @property
    def deletions(self) -> Deletions:
        """Return what deletes any tenant's versions: for servers that answer for many."""
        return self._deletions

    def _manifest(self, key: str, version: int | None) -> Manifest:
        check_key(key)
        tenant = self.settings.tenant
        if version is None:
            newest = self._manifests.newest(tenant, key)
            check_newest(self._manifests, tenant, key, newest, lambda: self._index.numbers(tenant, key))
            self._heads.check(self._manifests, tenant, key, 0 if newest is None else newest.version)
            if newest is None:
                raise NotFound(
                    f"key {key!r}: the store has none; `nearkin ls` lists the keys, `nearkin ls --deleted` those that "
                    "undelete brings back"
                )
            return newest
        check_version(version)
        self._heads.check_marks(self._manifests, tenant, key, version)
        try:
            return self._manifests.read_visible(tenant, key, version)
        except NotFound as err:
            raise NotFound(
                f"key {key!r} version {version}: the store has none; `nearkin ls --versions` lists them"
            ) from err


def _warn(damage: Damage) -> None:
    for key, version in damage.versions:
        _log.warning("%r version %d cannot be read: %s; run `nearkin verify`", key, version, damage.problem)
