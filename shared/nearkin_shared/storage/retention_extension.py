"""Extension of the retention of a version.

Invariant: an extension is acknowledged only when durable; no call makes a retention end earlier.

    1 the index is notified: listings read the record    2 the record is created    3 the version still exists

After a crash behind 1, listings look for a record that does not exist. A deletion of the same key waits (key locks); GC
keeps a deleted version that is retained, in whatever order both happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nearkin_shared.errors import BadInput, NotFound, RetryableError
from nearkin_shared.formats.manifest import CREATED_US_MAX, Manifest, moment_of
from nearkin_shared.formats.retention_record import RetentionRecord
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.manifests import History, ManifestStore
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.validation import check_key, check_reason, check_version

RACES_MAX = 16
RETENTION_SECONDS_MAX = 3_153_600_000
"""100 years: a typing error in a year must not retain a version for ever."""


class RetentionExtender:
    """Extension of retentions of any tenant's versions. The caller holds the key's lock."""

    def __init__(
        self,
        manifests: ManifestStore,
        note: Callable[[Sequence[MarkedVersion]], None],
        withdraw_note: Callable[[str, str, list[int]], None],
        clock: Callable[[], float],
    ) -> None:
        """Create the extender.

        `note` notifies the index; `withdraw_note` restores its state if the record could not be written.
        """
        self._manifests = manifests
        self._note = note
        self._withdraw_note = withdraw_note
        self._clock = clock

    def extend(
        self, tenant: str, key: str, version: int | None, retain_until_us: int, who: str, reason: str
    ) -> VersionInfo:
        """Retain a version, the newest by default, until a time; return it with that time.

        Raises: NotFound, BadInput (the time is earlier than the current one, in the past or too late), Corrupt,
        StoreUnavailable.
        """
        check_key(key)
        check_reason(reason)
        if version is not None:
            check_version(version)
        for _ in range(RACES_MAX):
            history, manifest = self._find(tenant, key, version)
            before_us = self._manifests.retentions.retain_until_us(manifest, history.retention)
            now_us = int(self._clock() * 1e6)
            _check_time(manifest, retain_until_us, before_us, now_us)
            if retain_until_us > before_us:
                record = RetentionRecord(
                    tenant, key, manifest.version, history.retention + 1, now_us, retain_until_us, who, reason
                )
                if not self._write(history, record):
                    continue
            return self._check_visible(manifest)
        raise RetryableError(f"{_label(manifest)}: {RACES_MAX} concurrent extensions; try again")

    def _find(self, tenant: str, key: str, version: int | None) -> tuple[History, Manifest]:
        histories = self._manifests.histories(tenant, key)
        for number in sorted(histories, reverse=True):
            if version in (None, number) and self._manifests.shows(tenant, key, histories[number]):
                return histories[number], self._manifests.get(tenant, key, number)
        label = f"key {key!r}" if version is None else f"key {key!r} version {version}"
        raise NotFound(f"{label}: does not exist; a deleted version must be undeleted before its retention is extended")

    def _write(self, history: History, record: RetentionRecord) -> bool:
        """Write a record; return whether no other one preceded it."""
        records_bytes = history.marks_bytes + len(self._manifests.retentions.encode(record))
        try:
            self._note([MarkedVersion(record.tenant, record.key, record.version, history.sequence, records_bytes)])  # 1
            failpoint("retention.noted")
            self._manifests.retentions.write(record)  # 2
        except AlreadyExists:
            return False
        except BaseException:
            self._withdraw_note(record.tenant, record.key, [record.version])
            raise
        failpoint("retention.recorded")
        return True

    def _check_visible(self, manifest: Manifest) -> VersionInfo:
        """Return the version as it is now.

        Raises: NotFound, if another process deleted it meanwhile.
        """
        if not self._manifests.is_seen(manifest.tenant, manifest.key, manifest.version):  # 3
            raise NotFound(f"{_label(manifest)}: deleted during the call; undelete it, then extend its retention")
        return self._manifests.info(manifest)


def _check_time(manifest: Manifest, retain_until_us: int, before_us: int, now_us: int) -> None:
    """Refuse a time that shortens a retention or exceeds the bounds. Raises BadInput."""
    if retain_until_us == before_us:
        return
    latest_us = min(now_us + RETENTION_SECONDS_MAX * 1_000_000, CREATED_US_MAX)
    label = f"{_label(manifest)}: retain until {_time(retain_until_us)}"
    if retain_until_us > latest_us:
        raise BadInput(f"{label}: want a time up to {_time(latest_us)} (100 years from now)")
    if retain_until_us < before_us:
        raise BadInput(
            f"{label}: it is retained until {_time(before_us)}, and a retention is never shortened; give a later time"
        )
    if retain_until_us <= now_us:
        raise BadInput(f"{label}: is in the past by this machine's clock ({_time(now_us)}); give a later time")


def _label(manifest: Manifest) -> str:
    return f"key {manifest.key!r} version {manifest.version}"


def _time(us: int) -> str:
    return f"{moment_of(us):%Y-%m-%dT%H:%M:%SZ}"
