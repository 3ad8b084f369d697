"""Find the roots of a GC run: all versions that can be read or undeleted.

    no tombstone, undeleted, or deleted within the undelete window    root
    undelete window over, or already collected                        expired

Invariant (I6): a version without a readable, authentic tombstone is a root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.head_record import Heads, Sequences
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.storage.heads import head_name, lost_record
from nearkin_shared.storage.manifests import (
    ManifestListing,
    ManifestStore,
    key_and_version,
    marked_version,
    retained_manifest,
)
from nearkin_shared.storage.retention_records import record_sequence
from nearkin_shared.utils.frozen import frozen

NO_HEADS = Heads()


@dataclass(slots=True)
class RootVersion:
    """Stored objects of one version: its manifest, if committed, and its tombstones."""

    manifest: str
    committed: bool = False
    marks: list[tuple[int, str, int]] = field(default_factory=list)
    """Tombstones as (sequence, object name, bytes), ascending."""
    ended: Mark | None = None
    """The tombstone by which the version has expired, or None."""
    retentions: list[str] = field(default_factory=list)
    """Object names of its retention records, ascending."""
    until_us: int = 0
    """End of its undelete window if it is deleted, else 0."""


@frozen
class Roots:
    """All versions of a store, about 300 bytes each."""

    kept: tuple[RootVersion, ...]
    """Versions that can be read, now or after an undelete."""
    undeletable: frozenset[str]
    """Manifest names of those in `kept` that are deleted and can be undeleted."""
    ended: tuple[RootVersion, ...]
    """Expired versions: their remaining objects are deleted."""
    highest: frozenset[str]
    """Manifest names of each key's highest version and of its recorded head.

    Their last tombstones stay: no number is reused, and a head without any object is a loss.
    """
    refused: tuple[str, ...] = ()
    """Names of damaged or unauthenticated tombstones; their versions are in `kept`."""


def find_roots(
    manifests: ManifestStore,
    now_us: int,
    ends: Callable[[Mark], bool] = lambda mark: False,
    heads: Heads = NO_HEADS,
    listing: ManifestListing | None = None,
) -> Roots:
    """List all manifests and tombstones and classify their versions.

    `listing`: all objects of some keys; only their versions are classified. `ends` selects tombstones of deleted
    versions that expire now, whatever remains of their undelete window. A version without a tombstone or retention
    record that `heads` have is kept.

    Raises: Corrupt for a name that belongs to no version, StoreUnavailable.
    """
    versions: dict[str, RootVersion] = {}
    listed, marks, retentions = manifests.listing() if listing is None else listing
    for name, _ in listed:
        versions[name] = RootVersion(name, committed=True)
    for name, size_bytes in marks:
        manifest_name, sequence = marked_version(name)
        versions.setdefault(manifest_name, RootVersion(manifest_name)).marks.append((sequence, name, size_bytes))
    for name, _ in retentions:
        manifest_name = retained_manifest(name)
        versions.setdefault(manifest_name, RootVersion(manifest_name)).retentions.append(name)
    highest = {name.rpartition("/")[0]: name for name in sorted(versions)}
    last_objects = {*highest.values(), *(head_name(*head) for head in heads.versions.items())} & versions.keys()
    kept, undeletable, ended = [], set(), []
    refused: list[str] = []
    for name, version in versions.items():
        version.marks.sort()
        mark = _highest(manifests, version, refused)
        if mark is not None and mark.kind is MarkKind.DELETED:
            version.until_us = mark.until_us
        if _has_lost_record(version, heads):
            version.ended = None
        elif mark is not None and (_is_over(mark, now_us) or (mark.kind is MarkKind.DELETED and ends(mark))):
            version.ended = mark
        if version.ended is not None:
            ended.append(version)
        elif version.committed:
            kept.append(version)
            if version.marks and version.marks[-1][0] % 2:
                undeletable.add(name)
    return Roots(tuple(kept), frozenset(undeletable), tuple(ended), frozenset(last_objects), tuple(refused))


def _has_lost_record(version: RootVersion, heads: Heads) -> bool:
    """Return whether a committed version lacks a record that an earlier run listed.

    The record is a tombstone or a retention record.
    """
    named = key_and_version(version.manifest) if version.committed and heads.sequences else None
    if named is None:
        return False
    mark = version.marks[-1][0] if version.marks else 0
    retention = max((record_sequence(name)[1] for name in version.retentions), default=0)
    known = heads.sequences.get(named[0], {}).get(named[1])
    return lost_record(*named, known, Sequences(mark, retention)) is not None


def _highest(manifests: ManifestStore, version: RootVersion, refused: list[str]) -> Mark | None:
    """Return the valid tombstone of a version, or None.

    None also for a damaged or unauthenticated one, whose name is added to `refused`: its version is kept.
    """
    if not version.marks:
        return None
    name = version.marks[-1][1]
    try:
        mark = manifests.read_mark(name)
    except Corrupt:
        refused.append(name)
        return None
    if manifests.authenticates_marks and not mark.authenticated:
        refused.append(name)
        return None
    return mark


def _is_over(mark: Mark, now_us: int) -> bool:
    return mark.kind is MarkKind.COLLECTED or (mark.kind is MarkKind.DELETED and mark.until_us < now_us)
