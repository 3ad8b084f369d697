"""Index against containers. Invariant: an entry that is found sound names what a reader of its container will get.

chunks    name -> (container, ordinal)      the directory has that name there
segments  id   -> (container, ordinal)      the recipe there, its chunks named by their directories, has that id
features  SF   -> (container, ordinal)      a chunk is there
versions  every manifest, if no writer is at work

Entries of containers that are missing or broken are none of its business: who looks at these names them. Of one that
the index itself does not list there are none.
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
"""Of each kind so many are told one by one: the remedy for all is a new index."""
TABLES = ("chunks", "segments", "features")


class ReadableIndex(Protocol):
    """What is asked of an index: rows of a table as they lie there, and single ones again."""

    def rows(self, table: str) -> Iterator[tuple[U8, Locations]]:
        """Yield (keys uint8[n, width], locations), some thousand at a time."""

    def at(self, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys as `rows` yields them."""

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield what is known of each container whose entries are all there."""


@frozen
class IndexFindings:
    """Entries looked at, and what is wrong with some."""

    entries: int
    problems: tuple[str, ...]


class IndexCheck:
    """One pass over an index."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._entries = 0
        self._published: set[int] = set()
        self._wrong: dict[str, list[str]] = {}

    def run(self, index: ReadableIndex, unlisted: Mapping[str, str]) -> IndexFindings:
        """Look at every entry. `unlisted`: manifests, and the versions in words, that the index should list."""
        self._published = {summary.container for summary in index.containers()}
        for table, check in zip(TABLES, (self._chunks, self._segments, self._features), strict=True):
            for keys, locations in index.rows(table):
                self._entries += len(keys)
                self._batch(index, table, keys, locations, check)
        for name, version in unlisted.items():
            self._wrong.setdefault("versions", []).append(f"does not list {version} ({name})")
        problems = []
        for table, wrong in self._wrong.items():
            problems += wrong[:PROBLEMS_MAX]
            if len(wrong) > PROBLEMS_MAX:
                problems.append(f"{len(wrong) - PROBLEMS_MAX} more such of {table}")
        return IndexFindings(self._entries, tuple(problems))

    def _batch(
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
                wrong = rows
            else:
                wrong = rows[~check(directory, keys[rows], locations.take(rows))]
            if not len(wrong):
                continue
            # Asked again: a round of garbage collection may have taken entry and chunk away meanwhile.
            again, found = index.at(table, keys[wrong])
            same = found & (again.containers == locations.containers[wrong])
            same &= again.ordinals == locations.ordinals[wrong]
            for row in wrong[same].tolist():
                key, ordinal = keys[row].tobytes().hex(), int(locations.ordinals[row])
                said = f"{table[:-1]} {key} is not what container {container:016x} has as number {ordinal}"
                self._wrong.setdefault(table, []).append(said)

    def _chunks(self, directory: Directory, keys: U8, locations: Locations) -> Bools:
        fine = locations.ordinals < len(directory.chunks)
        rows = np.flatnonzero(fine)
        fine[rows] = (directory.chunks.names[locations.ordinals[rows]] == keys[rows]).all(axis=1)
        return fine

    def _segments(self, directory: Directory, keys: U8, locations: Locations) -> Bools:
        table = directory.segments
        fine = locations.ordinals < len(table)
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        if fingerprinter is None:
            return fine
        reader = ChunkReader(self._containers.of(directory.domain))
        for row in np.flatnonzero(fine).tolist():
            ordinal = int(locations.ordinals[row])
            recipe = table.chunks.take(slice(int(table.bounds[ordinal]), int(table.bounds[ordinal + 1])))
            try:
                names = reader.plan(recipe).names
            except PermanentError:  # a container that it names is broken, and told
                continue
            zero = recipe.containers == np.uint64(ZERO)
            if zero.any():
                names[zero] = fingerprinter.name_zeros(recipe.ordinals[zero])
            bounds = np.array([0, len(recipe)], np.uint32)
            fine[row] = fingerprinter.name_segments(names, bounds)[0].tobytes() == keys[row].tobytes()
        return fine

    @staticmethod
    def _features(directory: Directory, _keys: U8, locations: Locations) -> Bools:
        fine = locations.ordinals < len(directory.chunks)
        rows = np.flatnonzero(fine)
        fine[rows] = directory.chunks.there[locations.ordinals[rows]]
        return fine
