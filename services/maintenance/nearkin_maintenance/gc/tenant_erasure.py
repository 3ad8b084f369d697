"""Find retained versions that block a tenant's erasure, and copies that it cannot reach.

Invariant: retention that cannot be read counts as retention; a copy is listed wherever one may exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import SHARDS
from nearkin_shared.errors import NotFound, PermanentError, RetentionActive
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.head_record import Heads, Sequences
from nearkin_shared.formats.manifest import CREATED_US_MAX, moment_of
from nearkin_shared.limits import RESUMABLE_HOURS
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.results import RemainingCopy
from nearkin_shared.retention import min_age_seconds
from nearkin_shared.storage.heads import VersionHeads, lost_record
from nearkin_shared.storage.manifests import ManifestStore, key_and_version
from nearkin_shared.storage.retention_records import SUFFIX, record_sequence
from nearkin_shared.utils.frozen import frozen

EXAMPLES_MAX = 3
"""Retained versions that an error names."""


@frozen
class RetainedVersions:
    """The versions of a tenant that must not be deleted yet."""

    count: int = 0
    until: datetime | None = None
    """The latest end of their retentions."""
    examples: tuple[str, ...] = ()
    """Some of them, by key and version."""
    unreadable: tuple[str, ...] = ()
    """Object names of manifests and records that cannot be read: the end of their retention is unknown."""

    def check_none(self, tenant: str) -> None:
        """Raise RetentionActive if there are any."""
        if not self.count and not self.unreadable:
            return
        problems = []
        if self.until is not None:
            more = "" if self.count <= len(self.examples) else ", ..."
            problems.append(
                f"retained versions: {self.count}, the last one until {self.until:%Y-%m-%dT%H:%M:%SZ} "
                f"({', '.join(self.examples)}{more})"
            )
        if self.unreadable:
            problems.append(
                f"versions with an unreadable retention: {len(self.unreadable)} (first: {self.unreadable[0]})"
            )
        raise RetentionActive(
            f"tenant {tenant!r}: {'; '.join(problems)}; nothing was erased: wait until then, or erase them all the "
            "same with --despite-retention"
        )


def find_retained(objects: EncryptedObjectStore, tenant: str, settings: Settings, now: float) -> RetainedVersions:
    """Return the tenant's versions that manifests, retention records or settings retain.

    Reads the head of every manifest, and the tenant's manifests. A tenant that an authentic erasure has closed has
    none.

    Raises: StoreUnavailable.
    """
    erasure = objects.keyring.find_erasure(tenant)
    if erasure is not None and erasure.problem is None:
        return RetainedVersions()
    manifests, now_us = ManifestStore(objects), int(now * 1e6)
    count, latest_us, examples, unreadable = 0, 0, list[str](), list[str]()
    names = objects.names_of_domain("manifests", domain_of(tenant))
    sequences: dict[str, int] = {}
    for name in names:
        if name.endswith(SUFFIX):
            try:
                manifest_name, sequence = record_sequence(name)
            except PermanentError:
                unreadable.append(name)
            else:
                sequences[manifest_name] = max(sequences.get(manifest_name, 0), sequence)
    heads = VersionHeads(objects).read()
    for name in names:
        if not name.endswith(".nkm"):
            continue
        if (lost := _lost_retention(heads, name, sequences.get(name, 0))) is not None:
            unreadable.append(lost)
            continue
        try:
            manifest = manifests.read(name)
            until_us = manifests.retentions.current_retain_until_us(manifest, sequences.get(name, 0))
        except NotFound:  # GC ended the version meanwhile
            continue
        except PermanentError:
            unreadable.append(name)
            continue
        seconds = min_age_seconds(settings.retention, tenant, manifest.key)
        until_us = max(until_us, manifest.created_us + seconds * 1_000_000 if seconds else 0)
        if until_us > now_us:
            count, latest_us = count + 1, max(latest_us, until_us)
            if len(examples) < EXAMPLES_MAX:
                examples.append(f"{manifest.key!r} version {manifest.version}")
    until = moment_of(min(latest_us, CREATED_US_MAX)) if count else None
    return RetainedVersions(count, until, tuple(examples), tuple(unreadable))


def _lost_retention(heads: Heads, manifest: str, sequence: int) -> str | None:
    """Return the name of a lost retention record, or None.

    An earlier GC run has listed it.
    """
    named = key_and_version(manifest)
    known = None if named is None else heads.sequences.get(named[0], {}).get(named[1])
    if named is None or known is None:
        return None
    return lost_record(*named, known, Sequences(known.mark, sequence))


def remaining_copies(settings: Settings, closed_at: datetime, removed_at: datetime) -> list[RemainingCopy]:
    """Return the copies that an erasure does not reach.

    `closed_at`: when the tenant is closed; `removed_at`: when its keys are deleted.
    """
    return [*_of_services(settings, closed_at), *_of_any_store(settings, removed_at)]


def _of_services(settings: Settings, closed_at: datetime) -> Iterator[RemainingCopy]:
    url = settings.object_store.url
    if url is None:
        return
    yield RemainingCopy(
        "kafka",
        f"contents and key names in the topics {settings.kafka.topic_prefix}*, dead letters included",
        closed_at + timedelta(hours=settings.kafka.retention_hours),
        "kafka.retention_hours ends it; `nearkin dlq drop` and kafka-delete-records end it sooner",
    )
    if settings.ingest.topics:
        yield RemainingCopy(
            "ingest-topics",
            f"contents in topics of your own: {', '.join(settings.ingest.topics)}",
            None,
            "their own retention ends it, or kafka-delete-records",
        )
    yield _of_index(settings)
    if url.startswith("s3://"):
        yield RemainingCopy(
            "bucket-versions",
            f"wrapped keys and sealed objects in versions, trash, replicas and inventories of {url}",
            None,
            "a lifecycle rule for noncurrent versions; remove those below keys/ at once",
        )


def _of_index(settings: Settings) -> RemainingCopy:
    if settings.index.backend == SHARDS:
        return RemainingCopy(
            "index-shards",
            "key names, digests and metadata in free pages of the folders of index shards, and their backups",
            None,
            "after the GC run that frees the objects: stop the shards, remove the folders N-of-COUNT, start them",
        )
    return RemainingCopy(
        "redis",
        "key names, digests and metadata in RDB and AOF files, replicas and their backups",
        None,
        "after the GC run that frees the objects: BGSAVE, BGREWRITEAOF; then remove older dumps",
    )


def _of_any_store(settings: Settings, removed_at: datetime) -> Iterator[RemainingCopy]:
    yield RemainingCopy(
        "key-copies",
        "copies of the folder keys/: with the key-encryption key they open everything that is left",
        None,
        "remove the tenant's folder below keys/ from each copy, or replace the key-encryption key there",
    )
    yield RemainingCopy(
        "backups",
        "copies and snapshots of the store: sealed, and opened by copies of keys/",
        None,
        "their own retention; erase the tenant there, too",
    )
    if settings.object_store.url is None:
        yield RemainingCopy(
            "index",
            "digests and sealed names in free pages of the local index",
            None,
            f"made again by the first GC run after {removed_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}, which frees the "
            "objects; blocks of removed files stay until the disk writes over them",
        )
    yield RemainingCopy(
        "staged-uploads",
        "parts of resumable uploads that an older release began, sealed under the store's key",
        removed_at + timedelta(hours=RESUMABLE_HOURS),
        f"ends {RESUMABLE_HOURS} h after their start; parts of this release are sealed under the tenant's keys",
    )
    yield RemainingCopy(
        "logs",
        "tenant and key names in access logs, audit records, traces and metrics",
        None,
        "your log retention",
    )
    yield RemainingCopy(
        "memory",
        "keys and contents in processes that have used them, their swap and core dumps",
        removed_at + timedelta(minutes=1),
        "processes stop using the keys within a minute; restart them to clear their memory",
    )
