"""Repair a local store.

Invariant: the store's lock is held; intact objects are not changed.

verify -> parity, copies of objects, copies of chunks -> verify -> quarantine lists the remaining damage
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nearkin.block_recoder import BlockRecoder
from nearkin.local.index_lifecycle import LocalIndex
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, PermanentError, SourceFailed
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.formats.container_layout import CONTAINER_BYTES_MAX
from nearkin_shared.formats.encrypted_object import MAGIC as SEALED_MAGIC
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.catalog import summarise_directory
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.results import Damage, Repaired, RepairReport, VerifyReport
from nearkin_shared.storage.containers import ContainerStore, id_of, object_name
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.types import NAME_BYTES, U8, Bools, ContainerId, Locations, offsets_of
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import remove_tree

if TYPE_CHECKING:
    from nearkin_maintenance import DomainOwners, Repairer, VerifyScope
    from nearkin_maintenance.repair.backup_copies import BackupCache, BackupObject
    from nearkin_maintenance.repair.container_repair import ChunkSource
    from nearkin_maintenance.repair.store_repair import BackupCopies
    from nearkin_shared.formats.directory import Directory

_log = logging.getLogger("nearkin")
ARENA_BYTES = 8 * 1024 * 1024
FILES_MAX = 10_000
_CONTAINER_FILE = re.compile(r"([0-9a-f]{16})(?:\.([0-9a-f]{4}))?\.nkc")
_MAGICS = (b"NKC1", b"NKM1", b"NKT1")


@frozen
class LocalRepair:
    """The parts of an open store that a repair works on."""

    settings: Settings
    objects: ParityObjectStore
    containers: ContainerStore
    manifests: ManifestStore
    index: LocalIndex
    quarantine: Quarantine
    fingerprinter: Callable[[str], Fingerprinter]
    verify: Callable[[], VerifyReport]
    """Verifies everything and leaves broken chunks in quarantine."""

    def run(self, files: Sequence[Path]) -> RepairReport:
        """Repair what can be repaired. Raises BadInput, StoreLocked, StoreUnavailable."""
        started = time.perf_counter()
        from nearkin_maintenance.repair.backup_copies import BackupCache, RequiredChunks
        from nearkin_maintenance.repair.store_repair import BackupCopies

        others, kept, contents = _sorted_out(files, self.objects)
        held = BackupCache()
        given = BackupCopies(others, kept, RequiredChunks(self.containers, self.manifests, kept, held))
        self.index.writable()
        if self.index.gc_folder.exists():  # repaired containers may have other bases: the next GC run marks
            remove_tree(self.index.gc_folder)
        quarantined = set(self.quarantine.read())
        report = self.verify()
        quarantined.update(self.quarantine.read())
        repairer, tenants = self._repairer()
        copies: list[ChunkSource] = [self._stored_sources(tenants)]
        if kept:
            copies.append(self._backup_sources(kept, held, tenants))
        of_contents = list[FileCopies]()
        if contents:
            of_contents.append(FileCopies(self.settings, self.fingerprinter(self.settings.tenant), contents))
        copies += of_contents
        copies.append(self._merged_source(tenants, tuple(copies)))
        repaired = self._repair_all(repairer, report, copies, given)
        # Chunks that depend on repaired ones are intact only now, and parity of repaired objects can be rebuilt.
        while repaired and report.damage:
            self.containers.evict()
            if any(one.object_name.startswith("manifests/") for one in repaired):
                self.index.relist_versions()
            report = self.verify()
            more = self._repair_all(repairer, report, copies, given)
            if not more:
                break
            again = {one.object_name for one in more} <= {one.object_name for one in repaired}
            repaired += more
            if again:  # and not a third time: the report lists what remains
                self.containers.evict()
                report = self.verify()
                break
        for one in of_contents:
            one.report_unused()
        added = 0
        for name in report.parity_missing:
            self.objects.add_parity(name, self.objects.get(name))
            added += 1
        kept_out = self.quarantine.read()
        self.index.republish_containers(quarantined.difference(kept_out))
        left = sum(len(entry.chunks) for entry in kept_out.values())
        return RepairReport(tuple(repaired), report.damage, left, added, time.perf_counter() - started)

    def _repair_all(
        self, repairer: Repairer, report: VerifyReport, copies: Sequence[ChunkSource], given: BackupCopies
    ) -> list[Repaired]:
        """Repair damaged objects, then deltas with lost bases; remove lost unreferenced chunks."""
        damaged = [damage.object_name for damage in report.damage]
        repaired = repairer.repair(damaged, copies, given)
        if damaged:
            repaired += repairer.repair_dependents(self.quarantine.read(), copies)
            repaired += repairer.remove_unreferenced(damaged)
        return repaired

    def repair_quarantined(self) -> list[Repaired]:
        """Repair quarantined containers with chunks of later puts, found by the index.

        The lock is held. Called after every put. Of containers without such chunks only directories are read (reading
        40 containers of 4 MiB made a small put four to ten times as slow). Deltas with a lost base are left to
        `repair`: if they were stored raw here, they would no longer record the base of a joined chunk.
        """
        record = self.quarantine.read()
        wanted = [
            container for container in sorted(record) if self._is_repairable(ContainerId(container), record[container])
        ]
        if not wanted:
            return []
        repairer, tenants = self._repairer()
        copies = [IndexCopies(self.index, self.containers, tenants)]  # joined chunks need all directories
        repaired = repairer.repair([object_name(ContainerId(container)) for container in wanted], copies)
        if repaired or repairer.sound.issuperset(wanted):  # or their repair died before it was recorded
            self.recheck([ContainerId(container) for container in sorted(record)], tenants)
        return repaired

    def _is_repairable(self, container: ContainerId, entry: PendingDelete) -> bool:
        """Return whether there is parity, or the index finds any broken chunk of a container."""
        if self.objects.has_some:
            return True
        try:
            names = self.containers.of(None).directory(container).chunks.names
        except PermanentError:
            return False
        _, found = self.index.writable().locate_chunks(names[entry.chunks[entry.chunks < len(names)]])
        return bool(found.any())

    def attend(
        self, damaged: Mapping[str, str], verified: Callable[[VerifyScope], VerifyReport]
    ) -> tuple[tuple[Repaired, ...], tuple[Damage, ...]]:
        """Repair damaged objects; return the repairs and the remaining damage."""
        from nearkin_maintenance import VerifyScope

        repairer, tenants = self._repairer()
        indexed = IndexCopies(self.index, self.containers, tenants)
        repaired = repairer.repair(damaged, [indexed, self._merged_source(tenants, [indexed])])
        ids = frozenset(container for container in map(id_of, damaged) if container is not None)
        report = verified(VerifyScope(only=ids))
        if ids:
            self.recheck(sorted(ids & self.quarantine.read().keys()), tenants)
        return tuple(repaired), report.damage

    def recheck(self, containers: Sequence[ContainerId], tenants: DomainOwners) -> None:
        """Read quarantined containers again, and release the intact ones."""
        from nearkin_maintenance import IntegrityChecker
        from nearkin_maintenance.repair.store_repair import still_broken

        soundness = IntegrityChecker(self.containers, tenants, self.fingerprinter(self.settings.tenant))
        self.quarantine.release(still_broken(soundness, containers, int(time.time() * 1e6)))
        failpoint("repair.released")

    def _repairer(self) -> tuple[Repairer, DomainOwners]:
        from nearkin_maintenance import ContainerRepairer, DomainOwners, Repairer

        tenants = DomainOwners(self.fingerprinter, [self.settings.tenant], self.manifests)
        healer = ContainerRepairer(self.containers, BlockRecoder(self.settings))

        def renew(directory: Directory) -> None:
            self.index.writable().renew(summarise_directory(directory))

        return Repairer(self.objects, self.containers, healer, renew), tenants

    def _merged_source(self, tenants: DomainOwners, copies: Sequence[ChunkSource]) -> ChunkSource:
        from nearkin_maintenance.repair.chunk_sources import MergedChunkSource

        return MergedChunkSource(self.containers, tenants, self.fingerprinter(self.settings.tenant), copies)

    def _stored_sources(self, tenants: DomainOwners) -> ChunkSource:
        from nearkin_maintenance.repair.chunk_sources import DuplicateChunkSource

        return DuplicateChunkSource(self.containers, tenants, self.fingerprinter(self.settings.tenant))

    def _backup_sources(
        self, copies: Mapping[ContainerId, Sequence[BackupObject]], held: BackupCache, tenants: DomainOwners
    ) -> ChunkSource:
        from nearkin_maintenance.repair.chunk_sources import BackupChunkSource

        return BackupChunkSource(self.containers, copies, held, tenants, self.fingerprinter(self.settings.tenant))


class IndexCopies:
    """Copies of broken chunks that later puts stored, found by the index."""

    def __init__(self, index: LocalIndex, containers: ContainerStore, tenants: DomainOwners) -> None:
        self._index = index
        self._containers = containers
        self._tenants = tenants

    def find(self, domain: bytes, names: frozenset[bytes]) -> Iterator[tuple[bytes, U8]]:
        """Yield (name, bytes): each decoded, and compared with its name."""
        fingerprinter = self._tenants.fingerprinter(domain)
        if fingerprinter is None:
            return
        wanted = sorted(names)
        table = np.frombuffer(b"".join(wanted), np.uint8).reshape(-1, NAME_BYTES)
        locations, found = self._index.writable().locate_chunks(table)
        reader = ChunkReader(self._containers.of(domain))
        for row in np.flatnonzero(found).tolist():
            here: Locations = locations.take(slice(row, row + 1))
            try:
                plan = reader.plan(here)
                payload = reader.fetch(plan)
            except PermanentError:
                continue
            if _agrees(fingerprinter, payload, table[row : row + 1]):
                yield wanted[row], payload


class FileCopies:
    """Chunks of files that hold content, cut as the settings of now say."""

    def __init__(self, settings: Settings, fingerprinter: Fingerprinter, files: Sequence[Path]) -> None:
        self._settings = settings
        self._fingerprinter = fingerprinter
        self._files = files
        self._domain = domain_of(settings.tenant)
        self._of_use: dict[Path, bool] = {}

    def report_unused(self) -> None:
        """Report the files that held none of the missing chunks."""
        cut = self._settings.chunker
        for path in (path for path, of_use in self._of_use.items() if not of_use):
            _log.warning(
                "%s: no chunk that is broken is in it, cut by %s into %d to %d bytes: give it with the profile and "
                "chunker.* that it was put with",
                path,
                cut.algorithm,
                cut.min_bytes,
                cut.max_bytes,
            )

    def find(self, domain: bytes, names: frozenset[bytes]) -> Iterator[tuple[bytes, U8]]:
        """Yield (name, bytes) of chunks that a file has. Raises SourceFailed."""
        if domain != self._domain:
            return
        missing = set(names)
        for path in self._files:
            self._of_use.setdefault(path, False)
            for name, content in self._chunks(path):
                if name in names:
                    self._of_use[path] = True
                if name in missing:
                    missing.discard(name)
                    yield name, content
            if not missing:
                return

    def _chunks(self, path: Path) -> Iterator[tuple[bytes, U8]]:
        from nearkin_chunker import BlobRun, ChunkerStage, CutState, FrameRuns
        from nearkin_shared.pipeline.stage import LookupResults

        stage, carry = ChunkerStage(self._settings, self._fingerprinter), b""
        state: CutState | None = None
        try:
            with path.open("rb") as file:
                while True:
                    data = file.read(ARENA_BYTES)
                    arena = np.frombuffer(carry + data, np.uint8)
                    final = len(data) < ARENA_BYTES
                    if not len(arena):
                        return
                    cut = stage.decide(FrameRuns(arena, (BlobRun(0, 0, len(arena), final),), state), LookupResults())
                    segments = cut.segments
                    ends = segments.offsets + segments.lengths
                    for row in np.flatnonzero(~segments.zero).tolist():
                        start, stop = int(segments.offsets[row]), int(ends[row])
                        yield segments.names[row].tobytes(), arena[start:stop].copy()
                    if final:
                        return
                    carry, state = arena[cut.consumed :].tobytes(), cut.state
        except OSError as err:
            raise SourceFailed(f"{path}: {err.strerror}") from err


def _agrees(fingerprinter: Fingerprinter, payload: U8, name: U8) -> bool:
    lengths = np.array([len(payload)], np.uint32)
    same: Bools = fingerprinter.name_chunks(payload, offsets_of(lengths), lengths) == name
    return bool(same.all())


def _sealed_as(path: Path) -> str:
    """Return the object name under which a copy was encrypted, from its file and folder names."""
    container, folder = _CONTAINER_FILE.fullmatch(path.name), path.parent.name
    if container is not None:
        return object_name(ContainerId(int(container[1], 16)), int(container[2] or "0", 16))
    return f"manifests/{folder[:2]}/{folder}/{path.name}"


def _sorted_out(
    files: Sequence[Path], objects: ParityObjectStore
) -> tuple[dict[str, BackupObject], dict[ContainerId, list[BackupObject]], list[Path]]:
    """Return copies of manifests and tombstones by name, of containers, and all other files.

    Other files hold content. Each file is read once and released. Copies of a container are ordered from oldest to
    newest.
    """
    from nearkin_maintenance.repair.backup_copies import parse_backup_object

    if len(files) > FILES_MAX:
        raise BadInput(f"{len(files)} files: give {FILES_MAX} at a time")
    others: dict[str, BackupObject] = {}
    kept: dict[ContainerId, dict[bytes, BackupObject]] = {}
    contents = []
    for path in files:
        try:
            with path.open("rb") as file:
                magic = file.read(4)
            found = None
            if path.stat().st_size <= CONTAINER_BYTES_MAX:
                if magic in _MAGICS:
                    found = parse_backup_object(partial(_read, path), str(path))
                elif magic == SEALED_MAGIC and isinstance(objects, EncryptedObjectStore):
                    name = _sealed_as(path)
                    found = parse_backup_object(partial(_open_copy, objects, name, path), str(path), name)
        except OSError as err:
            raise BadInput(f"{path}: {err.strerror}") from err
        except PermanentError as err:
            _log.warning("%s: not used", err)
            continue
        if found is None:
            contents.append(path)
        elif (container := id_of(found.name)) is not None:
            kept.setdefault(container, {}).setdefault(found.digest, found)
        else:
            others[found.name] = found
    return others, {container: sorted(of.values(), key=_oldest_first) for container, of in kept.items()}, contents


def _oldest_first(given: BackupObject) -> tuple[int, bool, bytes]:
    return (
        -given.chunks_there,
        not given.whole,
        given.digest,
    )  # a GC run takes chunks out of a container, and puts none in


def _open_copy(objects: EncryptedObjectStore, name: str, path: Path) -> bytes:
    return objects.decrypt(name, _read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise SourceFailed(f"{path}: {err.strerror}") from err
