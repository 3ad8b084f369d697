"""Find copies of chunks by fingerprint.

DuplicateChunkSource   other containers of the store, to which the same content was stored again
MergedChunkSource      the original chunks of which a GC run joined a merged chunk
BackupChunkSource      backup copies of containers, of any generation, with their bases:

    copy, generation 0    c is a delta of g     read from the copy, and g from its own copy or from the store
    store, generation 1   c is a delta of h     since a GC run deleted g

Each copy of a container is tried with bases from copies of the same age, then with those of the store. An ordinal means
the same chunk in every generation. So a copy is read chunk by chunk: stored in place of a later generation it would
lose undamaged chunks of that one and depend on deleted ones.

Invariant: each returned chunk was decoded and verified against its fingerprint.
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
"""Joined chunks whose parts are searched together: each search asks all sources again."""


class _FingerprintChecker:
    """Decodes chunks and verifies their fingerprints; only SHA-1 if the tenant is unknown."""

    def __init__(
        self, reader: ChunkReader, domain: bytes, tenants: DomainOwners, any_fingerprinter: Fingerprinter
    ) -> None:
        known = tenants.fingerprinter(domain)
        self._reader = reader
        self._fingerprinter = known or any_fingerprinter
        self._compared = np.ones(NAME_BYTES, np.bool_)
        self._compared[20:28] = known is not None

    def among(self, directory: Directory, missing: set[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes) of a container's chunks among `missing`, and remove them from it."""
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
        except PermanentError:  # it is the damaged chunk itself, or its base is damaged or deleted
            return None
        return payload if self.agrees(payload, plan.names) else None

    def agrees(self, content: U8, name: U8) -> bool:
        """Return whether a chunk matches its fingerprint, uint8[1, 32]."""
        found = self._fingerprinter.name_chunks(content, np.zeros(1, np.uint64), np.array([len(content)], np.uint32))
        return not np.any((found != name)[:, self._compared])


class DuplicateChunkSource:
    """Finds chunks in other containers of the same domain by reading all directories once."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners, any_fingerprinter: Fingerprinter) -> None:
        self._containers = containers
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes), decoded and verified."""
        own = self._containers.of(domain)
        checked, missing = (
            _FingerprintChecker(ChunkReader(own), domain, self._tenants, self._any_fingerprinter),
            set(names),
        )
        for container, _ in sorted(self._containers.ids(), reverse=True):  # repeated content is in recent containers
            if not missing:
                return
            try:
                directory = own.directory(container)
            except PermanentError:
                continue
            yield from checked.among(directory, missing)


class MergedChunkSource:
    """Finds chunks that a GC run joined, by their parts, which reference blocks list."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        copies: Sequence[ChunkSource],
    ) -> None:
        """`copies`: sources in which the parts are searched."""
        self._containers = containers
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._copies = copies

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes), joined again and verified. Raises the errors of `copies`."""
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
        """Yield (name, names of the parts in order, size in bytes) of joined chunks."""
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
    """Finds chunks in backup copies of containers, cached in memory by a BackupCache."""

    def __init__(
        self,
        containers: ContainerStore,
        copies: Mapping[ContainerId, Sequence[BackupObject]],
        held: BackupCache,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
    ) -> None:
        """`copies`: whole containers, verified; those of one container oldest first."""
        self._containers = containers
        self._held = held
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        ages = max(map(len, copies.values()), default=0)
        self._together = [
            {container: of[min(age, len(of) - 1)] for container, of in copies.items()} for age in range(ages)
        ]
        if ages > 1:  # copies of one age match each other; a copy made at another time may depend on the store only
            self._together += [{container: one} for container, of in copies.items() for one in of]

    def find(self, domain: bytes, names: frozenset[Name]) -> Iterator[tuple[Name, U8]]:
        """Yield (name, bytes), decoded and verified. Raises SourceFailed."""
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
    """A ContainerSource over backup copies, with the store as fallback."""

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
            raise NotFound(f"copy of {object_name(container)}: has no block {block}; supply a copy of another date")
        return memoryview(data)[directory.block_rows[block].place]

    def room_for(self, sizes_bytes: Sequence[int]) -> list[U8]:
        return self._below.room_for(sizes_bytes)

    def cache_blocks(self, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        for name, content in zip(names, decoded, strict=True):
            if name[0] not in self._copies:
                self._below.cache_blocks([name], [content])
