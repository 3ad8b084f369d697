"""Copies of chunks. Invariant: what is given out was decoded, and agrees with the name that was asked for.

DuplicateChunkSource       other containers of the store: what was put again
MergedChunkSource       what a round joined to one chunk and took in, from the chunks that it was before
BackupChunkSource    containers as somebody has kept them elsewhere, of whatever generation, and what they lean on:

    copy, generation 0    c leans on g        read from the copy, and g from a copy of its own or from the store
    store, generation 1   c leans on h        since a round took g away

Of several copies of a container each is looked at, with bases from copies as old as it, and with those of the store.
A number means the same chunk in every generation. So a copy is read chunk by chunk: put in the place of a later
generation it would take with it what that has sound, and lean on what is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.repair.backup_copies import BackupCache, BackupObject
from nearkin_maintenance.repair.container_repair import ChunkSource, Name
from nearkin_shared.errors import NotFound, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.block_kinds import reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import MIB
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import NAME_BYTES, U8, ContainerId, Locations
from nearkin_shared.utils.buffers import BufferPool

JOINED_AT_ONCE_BYTES = 64 * MIB
"""Of joined chunks whose parts are looked for together: each time all sources are asked anew."""


class _FingerprintChecker:
    """Decodes chunks, and compares them with their names; only SHA-1 where no tenant is known."""

    def __init__(
        self, reader: ChunkReader, domain: bytes, tenants: DomainOwners, any_fingerprinter: Fingerprinter
    ) -> None:
        known = tenants.fingerprinter(domain)
        self._reader = reader
        self._fingerprinter = known or any_fingerprinter
        self._compared = np.ones(NAME_BYTES, np.bool_)
        self._compared[20:28] = known is not None

    def among(self, directory: Directory, missing: set[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes) of a container's chunks that are `missing`, and take them out of it."""
        whole = directory.chunks.names.tobytes()
        for row in range(len(directory.chunks)):
            name = whole[row * NAME_BYTES : (row + 1) * NAME_BYTES]
            content = self._content(directory.container, row) if name in missing else None
            if content is not None:
                missing.discard(name)
                yield name, content

    def _content(self, container: ContainerId, row: int) -> U8 | None:
        here = Locations(np.array([container], np.uint64), np.array([row], np.uint32))
        try:
            plan = self._reader.plan(here)
            payload = self._reader.fetch(plan)
        except PermanentError:  # it is the broken one, or leans on it, or on what is gone
            return None
        return payload if self.agrees(payload, plan.names) else None

    def agrees(self, content: U8, name: U8) -> bool:
        """Return whether a chunk is what its name, uint8[1, 32], says."""
        found = self._fingerprinter.name_chunks(content, np.zeros(1, np.uint64), np.array([len(content)], np.uint32))
        return not np.any((found != name)[:, self._compared])


class DuplicateChunkSource:
    """Chunks of other containers of the same domain, found by reading all directories once."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners, any_fingerprinter: Fingerprinter) -> None:
        self._containers = containers
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes): each decoded, and compared with its name."""
        own = self._containers.of(domain)
        checked, missing = (
            _FingerprintChecker(ChunkReader(own), domain, self._tenants, self._any_fingerprinter),
            set(names),
        )
        for container, _ in sorted(self._containers.ids(), reverse=True):  # what was put again is new
            if not missing:
                return
            try:
                directory = own.directory(container)
            except PermanentError:
                continue
            yield from checked.among(directory, missing)


class MergedChunkSource:
    """Chunks that a round joined: no version has one as it is, but each refers to one from where its parts were."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        copies: Sequence[ChunkSource],
    ) -> None:
        """`copies`: where the parts are looked for."""
        self._containers = containers
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._copies = copies

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes): put together again, and compared with its name. Raises what the copies raise."""
        own = self._containers.of(domain)
        checked = _FingerprintChecker(ChunkReader(own), domain, self._tenants, self._any_fingerprinter)
        some, some_bytes = dict[Name, list[Name]](), 0
        for name, parts, size_bytes in self._parts(own, names):
            some[name] = parts
            some_bytes += size_bytes
            if some_bytes >= JOINED_AT_ONCE_BYTES:
                yield from self._joined(domain, some, checked)
                some, some_bytes = {}, 0
        yield from self._joined(domain, some, checked)

    def _parts(self, own: ContainerStore, names: frozenset[Name]) -> Iterator[tuple[Name, list[Name], int]]:
        """Yield a name, those of the chunks that it was, in order, and their bytes."""
        for container, _ in self._containers.ids():
            try:
                directory = own.directory(container)
            except PermanentError:
                continue
            chunks = directory.chunks
            for number in np.flatnonzero(reference_blocks(directory)).tolist():
                to, rows = directory.prefixes.of(number), np.flatnonzero(chunks.there & (chunks.blocks == number))
                try:
                    name = own.directory(ContainerId(int(to.containers[0]))).chunks.names[int(to.ordinals[0])].tobytes()
                except (PermanentError, IndexError):
                    continue
                if name in names:
                    yield name, [part.tobytes() for part in chunks.names[rows]], int(chunks.lengths[rows].sum())

    def _joined(
        self, domain: bytes, wanted: Mapping[Name, list[Name]], checked: _FingerprintChecker
    ) -> Iterator[tuple[Name, U8]]:
        missing, found = {part for parts in wanted.values() for part in parts}, dict[Name, U8]()
        for source in self._copies if missing else ():
            found.update(source.find(domain, frozenset(missing)))
            missing -= found.keys()
        for name, parts in wanted.items():
            if not missing.isdisjoint(parts):
                continue
            content = np.concatenate([found[part] for part in parts])
            if checked.agrees(content, np.frombuffer(name, np.uint8)[None]):
                yield name, content


class BackupChunkSource:
    """Chunks of copies of containers, in memory as far as `Held` has them."""

    def __init__(
        self,
        containers: ContainerStore,
        copies: Mapping[ContainerId, Sequence[BackupObject]],
        held: BackupCache,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
    ) -> None:
        """`copies`: whole containers, checked; those of one container the oldest first."""
        self._containers = containers
        self._held = held
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        ages = max(map(len, copies.values()), default=0)
        self._together = [
            {container: of[min(age, len(of) - 1)] for container, of in copies.items()} for age in range(ages)
        ]
        if ages > 1:  # those of one time were kept together; what was taken now and then may lean on the store alone
            self._together += [{container: one} for container, of in copies.items() for one in of]

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes): each decoded, and compared with its name. Raises SourceFailed."""
        missing = set(names)
        for copies in self._together:
            source = _BackupSource(self._containers.of(domain), copies, self._held)
            checked = _FingerprintChecker(ChunkReader(source), domain, self._tenants, self._any_fingerprinter)
            for container, given in copies.items():
                if not missing:
                    return
                heads = np.array([int.from_bytes(name[:8], sys.byteorder) for name in missing], np.uint64)
                if not np.isin(heads, given.heads).any():
                    continue
                directory = source.directory(container)
                if directory.domain == domain:
                    yield from checked.among(directory, missing)


class _BackupSource:
    """A ContainerSource: copies of containers, and the store where there is none."""

    def __init__(self, below: ContainerStore, copies: Mapping[ContainerId, BackupObject], held: BackupCache) -> None:
        self._below = below
        self._copies = copies
        self._held = held

    @property
    def buffers(self) -> BufferPool:
        return self._below.buffers

    def directory(self, container: ContainerId) -> Directory:
        given = self._copies.get(container)
        return self._below.directory(container) if given is None else self._held.of(given)[1]

    def cached_blocks(self, names: Sequence[BlockName]) -> list[U8 | None]:
        found = self._below.cached_blocks(names)
        return [None if name[0] in self._copies else content for name, content in zip(names, found, strict=True)]

    def record(self, container: ContainerId, block: int) -> bytes | memoryview:
        given = self._copies.get(container)
        if given is None:
            return self._below.record(container, block)
        data, directory = self._held.of(given)
        if block >= len(directory.blocks) or not directory.blocks.raw[block]:
            raise NotFound(f"the copy of {object_name(container)}: has no block {block}")
        return memoryview(data)[directory.block_rows[block].place]

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        return self._below.room_for(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        for name, content in zip(names, decoded, strict=True):
            if name[0] not in self._copies:
                self._below.cache_blocks([name], [content])
