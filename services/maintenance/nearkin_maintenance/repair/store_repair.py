"""Repair damaged objects of a store.

parity -> the object's own bytes      a copy of the object -> its own bytes      copies of chunks -> a new generation

A copy of another generation replaces a container as a whole only if the directory of the stored one is lost. Its chunks
may be deeper there than in the lost generation, on which recent chunks depend: so its deltas are stored raw.

Invariant: an object is overwritten by its own bytes only; a container repaired otherwise gets a new generation, and the
previous one is deleted once that is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from nearkin_maintenance.repair.backup_copies import BackupObject, RequiredChunks
from nearkin_maintenance.repair.container_repair import ChunkSource, ContainerRepairer
from nearkin_maintenance.repair.lost_bases import encode_without, lost_rows, referenced_rows, undecodable_rows
from nearkin_maintenance.verify.integrity import IntegrityChecker
from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.objectstore.parity import FOLDER, SUFFIX, ParityObjectStore
from nearkin_shared.results import Repaired
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore, id_of, object_name
from nearkin_shared.types import U32, ContainerId, Locations
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_NONE: U32 = np.zeros(0, np.uint32)
REMOVAL = "removal of lost chunks that nothing refers to"
_log = logging.getLogger("nearkin")


@frozen
class BackupCopies:
    """Backup copies of objects."""

    others: Mapping[str, BackupObject]
    """Manifests and tombstones, by object name."""
    containers: Mapping[ContainerId, Sequence[BackupObject]]
    """Of any generation."""
    needs: RequiredChunks | None
    """Decides among several copies of a container."""


class Repairer:
    """Repairs damaged objects one at a time. The caller holds the store's lock or lease."""

    def __init__(
        self,
        objects: ParityObjectStore,
        containers: ContainerStore,
        healer: ContainerRepairer,
        renew: Callable[[Directory], None],
    ) -> None:
        """`renew` updates the index for a new generation before the previous one is deleted."""
        self._renew = renew
        self._objects = objects
        self._containers = containers.of(None)
        self._healer = healer
        self.sound: set[ContainerId] = set()
        """Containers without damage of their own."""

    def repair(
        self, damaged: Iterable[str], copies: Sequence[ChunkSource] = (), given: BackupCopies | None = None
    ) -> list[Repaired]:
        """Repair the objects that `verify` named, as far as possible.

        Raises: StoreUnavailable, SourceFailed.
        """
        wanted, found = dict.fromkeys(damaged), []
        objects = {id_of(name) or name for name in wanted}
        for name in wanted:
            if name.startswith(f"{FOLDER}/"):
                done = self._parity(name, objects)
            else:
                done = self._object(name, copies, given or BackupCopies({}, {}, None))
            if done is not None:
                _log.warning("%s: repaired by %s", done.object_name, done.by)
                found.append(done)
        if found:
            self._containers.evict()
        return found

    def repair_dependents(self, unsound: Mapping[int, PendingDelete], copies: Sequence[ChunkSource]) -> list[Repaired]:
        """Store raw the deltas whose bases are lost, as far as copies have their content.

        Raises as `repair` does.

        `unsound`: the content of the quarantine. Containers are processed in the order of their bases: a chunk stored
        raw may be the base that others lack.
        """
        found = []
        for number in topological_order(unsound, self._base_containers):
            container, rows = ContainerId(number), unsound[number].chunks
            if unsound[number].whole or not self._reads(container):
                continue
            rows = undecodable_rows(self._containers, self._containers.directory(container), rows)
            done = (
                self._repair_container(container, self._containers.generation(container), copies, rows)
                if len(rows)
                else None
            )
            if done is not None:
                _log.warning("%s: repaired by %s", done.object_name, done.by)
                self._containers.evict()
                found.append(done)
        return found

    def remove_unreferenced(self, damaged: Iterable[str]) -> list[Repaired]:
        """Remove lost chunks that no recipe and no delta refers to: nothing can ever read them."""
        lost: dict[int, U32] = {}
        for container in filter(None, map(id_of, damaged)):
            if self._reads(container):
                rows = lost_rows(self._containers, self._containers.directory(container))
                lost.update({container: rows} if len(rows) else {})
        referenced = referenced_rows(self._containers, lost) if lost else None
        if referenced is None:
            return []
        found = []
        for number, rows in lost.items():
            container, removed = ContainerId(number), np.setdiff1d(rows, referenced[number])
            if not len(removed):
                continue
            try:
                data = encode_without(self._containers, self._containers.directory(container), removed)
            except Corrupt as err:
                _log.warning("lost chunks not removed: %s", err)
                continue
            self._new_generation(container, self._containers.generation(container), data)
            self._containers.evict(container)
            found.append(Repaired(object_name(container), REMOVAL, len(removed)))
        return found

    def _base_containers(self, container: int) -> list[int]:
        try:
            return self._containers.directory(ContainerId(container)).base_containers()
        except PermanentError:
            return []

    def _object(self, name: str, copies: Sequence[ChunkSource], given: BackupCopies) -> Repaired | None:
        container = id_of(name)
        if container is None:
            whole = self._objects.reconstruct(name)
            by = "parity"
            if whole is None and name in given.others:
                whole, by = given.others[name].data, "a copy"
            if whole is None:
                return None
            self._replace(name, whole)
            return Repaired(name, by)
        generation = self._containers.generation(container)
        stored = object_name(container, generation)
        whole = self._objects.reconstruct(stored)
        if whole is not None and self._stored(stored) != whole:
            self._replace(stored, whole)
            self._containers.evict()
            return Repaired(name, "parity")
        if container in given.containers and self._from_copy(container, generation, stored, given, copies):
            return Repaired(name, "a copy")
        return self._repair_container(container, generation, copies)

    def _from_copy(
        self, container: ContainerId, generation: int, stored: str, given: BackupCopies, copies: Sequence[ChunkSource]
    ) -> bool:
        there = self._stored(stored)
        for one in given.containers[container]:
            data = one.data
            same = (
                there is not None and len(there) == len(data) and there[-container_layout.FOOTER.size :] == data[-32:]
            )
            if same or one.sealed_as == stored:
                self._replace(stored, data)
                self._containers.evict()
                return True
        reads = self._reads(container)
        wholes = [one for one in given.containers[container] if one.whole]
        if reads and (generation or not wholes):
            return False  # repair chunk by chunk, which keeps the undamaged chunks of the stored generation
        chosen = wholes[0] if reads or given.needs is None else given.needs.best(container)
        data = chosen.data
        if reads or (chosen.whole and not generation and not self._too_deep(data)):
            self._replace(stored, data)  # no later generation is known
        else:  # a copy of any generation: no other source is left
            self._new_generation(container, generation, self._raw(container, data, copies))
        self._containers.evict()
        return True

    def _raw(self, container: ContainerId, data: bytes, copies: Sequence[ChunkSource]) -> bytes:
        try:
            return self._healer.raw(data, copies)
        except Corrupt as err:
            _log.warning("%s: deltas of its copy not stored raw, copy used as it is: %s", object_name(container), err)
            return data

    def _too_deep(self, data: bytes) -> bool:
        """Return whether a delta is no deeper than its base in this copy (its depth shrank later)."""
        copy = decode_container(data, "a copy of a container")
        for other, _ in self._containers.ids():
            try:
                directory = self._containers.directory(other)
            except PermanentError:
                continue
            chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
            deltas = chunks.there & (chunks.depths > 0)
            bases = Locations.join([chunks.bases.take(deltas), prefixes.bases])
            depths = np.concatenate([chunks.depths[deltas], np.repeat(blocks.depths, np.diff(prefixes.bounds))])
            mine = (bases.containers == np.uint64(copy.container)) & (bases.ordinals < len(copy.chunks))
            if np.any(copy.chunks.depths[bases.ordinals[mine]] >= depths[mine]):
                return True
        return False

    def _reads(self, container: ContainerId) -> bool:
        """Return whether the directory of a container is readable."""
        self._containers.evict(container)
        try:
            self._containers.directory(container)
        except Corrupt:
            return False
        return True

    def _repair_container(
        self, container: ContainerId, generation: int, copies: Sequence[ChunkSource], undecodable: U32 = _NONE
    ) -> Repaired | None:
        try:
            healed = self._healer.repair(container, copies, undecodable)
        except Corrupt as err:
            _log.warning("container not repaired from copies of chunks: %s", err)
            return None
        if healed.data is None:
            if not healed.lost:
                self.sound.add(container)
            return None
        self._new_generation(container, generation, healed.data)
        return Repaired(object_name(container), "copies of chunks", healed.found, healed.lost)

    def _new_generation(self, container: ContainerId, generation: int, data: bytes) -> None:
        """1 put 2 renew index entries 3 delete the previous one.

        After a crash a GC run deletes the older of two.
        """
        self._containers.put(container, [data], generation + 1)
        failpoint("repair.put")
        self._renew(self._containers.directory(container))
        failpoint("repair.renewed")
        self._containers.delete(container, generation)
        failpoint("repair.removed")

    def _replace(self, name: str, data: bytes) -> None:
        self._objects.replace(name, data)
        failpoint("repair.replaced")

    def _stored(self, name: str) -> bytes | None:
        try:
            return self._objects.get(name)
        except (NotFound, Corrupt):
            return None

    def _parity(self, name: str, damaged: Collection[ContainerId | str]) -> Repaired | None:
        of = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
        if (id_of(of) or of) in damaged:
            return None  # the next run repairs it, once its object is undamaged
        data = self._stored(of)
        if data is None:
            return None
        self._objects.renew_parity(of, data)
        return Repaired(name, "its object")


def still_broken(
    soundness: IntegrityChecker, containers: Sequence[ContainerId], at_us: int
) -> dict[int, PendingDelete | None]:
    """Read containers again; return the damage of each, None for an undamaged one."""
    for container in topological_order(containers, soundness.base_containers):
        soundness.check(ContainerId(container), deep=True)
    unsound = soundness.corrupt_chunks(containers)
    found: dict[int, PendingDelete | None] = {}
    for container in containers:
        if container not in unsound.chunks and container not in unsound.segments:
            found[container] = None
            continue
        chunks, segments = unsound.chunks.get(container, _NONE), unsound.segments.get(container, _NONE)
        found[container] = PendingDelete(at_us, _NONE if chunks is None else chunks, segments, chunks is None)
    return found


class ParityCheck:
    """Checks the parity of undamaged objects."""

    def __init__(self, objects: ParityObjectStore) -> None:
        self._objects = objects
        self.problems: dict[str, str] = {}
        self.missing: list[str] = []
        """Objects that should have parity and have none yet."""

    def check(self, name: str) -> None:
        """Compare the parity of one object.

        Damage of the object itself is reported by other checks.
        """
        try:
            data = self._objects.get(name)
        except NotFound:
            data = b""
        except PermanentError:
            return
        try:
            problem = self._objects.damage_of(name, data)
        except NotFound:
            if self._objects.adds:
                self.missing.append(name)
            return
        except PermanentError as err:
            problem = str(err)
        if problem is not None and not self._is_of_damaged(name):
            self.problems[f"{FOLDER}/{name}{SUFFIX}"] = problem

    def _is_of_damaged(self, name: str) -> bool:
        """Return whether the object differs from its parity: then the parity is needed as it is."""
        whole = self._objects.reconstruct(name)
        return whole is not None and not self._objects.is_stored(name, whole)
