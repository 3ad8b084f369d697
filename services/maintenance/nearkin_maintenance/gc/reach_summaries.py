"""Summarise which keys and containers reach a container, and list the indexed versions.

    listed      key of the index              -> its marks 12, key digest 16, version 8, end of its undelete window 8
    needs       container 8                   -> generation 4, check of its summary 8, then 8 for each container that
                                                 its recipes and blocks refer to
    depends     container 8, dependent 8      -> check 8: the reverse of `needs`
    reach       container 8, key digest 16    -> check 8: a version of the key names, or named, a segment of it
    sums        container 8                   -> number and sum of the intervals that name its segments, 8 each
    meta        trusted                       -> stored bytes: the tables are those of the end of a GC run
                added, ended                  -> bytes that all versions had added then, and those that ended since

Invariant (I6): a container is unreachable only if no counted version names a segment of it, its sum states none, and
every container that refers to it is unreachable too, whichever chunks the reference is about. That is less than marking
finds, which compares chunks. Whatever was changed by anything but a GC run with these tables (a container that is
missing or has another summary, a version without a manifest) is a doubt, and the run marks.
docs/adr/0078-collection-by-change.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from struct import Struct

import numpy as np

from nearkin_maintenance.gc.ledger_rows import KEY_BYTES, LedgerRows, row_check, to_bytes
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.protocols import IndexSnapshot
from nearkin_shared.types import ZERO, distinct
from nearkin_shared.utils.frozen import frozen

LISTED = Struct(">12s16sQQ")
_NEEDS = Struct("<I8s")
_SEQUENCE = Struct("<I")
Digests = Callable[[Collection[bytes]], Mapping[bytes, bytes]]
"""Returns the digest of the blob key for keys of a snapshot; without those that are no longer listed."""


class MarkingNeeded(Exception):
    """The run has to mark, for the reason given."""


class TablesContradicted(MarkingNeeded):
    """A counted version has another manifest: the run marks and counts everything again."""


@frozen
class ListedVersion:
    """A version as the index lists it."""

    marks: bytes
    key: bytes
    version: int

    @property
    def is_deleted(self) -> bool:
        """Return whether its highest announced mark deletes it."""
        return bool(_SEQUENCE.unpack_from(self.marks)[0] % 2)


@frozen
class IndexChanges:
    """Differences between the index and the tables."""

    versions: Mapping[bytes, dict[bytes, ListedVersion]] = field(default_factory=dict)
    """Of each changed key, by digest: all versions that the index lists, by their keys in the index."""
    removed: Collection[bytes] = ()
    """Keys of the index that it no longer lists."""
    containers: Collection[int] = ()
    """Containers that are new."""


def read_trusted(rows: LedgerRows) -> int | None:
    """Return the stored bytes of the store if the tables can be trusted, else None."""
    found = rows.get("meta", b"trusted")
    return None if found is None else int(found)


def find_changes(rows: LedgerRows, snapshot: IndexSnapshot, digests: Digests, now_us: int) -> IndexChanges:
    """Compare a snapshot of the index, or of the object store, with the tables.

    Versions whose undelete window is over count as changed.

    Raises: MarkingNeeded, if a container was removed or rewritten by anything but a GC run with these tables.
    """
    needs = {int.from_bytes(name): value for name, value in rows.items("needs")}
    if missing := needs.keys() - snapshot.containers.keys():
        raise MarkingNeeded(f"container {min(missing):016x} is no longer listed")
    for container, value in needs.items():
        if _NEEDS.unpack_from(value)[1] != snapshot.containers[container]:
            raise MarkingNeeded(f"container {container:016x} was rewritten")
    listed = dict(rows.items("listed"))
    changed, owners = [], dict[bytes, bytes]()
    for name, marks in snapshot.versions.items():
        row = listed.get(name)
        if row is None or row[:12] != marks:
            changed.append(name)
        elif marks[0] & 1 and LISTED.unpack(row)[3] <= now_us:
            owners[name[:-8]] = row[12:28]
    removed = [name for name in listed if name not in snapshot.versions]
    for name, digest in digests(changed).items():
        owners[name[:-8]] = digest
    for name in removed:
        owners[name[:-8]] = listed[name][12:28]
    versions: dict[bytes, dict[bytes, ListedVersion]] = {digest: {} for digest in owners.values()}
    for name, marks in snapshot.versions.items() if owners else ():
        owner = owners.get(name[:-8])
        if owner is not None:
            versions[owner][name] = ListedVersion(marks, owner, int.from_bytes(name[-8:]))
    return IndexChanges(versions, removed, sorted(snapshot.containers.keys() - needs.keys()))


def record_versions(rows: LedgerRows, changes: IndexChanges, until_us: Mapping[tuple[bytes, int], int]) -> None:
    """Record the listed versions of the changed keys, all of which are counted.

    `until_us`: end of the undelete window of deleted versions.
    """
    for name in changes.removed:
        rows.delete("listed", name)
    for versions in changes.versions.values():
        for name, listed in versions.items():
            until = until_us.get((listed.key, listed.version), 0)
            rows.put("listed", name, LISTED.pack(listed.marks, listed.key, listed.version, until))


def record_container(rows: LedgerRows, container: int, generation: int, check: bytes, directory: Directory) -> None:
    """Record the containers that a container refers to, in recipes and blocks."""
    recipes = distinct(directory.segments.chunks.containers).tolist()
    needed = sorted({*recipes, *directory.base_containers()} - {container, int(ZERO)})
    name, row = to_bytes(container), _NEEDS.pack(generation, check) + b"".join(map(to_bytes, needed))
    before = rows.get("needs", name)
    if before == row:
        return
    old = set(_needed(before))
    for other in old.difference(needed):
        rows.delete("depends", to_bytes(other) + name)
    for other in set(needed) - old:
        rows.put("depends", to_bytes(other) + name, row_check(to_bytes(other) + name))
        rows.gained.add(other)
    rows.put("needs", name, row)


def recorded_container(rows: LedgerRows, container: int) -> tuple[int, bytes] | None:
    """Return the generation of a container and the check of its summary, as recorded, or None."""
    found = rows.get("needs", to_bytes(container))
    return None if found is None else _NEEDS.unpack_from(found)


def forget_containers(rows: LedgerRows, containers: Iterable[int]) -> None:
    """Delete the rows of deleted containers."""
    for container in containers:
        name = to_bytes(container)
        for other in _needed(rows.get("needs", name)):
            rows.delete("depends", to_bytes(other) + name)
        for row, _ in rows.rows_with_prefix("reach", name):
            rows.delete("reach", row)
        for table in ("needs", "containers"):
            rows.delete(table, name)


def keep_containers(rows: LedgerRows, containers: Collection[int]) -> None:
    """Delete the rows of all other containers."""
    forget_containers(
        rows, [int.from_bytes(name) for name, _ in rows.items("needs") if int.from_bytes(name) not in containers]
    )


def find_unreachable(rows: LedgerRows, candidates: Collection[int]) -> set[int]:
    """Return the candidates that no version and no container outside of the result reaches.

    Raises: MarkingNeeded, if the counts and the summary of a container differ.
    """
    found = {container for container in candidates if not is_reached(rows, container)}
    while True:
        held = {c for c in found if not found.issuperset(_dependents(rows, c))}
        if not held:
            return found
        found -= held


def with_needed(rows: LedgerRows, candidates: Iterable[int]) -> set[int]:
    """Return the candidates that no version reaches, and all that they refer to."""
    found, waiting = set[int](), list(candidates)
    while waiting:
        container = waiting.pop()
        if container in found or is_reached(rows, container):
            continue
        found.add(container)
        waiting += _needed(rows.get("needs", to_bytes(container)))
    return found


def is_reached(rows: LedgerRows, container: int) -> bool:
    """Return whether a counted version names a segment of a container.

    Raises: MarkingNeeded, if its counts and its summary differ.
    """
    is_held = rows.is_held(container)
    if is_held != rows.has_sum(container):
        raise MarkingNeeded(f"container {container:016x}: the summary of its references is wrong")
    return is_held


def keys_reaching(rows: LedgerRows, containers: Iterable[int]) -> set[bytes]:
    """Return the digests of keys with a version that ever named a segment of `containers`.

    Raises: MarkingNeeded, if a row is damaged.
    """
    found = set()
    for container in containers:
        for row, check in rows.rows_with_prefix("reach", to_bytes(container)):
            if check != row_check(row):
                raise MarkingNeeded(f"container {container:016x}: a row of its summary is damaged")
            found.add(row[8 : 8 + KEY_BYTES])
    return found


def find_wrong_counts(rows: LedgerRows, segments: Mapping[int, np.ndarray]) -> int | None:
    """Return a container of which a live segment is not counted, or None.

    `segments`: bool[n] by container, as marking found them.
    """
    counted: defaultdict[int, set[int]] = defaultdict(set)
    for name, _ in rows.items("counts"):
        counted[int.from_bytes(name[:8])].add(int.from_bytes(name[8:]))
    for container, mask in segments.items():
        if not counted[container].issuperset(np.flatnonzero(mask).tolist()):
            return container
    return None


def _dependents(rows: LedgerRows, container: int) -> list[int]:
    found = []
    for row, check in rows.rows_with_prefix("depends", to_bytes(container)):
        if check != row_check(row):
            raise MarkingNeeded(f"container {container:016x}: a row of its dependents is damaged")
        found.append(int.from_bytes(row[8:]))
    return found


def _needed(row: bytes | None) -> list[int]:
    names = b"" if row is None else row[_NEEDS.size :]
    return [int.from_bytes(names[at : at + 8]) for at in range(0, len(names), 8)]
