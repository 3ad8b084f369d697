"""Soundness. Invariant: a chunk is sound only if its bytes, and those of every base below it, are what its name says.

container -> checksums -> bases -> decode -> names      each broken chunk is kept with the container that broke it
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.directory import Directory
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, U32, U64, ZERO, ContainerId, Locations, group_by_container, offsets_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

READ_BYTES = 8 * 1024 * 1024
"""Chunks are decoded and named so many bytes at a time."""
RECHECKS_MAX = 8
"""So often a container is looked at that rounds write anew meanwhile: each means a round."""


@frozen
class CheckResult:
    """What was found of one container: some 200 bytes, and 12 to 16 for each broken chunk.

    `broken` uint32[b] ordinals, ascending; `blamed` uint64[b] the container in which the damage of each lies. Those
    that were `collected` are among them, since whatever needs one is broken; they are no damage.
    """

    domain: bytes
    chunks: int
    broken: U32
    blamed: U64
    collected: U32

    @property
    def damaged(self) -> U32:
        """Return the ordinals of broken chunks that should be there."""
        return np.setdiff1d(self.broken, self.collected, assume_unique=True)


@frozen
class CorruptChunks:
    """What no later version may lean on: by container, ordinals of chunks and of segments; None: all of them."""

    chunks: dict[int, U32 | None]
    segments: dict[int, U32]


class IntegrityChecker:
    """What is sound of the containers of a store, all tenants' alike; `problems` by object name."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners, any_fingerprinter: Fingerprinter) -> None:
        self._containers = containers
        self._everyones = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._checked: dict[int, CheckResult | None] = {}
        self._looked_at: dict[int, tuple[int, bool]] = {}
        """Of each container which generation was, and whether all of it was read."""
        self.problems: dict[str, str] = {}
        self.chunks = 0
        self.bytes_read = 0
        self.untagged = 0

    def base_containers(self, container: int) -> list[int]:
        """Return the other containers in which bases of this one lie; none where it cannot be read."""
        try:
            return self._everyones.directory(ContainerId(container)).base_containers()
        except PermanentError:
            return []

    def check(self, container: ContainerId, *, deep: bool, helpers: ThreadPool = SERIAL) -> None:
        """Look at one container, after those that it leans on: `deep` reads and decodes all of it, with `helpers`.

        One that a round writes anew meanwhile is looked at again before it is called broken.
        """
        name = object_name(container)
        for _ in range(RECHECKS_MAX):
            self._check(container, name, helpers if deep else None)
            if name not in self.problems or not self._is_replaced(container):
                return
            del self.problems[name]
        self._check(container, name, helpers if deep else None)

    def _is_replaced(self, container: ContainerId) -> bool:
        """Return whether a container is there in a later generation than was looked at."""
        self._everyones.has_newer_generation([container])
        return self._everyones.generation(container) > self._looked_at[container][0]

    def _check(self, container: ContainerId, name: str, helpers: ThreadPool | None) -> None:
        """Look at a container; who helps to read all of it, None: its directory alone is read."""
        self._looked_at[container] = self._everyones.generation(container), helpers is not None
        try:
            if helpers is not None:
                data = self._raw(container, name)
                self.bytes_read += len(data)
                directory = decode_container(data, name)
                if directory.container != container:
                    raise Corrupt(f"{name}: holds container {directory.container:016x}")
            else:
                data, directory = b"", self._everyones.directory(container)
            self._looked_at[container] = self._everyones.generation(container), helpers is not None
        except PermanentError as err:
            self._checked[container] = None
            if not (isinstance(err, NotFound) or isinstance(err.__cause__, NotFound)):
                self.problems.setdefault(name, str(err))
            return  # one that is missing is a problem only once something is found to need it
        blamed = np.zeros(len(directory.chunks), np.uint64)
        blamed[~directory.chunks.there] = container  # collected: no damage, but whatever needs one is broken
        if helpers is not None:
            self._check_blocks(directory, data, blamed, name, helpers)
        self._check_bases(directory, blamed)
        if helpers is not None:
            self._check_names(directory, blamed, name, helpers)
        if name in self.problems and self._is_deleted(container):  # a round came by
            del self.problems[name]
            self._checked[container] = None
            return
        broken = np.flatnonzero(blamed).astype(np.uint32)
        collected = np.flatnonzero(~directory.chunks.there).astype(np.uint32)
        self._checked[container] = CheckResult(directory.domain, len(blamed), broken, blamed[broken], collected)

    def _is_deleted(self, container: ContainerId) -> bool:
        try:
            self._everyones.raw(container)
        except PermanentError as err:
            return isinstance(err, NotFound) or isinstance(err.__cause__, NotFound)
        return False

    def _raw(self, container: ContainerId, name: str) -> bytes:
        """Return a container's bytes; of one of which a part cannot be read, all others. Raises PermanentError."""
        try:
            return self._containers.raw(container)
        except Corrupt as err:
            salvaged = self._containers.salvage(container)
            if salvaged is None:
                raise
            self.problems.setdefault(name, str(err))
            return salvaged

    def directory(self, container: int, domain: bytes) -> Directory | None:
        """Return a container's directory for a version of `domain`; None, and a problem, where it is no use to it."""
        if self._of(container, domain) is None:
            return None
        try:
            return self._containers.of(domain).directory(ContainerId(container))
        except PermanentError as err:  # it was readable a moment ago
            self.problems.setdefault(object_name(ContainerId(container)), str(err))
            return None

    def affected_versions(self, chunks: Locations, domain: bytes) -> U64:
        """Return uint64[n]: the container whose damage breaks each chunk for a user in `domain`, 0 for a sound one."""
        blamed = np.zeros(len(chunks), np.uint64)
        for container, rows in group_by_container(chunks.containers):
            if container == ZERO:
                continue
            checked, ordinals = self._of(container, domain), chunks.ordinals[rows]
            if checked is None:
                blamed[rows] = container
                continue
            beyond = ordinals >= checked.chunks
            if beyond.any() and self._is_replaced(
                ContainerId(container)
            ):  # what came since may lean on what it took in
                self.check(ContainerId(container), deep=self._looked_at[container][1])
                checked = self._of(container, domain)
                if checked is None:
                    blamed[rows] = container
                    continue
                beyond = ordinals >= checked.chunks
            if beyond.any():
                name = object_name(ContainerId(container))
                self.problems.setdefault(
                    name, f"{name}: has {checked.chunks} chunks, number {int(ordinals.max())} is wanted"
                )
            blamed[rows[beyond]] = container
            if len(checked.broken):
                at = np.minimum(np.searchsorted(checked.broken, ordinals), len(checked.broken) - 1)
                hit = checked.broken[at] == ordinals
                blamed[rows[hit]] = checked.blamed[at[hit]]
        return blamed

    def corrupt_chunks(self, containers: Iterable[ContainerId]) -> CorruptChunks:
        """Return what is broken or lost of `containers`, looking also at those that came since the others were checked.

        A segment is unsound that names an unsound chunk, wherever that lies.
        """
        known = sorted({*containers, *self._checked})
        for container in topological_order([c for c in known if c not in self._checked], self.base_containers):
            self.check(ContainerId(container), deep=False)
        chunks: dict[int, U32 | None] = {}
        for container, checked in self._checked.items():
            damaged = None if checked is None else checked.damaged
            if damaged is None or len(damaged):
                chunks[container] = damaged
        segments: dict[int, U32] = {}
        for container in known if chunks else []:
            checked = self._checked[container]
            directory = None if checked is None else self.directory(container, checked.domain)
            if directory is None:
                chunks[container] = None
                continue
            recipes = directory.segments
            of_chunk = np.repeat(np.arange(len(recipes), dtype=np.uint32), np.diff(recipes.bounds))
            bad = np.unique(of_chunk[self.affected_versions(recipes.chunks, directory.domain) != 0])
            if len(bad):
                segments[container] = bad
        return CorruptChunks(chunks, segments)

    def _of(self, container: int, domain: bytes) -> CheckResult | None:
        """Return what is known of a container that something in `domain` needs; None, and a problem, if it is lost."""
        name = object_name(ContainerId(container))
        if container not in self._checked:  # not listed: lost, or put since
            self.check(ContainerId(container), deep=False)
        checked = self._checked[container]
        if checked is None:
            self.problems.setdefault(name, f"{name}: missing, and what is needed lies in it")
        elif checked.domain != domain:
            self.problems.setdefault(name, f"{name}: belongs to another tenant than what names it")
            return None
        return checked

    def _check_blocks(self, directory: Directory, data: bytes, blamed: U64, name: str, helpers: ThreadPool) -> None:
        def problem_of(block: int) -> str:
            said = int(directory.blocks.raw[block])
            try:
                decoded = decode_block(memoryview(data)[directory.block_rows[block].place], f"{name} block {block}")
            except PermanentError as err:
                return str(err)
            found = (
                said if directory.blocks.kinds[block] == container_layout.PATCH else len(decoded)
            )  # when it is decoded
            return "" if found == said else f"{name} block {block}: {found} bytes, not {said}"

        blocks: list[int] = np.flatnonzero(directory.blocks.raw).tolist()
        for block, problem in zip(blocks, helpers.map(problem_of, blocks), strict=True):
            if problem:
                self.problems.setdefault(name, problem)
                blamed[directory.chunks.blocks == block] = directory.container

    def _check_bases(self, directory: Directory, blamed: U64) -> None:
        """Blame the chunks whose base is lost or broken, shallow ones first: a base may lie in the same container.

        In a patch block one broken base breaks every chunk.
        """
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        for depth in range(1, int(chunks.depths.max(initial=0)) + 1):
            rows = np.flatnonzero((chunks.depths == depth) & (blamed == 0))
            blamed[rows] = self._affected_by_bases(directory, chunks.bases.take(rows), blamed)
            for block in np.flatnonzero((blocks.depths == depth) & (blocks.kinds == container_layout.PATCH)).tolist():
                culprits = self._affected_by_bases(directory, prefixes.of(block), blamed)
                if culprits.any():
                    mine = (chunks.blocks == block) & (blamed == 0)
                    blamed[mine] = culprits[culprits != 0][0]

    def _affected_by_bases(self, directory: Directory, bases: Locations, blamed: U64) -> U64:
        """Return what breaks each base: of the container's own chunks `blamed` says it."""
        own = bases.containers == np.uint64(directory.container)
        culprits = np.zeros(len(bases), np.uint64)
        culprits[own] = blamed[bases.ordinals[own]]
        culprits[~own] = self.affected_versions(bases.take(~own), directory.domain)
        return culprits

    def _check_names(self, directory: Directory, blamed: U64, name: str, helpers: ThreadPool) -> None:
        """Decode every chunk that seems sound and compare it with its name; only SHA-1 where no tenant is known."""
        fingerprinter = self._tenants.fingerprinter(directory.domain)
        self.untagged += fingerprinter is None
        compared = np.ones(32, np.bool_)
        compared[20:28] = fingerprinter is not None
        reader = ChunkReader(self._containers.of(directory.domain), helpers)
        rows = np.flatnonzero(blamed == 0)
        portion = np.cumsum(directory.chunks.lengths[rows], dtype=np.int64) // READ_BYTES
        parts = np.split(rows, np.flatnonzero(np.diff(portion)) + 1) if len(rows) else []
        while parts:
            part = parts.pop()
            try:
                payload, lengths, names = _read(reader, directory.container, part)
            except (Corrupt, NotFound) as err:
                if len(part) > 1:  # which of them it is; only on the way through damage
                    parts += np.array_split(part, 2)
                    continue
                bad, problem = part, f"{name}: {err}"
            else:
                found = _names(fingerprinter or self._any_fingerprinter, payload, lengths, helpers)
                bad = part[np.any((found != names)[:, compared], axis=1)]
                problem = f"{name}: {len(bad)} chunks are not what their names say"
                self.chunks += len(part)
            if len(bad):
                self.problems.setdefault(name, problem)
                blamed[bad] = directory.container


def _names(fingerprinter: Fingerprinter, payload: U8, lengths: U32, helpers: ThreadPool) -> U8:
    offsets = offsets_of(lengths)

    def names(part: slice) -> U8:
        return fingerprinter.name_chunks(payload, offsets[part], lengths[part])

    return np.concatenate(helpers.map(names, helpers.parts(lengths)))


def _read(reader: ChunkReader, container: ContainerId, rows: NDArray[np.intp]) -> tuple[U8, U32, U8]:
    """Return (bytes, lengths, names) of a container's chunks."""
    plan = reader.plan(Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32)))
    return reader.fetch(plan), plan.lengths, plan.names
