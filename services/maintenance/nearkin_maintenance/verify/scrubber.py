"""Scrub. Invariant: a pass reads every byte that was stored when it began, a step at a time, and no faster than it may.

containers by id, each with its parity -> manifests and marks by name, with theirs -> the descriptor -> the next pass

A step is one container or some manifests. Where a pass stands is durable every SAVE_SECONDS: dying in between repeats
as much.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.repair.store_repair import ParityCheck
from nearkin_maintenance.verify.integrity import IntegrityChecker
from nearkin_shared.config.storage import ScrubSettings
from nearkin_shared.errors import NearkinError, NotFound, PermanentError, RetryableError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.key_record import FOLDER as KEYS
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore, key_names
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import MARK_SUFFIX, ManifestStore
from nearkin_shared.storage.retention_records import SUFFIX as RETENTION_SUFFIX
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.frozen import frozen

DAY_SECONDS = 86_400
SAVE_SECONDS = 60.0
CACHE_BYTES = 16 * 1024 * 1024
"""Of decoded blocks, for bases that lie in other containers."""
BUSY_SHARE = 0.25
"""Most of the time that steps may take: small objects are few bytes and much work, which requests would wait for."""
NAMES_STEP = 64
"""Manifests, marks and keys of one step: some 100 KB."""
_log = logging.getLogger("nearkin")


@frozen
class Step:
    """What one step did. `damaged`: object name -> problem, of containers without their generation."""

    read_bytes: int
    objects: int
    damaged: dict[str, str]
    ended: bool
    """Whether a pass ended with it."""


class Scrubber:
    """Reads all of a store, over and over. For one thread; one process of a fleet at a time should."""

    def __init__(
        self,
        objects: ParityObjectStore,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        settings: Callable[[], ScrubSettings],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        # What lies there is looked at, not what parity makes of it.
        self._containers = containers.of(None).with_own_caches(objects.without_parity, CACHE_BYTES)
        self._manifests = ManifestStore(objects.without_parity, record_key=objects.record_key)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._settings = settings
        self._clock = clock
        self._states = ScrubStates(objects)
        self._state: ScrubState | None = None
        self._saved = time.monotonic()
        self._next = time.monotonic()
        self._ids: list[ContainerId] | None = None
        self._names: list[str] | None = None

    @property
    def state(self) -> ScrubState:
        """Return where it stands."""
        if self._state is None:
            self._state = self._states.read()
        return self._state

    def waits_seconds(self) -> float | None:
        """Return how long until the next step is due, 0 for now; None where none ever is."""
        settings, state = self._settings(), self.state
        if not settings.every_days:
            return None
        wait = self._next - time.monotonic()
        if not state.running:
            since_seconds = (int(self._clock() * 1e6) - state.begun_us) / 1e6  # as it was rounded then
            if state.begun_us and since_seconds >= 0:  # negative: begun by a clock that was wrong
                wait = max(wait, settings.every_days * DAY_SECONDS - since_seconds)
        return max(0.0, wait)

    def step(self, attend: Callable[[Step], None] | None = None) -> Step:
        """Do the next step, due or not; the next one is due when `rate_bytes` and BUSY_SHARE allow it.

        `attend` deals with what it found, before the pass counts as this far. Raises StoreUnavailable, and what
        `attend` raises: after a RetryableError the same step is done again.
        """
        if not self.state.running:
            self._begin()
        before, started = self.state, time.monotonic()
        done = self._containers_step() or self._names_step()
        read_seconds = done.read_bytes / max(1, int(self._settings().rate_bytes))
        self._next = started + max(read_seconds, (time.monotonic() - started) / BUSY_SHARE)
        state = self.state
        self._state = replace(
            state,
            read_bytes=state.read_bytes + done.read_bytes,
            read_objects=state.read_objects + done.objects,
            damaged_objects=state.damaged_objects + len(done.damaged),
        )
        try:
            if done.damaged and attend is not None:
                attend(done)
            if done.ended:
                self._end()
            elif done.damaged or time.monotonic() - self._saved >= SAVE_SECONDS:
                self.save()
        except RetryableError:
            self._state, self._ids, self._names = before, None, None
            raise
        return done

    def save(self) -> None:
        """Make where it stands durable."""
        self._states.write(self.state)
        self._saved = time.monotonic()

    def _begin(self) -> None:
        before, now_us = self.state, int(self._clock() * 1e6)
        self._state = ScrubState(
            begun_us=now_us,
            ended_us=min(before.ended_us, now_us - 1),  # a pass of the future was one by a clock that was wrong
            ended_bytes=before.ended_bytes,
            ended_objects=before.ended_objects,
            ended_damaged=before.ended_damaged,
        )
        self._ids = self._names = None
        self.save()

    def _end(self) -> None:
        state = self.state
        self._state = replace(
            state,
            ended_us=max(int(self._clock() * 1e6), state.begun_us),
            ended_bytes=state.read_bytes,
            ended_objects=state.read_objects,
            ended_damaged=state.damaged_objects,
        )
        self._ids = self._names = None
        self.save()

    def _containers_step(self) -> Step | None:
        """Read the next container, None where all were read."""
        state = self.state
        if state.names_from:
            return None
        if self._ids is None:
            self._ids = sorted(container for container, _ in self._containers.ids())
        at = bisect_left(self._ids, state.containers_below)
        if at == len(self._ids):
            return None
        container = self._ids[at]
        soundness = IntegrityChecker(self._containers, self._tenants, self._any_fingerprinter)
        soundness.check(container, deep=True)
        own = object_name(container)
        damaged = {name: problem for name, problem in soundness.problems.items() if name == own}
        if not damaged:
            damaged = self._parity(object_name(container, self._containers.generation(container)))
        self._state = replace(state, containers_below=container + 1)
        return Step(soundness.bytes_read, 1, damaged, ended=False)

    def _names_step(self) -> Step:
        """Read some manifests and marks; at their end the descriptor, and the pass."""
        state = self.state
        if self._names is None:
            named = [name for some in self._manifests.listing() for name, _ in some]
            self._names = sorted([*named, *key_names(self._objects)])
        at = bisect_left(self._names, state.names_from)
        some = self._names[at : at + NAMES_STEP]
        read_bytes, damaged = 0, {}
        for name in (*some, *([descriptor.NAME, chunking_record.NAME] if len(some) < NAMES_STEP else [])):
            try:
                self._read(name)
                read_bytes += self._objects.size_bytes(name)
            except NotFound:  # collected meanwhile
                continue
            except PermanentError as err:
                damaged[name] = str(err)
            else:
                damaged |= self._parity(name)
        if some:
            self._state = replace(state, names_from=f"{some[-1]}\0")
        return Step(read_bytes, len(some), damaged, ended=len(some) < NAMES_STEP)

    def _read(self, name: str) -> None:
        if name == descriptor.NAME:
            descriptor.read(self._objects.without_parity, fingerprint_bits=None)
        elif name == chunking_record.NAME:
            chunking_record.check_record(self._objects, self._objects.without_parity)
        elif isinstance(self._objects, EncryptedObjectStore) and name.startswith(f"{KEYS}/"):
            self._objects.keyring.check(name)
        elif name.endswith(MARK_SUFFIX):
            self._manifests.read_mark(name)
        elif name.endswith(RETENTION_SUFFIX):
            self._manifests.retentions.read(name)
        else:
            self._manifests.read(name)

    def _parity(self, name: str) -> dict[str, str]:
        """Compare the parity of a sound object; make it where there is none and should be."""
        if not (self._objects.adds or self._objects.has_some):
            return {}
        check = ParityCheck(self._objects)
        check.check(name)
        for lacking in check.missing:
            try:
                self._objects.add_parity(lacking, self._objects.get(lacking))
            except NearkinError as err:
                _log.warning("%s: no parity yet: %s", lacking, err)
        return dict(check.problems)
