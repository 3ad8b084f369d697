"""Delete the objects of expired versions.

    retained: the version is kept, whatever its tombstones record
    tombstone "collected" -> index -> manifest -> retention records, lower tombstones, ascending
    the highest version of a key, and its recorded head, keep their last tombstones

Invariant (I6): a version is deleted only after a tombstone that no undelete can precede; its number is never reused.
All in one exclusive section: an index that was rebuilt in between would count tombstones that are deleted right after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nearkin_maintenance.gc.roots import Roots, RootVersion
from nearkin_maintenance.gc.writer_gate import WriterGate
from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.formats.manifest import Manifest, moment_of
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.index.protocols import CollectedVersion
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.storage.manifests import ManifestStore, mark_name
from nearkin_shared.storage.retention_records import record_sequence
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import is_reserved_key

COLLECTED_AT_ONCE = 8
"""Versions per exclusive section. Each takes about 5 ms: a durable tombstone is written, a manifest and two tombstones
are deleted.
"""
WHO = "gc"
_log = logging.getLogger("nearkin")


@frozen
class ExpiredVersions:
    """Result: `kept` are the roots, including versions that were undeleted meanwhile."""

    kept: tuple[RootVersion, ...]
    versions: int

    def count_undeletable(self, roots: Roots) -> int:
        """Count the deleted versions that are kept: in their undelete window, or retained."""
        return len(roots.undeletable) + len(self.kept) - len(roots.kept)


class VersionExpiry:
    """Step 2 of a GC run: delete the objects of versions that cannot be undeleted."""

    def __init__(self, manifests: ManifestStore, now_us: Callable[[], int]) -> None:
        self._manifests = manifests
        self._now_us = now_us

    def expire(self, roots: Roots, gate: WriterGate) -> ExpiredVersions:
        """Delete manifests and tombstones of expired versions. Raises Corrupt, StoreUnavailable."""
        kept, versions = list(roots.kept), 0
        for start in range(0, len(roots.ended), COLLECTED_AT_ONCE):
            batch = roots.ended[start : start + COLLECTED_AT_ONCE]
            manifests = [self._manifest(version) for version in batch]
            finalized = []
            with gate.exclusive() as index:
                for version, manifest in zip(batch, manifests, strict=True):
                    if self._is_retained(version, manifest):
                        kept.append(version)
                    elif self._finalize(version):
                        finalized.append((version, self._remaining_mark_bytes(version, roots)))
                    else:
                        kept.append(version)  # undeleted meanwhile
                index.collect_many([_collected_version(*item) for item in finalized])
                failpoint("gc.uncatalogued")
                for version, _ in finalized:
                    assert version.ended is not None
                    versions += bool(version.committed) and not is_reserved_key(version.ended.key)
                    self._remove(version, roots)
        return ExpiredVersions(tuple(kept), versions)

    def _is_retained(self, version: RootVersion, manifest: Manifest | None) -> bool:
        """Return whether a deleted version must stay because of its retention.

        A process that ignores retention may have deleted it. A version that a run began to expire is not retained. A
        retention record that does not verify retains its version.
        """
        assert version.ended is not None
        if manifest is None or version.ended.kind is MarkKind.COLLECTED:
            return False
        name = f"{manifest.key!r} version {manifest.version}"
        try:
            listed = max((record_sequence(name)[1] for name in version.retentions), default=0)
            until_us = self._manifests.retentions.current_retain_until_us(manifest, listed)
        except Corrupt as err:
            _log.warning("gc: %s is kept: %s", name, err)
            return True
        if self._now_us() >= until_us:
            return False
        _log.warning(
            "gc: %s is deleted, but retained until %s: it is kept", name, f"{moment_of(until_us):%Y-%m-%dT%H:%M:%SZ}"
        )
        return True

    def _finalize(self, version: RootVersion) -> bool:
        """Write the tombstone that makes expiry final; return False if an undelete was first."""
        assert version.ended is not None
        if version.ended.kind is MarkKind.COLLECTED:
            return True
        try:
            self._manifests.put_mark(self._final_tombstone(version.ended))
        except AlreadyExists:
            return False
        failpoint("gc.expired")
        return True

    def _final_tombstone(self, mark: Mark) -> Mark:
        number, now_us = mark.sequence + 1, self._now_us()
        return Mark(mark.tenant, mark.key, mark.version, number, MarkKind.COLLECTED, now_us, 0, who=WHO)

    def _remaining_mark_bytes(self, version: RootVersion, roots: Roots) -> int:
        """Return the bytes of the tombstone that stays, or 0.

        It is the last tombstone of the key's highest version or of its recorded head.
        """
        assert version.ended is not None
        if version.manifest not in roots.highest:
            return 0
        if version.ended.kind is MarkKind.COLLECTED:
            return version.marks[-1][2]
        return len(self._manifests.encode_mark(self._final_tombstone(version.ended)))

    def _manifest(self, version: RootVersion) -> Manifest | None:
        """Return the manifest of an expired version, or None if it cannot be read."""
        mark = version.ended
        assert mark is not None
        try:
            return self._manifests.get(mark.tenant, mark.key, mark.version) if version.committed else None
        except PermanentError:
            return None

    def _remove(self, version: RootVersion, roots: Roots) -> None:
        """Delete the manifest, then the tombstones, ascending.

        The last tombstone records the state of the version until the end.
        """
        assert version.ended is not None
        mark = version.ended
        self._manifests.delete(mark.tenant, mark.key, mark.version)
        failpoint("gc.manifest")
        for name in version.retentions:
            self._manifests.retentions.delete(name)
            failpoint("gc.retention")
        names = [name for _, name, _ in version.marks]
        if mark.kind is MarkKind.DELETED:
            names.append(mark_name(mark.tenant, mark.key, mark.version, mark.sequence + 1))
        for name in names[:-1] if version.manifest in roots.highest else names:
            self._manifests.delete_mark(name)
        failpoint("gc.marks")


def _collected_version(version: RootVersion, marks_bytes: int) -> CollectedVersion:
    mark = version.ended
    assert mark is not None
    sequence = mark.sequence + (mark.kind is MarkKind.DELETED)
    return CollectedVersion(mark.tenant, mark.key, mark.version, sequence, marks_bytes)
