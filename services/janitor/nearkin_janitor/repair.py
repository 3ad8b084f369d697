"""Repair. Invariant: an object is overwritten by nothing but its own bytes; a container healed otherwise gets a new
generation, and the one before goes only after that is durable.

parity -> the object's own bytes      a copy of the object -> its own bytes      copies of chunks -> a new generation
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearkin.errors import Corrupt, NotFound, Permanent
from nearkin.formats import container as fmt
from nearkin.formats.condemned import Condemned
from nearkin.formats.container import Directory
from nearkin.formats.manifest import decode_manifest
from nearkin.formats.mark import decode_mark
from nearkin.records import U32, ContainerId, Repaired
from nearkin.store.containers import ContainerStore, id_of, object_name
from nearkin.store.manifests import mark_name
from nearkin.store.manifests import object_name as manifest_name
from nearkin.store.parity import FOLDER, SUFFIX, ParityObjects
from nearkin_janitor.heal import Copies, Healer
from nearkin_janitor.order import leaning_last
from nearkin_janitor.soundness import Soundness

_NONE: U32 = np.zeros(0, np.uint32)
_log = logging.getLogger("nearkin")


@dataclass(frozen=True, slots=True)
class Given:
    """A whole object that somebody has kept elsewhere."""

    name: str
    """Where it belongs; of a container, whatever its generation."""
    data: bytes
    whole: bool
    """Of a container: whether it is of generation 0, which holds all that any later one does."""


def given_object(data: bytes, what: str) -> Given | None:
    """Return what object a file is a copy of, None where it is none of a store's. Raises Corrupt for a broken one."""
    match data[:4]:
        case b"NKC1":
            directory = fmt.decode_container(data, what)
            for block in np.flatnonzero(directory.blocks.raw).tolist():
                start = int(directory.blocks.offsets[block]) - fmt.BLOCK.size
                end = start + fmt.BLOCK.size + int(directory.blocks.stored[block])
                fmt.decode_block(data[start:end], f"{what} block {block}")
            whole = int.from_bytes(data[4:6], "little") <= fmt.VERSION_WHOLE
            return Given(object_name(directory.container), data, whole)
        case b"NKM1":
            manifest = decode_manifest(data, what)
            return Given(manifest_name(manifest.tenant, manifest.key, manifest.version), data, True)
        case b"NKT1":
            mark = decode_mark(data, what)
            return Given(mark_name(mark.tenant, mark.key, mark.version, mark.sequence), data, True)
        case _:
            return None


class Repairer:
    """Puts right what is damaged, one object at a time. Who calls it holds the store's lock or lease."""

    def __init__(self, objects: ParityObjects, containers: ContainerStore, healer: Healer) -> None:
        self._objects = objects
        self._containers = containers.of(None)
        self._healer = healer
        self.renewed: list[Directory] = []
        """Containers that have another generation now: the index is to be told."""
        self.sound: set[ContainerId] = set()
        """Containers in which nothing of their own was broken."""

    def repair(
        self, damaged: Iterable[str], copies: Sequence[Copies] = (), given: Mapping[str, Given] | None = None
    ) -> list[Repaired]:
        """Put right what can be, of the objects named as `verify` names them. Raises StoreUnavailable."""
        wanted, found = dict.fromkeys(damaged), []
        for name in wanted:
            if name.startswith(f"{FOLDER}/"):
                done = self._parity(name, wanted)
            else:
                done = self._object(name, copies, (given or {}).get(name))
            if done is not None:
                _log.warning("%s: repaired by %s", done.object_name, done.by)
                found.append(done)
        if found:
            self._containers.forget_read()
        return found

    def _object(self, name: str, copies: Sequence[Copies], given: Given | None) -> Repaired | None:
        container = id_of(name)
        if container is None:
            whole = self._objects.mended(name)
            by = "parity"
            if whole is None and given is not None:
                whole, by = given.data, "a copy"
            if whole is None:
                return None
            self._objects.replace(name, whole)
            return Repaired(name, by)
        generation = self._containers.generation(container)
        stored = object_name(container, generation)
        whole = self._objects.mended(stored)
        if whole is not None and whole != self._stored(stored):
            self._objects.replace(stored, whole)
            self._containers.forget_read()
            return Repaired(name, "parity")
        if given is not None and self._from_copy(container, generation, stored, given):
            return Repaired(name, "a copy")
        return self._heal(container, generation, copies)

    def _from_copy(self, container: ContainerId, generation: int, stored: str, given: Given) -> bool:
        there = self._stored(stored)
        same = there is not None and len(there) == len(given.data) and there[-fmt.FOOTER.size :] == given.data[-32:]
        if same or (given.whole and not generation):
            self._objects.replace(stored, given.data)
        elif given.whole:
            self._new_generation(container, generation, given.data)
        else:
            return False
        self._containers.forget_read()
        return True

    def _heal(self, container: ContainerId, generation: int, copies: Sequence[Copies]) -> Repaired | None:
        try:
            healed = self._healer.healed(container, copies)
        except Corrupt as err:
            _log.warning("%s: it is not healed chunk by chunk", err)
            return None
        if healed.data is None:
            if not healed.lost:
                self.sound.add(container)
            return None
        self._new_generation(container, generation, healed.data)
        return Repaired(object_name(container), "copies of chunks", healed.found, healed.lost)

    def _new_generation(self, container: ContainerId, generation: int, data: bytes) -> None:
        self._containers.put(container, data, generation + 1)
        directory = self._containers.directory(container)
        self.renewed.append(directory)
        self._containers.delete(container, generation)

    def _stored(self, name: str) -> bytes | None:
        try:
            return self._objects.get(name)
        except (NotFound, Corrupt):
            return None

    def _parity(self, name: str, damaged: Mapping[str, None]) -> Repaired | None:
        of = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
        container = id_of(of)
        if (of if container is None else object_name(container)) in damaged:
            return None  # the next run, when its object is sound
        data = self._stored(of)
        if data is None:
            return None
        self._objects.renew_parity(of, data)
        return Repaired(name, "its object")


def still_broken(soundness: Soundness, containers: Sequence[ContainerId], at_us: int) -> dict[int, Condemned | None]:
    """Read containers again; return what of each is broken now, None for a sound one."""
    for container in leaning_last(containers, soundness.leans_on):
        soundness.check(ContainerId(container), deep=True)
    unsound = soundness.unsound(containers)
    found: dict[int, Condemned | None] = {}
    for container in containers:
        if container not in unsound.chunks and container not in unsound.segments:
            found[container] = None
            continue
        chunks, segments = unsound.chunks.get(container, _NONE), unsound.segments.get(container, _NONE)
        found[container] = Condemned(at_us, _NONE if chunks is None else chunks, segments, chunks is None)
    return found


class ParityCheck:
    """Looks at the parity of objects that are what was written."""

    def __init__(self, objects: ParityObjects) -> None:
        self._objects = objects
        self.problems: dict[str, str] = {}
        self.missing: list[str] = []
        """Objects that should have parity, and have none yet."""

    def check(self, name: str) -> None:
        """Compare the parity of one object. What is wrong with the object itself is told by others."""
        try:
            data = self._objects.get(name)
            problem = self._objects.damage_of(name, data)
        except NotFound:
            if self._objects.adds:
                self.missing.append(name)
            return
        except Permanent as err:
            problem = str(err)
        if problem is not None and not self._is_of_damaged(name):
            self.problems[f"{FOLDER}/{name}{SUFFIX}"] = problem

    def _is_of_damaged(self, name: str) -> bool:
        """Return whether the object is not what it was: then its parity is needed as it is."""
        whole = self._objects.mended(name)
        return whole is not None and whole != self._objects.get(name)
