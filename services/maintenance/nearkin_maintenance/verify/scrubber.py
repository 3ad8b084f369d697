"""Scrub a store: read all of it, step by step, at a bounded speed.

    containers by id, each with its parity -> manifests and tombstones by name, with theirs -> descriptor -> next pass

A step is one container or some manifests. The position is saved every SAVE_SECONDS: a process that dies in between
repeats as much. Invariant: a pass reads every byte that was stored when it began.
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
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore, key_names, open_blocked
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
"""Cache of decoded blocks, for bases in other containers."""
BUSY_SHARE = 0.25
"""Maximum share of time that steps take: small objects are few bytes but much work, for which requests would wait."""
NAMES_STEP = 64
"""Manifests, tombstones and keys per step: about 100 KB."""
_log = logging.getLogger("nearkin")


@frozen
class ScrubStep:
    """Result of one step.

    `damaged`: object name -> problem; containers without their generation.
    """

    read_bytes: int
    objects: int
    damaged: dict[str, str]
    ended: bool
    """Whether the pass ended with this step."""


class Scrubber:
    """Endless reader of a store, for one thread.

    Of a fleet, one process at a time should scrub.
    """

    def __init__(
        self,
        objects: ParityObjectStore,
        containers: ContainerStore,
        tenants: Callable[[ManifestStore], DomainOwners],
        any_fingerprinter: Fingerprinter,
        settings: Callable[[], ScrubSettings],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tenants` returns the owners of domains, by the manifests that it is given."""
        self._objects = objects
        self._all_containers = containers.of(None)
        self._tenants_by = tenants
        self._open(objects)
        self._any_fingerprinter = any_fingerprinter
        self._settings = settings
        self._clock = clock
        self._states = ScrubStates(objects)
        self._state: ScrubState | None = None
        self._saved_at = time.monotonic()
        self._next_step_at = time.monotonic()
        self._ids: list[ContainerId] | None = None
        self._names: list[str] | None = None

    @property
    def state(self) -> ScrubState:
        """Return the position of the scrub."""
        if self._state is None:
            self._state = self._states.read()
        return self._state

    def waits_seconds(self) -> float | None:
        """Return the time until the next step is due, 0 for now, None for never."""
        settings, state = self._settings(), self.state
        if not settings.every_days:
            return None
        wait = self._next_step_at - time.monotonic()
        if not state.running:
            since_seconds = (int(self._clock() * 1e6) - state.begun_us) / 1e6  # rounded as `begun_us` was
            if state.begun_us and since_seconds >= 0:  # negative: begun with a wrong clock
                wait = max(wait, settings.every_days * DAY_SECONDS - since_seconds)
        return max(0.0, wait)

    def step(self, handle_damage: Callable[[ScrubStep], None] | None = None) -> ScrubStep:
        """Do the next step, due or not.

        The following step is due when `rate_bytes` and BUSY_SHARE allow it. `handle_damage` receives a step with
        damage, before the position is saved.

        Raises: StoreUnavailable, and the errors of `handle_damage`; after a RetryableError the same step is repeated.
        """
        if not self.state.running:
            self._begin()
        if self._ids is None and self._names is None:  # lists of this pass are about to be made
            self._open(open_blocked(self._objects))  # a forged erasure record hides the objects of its tenant
        previous, started = self.state, time.monotonic()
        step = self._containers_step() or self._names_step()
        read_seconds = step.read_bytes / max(1, int(self._settings().rate_bytes))
        self._next_step_at = started + max(read_seconds, (time.monotonic() - started) / BUSY_SHARE)
        state = self.state
        self._state = replace(
            state,
            read_bytes=state.read_bytes + step.read_bytes,
            read_objects=state.read_objects + step.objects,
            damaged_objects=state.damaged_objects + len(step.damaged),
        )
        try:
            if step.damaged and handle_damage is not None:
                handle_damage(step)
            if step.ended:
                self._end()
            elif step.damaged or time.monotonic() - self._saved_at >= SAVE_SECONDS:
                self.save()
        except RetryableError:
            self._state, self._ids, self._names = previous, None, None
            raise
        return step

    def _open(self, objects: ParityObjectStore) -> None:
        """Read from these objects: the stored bytes, not those that parity corrects."""
        self._readable = objects
        self._tenants = self._tenants_by(ManifestStore(objects))
        self._containers = self._all_containers.with_own_caches(objects.without_parity, CACHE_BYTES)
        self._manifests = ManifestStore(objects.without_parity, record_key=objects.record_key)

    def save(self) -> None:
        """Make the position durable."""
        self._states.write(self.state)
        self._saved_at = time.monotonic()

    def _begin(self) -> None:
        previous, now_us = self.state, int(self._clock() * 1e6)
        self._state = ScrubState(
            begun_us=now_us,
            ended_us=min(previous.ended_us, now_us - 1),  # a pass in the future had a wrong clock
            ended_bytes=previous.ended_bytes,
            ended_objects=previous.ended_objects,
            ended_damaged=previous.ended_damaged,
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

    def _containers_step(self) -> ScrubStep | None:
        """Read the next container; return None after the last."""
        state = self.state
        if state.names_from:
            return None
        if self._ids is None:
            self._ids = sorted(container for container, _ in self._containers.ids())
        position = bisect_left(self._ids, state.containers_below)
        if position == len(self._ids):
            return None
        container = self._ids[position]
        integrity = IntegrityChecker(self._containers, self._tenants, self._any_fingerprinter)
        integrity.check(container, deep=True)
        own_name = object_name(container)
        damaged = {name: problem for name, problem in integrity.problems.items() if name == own_name}
        if not damaged:
            damaged = self._check_parity(object_name(container, self._containers.generation(container)))
        self._state = replace(state, containers_below=container + 1)
        return ScrubStep(integrity.bytes_read, 1, damaged, ended=False)

    def _names_step(self) -> ScrubStep:
        """Read some manifests and tombstones; after the last, the descriptor, which ends the pass."""
        state = self.state
        if self._names is None:
            listed = [name for batch in self._manifests.listing() for name, _ in batch]
            self._names = sorted([*listed, *key_names(self._objects)])
        position = bisect_left(self._names, state.names_from)
        batch = self._names[position : position + NAMES_STEP]
        read_bytes, damaged = 0, {}
        for name in (*batch, *([descriptor.NAME, chunking_record.NAME] if len(batch) < NAMES_STEP else [])):
            try:
                self._read(name)
                read_bytes += self._readable.size_bytes(name)
            except NotFound:  # collected meanwhile
                continue
            except PermanentError as err:
                damaged[name] = str(err)
            else:
                damaged |= self._check_parity(name)
        if batch:
            self._state = replace(state, names_from=f"{batch[-1]}\0")
        return ScrubStep(read_bytes, len(batch), damaged, ended=len(batch) < NAMES_STEP)

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

    def _check_parity(self, name: str) -> dict[str, str]:
        """Compare the parity of an intact object; add it if it should exist."""
        if not (self._objects.adds or self._objects.has_some):
            return {}
        check = ParityCheck(self._readable)
        check.check(name)
        for missing_name in check.missing:
            try:
                self._readable.add_parity(missing_name, self._readable.get(missing_name))
            except NearkinError as err:
                _log.warning("%s: no parity yet: %s", missing_name, err)
        return dict(check.problems)
