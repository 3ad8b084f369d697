"""Ends of versions. Invariant: one goes only behind a mark that no undeletion comes before; its number stays taken.

retained? kept, whatever its marks say
mark: collected -> index -> manifest -> retention records, lower marks, ascending; of a key's highest version the last
mark stays

All in one turn: an index that was made anew in between would count marks that go right after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nearkin_maintenance.gc.roots import Roots, Version
from nearkin_maintenance.gc.writer_gate import WriterGate
from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.formats.manifest import Manifest, moment_of
from nearkin_shared.formats.tombstone import Kind, Mark
from nearkin_shared.index.protocols import CollectedVersion
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.storage.manifests import ManifestStore, mark_name
from nearkin_shared.storage.retention_records import record_sequence
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

COLLECTED_AT_ONCE = 8
"""So many versions go in a turn: of each a durable mark, and a manifest and two marks removed, some 5 ms apiece."""
WHO = "gc"
_log = logging.getLogger("nearkin")


@frozen
class ExpiredVersions:
    """`kept` are the roots: those that were kept, and those that were brought back meanwhile."""

    kept: tuple[Version, ...]
    versions: int


class VersionExpiry:
    """Step 2 of a round."""

    def __init__(self, manifests: ManifestStore, now_us: Callable[[], int]) -> None:
        self._manifests = manifests
        self._now_us = now_us

    def expire(self, roots: Roots, turns: WriterGate) -> ExpiredVersions:
        """Free manifests and marks of the versions that are gone for good. Raises Corrupt, StoreUnavailable."""
        kept, versions = list(roots.kept), 0
        for start in range(0, len(roots.ended), COLLECTED_AT_ONCE):
            some = roots.ended[start : start + COLLECTED_AT_ONCE]
            manifests = [self._manifest(version) for version in some]
            going = []
            with turns.exclusive() as index:
                for version, manifest in zip(some, manifests, strict=True):
                    if self._is_retained(version, manifest):
                        kept.append(version)
                    elif self._finalize(version):
                        going.append((version, manifest, self._remaining_mark_bytes(version, roots)))
                    else:
                        kept.append(version)  # brought back meanwhile
                index.collect_many([_collected_version(*one) for one in going])
                failpoint("gc.uncatalogued")
                for version, _, _ in going:
                    versions += bool(version.committed)
                    self._remove(version, roots)
        return ExpiredVersions(tuple(kept), versions)

    def _is_retained(self, version: Version, manifest: Manifest | None) -> bool:
        """Return whether a deleted version must stay: a process that ignores its retention may have deleted it.

        One that a run has begun to end goes on ending. A retention record that does not verify keeps its version.
        """
        assert version.ended is not None
        if manifest is None or version.ended.kind is Kind.COLLECTED:
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
            "gc: %s is deleted, and retained until %s: kept", name, f"{moment_of(until_us):%Y-%m-%dT%H:%M:%SZ}"
        )
        return True

    def _finalize(self, version: Version) -> bool:
        """Make the mark by which a version never comes back; return False where an undeletion has come first."""
        assert version.ended is not None
        if version.ended.kind is Kind.COLLECTED:
            return True
        try:
            self._manifests.put_mark(self._final_tombstone(version.ended))
        except AlreadyExists:
            return False
        failpoint("gc.sentenced")
        return True

    def _final_tombstone(self, mark: Mark) -> Mark:
        number, now_us = mark.sequence + 1, self._now_us()
        return Mark(mark.tenant, mark.key, mark.version, number, Kind.COLLECTED, now_us, 0, who=WHO)

    def _remaining_mark_bytes(self, version: Version, roots: Roots) -> int:
        """Return the bytes of the mark that stays: the last one of the key's highest version."""
        assert version.ended is not None
        if version.manifest not in roots.highest:
            return 0
        if version.ended.kind is Kind.COLLECTED:
            return version.marks[-1][2]
        return len(self._manifests.encode_mark(self._final_tombstone(version.ended)))

    def _manifest(self, version: Version) -> Manifest | None:
        """Return the manifest of a version that goes, None where it cannot be read."""
        mark = version.ended
        assert mark is not None
        try:
            return self._manifests.get(mark.tenant, mark.key, mark.version) if version.committed else None
        except PermanentError:
            return None

    def _remove(self, version: Version, roots: Roots) -> None:
        """Remove the manifest, then marks, ascending: the last one says until the end what became of the version."""
        assert version.ended is not None
        mark = version.ended
        self._manifests.delete(mark.tenant, mark.key, mark.version)
        failpoint("gc.manifest")
        for name in version.retentions:
            self._manifests.retentions.delete(name)
            failpoint("gc.retention")
        names = [name for _, name, _ in version.marks]
        if mark.kind is Kind.DELETED:
            names.append(mark_name(mark.tenant, mark.key, mark.version, mark.sequence + 1))
        for name in names[:-1] if version.manifest in roots.highest else names:
            self._manifests.delete_mark(name)
        failpoint("gc.marks")


def _collected_version(version: Version, manifest: Manifest | None, marks_bytes: int) -> CollectedVersion:
    mark = version.ended
    assert mark is not None
    sequence = mark.sequence + (mark.kind is Kind.DELETED)
    return CollectedVersion(mark.tenant, mark.key, mark.version, manifest, sequence, marks_bytes)
