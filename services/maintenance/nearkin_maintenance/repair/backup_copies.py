"""Given objects. Invariant: of all copies that somebody gives, HELD_BYTES and one object more are in memory at most.

file -> checked, and let go of, but for what finds it again -> read anew when it is needed, and the same still

Several of one container may be of different generations. In place of one that is lost goes what the store needs most
of, in whatever order they were given: the others' chunks are looked for by name (chunk_sources.py).
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
    """A whole object that somebody has kept elsewhere, checked: 200 bytes, and 8 for each chunk."""

    name: str
    """Where it belongs; of a container, whatever its generation."""
    what: str
    """The file."""
    digest: bytes
    read: Callable[[], bytes]
    sealed_as: str | None = None
    """Under which name, its generation in it, it was sealed by a key of this store: no other object has that name."""
    whole: bool = True
    """Of a container: whether it is of generation 0, which holds all that any later one does."""
    chunks_there: int = 0
    heads: U64 = field(default_factory=lambda: _NO_HEADS)
    """Of a container: the first 8 bytes of each chunk's name that is there, ascending."""

    @property
    def data(self) -> bytes:
        """Return its bytes, read anew. Raises SourceFailed: they are not what they were."""
        data = self.read()
        if blake3(data).digest() != self.digest:
            raise SourceFailed(f"{self.what}: was changed while the repair used it; try again")
        return data


def parse_backup_object(read: Callable[[], bytes], what: str, sealed_as: str | None = None) -> BackupObject | None:
    """Return what object a file is a copy of, None where it is none of a store's. Raises Corrupt for a broken one."""
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
    """Containers among what is given, read and decoded; the least used go once they are more than HELD_BYTES."""

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
    """What versions, and what other containers hold, name of the containers that several copies are given of.

    Memory: a byte for each segment of the store.
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
        """Return the copy in whose place the fewest things that are needed would be missing.

        Among equals the one with the fewest chunks: what a round has freed since does not come back. Then the oldest,
        which goes where it was.
        """
        copies = self._given[container]
        if len(copies) == 1:
            return copies[0]
        return min(
            copies, key=lambda copy: (*self._lacking(container, copy), copy.chunks_there, not copy.whole, copy.digest)
        )

    def _lacking(self, container: ContainerId, copy: BackupObject) -> tuple[int, int]:
        """Return how many chunks and segments are needed of a copy that it has not; how many lean on what is gone."""
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
        """Return how many of some bases are in no container that can be read."""
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
        """Return which chunks of the containers in question are named, by recipes that versions need and by bases."""
        if self._chunks is not None:
            return self._chunks
        wanted: Masks = {int(container): _NONE for container, copies in self._given.items() if len(copies) > 1}
        for name, _ in self._manifests.names_and_marks()[0]:
            try:
                segments = self._manifests.read(name).segments
            except PermanentError:  # it is damaged itself
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
    """Return a mask of `count` rows; what it names beyond is left out."""
    return mask_of(mask[:count], count)
