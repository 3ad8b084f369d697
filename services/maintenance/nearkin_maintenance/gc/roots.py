"""Roots. Invariant: a version is a root unless a mark says that it is gone for good; doubt keeps it.

no mark, undeleted, or deleted and still to be brought back -> root      its time is over, or collected -> goes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.tombstone import Kind, Mark
from nearkin_shared.storage.manifests import ManifestStore, marked_version, retained_manifest
from nearkin_shared.utils.frozen import frozen


@dataclass(slots=True)
class Version:
    """What lies in the folder of a key of one version: its manifest, if that is there, and marks, the highest last."""

    manifest: str
    committed: bool = False
    marks: list[tuple[int, str, int]] = field(default_factory=list)
    """(sequence, object name, bytes), ascending."""
    ended: Mark | None = None
    """The mark that says that it is gone for good."""
    retentions: list[str] = field(default_factory=list)
    """Object names of its retention records, ascending."""


@frozen
class Roots:
    """All versions of a store, by what is to become of them. Some 300 bytes each."""

    kept: tuple[Version, ...]
    """Those that can be read, now or once they are undeleted."""
    undeletable: frozenset[str]
    """Manifests' names of those of `kept` that are deleted, and can be brought back."""
    ended: tuple[Version, ...]
    """Gone for good: what is left of them goes."""
    highest: frozenset[str]
    """Manifests' names of each key's highest version: its last mark stays, so that its number is not given again."""
    refused: tuple[str, ...] = ()
    """Names of marks that are damaged or not authenticated: their versions are among `kept`."""


def find_roots(manifests: ManifestStore, now_us: int, ends: Callable[[Mark], bool] = lambda mark: False) -> Roots:
    """List all manifests and marks. Raises Corrupt for a name that is no version's, StoreUnavailable.

    `ends`: of marks of deleted versions, those that are gone for good now, whatever time was left to undelete them.
    """
    versions: dict[str, Version] = {}
    listed, marks, retentions = manifests.listing()
    for name, _ in listed:
        versions[name] = Version(name, committed=True)
    for name, size_bytes in marks:
        of, sequence = marked_version(name)
        versions.setdefault(of, Version(of)).marks.append((sequence, name, size_bytes))
    for name, _ in retentions:
        of = retained_manifest(name)
        versions.setdefault(of, Version(of)).retentions.append(name)
    highest = {name.rpartition("/")[0]: name for name in sorted(versions)}
    kept, undeletable, ended = [], set(), []
    refused: list[str] = []
    for name, version in versions.items():
        version.marks.sort()
        mark = _highest(manifests, version, refused)
        if mark is not None and (_is_over(mark, now_us) or (mark.kind is Kind.DELETED and ends(mark))):
            version.ended = mark
        if version.ended is not None:
            ended.append(version)
        elif version.committed:
            kept.append(version)
            if version.marks and version.marks[-1][0] % 2:
                undeletable.add(name)
    return Roots(tuple(kept), frozenset(undeletable), tuple(ended), frozenset(highest.values()), tuple(refused))


def _highest(manifests: ManifestStore, version: Version, refused: list[str]) -> Mark | None:
    """Return the mark that holds, None where there is none; a version whose mark does not verify is kept.

    `refused` is called with the name of a mark that is not authenticated.
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
    return mark.kind is Kind.COLLECTED or (mark.kind is Kind.DELETED and mark.until_us < now_us)
