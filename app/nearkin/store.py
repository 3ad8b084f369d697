"""Open, read and change a store in a folder.

Invariant: a put either ends as a committed version or changes nothing that a reader can see.

root/nearkin.json   containers/   manifests/      the authoritative data
root/index/         lock          tmp/            rebuildable, transient
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from nearkin.local.failed_puts import FailedPutCleaner
from nearkin.local.index_lifecycle import WRITER_LOCK_TIMEOUT_SECONDS, LocalIndex
from nearkin.local.index_location import IndexLocation, check_index_path
from nearkin.local.process_lock import NAMES as LOCKS
from nearkin.local.source_feed import PutItem
from nearkin.local.writer import LocalPuts
from nearkin_shared.config.loader import explicit_names, load
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import (
    BadInput,
    Corrupt,
    NearkinError,
    NotFound,
    PermanentError,
    StoreLocked,
    StoreUnavailable,
)
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import CREATED_US_MAX, Manifest, moment_of, us_of
from nearkin_shared.objectstore.base import AlreadyExists, LocalObjectStore, check_tenant, sync_folder
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.factory import as_set, local_objects, no_store
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.objectstore.read_only import ReadOnlyObjectStore
from nearkin_shared.preconditions import Precondition, precondition_of
from nearkin_shared.reading.restore import Blob
from nearkin_shared.results import (
    Damage,
    Deletion,
    Explanation,
    GcReport,
    GcState,
    PutResult,
    RebuildReport,
    Repaired,
    RepairReport,
    Stats,
    VerifyReport,
    VersionInfo,
)
from nearkin_shared.retention import Decision, decisions, forget, guard_of, min_age_seconds, policy_of
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.chunking_record import ChunkingGuard
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.deletions import Deletions, user_and_host
from nearkin_shared.storage.disk_reserve import SpaceReserve
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore, key_digest
from nearkin_shared.storage.manifests import object_name as manifest_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubStates
from nearkin_shared.storage.version_listing import check_newest, list_from_index, list_from_manifests
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.memory import give_back_free
from nearkin_shared.utils.private_files import make_private_folders
from nearkin_shared.utils.thread_pool import all_cores
from nearkin_shared.validation import Progress, Source, check_bound, check_key, check_prefix, check_version

if TYPE_CHECKING:
    from nearkin.local.local_gc import LocalGc
    from nearkin.local.local_repair import LocalRepair
    from nearkin.salvage import SalvagedBlob
    from nearkin_maintenance import CorruptChunks, Scrubber, Verifier, VerifyScope
    from nearkin_maintenance.verify.scrubber import ScrubStep
    from nearkin_shared.formats.tombstone import Mark
    from nearkin_shared.index.catalog import CatalogEntry
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

__all__ = ["Item", "Progress", "Source", "Store", "create_store", "open_store"]

FORGET_REASON = "forget"
CLOSE_SECONDS = 30.0
"""So long the closing of a store waits for a put in another thread."""
_log = logging.getLogger("nearkin")


@frozen
class Item:
    """A blob for `put_many` with options; the fields are those of `Store.put`."""

    key: str
    source: Source
    metadata: Mapping[str, str] = field(default_factory=dict)
    sha256: bytes | None = None
    created: datetime | None = None
    """Creation time of a version that is copied from another store; None: the moment of the commit."""
    precondition: Precondition | None = None
    origin: BlobOrigin | None = None
    """Of a blob that is stored once, however often it is put; None: each put makes a version."""

    def as_put(self) -> PutItem:
        """Return the tuple that `LocalPuts.put` takes."""
        created_us = None if self.created is None else us_of(self.created)
        return PutItem(self.key, self.source, self.metadata, self.sha256, created_us, self.precondition, self.origin)


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
    root = _store_path(path)
    if not _has_store(root):
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
    root = _store_path(path)
    exists = BadInput(f"store {root}: already exists; choose another folder, or use the existing store")
    if _has_store(root):
        raise exists
    try:
        return _create(root, settings if settings is not None else load()[0], descriptor.FINGERPRINT_BITS, clock)
    except AlreadyExists as err:
        raise exists from err


def _create(root: Path, settings: Settings, fingerprint_bits: int, clock: Callable[[], float]) -> Store:
    """Create and open a store. Raises AlreadyExists if another process creates it first."""
    check_index_path(root, settings.index.path)  # before anything is made
    _check_only_store_files(root)
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


def _store_path(path: str | Path) -> Path:
    """Return the folder named by `path`. Raises BadInput for a path that cannot be a folder."""
    try:
        root = Path(path).expanduser()
        if "\0" in str(root):
            raise ValueError("a path holds no NUL byte")  # noqa: TRY301 - as all that no path can be
        if root.exists() and not root.is_dir():
            raise BadInput(f"store {root}: is a file; name a folder")
    except OSError as err:
        raise StoreUnavailable(f"store {path}: {err.strerror}") from err
    except (ValueError, RuntimeError, TypeError) as err:  # a user without a home; no path at all
        raise BadInput(f"store {str(path)!r}: {err}") from err
    return root


def _has_store(root: Path) -> bool:
    """Return whether the folder has a store. Raises Corrupt if a store has no descriptor."""
    try:
        if (root / descriptor.NAME).is_file():
            return True
    except OSError as err:
        raise StoreUnavailable(f"store {root}: {err.strerror}") from err
    if _entry_names(root) >= {"containers", "manifests"}:
        raise Corrupt(
            f"store {root}: {descriptor.NAME} is lost; restore it from a copy, every chunk's tag depends on it"
        )
    return False


def _check_only_store_files(root: Path) -> None:
    """Raise BadInput if the folder has files that creating a store does not leave."""
    if _entry_names(root) - {*LOCKS, "tmp", "keys", "parity", descriptor.NAME, chunking_record.NAME}:
        raise BadInput(
            f"store {root}: the folder is not empty and holds no {descriptor.NAME}; name an empty or new folder"
        )


def _entry_names(root: Path) -> set[str]:
    try:
        return {entry.name for entry in root.iterdir()} if root.is_dir() else set()
    except OSError as err:
        raise StoreUnavailable(f"store {root}: {err.strerror}") from err


_STORES: WeakSet[Store] = WeakSet()
"""All of this process."""


class Store:
    """An open store: one writer, any number of readers.

    The first write takes the lock, `close` releases it. In a forked process the store is open too, without the lock
    and the running put of its parent.
    """

    def __init__(
        self,
        root: Path,
        objects: LocalObjectStore,
        covered: ParityObjectStore,
        found: descriptor.Descriptor,
        guard: ChunkingGuard,
        clock: Callable[[], float] = time.time,
        *,
        read_only: bool = False,
    ) -> None:
        self.root = root
        self._is_read_only = read_only
        self.store_id = found.store_id
        self._clock = clock
        self.settings = settings = guard.settings
        self._chunking = guard
        self._objects = objects
        self._covered = covered
        self._fingerprinters = partial(
            Fingerprinter, bytes.fromhex(found.secret), fingerprint_bits=found.fingerprint_bits
        )
        self._fingerprinter = self._fingerprinters(settings.tenant)
        domain = self._fingerprinter.domain
        self._containers = ContainerStore(self._covered, domain, int(settings.restore.cache_bytes))
        self._manifests = ManifestStore(self._covered)
        self._index = LocalIndex(
            IndexLocation(root, found.store_id, settings.index.path),
            objects,
            covered,
            settings,
            self._fingerprinters,
            self._containers,
            self._manifests,
        )
        self._condemned = PendingDeleteStore(covered)
        self._heads = VersionHeads(covered)
        self._quarantine = Quarantine(covered, clock)
        self.reserve = SpaceReserve(root, lambda: int(self.settings.storage.reserve_bytes))
        self.pauses = GcPauseFlag(covered, clock, self.reserve)
        self._deletions = Deletions(
            self._manifests,
            lambda marks: self._index.noting().mark_many(marks),
            clock=clock,
            guard=guard_of(settings.retention, clock),
            notes=self._index,
            reserve=self.reserve,
            heads=self._heads,
        )
        self._puts = LocalPuts(
            root,
            lambda: self.settings,
            covered,
            self._fingerprinter,
            self._containers,
            self._manifests,
            self._index,
            clock,
            self._repair_quarantined,
            FailedPutCleaner(root, self._containers, self._index, self.reserve),
        )
        _STORES.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, the index, and cached data: some 200 MB.

        Waits for a GC step or a put of another thread; a GC run then continues, and takes the lock for its steps
        only. Ends an unfinished put_many of this thread: without the lock another process could collect the chunks
        that its uncommitted data depend on, so they will never be committed.
        """
        crossing, elsewhere = self._index.crossing, self._puts.is_written_by_other_process
        self._puts.abort_put_of_thread()
        wanted = crossing.exclusive(CLOSE_SECONDS, "the closing of the store") if elsewhere else crossing.shared()
        try:
            with wanted:
                self._index.close()
        except StoreLocked as err:  # a step, or a put, that takes long: the process is to end all the same
            _log.warning("%s; closed", err)
            self._index.close()
        self._puts.release_memory()
        self._containers.evict()
        self._containers.buffers.release_unused()

    def after_fork(self) -> None:
        """Reset in a forked process."""
        self._manifests.locks.after_fork()
        self._manifests.origins.after_fork()
        self._puts.after_fork()
        self._index.after_fork()

    def wait_for_lock(self, seconds: float) -> None:
        """Let writes wait up to `seconds` for another process; by default they do not."""
        self._index.lock_wait_seconds = seconds

    def _check_writable(self, operation: str) -> None:
        if self._is_read_only:
            raise BadInput(f"{operation}: store {self.root} was opened with read_only=True; open it without to write")

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

    def find_origin(self, key: str, origin: BlobOrigin) -> PutResult | None:
        """Return the result of an earlier put with this origin, or None. Raises StoreUnavailable."""
        tenant = self.settings.tenant
        histories = self._manifests.histories(tenant, key)
        manifest = self._manifests.find_origin(tenant, key, histories, origin)
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
        return Blob(manifest.info, manifest, self._containers.counting(), self._fingerprinter, start, end)

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
        to `broken`, by default with a warning in the log; an older one is never returned in its place. Manifests are
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
            else:
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
        later, and `undelete` restores them for `deletion.undelete_seconds`. Version numbers are not reused. A version
        that is committed meanwhile is kept. Raises NotFound, BadInput, RetentionActive
        (retention.min_age_seconds: none is deleted), TenantErased, StoreLocked, StoreUnavailable (some may be
        deleted: repeat the call).
        """
        self._check_writable("delete")
        return self._deletions.delete(
            self.settings.tenant,
            key,
            version,
            undelete_seconds=self.settings.deletion.undelete_seconds,
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
        marked = {entry.key: None for entry in self.catalog(tenant, prefix) if entry.sequence}
        return list(self._deletions.list_deleted(tenant, marked, broken or _warn))

    def rolled_back_keys(self) -> int:
        """Return how many keys of all tenants had lost their newest version at the last GC run.

        Raises StoreUnavailable.
        """
        known: dict[bytes, int] = {}
        for tenant, entry in self._index.listed_versions():
            digest = bytes.fromhex(key_digest(tenant, entry.key))
            known[digest] = max(known.get(digest, 0), entry.version)
        return len(self._heads.find_rolled_back(self._manifests, known))

    def forget(
        self,
        prefix: str = "",
        policy: RetentionPolicy | None = None,
        *,
        min_age: int = 0,
        dry_run: bool = False,
        broken: Callable[[Damage], None] | None = None,
    ) -> list[Decision]:
        """Delete versions that no rule keeps, of keys with `prefix`; return the decisions.

        Rules are those of `policy`, or of the settings; without one for a key all its versions are kept. Versions
        are kept for at least `min_age` seconds, and the minimum of the settings. Raises as `delete` does: repeat the
        call to continue.
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
            )
        )
        return found if dry_run else forget(self, found, FORGET_REASON)

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

    # --- the store as a whole ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return statistics of the store with all tenants, from index and object store listing."""
        from nearkin_shared.stats import OtherObjects, stats

        quarantine_bytes = sum(self._quarantine.list_records().values()) + sum(
            ScrubStates(self._covered).list_records().values()
        )
        pending_delete_bytes = sum(self._condemned.list_records().values())
        covered = self._covered

        def sum_up_index(index: LmdbIndex) -> Stats:
            others = OtherObjects(
                chunking_record.descriptor_bytes(self._objects),
                pending_delete_bytes,
                parity_bytes=sum(size_bytes for _, size_bytes in self._objects.names("parity")),
                quarantine_bytes=quarantine_bytes + sum(self.pauses.list_records().values()),
                encryption_bytes=covered.encryption_bytes() if isinstance(covered, EncryptedObjectStore) else None,
                manifest_bytes=sum(size_bytes for _, size_bytes in covered.names("manifests")),
            )
            return stats(index, self._containers, others, self._index.bytes_on_disk)

        return self._index.read(sum_up_index)

    def tenant_stats(self) -> Stats:
        """Return statistics of the own tenant only, for callers that may not see other tenants.

        If the store has other tenants, a container counts for the tenant in its header; data that no tenant owns
        (index, parity, quarantine, records of GC) are omitted then.
        """
        from nearkin_shared.stats import OtherObjects, sum_up

        tenant = self.settings.tenant
        entries, found = self._index.read(lambda index: (list(index.catalogs()), list(index.containers())))
        if all(owner == tenant for owner, _ in entries):
            return self.stats()
        own = [summary for summary in found if self._owns(summary.container)]
        return sum_up(
            ((owner, entry) for owner, entry in entries if owner == tenant),
            own,
            sum(summary.container_bytes for summary in own),
            OtherObjects(chunking_record.descriptor_bytes(self._objects)),
            index_bytes=0,
        )

    def _owns(self, container: ContainerId) -> bool:
        try:
            return self._containers.of(None).directory(container).domain == self._fingerprinter.domain
        except (Corrupt, NotFound):  # its tenant is not known
            return False

    def verify(
        self,
        sample: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        seed: int = 0,
        since: datetime | None = None,
    ) -> VerifyReport:
        """Read containers and every manifest; report damage, with the versions that it affects.

        All containers are read, or a `sample` (a share between 0 and 1 of them, drawn by `seed`), or those written
        `since`; of the others only directories. If all are read, every entry of the index is compared with them too.
        A read-only store only reports damage.

        Broken chunks are withdrawn from the index, so that a later put of the same data stores them again; stored
        objects are not changed. Raises BadInput, StoreUnavailable.
        """
        from nearkin_maintenance import VerifyScope

        return self._verified(
            VerifyScope(sample, seed, None if since is None else int(since.timestamp() * 1e6)), progress
        )

    def verify_key(
        self, key: str, version: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read one or all versions of `key` and their containers; report their damage.

        Deleted versions are not read. Broken chunks are withdrawn from the index, as after `verify`. Raises NotFound,
        BadInput, Corrupt, TenantErased, StoreUnavailable.
        """
        check_key(key)
        if version is not None:
            check_version(version)
        tenant = self.settings.tenant
        check_tenant(self._covered, tenant)
        histories = self._manifests.histories(tenant, key)
        hidden = {number for number, history in histories.items() if history.sequence % 2}
        listed = {number for number, history in histories.items() if history.committed}
        numbers = sorted((listed | set(self._index.numbers(tenant, key))) - hidden)
        if version is not None:
            numbers = [number for number in numbers if number == version]
        if not numbers:
            named = f"key {key!r}" if version is None else f"key {key!r} version {version}"
            raise NotFound(f"{named}: the store has none; `nearkin ls --versions` lists them")
        verifier = self._verifier()
        names = [manifest_name(tenant, key, number) for number in numbers]
        with all_cores("nearkin-verify") as helpers:
            report = verifier.run_versions(names, progress, helpers=helpers)
        return self._with_index_purged(verifier, report, everything=False)

    def _verifier(self) -> Verifier:
        from nearkin_maintenance import IndexedVersions, Verifier

        entries = {
            manifest_name(tenant, entry.key, entry.version): (tenant, entry)
            for tenant, entry in self._index.listed_versions()
        }
        indexed = IndexedVersions(
            {name: (tenant, entry.key, entry.version) for name, (tenant, entry) in entries.items()},
            self._index.lists,
            lambda: (self._index.to_check() or (None, False))[1],
        )
        objects, containers, manifests = self._covered, self._containers, self._manifests
        if isinstance(objects, EncryptedObjectStore) and (readable := objects.open_blocked()) is not objects:
            objects, manifests = readable, ManifestStore(readable)
            containers = ContainerStore(readable, self._fingerprinter.domain, int(self.settings.restore.cache_bytes))
        verifier = Verifier(
            containers,
            manifests,
            self._fingerprinters,
            self.settings.tenant,
            indexed,
            self._condemned,
            self._quarantine,
            objects,
        )
        verifier.compare_entries({name: entry.listed for name, (_, entry) in entries.items()})
        return verifier

    def _verified(self, choice: VerifyScope, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        note = not self._is_read_only
        structure_damage = self._index.find_structure_damage(note=note) if choice.is_full else None
        verifier = self._verifier()
        index, whole = self._index.to_check() or (None, False)
        unreadable = self._index.damage or structure_damage
        with all_cores("nearkin-verify") as helpers:
            report = verifier.run(choice, progress, index, index_whole=whole, helpers=helpers)
        if unreadable is not None and choice.is_full:
            report = replace(report, damage=(*report.damage, Damage("index", unreadable, ())))
        return self._with_index_purged(verifier, report, everything=choice.is_full)

    def _with_index_purged(self, verifier: Verifier, report: VerifyReport, *, everything: bool) -> VerifyReport:
        """Quarantine broken chunks, withdraw them from the index, complete the report."""
        if self._is_read_only or (not verifier.broken and not self._quarantine.list_records()):
            return report

        def quarantined() -> CorruptChunks:
            unsound = verifier.corrupt_chunks()
            self._quarantine.note(unsound.chunks, unsound.segments, everything=everything)
            return unsound

        forgotten = self._index.withdraw(quarantined)
        return replace(report, forgotten=forgotten) if verifier.broken else report

    def scrubber(self) -> Scrubber:
        """Return what reads all of this store again and again, by its settings `scrub`."""
        from nearkin_maintenance import DomainOwners, Scrubber

        tenants = DomainOwners(self._fingerprinters, [self.settings.tenant], self._manifests)
        return Scrubber(
            self._covered, self._containers, tenants, self._fingerprinter, lambda: self.settings.scrub, self._clock
        )

    def attend(self, step: ScrubStep) -> tuple[tuple[Repaired, ...], tuple[Damage, ...]]:
        """Repair damage that a scrub step found, from parity and later puts; quarantine the rest.

        Returns the repairs, and the remaining damage with the versions that it affects. Raises StoreLocked,
        StoreUnavailable.
        """
        self._check_writable("attend")
        with self._index.crossing.shared():
            return self._repairs().attend(step.damaged, self._verified)

    def repair(
        self, files: Sequence[str | Path] = (), progress: Callable[[int, int], None] | None = None
    ) -> RepairReport:
        """Verify all, and repair damage; the rest remains in quarantine.

        Sources are parity; `files`, which are copies of objects or content that was put once; and chunks with the
        same fingerprint in the store. Puts are excluded: they repair too after their commit, and both would write the
        same next generation. `progress` is called with the state of the verification. Raises BadInput, StoreLocked,
        StoreUnavailable.
        """
        self._check_writable("repair")
        if self._puts.is_put_of_thread:
            raise self._puts.is_put_in_progress()
        with self._index.crossing.exclusive(WRITER_LOCK_TIMEOUT_SECONDS, "a repair"):
            return self._repairs(progress).run([Path(file) for file in files])

    def _container_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._containers.ids())

    def _repair_quarantined(self) -> None:
        """Repair quarantined containers from committed data; failures are logged."""
        self.reserve.restore(self._container_bytes)
        try:
            if self._quarantine.list_records():
                self._repairs().repair_quarantined()
        except NearkinError as err:
            _log.warning("quarantined containers were not repaired, run `nearkin repair`: %s", err)

    def _repairs(self, progress: Callable[[int, int], None] | None = None) -> LocalRepair:
        from nearkin.local.local_repair import LocalRepair

        return LocalRepair(
            self.settings,
            self._covered,
            self._containers,
            self._manifests,
            self._index,
            self._quarantine,
            self._fingerprinters,
            partial(self.verify, None, progress),
        )

    def gc(
        self,
        *,
        dry_run: bool = False,
        deleted_too: bool = False,
        wait_seconds: float = 0.0,
        go_on: Callable[[], None] = lambda: None,
        steps: Callable[[int, int, str], None] | None = None,
    ) -> GcReport:
        """Run GC for all tenants; with `dry_run` report its effects and change nothing.

        `deleted_too`, for a dry run only: as if no deleted version could be undeleted any more.

        Puts, deletions and restores continue meanwhile, in this process and others: each effect of the run is an
        exclusive section of some 0.1 s, for which puts wait. The run waits for a put at its beginning up to
        `wait_seconds`, and for an exclusive section up to 60 s or as long. `go_on` is called before each container is
        written or removed, and stops the run by raising. `steps` is called with the steps done, all steps, and their
        kind.

        Data that the run finds unreachable become pending delete; a later run frees them after `gc.grace_seconds`.
        Versions that can no longer be undeleted are removed at once. Finally versions that `retention.policies` do
        not keep are deleted. Raises Corrupt (a needed object cannot be read: nothing is marked for deletion),
        GcPaused, StoreLocked, StoreUnavailable, RetryableError (a tenant was erased meanwhile).
        """
        collection = self._collection()
        if deleted_too and not dry_run:
            raise BadInput("deleted_too: allowed for a dry run only; add dry_run")
        if dry_run:
            return collection.preview(steps, deleted_too=deleted_too)
        self._check_writable("gc")
        if not wait_seconds:
            self._puts.check_none()
        try:
            report = self.reserve.run(lambda: collection.run(wait_seconds, go_on, steps))
        finally:
            self._puts.limit_memory_for_reading()
            give_back_free()
        self._finish_erasures()
        self.reserve.restore(self._container_bytes, grow=True)
        return report

    def _finish_erasures(self) -> None:
        """Rebuild an index that may hold data of erased tenants, then end the erasures.

        1 the objects are removed  2 the index is rebuilt  3 the erasure is recorded as swept. Each GC run does the
        remaining steps; while a put of this process is active, step 2 waits for the next run.
        """
        if not isinstance(self._covered, EncryptedObjectStore) or not self._covered.keyring.list_due():
            return
        failpoint("erasure.objects-removed")  # 1
        try:
            if self._index.holds_erased_tenants():
                _log.info("gc: the index is made again, without what it held of erased tenants")
                self._rebuild_index()  # 2
            failpoint("erasure.index-renewed")
            self._covered.confirm_swept()  # 3
        except (StoreLocked, BadInput) as err:
            _log.warning("gc: the index still holds names and digests of erased tenants until the next run: %s", err)

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
        if key is not None and not any(
            one.key == key and version in (None, one.version) for one in self.list_deleted(key)
        ):
            raise NotFound(f"key {key!r}: no such version is deleted; `nearkin rm` deletes it first")

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

    def _collection(self) -> LocalGc:
        from nearkin.local.local_gc import LocalGc

        return LocalGc(
            self.root,
            self.settings,
            self._containers,
            self._manifests,
            self._condemned,
            self._index,
            self._deletions,
            self._fingerprinters,
            self._clock,
            self.pauses,
            self._puts.limit_memory_for_gc,
            self.reserve.release,
        )

    def erase_tenant(self, tenant: str, grace_seconds: int | None = None, *, despite_retention: bool = False) -> int:
        """Erase a tenant's data keys, so that its data are unreadable; return how many.

        The tenant is closed at once; its keys are removed by the first `gc` after `grace_seconds` (None: the setting
        deletion.erase_grace_seconds; 0: now). Until then `keyring.cancel_erasure` opens it again. Other tenants are
        not affected. `gc` frees the bytes. A repeat completes an interrupted erasure; a tenant without keys can never
        have one in this store afterwards. Raises BadInput (the store is not encrypted), RetentionActive (some of its
        versions are retained; `despite_retention` erases them all the same), StoreLocked, StoreUnavailable.
        """
        self._check_writable("erase_tenant")
        if grace_seconds is None:
            grace_seconds = self.settings.deletion.erase_grace_seconds
        if not isinstance(self._covered, EncryptedObjectStore):
            raise BadInput(f"store {self.root}: is not encrypted: delete the tenant's keys, and let `gc` free them")
        self._puts.check_none()
        from nearkin_maintenance.gc.erased_tenants import withdraw_erased
        from nearkin_maintenance.gc.tenant_erasure import find_retained

        with self._index.crossing.shared():
            index = self._index.writable()
            if not despite_retention:
                find_retained(self._covered, tenant, self.settings, self._clock()).check_none(tenant)
            count = self._covered.keyring.erase(tenant, grace_seconds)
            withdraw_erased(self._covered, index, tenant)
            self._containers.evict()
        return count

    @property
    def index_folder(self) -> Path:
        """Return where the index is: in the store's folder, or below `index.path`."""
        return self._index.folder

    @property
    def keyring(self) -> Keyring:
        """Return the data keys of an encrypted store. Raises BadInput for another."""
        if not isinstance(self._covered, EncryptedObjectStore):
            raise BadInput(f"store {self.root}: is not encrypted (storage.encryption)")
        return self._covered.keyring

    def gc_state(self) -> GcState:
        """Return whether GC is paused, and the data pending delete. Raises StoreUnavailable."""
        pause, condemned = self.pauses.read(), self._condemned.read()
        at_us = min((entry.at_us for entry in condemned.values()), default=None)
        due = None if at_us is None else min(at_us / 1e6 + self.settings.gc.grace_seconds, CREATED_US_MAX // 1_000_000)
        return GcState(
            None if pause is None else moment_of(pause.at_us),
            "" if pause is None else pause.who,
            len(condemned),
            None if due is None else datetime.fromtimestamp(due, UTC),
        )

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Replace the index by one made from containers and manifests alone, all tenants' alike.

        Versions that were lost are given up: GC frees their data. Nothing is put or deleted meanwhile. Raises
        StoreLocked, StoreUnavailable.
        """
        return self._rebuild_index(progress, accept_loss=True)

    def _rebuild_index(
        self, progress: Callable[[int, int], None] | None = None, *, accept_loss: bool = False
    ) -> RebuildReport:
        self._check_writable("rebuild_index")
        self._puts.check_none()
        with self._index.crossing.exclusive(WRITER_LOCK_TIMEOUT_SECONDS, "a rebuild of the index"):
            report = self._index.rebuild(progress)
            if accept_loss:
                self._heads.accept(self._manifests)
            return report


def _warn(damage: Damage) -> None:
    for key, version in damage.versions:
        _log.warning("%r version %d cannot be read: %s; run `nearkin verify`", key, version, damage.problem)


def _after_fork() -> None:
    for store in list(_STORES):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
