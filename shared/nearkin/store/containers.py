"""Containers in an object store. Invariant: a directory or block that this module returns has passed its checksum."""

from __future__ import annotations

import copy
import random
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, Self, TypeVar

from nearkin.errors import Corrupt, NotFound
from nearkin.formats import container as fmt
from nearkin.formats.container import Directory
from nearkin.records import U8, ContainerId
from nearkin.store.buffers import Buffers
from nearkin.store.objects import ObjectStore

DIRECTORY_CACHE_BYTES = 48 * 1024 * 1024
TAIL_BYTES = 64 * 1024
"""Footer and directory of most containers come with one read of the last 64 KiB."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByteBoundedCache(Generic[Key, Value]):
    """Cache bounded in bytes, safe between threads. A value larger than the bound is not kept.

    What is dropped is any of the three quarters used least recently, by lot: version after version is read from end to
    end, and of data a little larger than the cache the least recently used ones are just those wanted next. (Ten
    botocore releases, 136 MB a round in 128 MiB: every block was decoded again in every round.)
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._used_bytes = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._lot = random.Random(0)  # noqa: S311 - no secret: the same reads drop the same values
        self.hits = 0
        self.misses = 0

    def get(self, key: Key) -> Value | None:
        """Return the value and make it the newest, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value, value_bytes: int) -> None:
        """Keep a value, dropping others until all fit."""
        with self._lock:
            if key in self._entries or value_bytes > self._bytes_max:
                return
            self._entries[key] = (value, value_bytes)
            self._used_bytes += value_bytes
            while self._used_bytes > self._bytes_max:
                older = self._lot.randrange(max(1, 3 * len(self._entries) // 4))
                _, dropped_bytes = self._entries.pop(next(islice(self._entries, older, None)))
                self._used_bytes -= dropped_bytes

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget what these keys name; those that are not there are fine."""
        with self._lock:
            for key in keys:
                _, dropped_bytes = self._entries.pop(key, (None, 0))
                self._used_bytes -= dropped_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._used_bytes = 0


class ContainerSource(Protocol):
    """Where the chunks of containers can be read: the store, or a writer's memory before they are durable."""

    @property
    def buffers(self) -> Buffers:
        """Return where memory for decoded bytes comes from."""

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises NotFound, Corrupt or StoreUnavailable."""

    def decoded(self, container: ContainerId, block: int) -> U8 | None:
        """Return a block's bytes where they are at hand: in a cache, or because the block is still open."""

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        """Return a block as it is stored, header and payload. Raises NotFound, Corrupt or StoreUnavailable."""

    def keep(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Take a decoded block into the cache."""


@dataclass(slots=True)
class ReadCosts:
    """What reading has cost so far; caches make it less. `containers` are those of which anything was read."""

    containers: set[ContainerId] = field(default_factory=set)
    directory_reads: int = 0
    block_reads: int = 0
    bytes_read: int = 0
    blocks_decoded: int = 0


def object_name(container: ContainerId) -> str:
    """Return a container's object name; the first level is the id's time, 4.7 hours a folder."""
    digits = f"{container:016x}"
    return f"containers/{digits[:5]}/{digits}.nkc"


class ContainerStore:
    """Containers by id, of one dedup domain, with bounded caches of directories and decoded blocks."""

    def __init__(self, objects: ObjectStore, domain: bytes, block_cache_bytes: int) -> None:
        self._objects = objects
        self._domain: bytes | None = domain
        self._directories: ByteBoundedCache[ContainerId, Directory] = ByteBoundedCache(DIRECTORY_CACHE_BYTES)
        self.blocks: ByteBoundedCache[tuple[ContainerId, int], U8] = ByteBoundedCache(block_cache_bytes)
        self.buffers = Buffers()
        self.costs = ReadCosts()

    def of(self, domain: bytes | None) -> Self:
        """Return the same store, and the same caches, for another domain; None: for all, which is the janitor's."""
        other = copy.copy(self)
        other._domain = domain
        return other

    def counting(self) -> Self:
        """Return the same store, and the same caches, with costs of its own."""
        other = copy.copy(self)
        other.costs = ReadCosts()
        return other

    def put(self, container: ContainerId, data: bytes) -> None:
        """Write a container durably. Raises AlreadyExists or StoreUnavailable."""
        self._objects.put_new(object_name(container), data)

    def delete(self, container: ContainerId) -> None:
        """Remove a container, durably; nothing may lean on it, and no index name it. Again is fine."""
        self._objects.delete(object_name(container))
        self.forget_read()

    def forget_read(self) -> None:
        """Let go of all that was read: containers may have gone, and nothing new may lean on them."""
        self._directories.clear()
        self.blocks.clear()

    def ids(self) -> Iterator[tuple[ContainerId, int]]:
        """Yield (id, bytes) of every container, in no order."""
        for name, size_bytes in self._objects.names("containers"):
            digits = name.rpartition("/")[2].removesuffix(".nkc")
            try:
                container = ContainerId(int(digits, 16))
            except ValueError as err:
                raise Corrupt(f"{name}: not a container's name; move it out of the store") from err
            yield container, size_bytes

    def raw(self, container: ContainerId) -> bytes:
        """Return a container's bytes, unchecked."""
        return self._objects.get(object_name(container))

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory, from the cache or with one or two reads. Raises Corrupt where it is lost."""
        name = object_name(container)
        known = self._directories.get(container)
        if known is not None:
            return self._ours(known, name)
        try:
            size_bytes = self._objects.size_bytes(name)
        except NotFound as err:
            raise Corrupt(f"{name}: missing, and what is asked for lies in it: run `nearkin verify`") from err
        if size_bytes < fmt.HEADER.size + fmt.FOOTER.size:
            raise Corrupt(f"{name}: {size_bytes} bytes are too few for a container")
        tail_start = max(0, size_bytes - TAIL_BYTES)
        header, tail = self._objects.get_ranges(name, [0, tail_start], [fmt.HEADER.size, size_bytes])
        # The footer first: its check covers the header, so that a flipped bit is not taken for a newer format.
        offset, length, check = fmt.footer_of(header, tail[-fmt.FOOTER.size :], size_bytes, name)
        found, domain = fmt.container_id_of(header, name)
        if found != container:
            raise Corrupt(f"{name}: holds container {found:016x}: was it renamed?")
        if offset >= tail_start:
            data = tail[offset - tail_start : offset - tail_start + length]
        else:
            (data,) = self._objects.get_ranges(name, [offset], [offset + length])
        directory = fmt.decode_directory(data, container, domain, size_bytes, check, name)
        self._directories.put(container, directory, directory.memory_bytes)
        self.costs.containers.add(container)
        self.costs.directory_reads += 1
        self.costs.bytes_read += len(header) + size_bytes - min(offset, tail_start)
        return self._ours(directory, name)

    def _ours(self, directory: Directory, name: str) -> Directory:
        """Refuse another tenant's (I9): whoever can name its container must not read through it."""
        if self._domain not in (None, directory.domain):
            raise Corrupt(f"{name}: belongs to another tenant")
        return directory

    def decoded(self, container: ContainerId, block: int) -> U8 | None:
        """Return a decoded block from the cache."""
        return self.blocks.get((container, block))

    def record(self, container: ContainerId, block: int) -> bytes:
        """Return a block as it is stored, with one ranged read."""
        directory = self.directory(container)
        if block >= len(directory.blocks):
            raise NotFound(f"{object_name(container)}: has no block {block}")
        start = int(directory.blocks.offsets[block]) - fmt.BLOCK.size
        end = start + fmt.BLOCK.size + int(directory.blocks.stored[block])
        try:
            (record,) = self._objects.get_ranges(object_name(container), [start], [end])
        except NotFound as err:
            raise Corrupt(
                f"{object_name(container)}: missing since its directory was read: run `nearkin verify`"
            ) from err
        self.costs.containers.add(container)
        self.costs.block_reads += 1
        self.costs.bytes_read += end - start
        return record

    def keep(self, container: ContainerId, block: int, decoded: U8) -> None:
        """Keep a decoded block in the cache."""
        self.costs.blocks_decoded += 1
        self.blocks.put((container, block), decoded, decoded.nbytes)
