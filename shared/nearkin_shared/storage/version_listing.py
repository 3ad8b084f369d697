"""Listings of versions.

Invariant: the marks next to the manifests decide, even if an index differs.

    index: (key, versions) -> newest visible -> its manifest     lost or damaged -> Damage     hidden -> nothing
    folder of the key: versions that a rebuilt index could not name
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter

from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.results import Damage, VersionInfo
from nearkin_shared.storage.manifests import MANIFEST_SUFFIX, History, ManifestStore, object_name

ListingGroup = tuple[str, tuple[int, ...]]
"""A key and versions of it, ascending; it becomes one line of a listing, or none."""


def include_unindexed(
    manifests: ManifestStore, tenant: str, names: Iterable[tuple[str, int]], retentions: dict[tuple[str, int], int]
) -> Iterator[tuple[str, int]]:
    """Yield the (key, version) of an index, and those that only the keys' folders have.

    A rebuilt index leaves out unreadable versions. `retentions` gains the sequence of the last retention record of each
    (key, version) before that is yielded.

    Raises: StoreUnavailable.
    """
    for key, entries in groupby(names, key=lambda entry: entry[0]):
        versions = {version for _, version in entries}
        with suppress(PermanentError):  # a foreign file in the key's folder: reported by the folder's own read
            histories = manifests.histories(tenant, key)
            versions |= {number for number, history in histories.items() if history.committed}
            retentions.update(((key, number), history.retention) for number, history in histories.items())
        yield from ((key, version) for version in sorted(versions))


def check_newest(
    manifests: ManifestStore, tenant: str, key: str, newest: Manifest | None, numbers: Callable[[], Sequence[int]]
) -> None:
    """Raise Corrupt if the manifest of a version listed after `newest` was removed.

    `newest` is the newest visible version. `numbers` returns the key's versions in the index, none without a readable
    index.
    """
    seen = 0 if newest is None else newest.version
    later = [number for number in numbers() if number > seen]
    if not later:
        return
    histories = manifests.histories(tenant, key)
    existing = {
        number for number, history in histories.items() if history.committed or history.sequence % 2
    }  # or deleted
    lost = max((number for number in later if number not in existing), default=None)
    if lost is not None and lost in numbers():  # else a GC run has ended it meanwhile
        raise Corrupt(
            f"{object_name(tenant, key, lost)}: missing, but the index lists {key!r} version {lost} as the newest; "
            "restore it from a copy (`nearkin repair --from`), get an older one by its number, or accept the loss "
            "with `nearkin rebuild-index`"
        )


def listing_groups(names: Iterable[tuple[str, int]], *, all_versions: bool) -> Iterator[ListingGroup]:
    """Yield the groups of a listing from (key, version) by key and version."""
    if all_versions:
        return ((key, (version,)) for key, version in names)
    return (
        (key, tuple(version for _, version in entries)) for key, entries in groupby(names, key=lambda entry: entry[0])
    )


def list_from_index(
    manifests: ManifestStore, tenant: str, entries: Iterable[CatalogEntry], *, all_versions: bool
) -> Iterator[VersionInfo | Damage]:
    """Yield the listing of an index's entries, by key and version.

    Most manifests are not read.

    The folder of a key decides: if it holds the manifests that the index names, in the sizes that it names, and no
    tombstone or retention record, the entries are complete. The manifests of any other key are read.

    Raises: StoreUnavailable.
    """
    groups = [list(same) for _, same in groupby(entries, key=attrgetter("key"))]
    folders = manifests.folder_files(tenant, [group[0].key for group in groups])
    for group, (folder, files) in zip(groups, folders, strict=True):
        infos: list[VersionInfo | None] = [None]
        if files is not None and _holds_only(manifests, folder, files, group):
            infos = [entry.info for entry in (group if all_versions else group[-1:])]
        complete = [info for info in infos if info is not None]
        if len(complete) == len(infos):
            yield from complete
        else:
            names = [(entry.key, entry.version) for entry in group]
            yield from list_from_manifests(manifests, tenant, names, all_versions=all_versions)


def _holds_only(manifests: ManifestStore, folder: str, files: Mapping[str, int], group: list[CatalogEntry]) -> bool:
    """Return whether a key's folder has exactly the manifests of these entries.

    Their sizes must agree too.
    """
    if len(files) != len(group):
        return False
    for entry in group:
        file_name, expected = f"{entry.version:016x}{MANIFEST_SUFFIX}", entry.manifest_bytes
        stored_bytes = files.get(file_name)
        if stored_bytes is None:
            return False
        if stored_bytes != expected and manifests.clear_bytes(f"{folder}/{file_name}", stored_bytes) != expected:
            return False
    return True


def list_from_manifests(
    manifests: ManifestStore, tenant: str, names: Iterable[tuple[str, int]], *, all_versions: bool
) -> Iterator[VersionInfo | Damage]:
    """Yield the listing of the (key, version) of an index, from their manifests.

    Raises: StoreUnavailable.
    """
    retentions = dict[tuple[str, int], int]()
    for unit in listing_groups(include_unindexed(manifests, tenant, names, retentions), all_versions=all_versions):
        retention = retentions.get((unit[0], unit[1][-1]))
        found = visible_version(manifests, tenant, unit, all_versions=all_versions, retention=retention)
        if found is not None:
            yield found


def visible_version(
    manifests: ManifestStore, tenant: str, group: ListingGroup, *, all_versions: bool, retention: int | None = None
) -> VersionInfo | Damage | None:
    """Return the newest visible version of a group, or None if all are deleted.

    Without `all_versions` the key's folder is listed if the group's newest is deleted. A version whose manifest is lost
    or damaged is a Damage: an older one never takes its position. `retention`: sequence of the last retention record of
    the group's newest, looked up by default.

    Raises: StoreUnavailable.
    """
    key, versions = group
    newest = versions[-1]
    found = _read(manifests, tenant, key, newest, None, retention)
    if found is not None or all_versions:
        return found
    try:
        histories = manifests.histories(tenant, key)
    except PermanentError as err:  # a foreign file in the key's folder
        return _damage(tenant, key, newest, str(err))
    for version in sorted(histories, reverse=True):
        history = histories[version]
        found = _read(manifests, tenant, key, version, history.sequence, history.retention)
        if found is not None:
            return found
    return None


def _read(
    manifests: ManifestStore, tenant: str, key: str, version: int, sequence: int | None, retention: int | None
) -> VersionInfo | Damage | None:
    """Return a version as a listing shows it, None if hidden.

    `sequence` of its highest mark and `retention` of its last retention record, if known; an odd `sequence` hides it.
    """
    if sequence is not None and sequence % 2:
        return None
    try:
        if sequence == 0 or manifests.is_seen(tenant, key, version):
            return manifests.info(manifests.get(tenant, key, version), retention)
    except NotFound:
        return _explain_missing(manifests, tenant, key, version)
    except PermanentError as err:
        return _damage(tenant, key, version, str(err))
    return None


def _explain_missing(manifests: ManifestStore, tenant: str, key: str, version: int) -> Damage | None:
    """Return the damage of a version without a manifest, or None if its last mark ended it."""
    try:
        ended = manifests.is_ended(tenant, key, version)
    except PermanentError as err:
        return _damage(tenant, key, version, str(err))
    return None if ended else missing_version(tenant, key, version)


def missing_version(tenant: str, key: str, version: int) -> Damage:
    """Return the damage of a version whose manifest is missing."""
    return _damage(tenant, key, version, f"{object_name(tenant, key, version)}: missing")


def _damage(tenant: str, key: str, version: int, problem: str) -> Damage:
    return Damage(object_name(tenant, key, version), problem, ((key, version),))


def infos_of(
    manifests: ManifestStore, tenant: str, key: str, histories: Iterable[History]
) -> Iterator[VersionInfo | Damage]:
    """Yield the visible versions of one key, in the order of their histories."""
    for history in histories:
        found = _read(manifests, tenant, key, history.version, None, history.retention)
        if found is not None:
            yield found
