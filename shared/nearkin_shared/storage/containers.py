"""Containers in an object store. Invariant: a directory or block that this module returns has passed its checksum."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from nearkin_shared.types import U8, ContainerId
from nearkin_shared.utils.buffers import BufferPool

FOLDER = "containers"
WRITTEN_USES = 3
"""A block that was just written counts as used so often: the next version leans on it, mostly."""
DIRECTORY_CACHE_BYTES = 48 * 1024 * 1024
TAIL_BYTES = 64 * 1024
"""Footer and directory of most containers come with one read of the last 64 KiB."""

RECONSTRUCTED_BYTES = 64 * 1024 * 1024
"""Containers that parity made whole in memory, until they are put right in the store."""
_log = logging.getLogger("nearkin")


class ContainerSource(Protocol):
    """Where the chunks of containers can be read: the store, or a writer's memory before they are durable."""

    @property
    def buffers(self) -> BufferPool:
        """Return where memory for decoded bytes comes from."""

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises NotFound, Corrupt or StoreUnavailable."""

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return the bytes of each block that is at hand: in a cache, or because the block is still open."""

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as it is stored, header and payload. Raises NotFound, Corrupt or StoreUnavailable."""

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        """Return memory for blocks that will be decoded and kept, undefined: the cache lets go of as much before."""

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Take decoded blocks into the cache."""


class ContainerRewritten(Corrupt):
    """A block went while it was to be read: its container was written anew, and says where its chunks lie now."""

    moved = False
    """Whether a later generation was found for it, which nobody but a round, or a repair, can have put meanwhile."""


GENERATIONS_MAX = 1 << 16
_NAME = re.compile(r"([0-9a-f]{16})(?:\.([0-9a-f]{4}))?\.nkc")


def object_name(container: ContainerId, generation: int = 0) -> str:
    """Return a container's object name; the first level is the id's time, 4.7 hours a folder.

    One that was written anew, without what was garbage, is of the next generation; the highest holds.
    """
    digits = f"{container:016x}"
    rewritten = f".{generation:04x}" if generation else ""
    return f"{FOLDER}/{digits[:5]}/{digits}{rewritten}.nkc"


def id_of(name: str) -> ContainerId | None:
    """Return the id of the container that an object's name is of, None for another's."""
    matched = _NAME.fullmatch(name.rpartition("/")[2]) if name.startswith(f"{FOLDER}/") else None
    return None if matched is None else ContainerId(int(matched[1], 16))


class ContainerStore:
    """Containers by id, of one dedup domain, with bounded caches of directories and decoded blocks."""

    def __init__(self, objects: ObjectStore, domain: bytes, block_cache_bytes: int) -> None:
        self._objects = objects
        self._domain: bytes | None = domain
        self._directories: ByteBoundedCache[ContainerId, tuple[Directory, int]] = ByteBoundedCache(
            DIRECTORY_CACHE_BYTES, "directories"
        )
        """With the generation that each is of."""
        self.blocks: ByteBoundedCache[tuple[ContainerId, int], U8] = ByteBoundedCache(block_cache_bytes, "blocks")
        self.restores = ActiveRestores()
        """Through the cache of blocks."""
        self.buffers = BufferPool()
        self.costs = ReadCosts()
        self._generations: dict[ContainerId, int] = {}
        """Of containers that were written anew, as far as known: some 100 bytes each."""
        self._noted = GenerationLog()
        self._mended: ByteBoundedCache[str, bytes] = ByteBoundedCache(RECONSTRUCTED_BYTES, "mended")

    @property
    def far(self) -> bool:
        """Return whether a read takes so long that others should be on their way meanwhile."""
        return self._objects.far

    def of(self, domain: bytes | None) -> Self:
        """Return the same store, and the same caches, for another domain; None: for all, which is the maintenance
        service's.
        """
        other = copy.copy(self)
        other._domain = domain
        return other

    def with_own_caches(self, objects: ObjectStore, block_cache_bytes: int = RECONSTRUCTED_BYTES) -> Self:
        """Return a store of the same containers as another object store has them, with caches of its own."""
        other = copy.copy(self)
        other._objects = objects
        other._directories = ByteBoundedCache(DIRECTORY_CACHE_BYTES, "directories")
        other.blocks = ByteBoundedCache(block_cache_bytes, "blocks")
        other.restores = ActiveRestores()
        other._mended = ByteBoundedCache(RECONSTRUCTED_BYTES, "mended")
        other._generations = dict(self._generations)
        other._noted = GenerationLog()
        return other

    def with_objects(self, objects: ObjectStore) -> Self:
        """Return the same store, and the same caches, whose containers are read and written through `objects`."""
        other = copy.copy(self)
        other._objects = objects
        return other

    def counting(self) -> Self:
        """Return the same store, and the same caches, with costs of its own."""
        other = copy.copy(self)
        other.costs = ReadCosts()
        return other

    def put(self, container: ContainerId, parts: Sequence[Payload], generation: int = 0) -> None:
        """Write a container, its parts one behind the other, durably. Raises AlreadyExists or StoreUnavailable."""
        self._objects.put_new(object_name(container, generation), *parts)
        if generation:
            self._is_now(container, generation)

    def takes_bytes(self, container: ContainerId, container_bytes: int) -> int:
        """Return what a container of so many bytes takes where it lies: its parity included, and its seal."""
        return takes_bytes(self._objects, object_name(container), container_bytes)

    def delete(self, container: ContainerId, generation: int) -> None:
        """Remove one generation of a container, durably. Again is fine.

        It is not the last one, or nothing leans on the container and no index names it.
        """
        self._objects.delete(object_name(container, generation))

    def evict(self, container: ContainerId | None = None) -> None:
        """Let go of all that was read, or of one container: it may have gone, and nothing new may lean on it."""
        if container is None:
            self._directories.clear()
            self.blocks.clear()
        else:
            self._directories.drop([container])
            self.blocks.drop_if(lambda key: key[0] == container)

    def evict_deleted(self) -> None:
        """Let go of what was read of containers that have gone, or of which there is a later generation.

        Only while nobody else writes: what another process did and undid would not be seen.
        """
        there = self.generations()
        same = {
            container
            for container, (_, generation) in self._directories.items()
            if max(there.get(container, {}), default=-1) == generation
        }
        self._directories.drop_if(lambda container: container not in same)
        self.blocks.drop_if(lambda key: key[0] not in same)

    def ids(self) -> Iterator[tuple[ContainerId, int]]:
        """Yield (id, bytes) of every container, in no order; of its highest generation."""
        for container, generations in self.generations().items():
            yield container, generations[max(generations)]

    def generations(self) -> dict[ContainerId, dict[int, int]]:
        """Return by container the bytes of each generation that is there: mostly one."""
        found: dict[ContainerId, dict[int, int]] = {}
        for container, generation, size_bytes in self._listed(FOLDER):
            found.setdefault(container, {})[generation] = size_bytes
            if generation > self._generations.get(container, 0):
                self._is_now(container, generation)
        return found

    def _listed(self, folder: str) -> Iterator[tuple[ContainerId, int, int]]:
        for name, size_bytes in self._objects.names(folder):
            matched = _NAME.fullmatch(name.rpartition("/")[2])
            if matched is None:
                raise Corrupt(f"{name}: not a container's name; move it out of the store")
            yield ContainerId(int(matched[1], 16)), int(matched[2] or "0", 16), size_bytes

    def _is_now(self, container: ContainerId, generation: int) -> None:
        """Take note of another generation, and let go of what was read of the one until now.

        After a repair by a copy of the first generation, numbers of blocks that a later one had given are given again.
        """
        self._generations[container] = generation
        self._directories.drop([container])
        self.blocks.drop_if(lambda key: key[0] == container)
        self._noted.record(container)

    @property
    def changes(self) -> int:
        """Return how many changes of containers were noted: a plan that is made from now on knows of these."""
        return self._noted.count

    def generation(self, container: ContainerId) -> int:
        """Return the generation of a container, as far as known: `generations` looks."""
        return self._generations.get(container, 0)

    def _find_newer_generation(self, container: ContainerId, tried: int) -> bool:
        """Look for another generation than the one that was tried; return whether there is one."""
        return self._has_any_newer_generation({container: tried})

    def _has_any_newer_generation(self, tried: Mapping[ContainerId, int]) -> bool:
        """Look for other generations than those that were tried, each folder once; return whether there is one."""
        self._directories.drop(tried)
        there: dict[ContainerId, int] = {}
        for folder in dict.fromkeys(object_name(container).rpartition("/")[0] for container in tried):
            for found, generation, _ in self._listed(folder):
                if found in tried:
                    there[found] = max(generation, there.get(found, 0))
        others = [container for container, generation in there.items() if generation != tried[container]]
        for container in others:
            self._is_now(container, there[container])
        return bool(others)

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Look whether any of these is there in a later generation than was read; that one is read from now on.

        Or whether one was noted, by whoever shares the caches, after so many `changes`: what was planned before goes by
        an older generation, though the directory at hand is of this one.
        """
        containers = list(containers)
        if since is not None and self._noted.has_changed_since(containers, since):
            return True
        tried = dict[ContainerId, int]()
        for container in map(ContainerId, containers):
            known = self._directories.get(container)
            tried[container] = self.generation(container) if known is None else known[1]
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
        """Return a damaged container as far as it can be read, zeros where it cannot; None where that is not known."""
        if not isinstance(self._objects, SupportsSalvage):
            return None
        return self._objects.salvage(object_name(container, self.generation(container)))

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory, from the cache or with one or two reads. Raises Corrupt where it is lost."""
        return self._known(container)[0]

    def _known(self, container: ContainerId) -> tuple[Directory, int]:
        known = self._directories.get(container)
        if known is None:
            tried = self.generation(container)
            try:
                known = self._read_directory(container, tried)
            except NotFound as err:
                if not self._find_newer_generation(container, tried):
                    name = object_name(container, tried)
                    raise Corrupt(f"{name}: missing, and what is asked for lies in it: run `nearkin verify`") from err
                known = self._read_directory(container, self.generation(container))
            except Corrupt:
                if not self._find_newer_generation(container, tried):  # who healed it died before this one went
                    raise
                known = self._read_directory(container, self.generation(container))
        if self._domain not in (None, known[0].domain):
            # Another tenant's (I9): whoever can name its container must not read through it.
            raise Corrupt(f"{object_name(container, known[1])}: belongs to another tenant")
        return known

    def _read_directory(self, container: ContainerId, generation: int) -> tuple[Directory, int]:
        name = object_name(container, generation)
        try:
            directory = self._read_stored_directory(container, name)
        except Corrupt as err:
            whole = self._reconstruct(name, err)
            if whole is None:
                raise
            directory = decode_container(whole, name)
        self._directories.put(container, (directory, generation), directory.memory_bytes)
        return directory, generation

    def _read_stored_directory(self, container: ContainerId, name: str) -> Directory:
        size_bytes = self._objects.size_bytes(name)
        if size_bytes < container_layout.HEADER.size + container_layout.FOOTER.size:
            raise Corrupt(f"{name}: {size_bytes} bytes are too few for a container")
        tail_start = max(0, size_bytes - TAIL_BYTES)
        try:
            header, tail = self._objects.get_ranges(name, [0, tail_start], [container_layout.HEADER.size, size_bytes])
        except Corrupt:  # a page, or a sector, of a block perhaps: the directory may be whole
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
        """Return a damaged container as it was written, where parity knows; the object itself stays as it is."""
        whole = self._mended.get(name)
        if whole is None and isinstance(self._objects, SupportsReconstruction):
            whole = self._objects.reconstruct(name)
            if whole is not None:
                _log.warning("%s; read by its parity: run `nearkin repair`", why)
                self._mended.put(name, whole, len(whole))
        return whole

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> Payload | None:
        """Return a block as it was written, header and payload, where what is stored is damaged and parity knows.

        Raises Rewritten where a later generation has its chunks in another one.
        """
        directory, generation = self._known(container)
        whole = self._reconstruct(object_name(container, generation), why)
        if whole is None and self._find_newer_generation(container, generation):
            return self.record(container, block)
        if whole is None or block >= len(directory.blocks) or not directory.blocks.raw[block]:
            return None
        return whole[directory.block_rows[block].place]

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return decoded blocks from the cache."""
        return self.blocks.get_many(names)

    def record(self, container: ContainerId, block: int) -> Payload:
        """Return a block as it is stored, with one ranged read. Raises Rewritten where it was there a moment ago."""
        directory, generation = self._known(container)
        try:
            return self._read_record(directory, generation, block)
        except NotFound as err:
            if block >= len(directory.blocks):
                raise
            if not self._find_newer_generation(container, generation):
                name = object_name(container, generation)
                raise Corrupt(f"{name}: missing since its directory was read: run `nearkin verify`") from err
        except ContainerRewritten:
            raise
        except Corrupt:
            if not self._find_newer_generation(
                container, generation
            ):  # healed, and who did it died before this one went
                raise
        return self._read_record(*self._known(container), block)  # its number is its own, in every generation

    def records(self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int) -> Sequence[Payload]:
        """Return the first of some blocks as they are stored, with one read: one, and more up to `raw_bytes_max`.

        Raises what `record` does.
        """
        directory, generation = self._known(container)
        rows, some = directory.block_rows, list[BlockRow]()
        for block in blocks:
            if block >= len(rows) or not rows[block].raw_bytes or raw_bytes_max <= 0:
                break
            some.append(rows[block])
            raw_bytes_max -= rows[block].raw_bytes
        if len(some) > 1:
            name = object_name(container, generation)
            with suppress(NotFound, Corrupt):  # one by one it is found out which, and why
                read = self._objects.get_ranges(name, [row.start for row in some], [row.stop for row in some])
                self.costs.read(container, sum(row.stop - row.start for row in some), blocks=len(some))
                return read
        return [self.record(container, blocks[0])]

    def _read_record(self, directory: Directory, generation: int, block: int) -> Payload:
        name = object_name(directory.container, generation)
        if block >= len(directory.blocks):
            raise NotFound(f"{name}: has no block {block}")
        if not directory.blocks.raw[block]:
            raise ContainerRewritten(f"{name}: block {block} is gone: read again")
        place = directory.block_rows[block].place
        try:
            (record,) = self._objects.get_ranges(name, [place.start], [place.stop])
        except Corrupt as err:  # a page that does not open, or a bad sector
            whole = self._reconstruct(name, err)
            if whole is None:
                raise
            record = whole[place]
        self.costs.read(directory.container, place.stop - place.start, blocks=1)
        return record

    def room_for(self, sizes_bytes: Sequence[int], beside_bytes_max: int | None = None) -> list[U8]:
        """Return memory for blocks that will be decoded and kept, undefined: the cache lets go of as much before.

        And of as much as more than `beside_bytes_max` is looked at beside it.
        """
        beside_bytes = 0
        if beside_bytes_max is not None:
            beside_bytes = max(0, self.buffers.leased_bytes - self.blocks.used_bytes - beside_bytes_max)
        self.blocks.make_room(sizes_bytes, beside_bytes)
        return self.buffers.take_many(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        """Keep decoded blocks in the cache."""
        self.costs.blocks_decoded += len(names)
        self.blocks.put_many(names, decoded, [content.nbytes for content in decoded])

    def cache_directory(self, directory: Directory) -> None:
        """Keep the directory of a container that was just put, as its own bytes say it."""
        self._directories.put(directory.container, (directory, 0), directory.memory_bytes)

    def cache_written(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Keep what a block that was just encoded decodes to; it cost no decoding."""
        self.blocks.put((container, block), decoded, decoded.nbytes, WRITTEN_USES)
