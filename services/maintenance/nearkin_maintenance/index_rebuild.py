"""Index rebuild. Invariant: containers in stream order, then manifests, give the lost index, entry by entry.

Every tenant's containers are claimed, each under its own domain. Where no version names a container's tenant, its
segments cannot be named and are not claimed; its chunks and bases are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.pending_delete_record import Record
from nearkin_shared.formats.tombstone import MarkKind
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import Index, MarkedVersion
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import ManifestStore, marked_version, retained_manifest
from nearkin_shared.types import (
    NAME_BYTES,
    SEGMENT_ID_BYTES,
    U8,
    U32,
    U64,
    ZERO,
    Bools,
    ContainerId,
    Locations,
    offsets_of,
)
from nearkin_shared.utils.failpoints import failpoint

READ_BYTES = 8 * 1024 * 1024
"""Chunks are decoded and sketched so many bytes at a time."""
NO_MARKS: Mapping[str, int] = MappingProxyType({})
NO_PENDING_DELETES: Record = MappingProxyType({})
PUBLISH_CHUNKS = 1 << 16
"""Chunks go into the index so many at a time, all of their containers: 6 MB of claims, while the next are decoded."""
COMMIT_VERSIONS = 256
"""Versions go into the catalog so many a transaction."""


class Sketches(Protocol):
    """Computes the super-features that a sketch's name stands for."""

    def __call__(self, sketch: str, payload: U8, offsets: U64, lengths: U32) -> U64:
        """Return uint64[n, k]. Raises Corrupt for a name it does not know."""


Progress = Callable[[int, int], None]
"""(objects done, objects in all)."""


def rebuild_index(
    containers: ContainerStore,
    manifests: ManifestStore,
    index: Index,
    tenants: DomainOwners,
    sketches: Sketches,
    progress: Progress | None = None,
    known_containers: Collection[int] = (),
    known_manifests: Collection[str] = (),
    known_marks: Mapping[str, int] = NO_MARKS,
    condemned: Record = NO_PENDING_DELETES,
) -> RebuildReport:
    """Fill `index` with all but what it is known to hold: an empty one, or one whose writer died between two steps.

    `known_marks` are the highest by their manifest's name. What is `condemned` is not to be found again, nor are
    versions that a mark calls collected: their manifests are about to go.
    What cannot be read is left out and named; nothing is written to the object store.
    """
    started = time.perf_counter()
    failpoint("rebuild.begun")
    ids = sorted(container for container, _ in containers.ids() if container not in known_containers)
    listed, marks, retentions = manifests.listing()
    names = [entry for entry in listed if entry[0] not in known_manifests]
    total = len(ids) + len(names)
    skipped: list[str] = []
    sound = {int(container) for container in known_containers}
    chunks = segments = 0
    everyones = containers.of(None)
    with _Publisher(index) as publisher:
        for done, container in enumerate(
            topological_order(ids, lambda container: _base_containers(everyones, container))
        ):
            try:
                directory = everyones.directory(ContainerId(container))
                own = containers.of(directory.domain)
                if container in condemned and condemned[container].whole:  # it may lean on what is gone already
                    publisher.add(_summary_only(directory))
                    continue
                claims = entries_of_container(
                    directory, own, tenants.fingerprinter(directory.domain), sketches, sound, condemned
                )
            except PermanentError:
                skipped.append(object_name(ContainerId(container)))
            else:
                publisher.add(claims)
                sound.add(container)
                chunks += int(np.count_nonzero(claims.directory.chunks.there))  # collected ones leave their numbers
                segments += int(np.count_nonzero(np.diff(claims.directory.segments.bounds)))
            if progress is not None:
                progress(done + 1, total)
        publisher.finish()

    def committed(done: int) -> None:
        if progress is not None:
            progress(len(ids) + done, total)

    versions = _commit_versions(manifests, index, names, marks, committed, skipped)
    index.mark_many(
        list(_marked_versions(manifests, marks, known_marks, skipped, _retention_bytes(retentions, skipped)))
    )
    index.mark_many(list(_retained_versions(manifests, marks, retentions, skipped)))
    failpoint("rebuild.marks")
    return RebuildReport(len(ids), chunks, segments, versions, time.perf_counter() - started, tuple(skipped))


def fill_catalog(containers: ContainerStore, manifests: ManifestStore, index: Index) -> list[str]:
    """Fill an empty index with what listings and sums need; return the names of objects that cannot be read.

    Reads directories and manifests alone: no chunk, segment or super-feature is found in such an index.
    """
    skipped: list[str] = []
    everyones = containers.of(None)
    with _Publisher(index) as publisher:
        for container in sorted(container for container, _ in containers.ids()):
            try:
                publisher.add(_summary_only(everyones.directory(ContainerId(container))))
            except PermanentError:
                skipped.append(object_name(ContainerId(container)))
        publisher.finish()
    names, marks, retentions = manifests.listing()
    _commit_versions(manifests, index, names, marks, lambda _: None, skipped)
    index.mark_many(list(_marked_versions(manifests, marks, NO_MARKS, skipped, _retention_bytes(retentions, skipped))))
    index.mark_many(list(_retained_versions(manifests, marks, retentions, skipped)))
    return skipped


def _commit_versions(
    manifests: ManifestStore,
    index: Index,
    names: Iterable[tuple[str, int]],
    marks: list[tuple[str, int]],
    progress: Callable[[int], None],
    skipped: list[str],
) -> int:
    """Add the versions of manifests to an index, by their time; return how many. `skipped` gains the unreadable."""
    found = []
    collected = _collected_manifests(manifests, marks)
    for name, size_bytes in names:
        if name in collected:
            continue
        try:
            found.append((manifests.read(name), size_bytes))
        except PermanentError:
            skipped.append(name)
    found.sort(key=lambda pair: (pair[0].created_us, pair[0].key, pair[0].version))
    for start in range(0, len(found), COMMIT_VERSIONS):
        index.commit_many(found[start : start + COMMIT_VERSIONS])
        failpoint("rebuild.versions")
        progress(min(start + COMMIT_VERSIONS, len(found)))
    return len(found)


class _Publisher:
    """Publishes beside whoever decodes: one batch waits at most. The order stays."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._batch: list[ContainerEntries] = []
        self._chunks = 0
        self._thread = ThreadPoolExecutor(1, "rebuild-publish")
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def add(self, claims: ContainerEntries) -> None:
        """Take what a container claims. Raises what publishing those before it did."""
        self._batch.append(claims)
        self._chunks += len(claims.directory.chunks)
        if self._chunks >= PUBLISH_CHUNKS:
            self._next()

    def finish(self) -> None:
        """Return when all is published. Raises what publishing did."""
        self._next()
        self._next()

    def _next(self) -> None:
        before, self._running = self._running, None
        if before is not None:
            before.result()
        if self._batch:
            batch, self._batch, self._chunks = self._batch, [], 0
            self._running = self._thread.submit(self._publish, batch)

    def _publish(self, batch: list[ContainerEntries]) -> None:
        self._index.publish_many(batch)
        for _ in batch:
            failpoint("rebuild.container")


def _collected_manifests(manifests: ManifestStore, marks: list[tuple[str, int]]) -> set[str]:
    """Return the names of the manifests whose versions are collected: only an even mark can say so."""
    highest: dict[str, tuple[int, str]] = {}
    for name, _ in marks:
        with suppress(Corrupt):  # told by `_marked`
            manifest, sequence = marked_version(name)
            highest[manifest] = max(highest.get(manifest, (0, "")), (sequence, name))
    found = set()
    for manifest, (sequence, name) in highest.items():
        if sequence % 2 == 0:
            with suppress(PermanentError):
                if manifests.read_mark(name).kind is MarkKind.COLLECTED:
                    found.add(manifest)
    return found


def _marked_versions(
    manifests: ManifestStore,
    marks: list[tuple[str, int]],
    known: Mapping[str, int],
    skipped: list[str],
    records_bytes: Mapping[str, int],
) -> Iterator[MarkedVersion]:
    """Yield what an index notes of marks, from their names and the highest mark of each version.

    `records_bytes`: of retention records, by manifest name.
    """
    highest: dict[str, tuple[int, int, str]] = {}
    for name, size_bytes in marks:
        try:
            manifest, sequence = marked_version(name)
        except Corrupt:
            skipped.append(name)
            continue
        before, marks_bytes, highest_name = highest.get(manifest, (0, 0, name))
        if sequence > before:
            highest_name = name
        highest[manifest] = max(sequence, before), marks_bytes + size_bytes, highest_name
    for manifest, (sequence, marks_bytes, name) in highest.items():
        if known.get(manifest, 0) >= sequence:
            continue
        try:
            mark = manifests.read_mark(name)
        except PermanentError:
            skipped.append(name)
        else:
            ending = mark.kind is MarkKind.COLLECTED and manifest in known  # listed until the round goes on: as deleted
            total_bytes = marks_bytes + records_bytes.get(manifest, 0)
            yield MarkedVersion(mark.tenant, mark.key, mark.version, sequence - ending, total_bytes)


def _retention_bytes(retentions: list[tuple[str, int]], skipped: list[str]) -> dict[str, int]:
    """Return the bytes of each version's retention records by its manifest's name. `skipped` gains unknown names."""
    found: dict[str, int] = {}
    for name, size_bytes in retentions:
        try:
            manifest = retained_manifest(name)
        except Corrupt:
            skipped.append(name)
        else:
            found[manifest] = found.get(manifest, 0) + size_bytes
    return found


def _retained_versions(
    manifests: ManifestStore, marks: list[tuple[str, int]], retentions: list[tuple[str, int]], skipped: list[str]
) -> Iterator[MarkedVersion]:
    """Yield what an index notes of versions with retention records and no mark: listings of them read the records."""
    marked = set()
    for name, _ in marks if retentions else ():
        with suppress(Corrupt):  # reported by `_marked`
            marked.add(marked_version(name)[0])
    named = {f"{name.rsplit('.', 2)[0]}.nkm": name for name, _ in retentions}
    for manifest, records_bytes in _retention_bytes(retentions, []).items():
        if manifest not in marked:
            try:
                record = manifests.retentions.read(named[manifest])
            except PermanentError:
                skipped.append(named[manifest])
            else:
                yield MarkedVersion(record.tenant, record.key, record.version, 0, records_bytes)


def _base_containers(containers: ContainerStore, container: int) -> list[int]:
    """Return the other containers that one names, in bases and recipes; none where it cannot be read."""
    try:
        directory = containers.directory(ContainerId(container))
    except PermanentError:
        return []
    recipes = np.unique(directory.segments.chunks.containers)
    return [*directory.base_containers(), *(int(other) for other in recipes if other not in (0, ZERO, container))]


def entries_of_container(
    directory: Directory,
    containers: ContainerStore,
    fingerprinter: Fingerprinter | None,
    sketches: Sketches,
    sound: Collection[int],
    condemned: Record = NO_PENDING_DELETES,
) -> ContainerEntries:
    """Return what a container claims, from its bytes and those of the `sound` containers before it.

    What is `condemned` is not claimed, nor any segment that names some of it.

    A segment with a chunk in any other container is not claimed: a version put later would not restore; nor is any
    without a `fingerprinter`, which names them. Raises Corrupt where a chunk of its own cannot be decoded, or names
    another domain's.
    """
    reader = ChunkReader(containers)
    mine = condemned.get(directory.container)
    there = np.flatnonzero(directory.chunks.there).astype(np.uint32)
    only = None if mine is None else np.setdiff1d(there, mine.chunks)
    features = _super_features(directory, reader, sketches)
    if only is not None:
        features = {sketch: _select_bases(only, *found) for sketch, found in features.items()}
    if fingerprinter is None:
        none = np.zeros((len(directory.segments), SEGMENT_ID_BYTES), np.uint8)
        return ContainerEntries(directory, none, features, only)
    recipes, bounds = directory.segments.chunks, directory.segments.bounds
    named, which = np.unique(recipes.containers, return_inverse=True)
    usable = [int(holder) in sound or holder in (ZERO, directory.container) for holder in named]
    lost = ~np.array(usable, np.bool_)[which]
    for at, holder in enumerate(named.tolist()):
        if usable[at] and holder != ZERO:
            rows = np.flatnonzero(which == at)
            lost[rows] = ~_findable(containers.directory(ContainerId(holder)), recipes.ordinals[rows], condemned)
    names = np.zeros((len(recipes), NAME_BYTES), np.uint8)
    names[~lost] = reader.plan(recipes.take(~lost)).names
    zero = recipes.containers == np.uint64(ZERO)
    if zero.any():
        names[zero] = fingerprinter.name_zeros(recipes.ordinals[zero])
    segment_ids = fingerprinter.name_segments(names, bounds)
    segment_ids[np.diff(bounds) == 0] = 0
    of_segment = np.repeat(np.arange(len(directory.segments)), np.diff(bounds))
    segment_ids[of_segment[lost]] = 0
    if mine is not None:
        segment_ids[mine.segments] = 0
    return ContainerEntries(directory, segment_ids, features, only)


def _summary_only(directory: Directory) -> ContainerEntries:
    """Return the claims of a container that takes up room until it goes, and in which nothing is to be found."""
    none = np.zeros((len(directory.segments), SEGMENT_ID_BYTES), np.uint8)
    return ContainerEntries(directory, none, {}, np.zeros(0, np.uint32))


def _findable(directory: Directory, ordinals: U32, condemned: Record) -> Bools:
    """Return which of a container's chunks are there and not condemned. Raises Corrupt for what it never had."""
    if len(ordinals) and int(ordinals.max()) >= len(directory.chunks):
        raise Corrupt(f"{object_name(directory.container)}: {len(directory.chunks)} chunks, {ordinals.max()} is wanted")
    found = directory.chunks.there[ordinals]
    if directory.container in condemned:
        found &= ~np.isin(ordinals, condemned[directory.container].chunks)
    return found


def _select_bases(ordinals: U32, bases: U32, super_features: U64) -> tuple[U32, U64]:
    """Return the bases that are among `ordinals`, and their super-features."""
    kept = np.isin(bases, ordinals)
    return bases[kept], super_features[kept]


def _super_features(directory: Directory, reader: ChunkReader, sketches: Sketches) -> dict[str, tuple[U32, U64]]:
    """Sketch again, by each segment's own algorithm, the chunks that it introduced and that may serve as bases."""
    segments, chunks = directory.segments, directory.chunks
    introduced_by = np.full(len(chunks), -1, np.int64)
    own = np.flatnonzero(segments.chunks.containers == np.uint64(directory.container))[::-1]
    of_segment = np.repeat(np.arange(len(segments), dtype=np.int64), np.diff(segments.bounds))
    introduced_by[segments.chunks.ordinals[own]] = of_segment[own]  # written backwards: the first mention wins
    eligible = np.flatnonzero((chunks.depths < directory.depth_max) & (introduced_by >= 0) & chunks.there)
    for rows in _portions(chunks.lengths, np.setdiff1d(np.flatnonzero(chunks.there), eligible)):
        _read(directory, reader, rows)  # no base of anything, but it is claimed, so it must decode
    by_sketch = segments.sketches[introduced_by[eligible]]
    found: dict[str, tuple[U32, U64]] = {}
    for number, sketch in enumerate(directory.sketch_names):
        ordinals = eligible[by_sketch == number].astype(np.uint32)
        parts = []
        for rows in _portions(chunks.lengths, ordinals):
            payload, lengths = _read(directory, reader, rows)
            parts.append(sketches(sketch, payload, offsets_of(lengths), lengths))
        if parts:
            found[sketch] = (ordinals, np.concatenate(parts))
    return found


def _portions(lengths: U32, ordinals: NDArray[np.integer]) -> list[NDArray[np.integer]]:
    """Return the ordinals cut into runs of about READ_BYTES."""
    portion = np.cumsum(lengths[ordinals], dtype=np.int64) // READ_BYTES
    return [rows for rows in np.split(ordinals, np.flatnonzero(np.diff(portion)) + 1) if len(rows)]


def _read(directory: Directory, reader: ChunkReader, ordinals: NDArray[np.integer]) -> tuple[U8, U32]:
    """Return the bytes of a container's chunks, one after another, and the length of each. Raises Corrupt."""
    holders = np.full(len(ordinals), directory.container, np.uint64)
    plan = reader.plan(Locations(holders, ordinals.astype(np.uint32)))
    return reader.fetch(plan), plan.lengths
