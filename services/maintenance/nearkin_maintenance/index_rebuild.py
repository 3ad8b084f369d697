"""Rebuild the index from containers in stream order and then from manifests.

Containers of all tenants are published, each under its own dedup domain. Segments of a container whose tenant no
version names cannot be identified and are left out; its chunks and bases are published.

Invariant: the result equals the lost index, entry by entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
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
from nearkin_shared.utils.frozen import frozen

READ_BYTES = 8 * 1024 * 1024
"""Chunks are decoded and sketched in portions of this many bytes."""
NO_TOMBSTONES: Mapping[str, int] = MappingProxyType({})
NO_PENDING_DELETES: Record = MappingProxyType({})
PUBLISH_CHUNKS = 1 << 16
"""Chunks per index write, whole containers: 6 MB of entries, while the next ones are decoded."""
COMMIT_VERSIONS = 256
"""Versions per catalog transaction."""


class Sketches(Protocol):
    """Computes the super-features of a named sketch."""

    def __call__(self, sketch: str, payload: U8, offsets: U64, lengths: U32) -> U64:
        """Return uint64[n, k]. Raises Corrupt for an unknown name."""


@frozen
class KnownObjects:
    """Containers and versions that an index holds already.

    `versions`: by manifest name the number of the highest tombstone that the index has recorded, 0 for none.
    """

    containers: Collection[int] = ()
    versions: Mapping[str, int] = field(default_factory=dict)


NOTHING_KNOWN = KnownObjects()
Progress = Callable[[int, int], None]
"""(objects done, objects in all)."""


def rebuild_index(
    containers: ContainerStore,
    manifests: ManifestStore,
    index: Index,
    tenants: DomainOwners,
    sketches: Sketches,
    progress: Progress | None = None,
    known: KnownObjects = NOTHING_KNOWN,
    pending_deletes: Record = NO_PENDING_DELETES,
) -> RebuildReport:
    """Add to `index` all entries and versions that it is not known to hold.

    It may be empty, or lack the last steps of a crashed writer. Not published are chunks and segments in
    `pending_deletes`, and versions with a tombstone of kind COLLECTED: their manifests are about to be deleted.
    Unreadable objects are left out and reported; nothing is written to the object store.
    """
    started = time.perf_counter()
    failpoint("rebuild.begun")
    ids = sorted(container for container, _ in containers.ids() if container not in known.containers)
    listed, marks, retentions = manifests.listing()
    names = [entry for entry in listed if entry[0] not in known.versions]
    total = len(ids) + len(names)
    skipped: list[str] = []
    sound = {int(container) for container in known.containers}
    chunks = segments = 0
    all_containers = containers.of(None)
    with _Publisher(index) as publisher:
        for done, container in enumerate(
            topological_order(ids, lambda container: _base_containers(all_containers, container))
        ):
            try:
                directory = all_containers.directory(ContainerId(container))
                own = containers.of(directory.domain)
                if (
                    container in pending_deletes and pending_deletes[container].whole
                ):  # its bases may be deleted already
                    publisher.add(_summary_only(directory))
                    continue
                entries = entries_of_container(
                    directory, own, tenants.fingerprinter(directory.domain), sketches, sound, pending_deletes
                )
            except PermanentError:
                skipped.append(object_name(ContainerId(container)))
            else:
                publisher.add(entries)
                sound.add(container)
                chunks += int(np.count_nonzero(entries.directory.chunks.there))  # deleted chunks leave empty rows
                segments += int(np.count_nonzero(np.diff(entries.directory.segments.bounds)))
            if progress is not None:
                progress(done + 1, total)
        publisher.finish()

    def on_commit(done: int) -> None:
        if progress is not None:
            progress(len(ids) + done, total)

    versions = _commit_versions(manifests, index, names, marks, on_commit, skipped)
    index.mark_many(
        list(_marked_versions(manifests, marks, known.versions, skipped, _retention_bytes(retentions, skipped)))
    )
    index.mark_many(list(_retained_versions(manifests, marks, retentions, skipped)))
    failpoint("rebuild.marks")
    return RebuildReport(len(ids), chunks, segments, versions, time.perf_counter() - started, tuple(skipped))


def fill_catalog(containers: ContainerStore, manifests: ManifestStore, index: Index) -> list[str]:
    """Fill an empty index with what listings and totals need.

    Return the names of unreadable objects.

    Reads directories and manifests only: such an index finds no chunk, segment or super-feature.
    """
    skipped: list[str] = []
    all_containers = containers.of(None)
    with _Publisher(index) as publisher:
        for container in sorted(container for container, _ in containers.ids()):
            try:
                publisher.add(_summary_only(all_containers.directory(ContainerId(container))))
            except PermanentError:
                skipped.append(object_name(ContainerId(container)))
        publisher.finish()
    names, marks, retentions = manifests.listing()
    _commit_versions(manifests, index, names, marks, lambda _: None, skipped)
    index.mark_many(
        list(_marked_versions(manifests, marks, NO_TOMBSTONES, skipped, _retention_bytes(retentions, skipped)))
    )
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
    """Add versions to an index, by their time; return their count.

    Appends unreadable names to `skipped`.
    """
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
    """Publish entries on a thread of its own, in order, while the caller decodes.

    At most one batch waits.
    """

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

    def add(self, entries: ContainerEntries) -> None:
        """Add the entries of a container. Raises the errors of earlier batches."""
        self._batch.append(entries)
        self._chunks += len(entries.directory.chunks)
        if self._chunks >= PUBLISH_CHUNKS:
            self._submit_batch()

    def finish(self) -> None:
        """Wait until all entries are published. Raises the errors of publishing."""
        self._submit_batch()
        self._submit_batch()

    def _submit_batch(self) -> None:
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
    """Return the manifest names of collected versions: those with an even last tombstone."""
    highest: dict[str, tuple[int, str]] = {}
    for name, _ in marks:
        with suppress(Corrupt):  # reported by `_marked_versions`
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
    """Yield the catalog record of each version with tombstones.

    `records_bytes`: bytes of retention records, by manifest name.
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
            is_ending = mark.kind is MarkKind.COLLECTED and manifest in known  # the GC run continues: listed as deleted
            total_bytes = marks_bytes + records_bytes.get(manifest, 0)
            yield MarkedVersion(mark.tenant, mark.key, mark.version, sequence - is_ending, total_bytes)


def _retention_bytes(retentions: list[tuple[str, int]], skipped: list[str]) -> dict[str, int]:
    """Return the bytes of retention records by manifest name.

    Appends unknown names to `skipped`.
    """
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
    """Yield catalog records of versions that have retention records but no tombstone."""
    marked = set()
    for name, _ in marks if retentions else ():
        with suppress(Corrupt):  # reported by `_marked_versions`
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
    """Return the other containers that bases and recipes of one name.

    None if it is unreadable.
    """
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
    pending_deletes: Record = NO_PENDING_DELETES,
) -> ContainerEntries:
    """Return the index entries of a container; its segments may use `sound` containers.

    Left out: chunks and segments in `pending_deletes`, and any segment with a chunk of these or in an unsound
    container, since a version stored later would not restore. Without a `fingerprinter`, all segments.

    Raises: Corrupt if a chunk cannot be decoded or names a chunk of another dedup domain.
    """
    reader = ChunkReader(containers)
    own_deletes = pending_deletes.get(directory.container)
    there = np.flatnonzero(directory.chunks.there).astype(np.uint32)
    only = None if own_deletes is None else np.setdiff1d(there, own_deletes.chunks)
    features = _super_features(directory, reader, sketches)
    if only is not None:
        features = {sketch: _select_bases(only, *found) for sketch, found in features.items()}
    if fingerprinter is None:
        none = np.zeros((len(directory.segments), SEGMENT_ID_BYTES), np.uint8)
        return ContainerEntries(directory, none, features, only)
    recipes, bounds = directory.segments.chunks, directory.segments.bounds
    named, which = np.unique(recipes.containers, return_inverse=True)
    usable = [int(holder) in sound or holder in (ZERO, directory.container) for holder in named]
    is_lost = ~np.array(usable, np.bool_)[which]
    for at, holder in enumerate(named.tolist()):
        if usable[at] and holder != ZERO:
            rows = np.flatnonzero(which == at)
            is_lost[rows] = ~_findable(
                containers.directory(ContainerId(holder)), recipes.ordinals[rows], pending_deletes
            )
    names = np.zeros((len(recipes), NAME_BYTES), np.uint8)
    names[~is_lost] = reader.plan(recipes.take(~is_lost)).names
    zero = recipes.containers == np.uint64(ZERO)
    if zero.any():
        names[zero] = fingerprinter.name_zeros(recipes.ordinals[zero])
    segment_ids = fingerprinter.name_segments(names, bounds)
    segment_ids[np.diff(bounds) == 0] = 0
    of_segment = np.repeat(np.arange(len(directory.segments)), np.diff(bounds))
    segment_ids[of_segment[is_lost]] = 0
    if own_deletes is not None:
        segment_ids[own_deletes.segments] = 0
    return ContainerEntries(directory, segment_ids, features, only)


def _summary_only(directory: Directory) -> ContainerEntries:
    """Return a container without findable entries: it takes up bytes until it is deleted."""
    none = np.zeros((len(directory.segments), SEGMENT_ID_BYTES), np.uint8)
    return ContainerEntries(directory, none, {}, np.zeros(0, np.uint32))


def _findable(directory: Directory, ordinals: U32, pending_deletes: Record) -> Bools:
    """Return a mask of the chunks that exist and are not pending delete.

    Raises: Corrupt for an unknown ordinal.
    """
    if len(ordinals) and int(ordinals.max()) >= len(directory.chunks):
        raise Corrupt(
            f"{object_name(directory.container)}: has {len(directory.chunks)} chunks, but a recipe names chunk "
            f"{ordinals.max()}; run `nearkin verify`"
        )
    found = directory.chunks.there[ordinals]
    if directory.container in pending_deletes:
        found &= ~np.isin(ordinals, pending_deletes[directory.container].chunks)
    return found


def _select_bases(ordinals: U32, bases: U32, super_features: U64) -> tuple[U32, U64]:
    """Return the bases among `ordinals` and their super-features."""
    kept = np.isin(bases, ordinals)
    return bases[kept], super_features[kept]


def _super_features(directory: Directory, reader: ChunkReader, sketches: Sketches) -> dict[str, tuple[U32, U64]]:
    """Sketch the base candidates that a container introduced, by each segment's algorithm."""
    segments, chunks = directory.segments, directory.chunks
    introduced_by = np.full(len(chunks), -1, np.int64)
    own = np.flatnonzero(segments.chunks.containers == np.uint64(directory.container))[::-1]
    of_segment = np.repeat(np.arange(len(segments), dtype=np.int64), np.diff(segments.bounds))
    introduced_by[segments.chunks.ordinals[own]] = of_segment[own]  # reversed order: the first mention wins
    eligible = np.flatnonzero((chunks.depths < directory.depth_max) & (introduced_by >= 0) & chunks.there)
    for rows in _portions(chunks.lengths, np.setdiff1d(np.flatnonzero(chunks.there), eligible)):
        _read(directory, reader, rows)  # no base candidates, but they are published and so must decode
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
    """Return the ordinals in runs of about READ_BYTES."""
    portion = np.cumsum(lengths[ordinals], dtype=np.int64) // READ_BYTES
    return [rows for rows in np.split(ordinals, np.flatnonzero(np.diff(portion)) + 1) if len(rows)]


def _read(directory: Directory, reader: ChunkReader, ordinals: NDArray[np.integer]) -> tuple[U8, U32]:
    """Return the bytes of a container's chunks, concatenated, and the length of each.

    Raises: Corrupt.
    """
    holders = np.full(len(ordinals), directory.container, np.uint64)
    plan = reader.plan(Locations(holders, ordinals.astype(np.uint32)))
    return reader.fetch(plan), plan.lengths
