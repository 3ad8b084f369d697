"""Read backup objects that are supplied to `repair --from`.

file -> verified, and released but for its fingerprint heads -> read again when needed, if unchanged

Several copies of one container may be of different generations. A lost container is replaced by the copy that lacks the
fewest needed chunks, in whatever order they were supplied; chunks of the others are found by name (chunk_sources.py).

Memory: at most HELD_BYTES plus one object, however many copies are supplied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from nearkin_maintenance.gc.mark import Masks, mark_ordinals, mask_of
from nearkin_shared.errors import PermanentError, SourceFailed
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import decode_manifest
from nearkin_shared.formats.tombstone import decode_mark
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import ManifestStore, mark_name
from nearkin_shared.storage.manifests import object_name as manifest_name
from nearkin_shared.types import U32, U64, Bools, ContainerId, Locations, group_by_container

HELD_BYTES = 64 * 1024 * 1024
_NONE: Bools = np.zeros(0, np.bool_)
_NO_HEADS: U64 = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class BackupObject:
    """A whole object from a backup, verified: 200 bytes of memory, and 8 per chunk."""

    name: str
    """Name of the object in the store; of a container, that of generation 0."""
    what: str
    """Path of the file."""
    digest: bytes
    read: Callable[[], bytes]
    sealed_as: str | None = None
    """Object name, with its generation, to which its authenticated encryption binds it, if encrypted by this store."""
    whole: bool = True
    """Of a container: whether it is of generation 0, which holds all chunks of any later one."""
    chunks_there: int = 0
    heads: U64 = field(default_factory=lambda: _NO_HEADS)
    """Of a container: the first 8 bytes of each existing chunk's fingerprint, ascending."""

    @property
    def data(self) -> bytes:
        """Return its bytes, read again. Raises SourceFailed if they have changed."""
        data = self.read()
        if blake3(data).digest() != self.digest:
            raise SourceFailed(f"{self.what}: changed while the repair was reading it; run the repair again")
        return data


def parse_backup_object(read: Callable[[], bytes], what: str, sealed_as: str | None = None) -> BackupObject | None:
    """Return the object of which a file is a copy, or None if it is none.

    Raises: Corrupt for a damaged copy.
    """
    data = read()
    digest = blake3(data).digest()
    match data[:4]:
        case b"NKC1":
            directory = decode_container(data, what)
            for block in np.flatnonzero(directory.blocks.raw).tolist():
                decode_block(data[directory.block_rows[block].place], f"{what} block {block}")
            whole = int.from_bytes(data[4:6], "little") <= container_layout.VERSION_WHOLE
            there = directory.chunks.names[directory.chunks.there]
            heads = np.sort(np.ascontiguousarray(there[:, :8]).view(np.uint64).ravel())
            name = object_name(directory.container)
            return BackupObject(name, what, digest, read, sealed_as, whole, len(there), heads)
        case b"NKM1":
            manifest = decode_manifest(data, what)
            name = manifest_name(manifest.tenant, manifest.key, manifest.version)
            return BackupObject(name, what, digest, read, sealed_as)
        case b"NKT1":
            mark = decode_mark(data, what)
            return BackupObject(
                mark_name(mark.tenant, mark.key, mark.version, mark.sequence), what, digest, read, sealed_as
            )
        case _:
            return None


class BackupCache:
    """Decoded containers of a backup; evicts the least recently used above HELD_BYTES."""

    def __init__(self) -> None:
        self._held: OrderedDict[BackupObject, tuple[bytes, Directory]] = OrderedDict()
        self.held_bytes = 0

    def of(self, given: BackupObject) -> tuple[bytes, Directory]:
        """Return a container's bytes and directory. Raises SourceFailed."""
        found = self._held.get(given)
        if found is not None:
            self._held.move_to_end(given)
            return found
        data = given.data
        found = self._held[given] = data, decode_container(data, given.what)
        self.held_bytes += _held_bytes(found)
        while self.held_bytes > HELD_BYTES and len(self._held) > 1:
            self.held_bytes -= _held_bytes(self._held.popitem(last=False)[1])
        return found


def _held_bytes(held: tuple[bytes, Directory]) -> int:
    return len(held[0]) + held[1].memory_bytes


class RequiredChunks:
    """Chunks and segments that the store needs of containers with several copies.

    Memory: a byte per segment of the store.
    """

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        given: Mapping[ContainerId, Sequence[BackupObject]],
        held: BackupCache,
    ) -> None:
        self._containers = containers.of(None)
        self._manifests = manifests
        self._given = given
        self._held = held
        self._segments: Masks = {}
        self._chunks: Masks | None = None

    def best(self, container: ContainerId) -> BackupObject:
        """Return the copy that lacks the fewest needed chunks and segments.

        Among equals the one with the fewest chunks, so that chunks which a GC run has freed do not return; then a copy
        of generation 0, whose object name is unchanged.
        """
        copies = self._given[container]
        if len(copies) == 1:
            return copies[0]
        return min(
            copies, key=lambda copy: (*self._lacking(container, copy), copy.chunks_there, not copy.whole, copy.digest)
        )

    def _lacking(self, container: ContainerId, copy: BackupObject) -> tuple[int, int]:
        """Count the needed chunks and segments that a copy lacks, and its missing bases."""
        wanted = self._referenced_chunks()
        _, directory = self._held.of(copy)
        chunks, segments, prefixes = directory.chunks, directory.segments, directory.prefixes
        lengths = np.diff(segments.bounds)
        recipes = self._segments.get(container, _NONE)
        has = _within(recipes, len(segments)) & (lengths > 0)
        own = {int(container): wanted.get(int(container), _NONE).copy()}
        _name(own, segments.chunks.take(np.repeat(has, lengths)), own)
        needed = _within(own[int(container)], len(chunks))
        missing = (
            int(recipes.sum()) - int(has.sum()) + int(own[int(container)].sum()) - int((needed & chunks.there).sum())
        )
        used = needed & chunks.there
        in_use = np.zeros(len(directory.blocks), np.bool_)
        in_use[chunks.blocks[used]] = True
        of_prefix = np.repeat(np.arange(len(directory.blocks)), np.diff(prefixes.bounds))
        deltas = used & (directory.blocks.kinds[chunks.blocks] == container_layout.XDELTA3)
        bases = Locations.join([chunks.bases.take(deltas), prefixes.bases.take(in_use[of_prefix])])
        gone = sum(
            self._count_missing(other, bases.ordinals[rows], directory)
            for other, rows in group_by_container(bases.containers)
        )
        return missing, gone

    def _count_missing(self, container: int, ordinals: U32, mine: Directory) -> int:
        """Return how many of some bases no readable container holds."""
        if container == mine.container:
            found = mine
        else:
            try:
                found = self._containers.directory(ContainerId(container))
            except PermanentError:
                return 0 if ContainerId(container) in self._given else len(ordinals)
        inside = ordinals < len(found.chunks)
        return len(ordinals) - int(found.chunks.there[ordinals[inside]].sum())

    def _referenced_chunks(self) -> Masks:
        """Return masks of the referenced chunks of containers with several copies."""
        if self._chunks is not None:
            return self._chunks
        wanted: Masks = {int(container): _NONE for container, copies in self._given.items() if len(copies) > 1}
        for name, _ in self._manifests.names_and_marks()[0]:
            try:
                segments = self._manifests.read(name).segments
            except PermanentError:  # a damaged manifest needs nothing
                continue
            for container, rows in group_by_container(segments.containers):
                mark_ordinals(self._segments, container, segments.ordinals[rows])
        for directory in self._readable():
            chunks, table = directory.chunks, directory.segments
            recipes = _within(self._segments.get(directory.container, _NONE), len(table))
            deltas = chunks.there & (directory.blocks.kinds[chunks.blocks] == container_layout.XDELTA3)
            _name(wanted, table.chunks.take(np.repeat(recipes, np.diff(table.bounds))), wanted)
            _name(wanted, Locations.join([chunks.bases.take(deltas), directory.prefixes.bases]), wanted)
        self._chunks = wanted
        return wanted

    def _readable(self) -> Iterator[Directory]:
        for container, _ in self._containers.ids():
            try:
                yield self._containers.directory(container)
            except PermanentError:
                continue


def _name(masks: Masks, chunks: Locations, only: Collection[int]) -> None:
    for container, rows in group_by_container(chunks.containers):
        if container in only:
            mark_ordinals(masks, container, chunks.ordinals[rows])


def _within(mask: Bools, count: int) -> Bools:
    """Return a mask of `count` rows; rows beyond are cut off."""
    return mask_of(mask[:count], count)
