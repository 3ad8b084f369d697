"""Verify. Invariant: every broken object is named, with the versions it touches, through bases too (I8).

containers: checksums -> decode -> names of every chunk      manifests: parse -> segments -> chunks all sound?
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nearkin.errors import Corrupt, NotFound, Permanent
from nearkin.fingerprints import Fingerprinter
from nearkin.formats import container as fmt
from nearkin.formats.container import Directory
from nearkin.formats.manifest import Manifest
from nearkin.records import ZERO, Bools, ContainerId, Damage, Locations, VerifyReport
from nearkin.store.chunks import ChunkReader, offsets_of
from nearkin.store.containers import ContainerStore, object_name
from nearkin.store.manifests import ManifestStore

READ_BYTES = 8 * 1024 * 1024
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Sound:
    """What is known of each container: its directory and which chunks are sound; `directory` None: unreadable."""

    directory: Directory | None
    chunks: Bools


@dataclass(slots=True)
class _Findings:
    problems: dict[str, str] = field(default_factory=dict)
    touched: dict[str, set[tuple[str, int]]] = field(default_factory=dict)

    def found(self, name: str, problem: str) -> None:
        self.problems.setdefault(name, problem)
        self.touched.setdefault(name, set())

    def damage(self) -> tuple[Damage, ...]:
        return tuple(
            Damage(name, problem, tuple(sorted(self.touched[name]))) for name, problem in sorted(self.problems.items())
        )


class Verifier:
    """One pass over a store."""

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        fingerprinter: Fingerprinter,
        remembered: Mapping[str, tuple[str, int]],
    ) -> None:
        self._remembered = remembered
        self._containers = containers
        self._manifests = manifests
        self._fingerprinter = fingerprinter
        self._reader = ChunkReader(containers)
        self._known: dict[int, _Sound] = {}
        self._broken_by: dict[tuple[int, int], str] = {}
        self._findings = _Findings()
        self._bytes = 0
        self._chunks = 0

    def run(self, sample: float | None, progress: Progress | None) -> VerifyReport:
        """Read containers (a share of them with `sample`), then every manifest. Raises only StoreUnavailable."""
        started = time.perf_counter()
        # Manifests first: all that one of them names is durable by then, so a put meanwhile never looks like damage.
        names = sorted(name for name, _ in self._manifests.names())
        ids = sorted(container for container, _ in self._containers.ids())
        listed, chosen = set(names), set(ids)
        if sample is not None:
            chosen = set(random.sample(ids, max(1, round(len(ids) * sample)))) if ids else set()
        total = len(ids) + len(names)
        for done, container in enumerate(ids):
            self._known[container] = self._container(container, deep=container in chosen)
            if progress is not None:
                progress(done + 1, total)
        for name, (key, version) in self._remembered.items():
            if name not in listed:
                self._findings.found(name, f"{name}: missing, and the index lists {key!r} version {version}")
                self._findings.touched[name].add((key, version))
        for done, name in enumerate(names):
            self._manifest(name)
            if progress is not None:
                progress(len(ids) + done + 1, total)
        return VerifyReport(
            containers=len(chosen),
            chunks=self._chunks,
            versions=len(names),
            bytes_read=self._bytes,
            damage=self._findings.damage(),
            seconds=time.perf_counter() - started,
        )

    def _container(self, container: ContainerId, *, deep: bool) -> _Sound:
        name = object_name(container)
        try:
            if not deep:
                directory = self._containers.directory(container)
                return self._with_bases(directory, np.ones(len(directory.chunks), np.bool_))
            data = self._containers.raw(container)
            self._bytes += len(data)
            directory = fmt.decode_container(data, name)
            if directory.container != container:
                raise Corrupt(f"{name}: holds container {directory.container:016x}")
        except Permanent as err:
            self._findings.found(name, str(err))
            return _Sound(None, np.zeros(0, np.bool_))
        sound = np.ones(len(directory.chunks), np.bool_)
        for block in range(len(directory.blocks)):
            start = int(directory.blocks.offsets[block]) - fmt.BLOCK.size
            end = start + fmt.BLOCK.size + int(directory.blocks.stored[block])
            try:
                decoded = fmt.decode_block(memoryview(data)[start:end], f"{name} block {block}")
            except Corrupt as err:
                problem = str(err)
            else:
                said = int(directory.blocks.raw[block])
                problem = "" if len(decoded) == said else f"{name} block {block}: {len(decoded)} bytes, not {said}"
            if problem:
                self._findings.found(name, problem)
                sound[directory.chunks.blocks == block] = False
        for row in np.flatnonzero(~sound):
            self._broken_by[container, int(row)] = name
        checked = self._with_bases(directory, sound)
        self._names(checked, name)
        return checked

    def _with_bases(self, directory: Directory, sound: Bools) -> _Sound:
        """Mark the chunks whose base is lost or broken: bases are older, or shallower in the same container."""
        chunks = directory.chunks
        for depth in range(1, int(chunks.depths.max(initial=0)) + 1):
            for row in np.flatnonzero((chunks.depths == depth) & sound):
                container, ordinal = int(chunks.bases.containers[row]), int(chunks.bases.ordinals[row])
                own = container == directory.container
                base = _Sound(directory, sound) if own else self._known.get(container)
                if base is None or base.directory is None or ordinal >= len(base.chunks) or not base.chunks[ordinal]:
                    sound[row] = False
                    culprit = self._broken_by.get((container, ordinal), object_name(ContainerId(container)))
                    if base is None:
                        self._findings.found(culprit, f"{culprit}: missing, and it holds bases")
                    self._broken_by[directory.container, int(row)] = culprit
        return _Sound(directory, sound)

    def _names(self, known: _Sound, name: str) -> None:
        """Decode every sound chunk and compare its fingerprint and tag with its name."""
        assert known.directory is not None
        container = known.directory.container
        rows = np.flatnonzero(known.chunks)
        portion = np.cumsum(known.directory.chunks.lengths[rows], dtype=np.int64) // READ_BYTES
        for part in np.split(rows, np.flatnonzero(np.diff(portion)) + 1) if len(rows) else []:
            try:
                plan = self._reader.plan(Locations(np.full(len(part), container, np.uint64), part.astype(np.uint32)))
                payload = self._reader.fetch(plan)
            except (Corrupt, NotFound) as err:
                bad, problem = part, f"{name}: {err}"
            else:
                found = self._fingerprinter.name_chunks(payload, offsets_of(plan.lengths), plan.lengths)
                bad = part[np.any(found != plan.names, axis=1)]
                problem = f"{name}: {len(bad)} chunks are not what their names say"
                self._chunks += len(part)
            if len(bad):
                self._findings.found(name, problem)
                known.chunks[bad] = False
                self._broken_by.update({(container, int(row)): name for row in bad})

    def _manifest(self, name: str) -> None:
        try:
            manifest = self._manifests.read(name)
        except Permanent as err:
            self._findings.found(name, str(err))
            if name in self._remembered:
                self._findings.touched[name].add(self._remembered[name])
            return
        version = manifest.key, manifest.version
        for culprit, problem in self._touching(manifest).items():
            self._findings.found(culprit, problem)
            self._findings.touched[culprit].add(version)

    def _touching(self, manifest: Manifest) -> dict[str, str]:
        """Return what breaks this version: object name -> problem."""
        culprits: dict[str, str] = {}
        length = 0
        for container in np.unique(manifest.segments.containers):
            holder = self._known.get(int(container))
            name = object_name(ContainerId(int(container)))
            if holder is None or holder.directory is None:
                culprits[name] = f"{name}: missing or unreadable, and it holds recipes"
                continue
            ordinals = manifest.segments.ordinals[manifest.segments.containers == container]
            table = holder.directory.segments
            if int(ordinals.max()) >= len(table):
                culprits[name] = f"{name}: has {len(table)} recipes, number {int(ordinals.max())} is wanted"
                continue
            wanted = np.zeros(len(table), np.int64)
            np.add.at(wanted, ordinals, 1)
            times = np.repeat(wanted, np.diff(table.bounds))
            length += self._chunks_of(table.chunks, times, culprits)
        if not culprits and length != manifest.size_bytes:
            name = f"{manifest.key!r} version {manifest.version}"
            culprits[name] = f"{name}: its segments hold {length} bytes, the manifest says {manifest.size_bytes}"
        return culprits

    def _chunks_of(
        self, chunks: Locations, times: np.ndarray[tuple[int], np.dtype[np.int64]], culprits: dict[str, str]
    ) -> int:
        """Add what breaks the chunks with `times` > 0 to `culprits`; return their bytes, each counted so often."""
        total = 0
        used = times > 0
        for container in np.unique(chunks.containers[used]):
            rows = np.flatnonzero(used & (chunks.containers == container))
            ordinals = chunks.ordinals[rows]
            if container == ZERO:
                total += int((ordinals.astype(np.int64) * times[rows]).sum())
                continue
            holder = self._known.get(int(container))
            name = object_name(ContainerId(int(container)))
            if holder is None or holder.directory is None or int(ordinals.max()) >= len(holder.chunks):
                culprits[name] = f"{name}: missing or unreadable, and it holds chunks"
                continue
            total += int((holder.directory.chunks.lengths[ordinals].astype(np.int64) * times[rows]).sum())
            for ordinal in np.unique(ordinals[~holder.chunks[ordinals]]):
                culprit = self._broken_by.get((int(container), int(ordinal)), name)
                culprits.setdefault(culprit, self._findings.problems.get(culprit, f"{culprit}: broken"))
        return total


def verify_store(
    containers: ContainerStore,
    manifests: ManifestStore,
    fingerprinter: Fingerprinter,
    sample: float | None = None,
    progress: Progress | None = None,
    remembered: Mapping[str, tuple[str, int]] | None = None,
) -> VerifyReport:
    """Check a store; see Verifier.

    `remembered` says which (key, version) an index knows under which manifest's name: what lists a version whose
    manifest is lost, or names one whose manifest cannot be read.
    """
    return Verifier(containers, manifests, fingerprinter, remembered or {}).run(sample, progress)
