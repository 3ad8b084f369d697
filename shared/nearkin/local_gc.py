"""Garbage collection of a local store. Invariant: one round at a time, and no put beside it: the store's lock is held.

a round (nearkin_janitor.Collector) -> what retention.policies do not keep is deleted, for later rounds to free
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nearkin.config import MARK_SWEEP, Settings
from nearkin.failpoints import failpoint
from nearkin.fingerprints import Fingerprinter
from nearkin.formats.mark import NO_REQUEST, Kind, Mark, encode_mark
from nearkin.local_index import LocalIndex
from nearkin.recoding import BlockRecoder
from nearkin.records import GcReport
from nearkin.retention import keeps_some, outdated
from nearkin.store.condemned import CondemnedStore
from nearkin.store.containers import ContainerStore
from nearkin.store.deletion import Deletions
from nearkin.store.manifests import ManifestStore
from nearkin_janitor import Collector, Ledger, Rewriter, Tenants

WHO, REASON = "retention", "retention.policies"


@dataclass(frozen=True, slots=True)
class LocalGc:
    """The parts of an open store that a round works on."""

    settings: Settings
    containers: ContainerStore
    manifests: ManifestStore
    condemned: CondemnedStore
    index: LocalIndex
    deletions: Deletions
    fingerprinter: Callable[[str], Fingerprinter]
    clock: Callable[[], float]

    def run(self) -> GcReport:
        """Do a round. Raises Corrupt, StoreLocked, StoreUnavailable."""
        index = self.index.writable()
        failpoint("gc.begun")
        try:
            with self._ledger() as ledger:
                report = self._collector(ledger).run(index)
            return self._with_retention(report, dry_run=False)
        finally:
            self.containers.forget_read()  # no later put may lean on what has gone

    def preview(self, *, deleted_too: bool) -> GcReport:
        """Return what `run` would do, and what holds the rest; takes no lock."""
        return self._with_retention(self._collector().preview(deleted_too=deleted_too), dry_run=True)

    @contextmanager
    def _ledger(self) -> Iterator[Ledger | None]:
        if self.settings.gc.mode == MARK_SWEEP:
            yield None
            return
        ledger = Ledger(self.index.gc_folder, int(self.settings.index.map_bytes), self.settings.gc.mode)
        try:
            yield ledger
        finally:
            ledger.close()

    def _collector(self, ledger: Ledger | None = None) -> Collector:
        tenant = self.settings.tenant
        tenants = Tenants(self.fingerprinter, [tenant], self.manifests)
        recoder = BlockRecoder(self.settings)
        rewriter = Rewriter(self.containers, tenants, self.fingerprinter(tenant), recoder)
        chosen, clock = self.settings.gc, self.clock
        return Collector(self.containers, self.manifests, self.condemned, chosen, rewriter, clock=clock, ledger=ledger)

    def _with_retention(self, report: GcReport, *, dry_run: bool) -> GcReport:
        """Delete what the settings' policies do not keep, of all tenants; marks take bytes, which the report counts."""
        retention, marks_bytes = self.settings.retention, 0
        if not any(map(keeps_some, retention.policies)):
            return report
        keys = dict.fromkeys((tenant, entry.key) for tenant, entry in self.index.readable().catalogs())
        going = list(outdated(retention, keys, self.manifests, self.clock()))
        for tenant, info in going:
            mark = Mark(tenant, info.key, info.version, 1, Kind.DELETED, 0, 0, NO_REQUEST, WHO, REASON)
            marks_bytes += len(encode_mark(mark))
            if not dry_run:
                seconds = self.settings.deletion.undelete_seconds
                self.deletions.delete(tenant, info.key, info.version, undelete_seconds=seconds, who=WHO, reason=REASON)
        return replace(report, forgotten=len(going), freed_bytes=report.freed_bytes - marks_bytes)
