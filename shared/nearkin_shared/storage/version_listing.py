"""What a listing shows. Invariant: the marks beside the manifests decide, whatever an index says or still says.

index: (key, versions) -> newest not hidden? -> its manifest       lost or broken -> Damage       hidden -> nothing
folder of the key: what an index made anew could not name
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
"""A key and versions of it, ascending: one line of a listing is made of it, or none."""


def include_unindexed(
    manifests: ManifestStore, tenant: str, names: Iterable[tuple[str, int]], retentions: dict[tuple[str, int], int]
) -> Iterator[tuple[str, int]]:
    """Yield the (key, version) of an index, and those that lie in the same keys' folders and it does not name.

    An index that was made anew leaves out what cannot be read. `retentions` gains the sequence of the last retention
    record of each (key, version) before that is yielded. Raises StoreUnavailable.
    """
    for key, same in groupby(names, key=lambda entry: entry[0]):
        versions = {version for _, version in same}
        with suppress(PermanentError):  # a stray file in the key's folder: told where the folder decides
            histories = manifests.histories(tenant, key)
            versions |= {number for number, history in histories.items() if history.committed}
            retentions.update(((key, number), history.retention) for number, history in histories.items())
        yield from ((key, version) for version in sorted(versions))


def check_newest(
    manifests: ManifestStore, tenant: str, key: str, newest: Manifest | None, numbers: Callable[[], Sequence[int]]
) -> None:
    """Raise Corrupt where an index lists a version after the `newest` that is to be seen, and its manifest is gone.

    `numbers` asks the index for the key's versions, none where no index can be read: then that is not known.
    """
    seen = 0 if newest is None else newest.version
    later = [number for number in numbers() if number > seen]
    if not later:
        return
    histories = manifests.histories(tenant, key)
    there = {number for number, history in histories.items() if history.committed or history.sequence % 2}  # or deleted
    lost = max((number for number in later if number not in there), default=None)
    if lost is not None and lost in numbers():  # else a round has ended it meanwhile
        raise Corrupt(
            f"{object_name(tenant, key, lost)}: missing, and the index lists {key!r} version {lost}, the newest: put "
            "it back from a copy (`nearkin repair --from`), ask for an older one by its number, or give it up with "
            "`nearkin rebuild-index`"
        )


def listing_groups(names: Iterable[tuple[str, int]], *, all_versions: bool) -> Iterator[ListingGroup]:
    """Yield the units of a listing from (key, version) by key and version."""
    if all_versions:
        return ((key, (version,)) for key, version in names)
    return ((key, tuple(version for _, version in same)) for key, same in groupby(names, key=lambda entry: entry[0]))


def list_from_index(
    manifests: ManifestStore, tenant: str, entries: Iterable[CatalogEntry], *, all_versions: bool
) -> Iterator[VersionInfo | Damage]:
    """Yield what a listing shows of an index's entries, by key and version, without a read of most manifests.

    The folder of a key decides: if it holds the manifests that the index names, in the sizes that it names, and no
    tombstone or retention record, the entries say all. The manifests of any other key are read. Raises
    StoreUnavailable.
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
    """Return whether the files of a key's folder are the manifests of these entries, in the sizes that they name."""
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
    """Yield what a listing shows of (key, version) of an index, from their manifests. Raises StoreUnavailable."""
    retentions = dict[tuple[str, int], int]()
    for unit in listing_groups(include_unindexed(manifests, tenant, names, retentions), all_versions=all_versions):
        retention = retentions.get((unit[0], unit[1][-1]))
        found = visible_version(manifests, tenant, unit, all_versions=all_versions, retention=retention)
        if found is not None:
            yield found


def visible_version(
    manifests: ManifestStore, tenant: str, unit: ListingGroup, *, all_versions: bool, retention: int | None = None
) -> VersionInfo | Damage | None:
    """Return the newest version of a unit that is to be seen, None where all are deleted.

    Without `all_versions` the key's folder is asked where the unit's newest is deleted. One whose manifest is lost or
    broken is a Damage: an older one never stands in for it. `retention`: sequence of the last retention record of the
    unit's newest, looked up by default. Raises StoreUnavailable.
    """
    key, versions = unit
    newest = versions[-1]
    found = _read(manifests, tenant, key, newest, None, retention)
    if found is not None or all_versions:
        return found
    try:
        histories = manifests.histories(tenant, key)
    except PermanentError as err:  # a stray file in the key's folder
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
    """Return a version as a listing has it; `sequence` of its highest mark where that is known, odd: hidden.

    `retention`: sequence of its last retention record where that is known.
    """
    if sequence is not None and sequence % 2:
        return None
    try:
        if sequence == 0 or manifests.is_seen(tenant, key, version):
            return manifests.info(manifests.get(tenant, key, version), retention)
    except NotFound:
        return missing_version(tenant, key, version)
    except PermanentError as err:
        return _damage(tenant, key, version, str(err))
    return None


def missing_version(tenant: str, key: str, version: int) -> Damage:
    """Return the damage of a version whose manifest is missing."""
    return _damage(tenant, key, version, f"{object_name(tenant, key, version)}: missing")


def _damage(tenant: str, key: str, version: int, problem: str) -> Damage:
    return Damage(object_name(tenant, key, version), problem, ((key, version),))


def infos_of(
    manifests: ManifestStore, tenant: str, key: str, histories: Iterable[History]
) -> Iterator[VersionInfo | Damage]:
    """Yield the versions of one key that are to be seen, in the order of their histories as just listed."""
    for history in histories:
        found = _read(manifests, tenant, key, history.version, None, history.retention)
        if found is not None:
            yield found
