"""Scrub a store that services write.

Damage is repaired with parity only. Damage that parity cannot repair is quarantined, withdrawn from an index that
supports it, and reported with the affected versions. A container is overwritten with its own bytes, so no lease is
needed: several maintenance workers would write the same.

Invariant (I8): all damage that the scrub finds is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.verify.integrity import CorruptChunks
from nearkin_maintenance.verify.scope import VerifyScope
from nearkin_maintenance.verify.scrubber import Scrubber
from nearkin_maintenance.verify.verifier import IndexedVersions, Verifier
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, NearkinError, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.index.protocols import ContainerDirectories, SupportsCollection
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.parity import FOLDER, SUFFIX, ParityObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.storage.containers import ContainerStore, id_of, object_name
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.quarantine import Quarantine

RETRY_SECONDS = 60.0
IDLE_SECONDS_MAX = 3600.0
QUARANTINE_TRIES = 5
_log = logging.getLogger("nearkin.maintenance")


class BackgroundScrub:
    """A thread that scrubs until it is stopped."""

    def __init__(
        self,
        objects: ParityObjectStore,
        settings: Callable[[], Settings],
        fingerprinter: Callable[[str], Fingerprinter],
        index: object,
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._fingerprinter = fingerprinter
        self._index = index
        tenant = settings().tenant
        self._manifests = ManifestStore(objects)
        self._containers = ContainerStore(objects, fingerprinter(tenant).domain, int(settings().base.cache_bytes))
        self._scrubber = Scrubber(
            objects,
            self._containers,
            partial(DomainOwners, fingerprinter, [tenant]),
            fingerprinter(tenant),
            lambda: settings().scrub,
        )
        self._quarantine = Quarantine(objects, time.time)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-scrub", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step; the position is durable then."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> None:
        """Do one step and handle its findings. Raises StoreUnavailable."""
        step = self._scrubber.step(lambda found: self._handle_damage(found.damaged))
        metrics.count_scrubbed(step.read_bytes, step.objects, step.ended)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                wait_seconds = self._scrubber.waits_seconds()
                if wait_seconds == 0.0:
                    self.step()
                    continue
            except NearkinError as err:
                _log.error("scrub: %s", err)
                wait_seconds = RETRY_SECONDS
            self._stopped.wait(IDLE_SECONDS_MAX if wait_seconds is None else min(wait_seconds, IDLE_SECONDS_MAX))
        try:
            if self._scrubber.state.running:
                self._scrubber.save()
        except NearkinError as err:
            _log.warning("scrub: %s", err)

    def _handle_damage(self, damaged: Mapping[str, str]) -> None:
        for name, problem in damaged.items():
            _log.error("scrub: %s", problem)
            if self._reconstruct(name):
                metrics.SCRUB_REPAIRED.inc()
                _log.warning("%s: repaired by parity", name)
        ids = frozenset(container for container in map(id_of, damaged) if container is not None)
        tenant = self._settings().tenant
        verifier = Verifier(
            self._containers, self._manifests, self._fingerprinter, tenant, IndexedVersions(), objects=self._objects
        )
        report = verifier.run(VerifyScope(only=ids))
        if verifier.broken:
            corrupt = verifier.corrupt_chunks()
            self._quarantine_chunks(corrupt)
            if isinstance(self._index, SupportsCollection):
                directories = ContainerDirectories(self._containers.directory)
                self._index.withdraw(corrupt.chunks, corrupt.segments, (), directories)
        metrics.SCRUB_DAMAGED.inc(len(damaged))
        metrics.CORRUPT.labels("scrub").inc(len(damaged))
        for damage in report.damage:
            affected = [*((tenant, *version) for version in damage.versions), *damage.of_other_tenants]
            examples = ", ".join(f"{key!r} version {version} of {owner!r}" for owner, key, version in affected[:8])
            more = f" and {len(affected) - 8} more" if len(affected) > 8 else ""
            _log.error("scrub: %s is damaged; affected: %s%s", damage.object_name, examples or "no version", more)

    def _quarantine_chunks(self, corrupt: CorruptChunks) -> None:
        """Add corrupt chunks to the quarantine; retry if another process adds to it.

        Raises: AlreadyExists after QUARANTINE_TRIES attempts.
        """
        for retries_left in reversed(range(QUARANTINE_TRIES)):
            try:
                self._quarantine.note(corrupt.chunks, corrupt.segments, everything=False)
            except AlreadyExists:
                if not retries_left:
                    raise
            else:
                return

    def _reconstruct(self, name: str) -> bool:
        """Overwrite an object with its bytes as reconstructed from parity.

        A damaged parity object is made again from its object. Returns whether the object was repaired.
        """
        try:
            if name.startswith(f"{FOLDER}/"):
                object_of_parity = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
                self._objects.renew_parity(object_of_parity, self._objects.get(object_of_parity))
                return True
            container = id_of(name)
            stored = name if container is None else object_name(container, self._containers.generation(container))
            reconstructed = self._objects.reconstruct(stored)
            if reconstructed is None or reconstructed == self._read_stored(stored):
                return False
        except PermanentError as err:  # collected meanwhile, or unreadable
            _log.warning("scrub: %s", err)
            return False
        self._objects.replace(stored, reconstructed)
        self._containers.evict()
        return True

    def _read_stored(self, name: str) -> bytes | None:
        """Return a stored object, or None if the device cannot read it. Raises NotFound."""
        try:
            return self._objects.get(name)
        except Corrupt:
            return None
