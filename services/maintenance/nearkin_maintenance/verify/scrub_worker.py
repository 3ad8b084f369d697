"""The scrub of a store that services write. Invariant: it repairs by parity alone, and tells all that it finds.

A container is overwritten by its own bytes, so no lease is needed: several maintenance workers would do the same.
What parity cannot put right is quarantined, forgotten by an index that can forget, and told with the versions it
touches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.verify.integrity import CorruptChunks
from nearkin_maintenance.verify.scope import VerifyScope
from nearkin_maintenance.verify.scrubber import Scrubber
from nearkin_maintenance.verify.verifier import Verifier
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, NearkinError, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.parity import FOLDER, SUFFIX, ParityObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.storage.containers import ContainerStore, id_of, object_name
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.quarantine import Quarantine

RETRY_SECONDS = 60.0
IDLE_SECONDS_MAX = 3600.0
NOTE_TRIES = 5
_log = logging.getLogger("nearkin.maintenance")


class BackgroundScrub:
    """Scrubs on a thread of its own until it is stopped."""

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
            DomainOwners(fingerprinter, [tenant], self._manifests),
            fingerprinter(tenant),
            lambda: settings().scrub,
        )
        self._quarantine = Quarantine(objects, time.time)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-scrub", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs; where it stands is durable then."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> None:
        """Do a step, and deal with what it found. Raises StoreUnavailable."""
        done = self._scrubber.step(lambda found: self._attend(found.damaged))
        metrics.count_scrubbed(done.read_bytes, done.objects, done.ended)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                wait = self._scrubber.waits_seconds()
                if wait == 0.0:
                    self.step()
                    continue
            except NearkinError as err:
                _log.error("scrub: %s", err)
                wait = RETRY_SECONDS
            self._stopped.wait(IDLE_SECONDS_MAX if wait is None else min(wait, IDLE_SECONDS_MAX))
        try:
            if self._scrubber.state.running:
                self._scrubber.save()
        except NearkinError as err:
            _log.warning("scrub: %s", err)

    def _attend(self, damaged: Mapping[str, str]) -> None:
        for name, problem in damaged.items():
            _log.error("scrub: %s", problem)
            if self._reconstruct(name):
                metrics.SCRUB_REPAIRED.inc()
                _log.warning("%s: repaired by parity", name)
        ids = frozenset(container for container in map(id_of, damaged) if container is not None)
        tenant = self._settings().tenant
        verifier = Verifier(self._containers, self._manifests, self._fingerprinter, tenant, {}, objects=self._objects)
        report = verifier.run(VerifyScope(only=ids))
        if verifier.broken:
            unsound = verifier.corrupt_chunks()
            self._note(unsound)
            if isinstance(self._index, SupportsCollection):
                self._index.withdraw(unsound.chunks, unsound.segments, ())
        metrics.SCRUB_DAMAGED.inc(len(damaged))
        metrics.CORRUPT.labels("scrub").inc(len(damaged))
        for damage in report.damage:
            touched = [*((tenant, *version) for version in damage.versions), *damage.of_other_tenants]
            named = ", ".join(f"{key!r} version {version} of {whose!r}" for whose, key, version in touched[:8])
            more = f" and {len(touched) - 8} more" if len(touched) > 8 else ""
            _log.error("scrub: %s is damaged and touches %s%s", damage.object_name, named or "no version", more)

    def _note(self, unsound: CorruptChunks) -> None:
        """Quarantine what is broken; whoever adds to the record at the same moment goes first. Raises AlreadyExists."""
        for left in reversed(range(NOTE_TRIES)):
            try:
                self._quarantine.note(unsound.chunks, unsound.segments, everything=False)
            except AlreadyExists:
                if not left:
                    raise
            else:
                return

    def _reconstruct(self, name: str) -> bool:
        """Put an object's own bytes back, as its parity has them; a broken parity is made anew from its object."""
        try:
            if name.startswith(f"{FOLDER}/"):
                of = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
                self._objects.renew_parity(of, self._objects.get(of))
                return True
            container = id_of(name)
            stored = name if container is None else object_name(container, self._containers.generation(container))
            whole = self._objects.reconstruct(stored)
            if whole is None or whole == self._stored(stored):
                return False
        except PermanentError as err:  # collected meanwhile, or nothing of it can be read
            _log.warning("scrub: %s", err)
            return False
        self._objects.replace(stored, whole)
        self._containers.evict()
        return True

    def _stored(self, name: str) -> bytes | None:
        """Return an object as it lies there, None where the device cannot read it. Raises NotFound."""
        try:
            return self._objects.get(name)
        except Corrupt:
            return None
