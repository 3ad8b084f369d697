"""Containers in an object store, with caches of directories and decoded blocks.

Invariant: every directory or block that this module returns has passed its checksum.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, Self

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats import container_layout, directory_codec
from nearkin_shared.formats.container import container_id_of, decode_container, footer_of
from nearkin_shared.formats.directory import BlockRow, Directory
from nearkin_shared.objectstore.base import ObjectStore, Payload, SupportsSalvage
from nearkin_shared.objectstore.delegating import takes_bytes
from nearkin_shared.objectstore.parity import SupportsReconstruction
from nearkin_shared.reading.block_cache import ByteBoundedCache
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.reading.read_stats import ActiveRestores, GenerationLog, ReadCosts
from nearkin_shared.types import U8, ContainerId, Locations
from nearkin_shared.utils.buffers import BufferPool

FOLDER = "containers"
WRITTEN_USES = 3
"""Initial use count of a block just written: it is usually a base of the next version."""
DIRECTORY_CACHE_BYTES = 48 * 1024 * 1024
TAIL_BYTES = 64 * 1024
"""One read of the last 64 KiB returns the footer and directory of most containers."""

RECONSTRUCTED_BYTES = 64 * 1024 * 1024
"""Cache of containers that parity reconstructed, until `repair` restores them in the store."""
_log = logging.getLogger("nearkin")


class ContainerSource(Protocol):
    """Source of containers: the store, or a writer's memory before they are durable."""

    @property
    def buffers(self) -> BufferPool:
        """Return the pool of memory for decoded bytes."""

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises NotFound, Corrupt or StoreUnavailable."""

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return the bytes of each block that is cached or open, None for others."""

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as stored, header and payload.

        Raises: NotFound, Corrupt, StoreUnavailable.
        """

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return uninitialised memory for blocks that will be decoded and cached.

        The cache evicts as much first.
        """

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Cache decoded blocks."""


class ContainerRewritten(Corrupt):
    """A block was removed before it was read: its container was rewritten.

    The new generation has the current location of its chunks.
    """

    moved = False
    """Whether a later generation was found, which only a GC run or a repair can have written meanwhile."""


_NAME = re.compile(r"([0-9a-f]{16})(?:\.([0-9a-f]{4}))?\.nkc")


def object_name(container: ContainerId, generation: int = 0) -> str:
    """Return a container's object name; the first level is its time, 4.7 hours per folder.

    A rewritten container has the next generation; the highest generation is valid.
    """
    digits = f"{container:016x}"
    rewritten = f".{generation:04x}" if generation else ""
    return f"{FOLDER}/{digits[:5]}/{digits}{rewritten}.nkc"


def id_of(name: str) -> ContainerId | None:
    """Return the container id of an object name, or None for another object."""
    matched = _NAME.fullmatch(name.rpartition("/")[2]) if name.startswith(f"{FOLDER}/") else None
    return None if matched is None else ContainerId(int(matched[1], 16))


DamageListener = Callable[[Corrupt, Locations, "ContainerStore"], None]
"""Called with the error of a read, the chunks that were read together, and the store that was read."""


def _lost(container: ContainerId, message: str) -> Corrupt:
    lost = Corrupt(message)
    lost.container = container
    return lost


def _ignore_damage(_err: Corrupt, _chunks: Locations, _containers: ContainerStore) -> None:
    """Do nothing: the store has no notes of damage."""


class ContainerStore:
    """Containers of one dedup domain by id, with bounded caches."""

    def __init__(self, objects: ObjectStore, domain: bytes, block_cache_bytes: int) -> None:
        self._objects = objects
        self._domain: bytes | None = domain
        self._directories: ByteBoundedCache[ContainerId, tuple[Directory, int]] = ByteBoundedCache(
            DIRECTORY_CACHE_BYTES, "directories"
        )
        """Directories, each with its generation."""
        self.blocks: ByteBoundedCache[tuple[ContainerId, int], U8] = ByteBoundedCache(block_cache_bytes, "blocks")
        self.restores: ActiveRestores = ActiveRestores()
        """Restores in progress, which share the block cache."""
        self.buffers: BufferPool = BufferPool()
        self.costs: ReadCosts = ReadCosts()
        self._generations: dict[ContainerId, int] = {}
        """Known generations of rewritten containers; about 100 bytes each."""
        self._change_log = GenerationLog()
        self._reconstructed: ByteBoundedCache[str, bytes] = ByteBoundedCache(RECONSTRUCTED_BYTES, "mended")
        self.on_damage: DamageListener = _ignore_damage
        """Called by readers of versions, in any thread."""

    @property
    def far(self) -> bool:
        """Return whether reads have a latency that other reads should overlap."""
        return self._objects.far

    def of(self, domain: bytes | None) -> Self:
        """Return the store with the same caches for another domain; None for all domains."""
        other = copy.copy(self)
        other._domain = domain
        return other

    def with_own_caches(self, objects: ObjectStore, block_cache_bytes: int = RECONSTRUCTED_BYTES) -> Self:
        """Return a store of the same containers in another object store, with its own caches."""
        other = copy.copy(self)
        other._objects = objects
        other._directories = ByteBoundedCache(DIRECTORY_CACHE_BYTES, "directories")
        other.blocks = ByteBoundedCache(block_cache_bytes, "blocks")
        other.restores = ActiveRestores()
        other._reconstructed = ByteBoundedCache(RECONSTRUCTED_BYTES, "mended")
        other._generations = dict(self._generations)
        other._change_log = GenerationLog()
        return other

    def with_objects(self, objects: ObjectStore) -> Self:
        """Return the store with the same caches over another object store."""
        other = copy.copy(self)
        other._objects = objects
        return other

    def counting(self) -> Self:
        """Return the store with the same caches and its own cost counters."""
        other = copy.copy(self)
        other.costs = ReadCosts()
        return other

    def put(self, container: ContainerId, parts: Sequence[Payload], generation: int = 0) -> None:
        """Write a container from consecutive parts, durably.

        Raises: AlreadyExists, StoreUnavailable.
        """
        self._objects.put_new(object_name(container, generation), *parts)
        if generation:
            self._set_generation(container, generation)

    def takes_bytes(self, container: ContainerId, container_bytes: int) -> int:
        """Return the stored size of a container, with its parity and encryption."""
        return takes_bytes(self._objects, object_name(container), container_bytes)

    def delete(self, container: ContainerId, generation: int) -> None:
        """Delete one generation of a container, durably. Idempotent.

        Precondition: a later generation exists, or no chunk depends on the container and no index entry names it.
        """
        self._objects.delete(object_name(container, generation))

    def evict(self, container: ContainerId | None = None) -> None:
        """Evict everything, or one container, which may have been deleted."""
        if container is None:
            self._directories.clear()
            self.blocks.clear()
        else:
            self._directories.drop([container])
            self.blocks.drop_if(lambda key: key[0] == container)

    def evict_deleted(self) -> None:
        """Evict containers that were deleted or have a later generation.

        Only while no other process writes: a change that was undone would go unnoticed.
        """
        existing = self.generations()
        unchanged = {
            container
            for container, (_, generation) in self._directories.items()
            if max(existing.get(container, {}), default=-1) == generation
        }
        self._directories.drop_if(lambda container: container not in unchanged)
        self.blocks.drop_if(lambda key: key[0] not in unchanged)

    def ids(self) -> Iterator[tuple[ContainerId, int]]:
        """Yield (id, bytes) of the highest generation of every container, in no order."""
        for container, generations in self.generations().items():
            yield container, generations[max(generations)]

    def generations(self) -> dict[ContainerId, dict[int, int]]:
        """Return the bytes of each existing generation by container; usually one."""
        found: dict[ContainerId, dict[int, int]] = {}
        for container, generation, size_bytes in self._listed(FOLDER):
            found.setdefault(container, {})[generation] = size_bytes
            if generation > self._generations.get(container, 0):
                self._set_generation(container, generation)
        return found

    def generations_of(self, containers: Collection[int]) -> dict[int, dict[int, int]]:
        """Return the bytes of each generation of some containers; list their folders alone."""
        found: dict[int, dict[int, int]] = {}
        for folder in sorted({object_name(ContainerId(container)).rpartition("/")[0] for container in containers}):
            for container, generation, size_bytes in self._listed(folder):
                if container in containers:
                    found.setdefault(container, {})[generation] = size_bytes
                    if generation > self._generations.get(container, 0):
                        self._set_generation(container, generation)
        return found

    def _listed(self, folder: str) -> Iterator[tuple[ContainerId, int, int]]:
        for name, size_bytes in self._objects.names(folder):
            matched = _NAME.fullmatch(name.rpartition("/")[2])
            if matched is None:
                raise Corrupt(f"{name}: not a container's name; move it out of the store")
            yield ContainerId(int(matched[1], 16)), int(matched[2] or "0", 16), size_bytes

    def _set_generation(self, container: ContainerId, generation: int) -> None:
        """Record another generation, and evict the previous one.

        After a repair from a copy of the first generation, block numbers of a later generation are assigned again.
        """
        self._generations[container] = generation
        self._directories.drop([container])
        self.blocks.drop_if(lambda key: key[0] == container)
        self._change_log.record(container)

    @property
    def changes(self) -> int:
        """Return the number of recorded container changes, for `has_newer_generation`."""
        return self._change_log.count

    def generation(self, container: ContainerId) -> int:
        """Return the known generation of a container; `generations` reads the store."""
        return self._generations.get(container, 0)

    def _find_newer_generation(self, container: ContainerId, tried: int) -> bool:
        """Look for another generation than the one tried; return whether one exists."""
        return self._has_any_newer_generation({container: tried})

    def _has_any_newer_generation(self, tried: Mapping[ContainerId, int]) -> bool:
        """Look for other generations than those tried; return whether one exists.

        Lists each folder once.
        """
        self._directories.drop(tried)
        existing: dict[ContainerId, int] = {}
        for folder in dict.fromkeys(object_name(container).rpartition("/")[0] for container in tried):
            for found, generation, _ in self._listed(folder):
                if found in tried:
                    existing[found] = max(generation, existing.get(found, 0))
        others = [container for container, generation in existing.items() if generation != tried[container]]
        for container in others:
            self._set_generation(container, existing[container])
        return bool(others)

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Return whether a container has a later generation than the one read.

        That one is read from then on. With `since`, a value of `changes`, also return True if a change was recorded
        after it by a user of the same caches: a plan made before relies on the older generation, although the cached
        directory is current.
        """
        containers = list(containers)
        if since is not None and self._change_log.has_changed_since(containers, since):
            return True
        tried = dict[ContainerId, int]()
        for container in map(ContainerId, containers):
            cached = self._directories.get(container)
            tried[container] = self.generation(container) if cached is None else cached[1]
        return self._has_any_newer_generation(tried)

    def raw(self, container: ContainerId) -> bytes:
        """Return a container's bytes, unchecked."""
        tried = self.generation(container)
        try:
            return self._objects.get(object_name(container, tried))
        except NotFound:
            if not self._find_newer_generation(container, tried):
                raise
            return self._objects.get(object_name(container, self.generation(container)))

    def salvage(self, container: ContainerId) -> bytes | None:
        """Return the readable parts of a damaged container, with zeros for the rest.

        None if the readable parts are unknown.
        """
        if not isinstance(self._objects, SupportsSalvage):
            return None
        return self._objects.salvage(object_name(container, self.generation(container)))

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory, from the cache or with one or two reads.

        Raises: Corrupt, if the container is lost.
        """
        return self._cached_directory(container)[0]

    def _cached_directory(self, container: ContainerId) -> tuple[Directory, int]:
        cached = self._directories.get(container)
        if cached is None:
            tried = self.generation(container)
            try:
                cached = self._read_directory(container, tried)
            except NotFound as err:
                if not self._find_newer_generation(container, tried):
                    name = object_name(container, tried)
                    raise _lost(container, f"{name}: missing, but a version needs it; run `nearkin verify`") from err
                cached = self._read_directory(container, self.generation(container))
            except Corrupt:
                if not self._find_newer_generation(container, tried):  # the repairing process died before deleting it
                    raise
                cached = self._read_directory(container, self.generation(container))
        if self._domain not in (None, cached[0].domain):
            # Another tenant's (I9): knowing a container's name must not give access to it.
            raise Corrupt(f"{object_name(container, cached[1])}: belongs to another tenant")
        return cached

    def _read_directory(self, container: ContainerId, generation: int) -> tuple[Directory, int]:
        name = object_name(container, generation)
        try:
            directory = self._read_stored_directory(container, name)
        except Corrupt as err:
            reconstructed = self._reconstruct(name, err)
            if reconstructed is None:
                err.container = container
                raise
            directory = decode_container(reconstructed, name)
        self._directories.put(container, (directory, generation), directory.memory_bytes)
        if self.generation(container) != generation:  # rewritten meanwhile: it lists chunks that were removed
            self._directories.drop([container])
        return directory, generation

    def _read_stored_directory(self, container: ContainerId, name: str) -> Directory:
        size_bytes = self._objects.size_bytes(name)
        if size_bytes < container_layout.HEADER.size + container_layout.FOOTER.size:
            raise Corrupt(f"{name}: {size_bytes} bytes are too few for a container")
        tail_start = max(0, size_bytes - TAIL_BYTES)
        try:
            header, tail = self._objects.get_ranges(name, [0, tail_start], [container_layout.HEADER.size, size_bytes])
        except Corrupt:  # a damaged page or sector may belong to a block: the directory may be intact
            tail_start = size_bytes - container_layout.FOOTER.size
            header, tail = self._objects.get_ranges(name, [0, tail_start], [container_layout.HEADER.size, size_bytes])
        # The footer first: its check covers the header, so that a flipped bit is not taken for a newer format.
        offset, length, check = footer_of(header, tail[-container_layout.FOOTER.size :], size_bytes, name)
        found, domain = container_id_of(header, name)
        if found != container:
            raise Corrupt(f"{name}: holds container {found:016x}: was it renamed?")
        if offset >= tail_start:
            data = tail[offset - tail_start : offset - tail_start + length]
        else:
            (data,) = self._objects.get_ranges(name, [offset], [offset + length])
        self.costs.read(container, len(header) + size_bytes - min(offset, tail_start), directories=1)
        return directory_codec.decode_directory(data, container, domain, size_bytes, check, name)

    def _reconstruct(self, name: str, why: Corrupt) -> bytes | None:
        """Return a damaged container as written, if parity can reconstruct it.

        The object itself is not changed.
        """
        reconstructed = self._reconstructed.get(name)
        if reconstructed is None and isinstance(self._objects, SupportsReconstruction):
            reconstructed = self._objects.reconstruct(name)
            if reconstructed is not None:
                _log.warning("%s; reconstructed from parity; run `nearkin repair`", why)
                self._reconstructed.put(name, reconstructed, len(reconstructed))
        return reconstructed

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> Payload | None:
        """Return a damaged block as written, header and payload, if parity can reconstruct it.

        Raises: ContainerRewritten, if a later generation has its chunks in another block.
        """
        directory, generation = self._cached_directory(container)
        reconstructed = self._reconstruct(object_name(container, generation), why)
        if reconstructed is None and self._find_newer_generation(container, generation):
            return self.record(container, block)
        if reconstructed is None or block >= len(directory.blocks) or not directory.blocks.raw[block]:
            return None
        return reconstructed[directory.block_rows[block].place]

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return decoded blocks from the cache."""
        return self.blocks.get_many(names)

    def record(self, container: ContainerId, block: int) -> Payload:
        """Return a block as stored, with one ranged read.

        Raises: ContainerRewritten, if the block was removed after the directory was read.
        """
        directory, generation = self._cached_directory(container)
        try:
            return self._read_record(directory, generation, block)
        except NotFound as err:
            if block >= len(directory.blocks):
                raise
            if not self._find_newer_generation(container, generation):
                name = object_name(container, generation)
                raise Corrupt(f"{name}: deleted after its directory was read; run `nearkin verify`") from err
        except ContainerRewritten:
            raise
        except Corrupt:
            if not self._find_newer_generation(container, generation):  # repaired; the repairer died before deleting it
                raise
        return self._read_record(
            *self._cached_directory(container), block
        )  # a block number is unique over all generations

    def records(self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int) -> Sequence[Payload]:
        """Return the first blocks as stored, with one read: at least one, up to `raw_bytes_max`.

        Raises: as `record` does.
        """
        directory, generation = self._cached_directory(container)
        rows, batch = directory.block_rows, list[BlockRow]()
        for block in blocks:
            if block >= len(rows) or not rows[block].raw_bytes or raw_bytes_max <= 0:
                break
            batch.append(rows[block])
            raw_bytes_max -= rows[block].raw_bytes
        if len(batch) > 1:
            name = object_name(container, generation)
            with suppress(NotFound, Corrupt):  # single reads below find the damaged one
                read = self._objects.get_ranges(name, [row.start for row in batch], [row.stop for row in batch])
                self.costs.read(container, sum(row.stop - row.start for row in batch), blocks=len(batch))
                return read
        return [self.record(container, blocks[0])]

    def _read_record(self, directory: Directory, generation: int, block: int) -> Payload:
        name = object_name(directory.container, generation)
        if block >= len(directory.blocks):
            raise NotFound(f"{name}: has no block {block}")
        if not directory.blocks.raw[block]:
            raise ContainerRewritten(f"{name}: block {block} was removed; read the container again")
        place = directory.block_rows[block].place
        try:
            (record,) = self._objects.get_ranges(name, [place.start], [place.stop])
        except Corrupt as err:  # a page that does not decrypt, or a bad sector
            reconstructed = self._reconstruct(name, err)
            if reconstructed is None:
                raise
            record = reconstructed[place]
        self.costs.read(directory.container, place.stop - place.start, blocks=1)
        return record

    def room_for(self, sizes_bytes: Sequence[int], uncached_bytes_max: int | None = None) -> list[U8]:
        """Return uninitialised memory for blocks that will be decoded and cached.

        The cache evicts as much first, and also the excess of leased buffers outside the cache over
        `uncached_bytes_max`.
        """
        uncached_bytes = 0
        if uncached_bytes_max is not None:
            uncached_bytes = max(0, self.buffers.leased_bytes - self.blocks.used_bytes - uncached_bytes_max)
        self.blocks.make_room(sizes_bytes, uncached_bytes)
        return self.buffers.take_many(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Cache decoded blocks."""
        self.costs.blocks_decoded += len(names)
        self.blocks.put_many(names, decoded, [content.nbytes for content in decoded])

    def cache_directory(self, directory: Directory) -> None:
        """Cache the directory of a container that was just stored."""
        self._directories.put(directory.container, (directory, 0), directory.memory_bytes)

    def cache_written(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Cache the decoded bytes of a block that was just encoded."""
        self.blocks.put((container, block), decoded, decoded.nbytes, WRITTEN_USES)
