"""Compare the index with the containers.

    chunks    name -> (container, ordinal)      the directory has that name there
    segments  id   -> (container, ordinal)      the recipe there, with its chunks' names, has that id
    features  SF   -> (container, ordinal)      a chunk is stored there
    versions  every manifest, if no writer is active

Invariant: an entry without a finding names data that a reader of its container gets. Entries of missing or damaged
containers are reported by the check of those containers. A container that the index itself does not list must have no
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_shared.errors import PermanentError
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, ZERO, Bools, ContainerId, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

PROBLEMS_MAX = 3
"""Problems of each kind that are reported one by one: the remedy for all is an index rebuild."""
TABLES = ("chunks", "segments", "features")


class ReadableIndex(Protocol):
    """Access to an index: all stored rows of a table, and single ones."""

    def rows(self, table: str) -> Iterator[tuple[U8, Locations]]:
        """Yield (keys uint8[n, width], locations), some thousand at a time."""

    def at(self, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys in the form that `rows` yields."""

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield the summary of each container whose entries are all published."""


@frozen
class IndexFindings:
    """Number of entries checked, and the problems found."""

    entries: int
    problems: tuple[str, ...]


class IndexCheck:
    """One comparison of an index with the containers."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._entries = 0
        self._published: set[int] = set()
        self._mismatches: dict[str, list[str]] = {}

    def run(self, index: ReadableIndex, unlisted: Mapping[str, str]) -> IndexFindings:
        """Check every entry.

        `unlisted`: versions that the index lacks, described, by manifest name.
        """
        self._published = {summary.container for summary in index.containers()}
        for table, check in zip(TABLES, (self._check_chunks, self._check_segments, self._check_features), strict=True):
            for keys, locations in index.rows(table):
                self._entries += len(keys)
                self._check_batch(index, table, keys, locations, check)
        for name, version in unlisted.items():
            self._mismatches.setdefault("versions", []).append(f"does not list {version} ({name})")
        problems = []
        for table, mismatched in self._mismatches.items():
            problems += mismatched[:PROBLEMS_MAX]
            if len(mismatched) > PROBLEMS_MAX:
                problems.append(f"{len(mismatched) - PROBLEMS_MAX} more problems of {table}")
        return IndexFindings(self._entries, tuple(problems))

    def _check_batch(
        self,
        index: ReadableIndex,
        table: str,
        keys: U8,
        locations: Locations,
        check: Callable[[Directory, U8, Locations], Bools],
    ) -> None:
        for container, rows in group_by_container(locations.containers):
            try:
                directory = self._containers.directory(ContainerId(container))
            except PermanentError:
                if container in self._published:
                    continue
                mismatched = rows
            else:
                mismatched = rows[~check(directory, keys[rows], locations.take(rows))]
            if not len(mismatched):
                continue
            # Read the entries again: a GC run may have removed entry and chunk meanwhile.
            current, found = index.at(table, keys[mismatched])
            is_unchanged = found & (current.containers == locations.containers[mismatched])
            is_unchanged &= current.ordinals == locations.ordinals[mismatched]
            for row in mismatched[is_unchanged].tolist():
                key, ordinal = keys[row].tobytes().hex(), int(locations.ordinals[row])
                problem = f"{table[:-1]} {key} differs from ordinal {ordinal} of container {container:016x}"
                self._mismatches.setdefault(table, []).append(problem)

    def _check_chunks(self, directory: Directory, keys: U8, locations: Locations) -> Bools:
        is_valid = locations.ordinals < len(directory.chunks)
        rows = np.flatnonzero(is_valid)
        is_valid[rows] = (directory.chunks.names[locations.ordinals[rows]] == keys[rows]).all(axis=1)
        return is_valid

    def _check_segments(self, directory: Directory, keys: U8, locations: Locations) -> Bools:
        table = directory.segments
        is_valid = locations.ordinals < len(table)
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        if fingerprinter is None:
            return is_valid
        reader = ChunkReader(self._containers.of(directory.domain))
        for row in np.flatnonzero(is_valid).tolist():
            ordinal = int(locations.ordinals[row])
            recipe = table.chunks.take(slice(int(table.bounds[ordinal]), int(table.bounds[ordinal + 1])))
            try:
                names = reader.plan(recipe).names
            except PermanentError:  # a damaged container, which is reported on its own
                continue
            is_zero = recipe.containers == np.uint64(ZERO)
            if is_zero.any():
                names[is_zero] = fingerprinter.name_zeros(recipe.ordinals[is_zero])
            bounds = np.array([0, len(recipe)], np.uint32)
            is_valid[row] = fingerprinter.name_segments(names, bounds)[0].tobytes() == keys[row].tobytes()
        return is_valid

    @staticmethod
    def _check_features(directory: Directory, _keys: U8, locations: Locations) -> Bools:
        is_valid = locations.ordinals < len(directory.chunks)
        rows = np.flatnonzero(is_valid)
        is_valid[rows] = directory.chunks.there[locations.ordinals[rows]]
        return is_valid
