"""Check the integrity of chunks through all their bases.

    container -> checksums -> bases -> decode -> names      each corrupt chunk is recorded with the culprit container

Invariant (I8): a chunk is intact only if its bytes, and those of every base below it, match their names.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_shared.errors import Corrupt, FormatTooNew, NotFound, PermanentError
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
"""Chunk bytes that are decoded and fingerprinted together."""
RECHECKS_MAX = 8
"""Maximum repeated checks of a container that GC runs rewrite meanwhile; each rewrite needs a GC run."""


@frozen
class CheckResult:
    """Result for one container: about 200 bytes, and 12 to 16 for each corrupt chunk.

    `broken` uint32[b]: ordinals, ascending. `blamed` uint64[b]: the container with the damage that affects each.
    `collected` chunks are in `broken`, because chunks that need one cannot be decoded, but are not damage.
    """

    domain: bytes
    chunks: int
    broken: U32
    blamed: U64
    collected: U32

    @property
    def damaged(self) -> U32:
        """Return the ordinals of corrupt chunks that GC has not removed."""
        return np.setdiff1d(self.broken, self.collected, assume_unique=True)


@frozen
class CorruptChunks:
    """Chunks and segments on which no later version may depend, by container.

    Ordinals; None: all chunks of the container.
    """

    chunks: dict[int, U32 | None]
    segments: dict[int, U32]


class IntegrityChecker:
    """Check of the containers of a store, all tenants alike; `problems` by object name."""

    def __init__(self, containers: ContainerStore, tenants: DomainOwners, any_fingerprinter: Fingerprinter) -> None:
        self._containers = containers
        self._all_containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._checked: dict[int, CheckResult | None] = {}
        self._checks_done: dict[int, tuple[int, bool]] = {}
        """By container: the generation that was checked, and whether it was read completely."""
        self.problems: dict[str, str] = {}
        self.too_new: set[str] = set()
        """Names in `problems` whose only problem is the format of a later Nearkin."""
        self.chunks = 0
        self.bytes_read = 0
        self.untagged = 0

    def base_containers(self, container: int) -> list[int]:
        """Return the other containers with bases of this one.

        Empty if its directory cannot be read.
        """
        try:
            return self._all_containers.directory(ContainerId(container)).base_containers()
        except PermanentError:
            return []

    def check(self, container: ContainerId, *, deep: bool, helpers: ThreadPool = SERIAL) -> None:
        """Check one container, after those of its bases.

        `deep`: read and decode all of it, with `helpers`. A container that a GC run rewrites meanwhile is checked again
        before it is reported.
        """
        name = object_name(container)
        for _ in range(RECHECKS_MAX):
            self._check(container, name, helpers if deep else None)
            if name not in self.problems or not self._is_replaced(container):
                return
            self._drop_problem(name)
        self._check(container, name, helpers if deep else None)

    def _drop_problem(self, name: str) -> None:
        del self.problems[name]
        self.too_new.discard(name)

    def _add_problem(self, name: str, problem: str, *, is_too_new: bool = False) -> None:
        """Record a problem of a container.

        The first counts, but damage counts more than a later format.
        """
        if name not in self.problems:
            self.problems[name] = problem
            if is_too_new:
                self.too_new.add(name)
        elif name in self.too_new and not is_too_new:
            self.too_new.discard(name)
            self.problems[name] = problem

    def _is_replaced(self, container: ContainerId) -> bool:
        """Return whether a later generation than the checked one exists."""
        self._all_containers.has_newer_generation([container])
        return self._all_containers.generation(container) > self._checks_done[container][0]

    def _check(self, container: ContainerId, name: str, helpers: ThreadPool | None) -> None:
        """Check a container; with `helpers` None, read only its directory."""
        self._checks_done[container] = self._all_containers.generation(container), helpers is not None
        try:
            if helpers is not None:
                data = self._raw(container, name)
                self.bytes_read += len(data)
                directory = decode_container(data, name)
                if directory.container != container:
                    raise Corrupt(f"{name}: holds container {directory.container:016x}")
            else:
                data, directory = b"", self._all_containers.directory(container)
            self._checks_done[container] = self._all_containers.generation(container), helpers is not None
        except PermanentError as err:
            self._checked[container] = None
            if not (isinstance(err, NotFound) or isinstance(err.__cause__, NotFound)):
                self._add_problem(name, str(err), is_too_new=isinstance(err, FormatTooNew))
            return  # a missing container is a problem only if some version needs it
        blamed = np.zeros(len(directory.chunks), np.uint64)
        blamed[~directory.chunks.there] = container  # removed by GC: no damage, but dependents cannot be decoded
        if helpers is not None:
            self._check_blocks(directory, data, blamed, name, helpers)
        self._check_bases(directory, blamed)
        if helpers is not None:
            self._check_names(directory, blamed, name, helpers)
        if name in self.problems and self._is_deleted(container):  # by a GC run meanwhile
            self._drop_problem(name)
            self._checked[container] = None
            return
        broken = np.flatnonzero(blamed).astype(np.uint32)
        collected = np.flatnonzero(~directory.chunks.there).astype(np.uint32)
        self._checked[container] = CheckResult(directory.domain, len(blamed), broken, blamed[broken], collected)

    def _is_deleted(self, container: ContainerId) -> bool:
        try:
            self._all_containers.raw(container)
        except PermanentError as err:
            return isinstance(err, NotFound) or isinstance(err.__cause__, NotFound)
        return False

    def _raw(self, container: ContainerId, name: str) -> bytes:
        """Return a container's bytes, or its readable parts.

        Raises: PermanentError if nothing can be read.
        """
        try:
            return self._containers.raw(container)
        except Corrupt as err:
            salvaged = self._containers.salvage(container)
            if salvaged is None:
                raise
            self._add_problem(name, str(err))
            return salvaged

    def directory(self, container: int, domain: bytes) -> Directory | None:
        """Return a container's directory for a version of `domain`.

        None, with a problem recorded, if the version cannot use it.
        """
        if self._result_of(container, domain) is None:
            return None
        try:
            return self._containers.of(domain).directory(ContainerId(container))
        except PermanentError as err:  # it was readable a moment ago
            self._add_problem(object_name(ContainerId(container)), str(err), is_too_new=isinstance(err, FormatTooNew))
            return None

    def culprit_containers(self, chunks: Locations, domain: bytes) -> U64:
        """Return uint64[n]: the container whose damage affects each chunk for `domain`.

        0 for an intact chunk.
        """
        blamed = np.zeros(len(chunks), np.uint64)
        for container, rows in group_by_container(chunks.containers):
            if container == ZERO:
                continue
            checked, ordinals = self._result_of(container, domain), chunks.ordinals[rows]
            if checked is None:
                blamed[rows] = container
                continue
            beyond = ordinals >= checked.chunks
            # Chunks written since may depend on chunks that a merge added to the container.
            if beyond.any() and self._is_replaced(ContainerId(container)):
                self.check(ContainerId(container), deep=self._checks_done[container][1])
                checked = self._result_of(container, domain)
                if checked is None:
                    blamed[rows] = container
                    continue
                beyond = ordinals >= checked.chunks
            if beyond.any():
                name = object_name(ContainerId(container))
                self._add_problem(
                    name, f"{name}: has {checked.chunks} chunks, but a reference names chunk {int(ordinals.max())}"
                )
            blamed[rows[beyond]] = container
            if len(checked.broken):
                at = np.minimum(np.searchsorted(checked.broken, ordinals), len(checked.broken) - 1)
                is_corrupt = checked.broken[at] == ordinals
                blamed[rows[is_corrupt]] = checked.blamed[at[is_corrupt]]
        return blamed

    def corrupt_chunks(self, containers: Iterable[ContainerId]) -> CorruptChunks:
        """Return the corrupt and lost data of `containers`.

        Includes containers that were written since the others were checked. A segment with a corrupt chunk is corrupt,
        whatever container holds the chunk.
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
            corrupt = np.unique(of_chunk[self.culprit_containers(recipes.chunks, directory.domain) != 0])
            if len(corrupt):
                segments[container] = corrupt
        return CorruptChunks(chunks, segments)

    def _result_of(self, container: int, domain: bytes) -> CheckResult | None:
        """Return the result for a container that `domain` needs.

        None, with a problem recorded, if it is missing.
        """
        name = object_name(ContainerId(container))
        if container not in self._checked:  # not listed: lost, or put since
            self.check(ContainerId(container), deep=False)
        checked = self._checked[container]
        if checked is None:
            self.problems.setdefault(name, f"{name}: missing, and a version needs its chunks")
        elif checked.domain != domain:
            self._add_problem(name, f"{name}: belongs to another tenant than the object that names it")
            return None
        return checked

    def _check_blocks(self, directory: Directory, data: bytes, blamed: U64, name: str, helpers: ThreadPool) -> None:
        def problem_of(block: int) -> str | FormatTooNew:
            expected_bytes = int(directory.blocks.raw[block])
            try:
                decoded = decode_block(memoryview(data)[directory.block_rows[block].place], f"{name} block {block}")
            except FormatTooNew as err:
                return err
            except PermanentError as err:
                return str(err)
            if directory.blocks.kinds[block] == container_layout.PATCH:  # its length is checked when it is decoded
                return ""
            if len(decoded) == expected_bytes:
                return ""
            return f"{name} block {block}: {len(decoded)} bytes, not {expected_bytes}"

        blocks: list[int] = np.flatnonzero(directory.blocks.raw).tolist()
        for block, problem in zip(blocks, helpers.map(problem_of, blocks), strict=True):
            if problem:
                self._add_problem(name, str(problem), is_too_new=isinstance(problem, FormatTooNew))
                blamed[directory.chunks.blocks == block] = directory.container

    def _check_bases(self, directory: Directory, blamed: U64) -> None:
        """Mark chunks whose base is lost or corrupt, lowest depth first.

        A base may be in the same container. In a patch block, one corrupt base affects every chunk.
        """
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        for depth in range(1, int(chunks.depths.max(initial=0)) + 1):
            rows = np.flatnonzero((chunks.depths == depth) & (blamed == 0))
            blamed[rows] = self._culprits_of_bases(directory, chunks.bases.take(rows), blamed)
            for block in np.flatnonzero((blocks.depths == depth) & (blocks.kinds == container_layout.PATCH)).tolist():
                culprits = self._culprits_of_bases(directory, prefixes.of(block), blamed)
                if culprits.any():
                    is_affected = (chunks.blocks == block) & (blamed == 0)
                    blamed[is_affected] = culprits[culprits != 0][0]

    def _culprits_of_bases(self, directory: Directory, bases: Locations, blamed: U64) -> U64:
        """Return the container whose damage affects each base, or 0.

        For the container's own chunks, `blamed` has the result.
        """
        own = bases.containers == np.uint64(directory.container)
        culprits = np.zeros(len(bases), np.uint64)
        culprits[own] = blamed[bases.ordinals[own]]
        culprits[~own] = self.culprit_containers(bases.take(~own), directory.domain)
        return culprits

    def _check_names(self, directory: Directory, blamed: U64, name: str, helpers: ThreadPool) -> None:
        """Decode all chunks without a finding and compare them with their names.

        Only by SHA-1 if the tenant is unknown.
        """
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
                payload, lengths, names = _read_chunks(reader, directory.container, part)
            except (Corrupt, NotFound) as err:
                if len(part) > 1:  # bisect to the corrupt chunk; happens for damaged containers only
                    parts += np.array_split(part, 2)
                    continue
                corrupt, problem = part, f"{name}: {err}"
            else:
                computed = _compute_names(fingerprinter or self._any_fingerprinter, payload, lengths, helpers)
                corrupt = part[np.any((computed != names)[:, compared], axis=1)]
                problem = f"{name}: {len(corrupt)} chunks failed fingerprint verification"
                self.chunks += len(part)
            if len(corrupt):
                self._add_problem(name, problem)
                blamed[corrupt] = directory.container


def _compute_names(fingerprinter: Fingerprinter, payload: U8, lengths: U32, helpers: ThreadPool) -> U8:
    offsets = offsets_of(lengths)

    def names(part: slice) -> U8:
        return fingerprinter.name_chunks(payload, offsets[part], lengths[part])

    return np.concatenate(helpers.map(names, helpers.parts(lengths)))


def _read_chunks(reader: ChunkReader, container: ContainerId, rows: NDArray[np.intp]) -> tuple[U8, U32, U8]:
    """Return (bytes, lengths, names) of a container's chunks."""
    plan = reader.plan(Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32)))
    return reader.fetch(plan), plan.lengths, plan.names
