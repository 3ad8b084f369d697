"""Run GC for a fleet, concurrently with its services.

    due, index complete, lease free -> lease -> GC run, every effect fenced -> result recorded -> lease released
    gc.mode = hybrid: tables of the fleet's run before here -> by change (online_run.py), else the run marks

Invariant: one maintenance worker of a fleet runs at a time, and stops before another one may begin. An index rebuild
uses the same lease: no GC run withdraws entries that a rebuild publishes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nearkin_maintenance.gc.clock_check import check_clock
from nearkin_maintenance.gc.erased_tenants import count_erasures, sweep_erased
from nearkin_maintenance.gc.gc_context import GcHooks
from nearkin_maintenance.gc.gc_run import GcRun
from nearkin_maintenance.gc.gc_tables import FleetRun, GcTables, is_current, record_run
from nearkin_maintenance.gc.reference_counts import ReferenceCounts, TablesUnavailable
from nearkin_maintenance.gc.rolled_back_keys import check_none_rolled_back, record_heads
from nearkin_maintenance.gc.schedule import GcSchedule
from nearkin_maintenance.gc.tombstone_signing import sign_old_marks
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_shared.config.storage import HYBRID, GcSettings
from nearkin_shared.crypto.erasure_records import Erasure
from nearkin_shared.errors import GcPaused, NearkinError, RetryableError
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.fleet.lease import LEASE_SECONDS, Lease
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.fenced import FencedObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.results import GcReport, RemainingCopy
from nearkin_shared.results_json import gc_json
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.types import U32
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.memory import give_back_free

POLL_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""Wait after a failed GC run, unless the interval is shorter."""
STOP_SECONDS = 60.0
_log = logging.getLogger("nearkin.maintenance")


class FencedIndex:
    """An index that refuses changes once the lease is lost."""

    def __init__(self, index: FleetIndex, check: Callable[[], None]) -> None:
        self._index = index
        self._check = check

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Withdraw entries. Raises LeaseLost."""
        self._check()
        self._index.withdraw(chunks, segments, containers, looked_up)

    def renew(self, summary: ContainerSummary) -> None:
        """Replace the entries of a rewritten container. Raises LeaseLost."""
        self._check()
        self._index.renew(summary)

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation. Raises LeaseLost."""
        self._check()
        return self._index.advance_generation(at_least)

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog. Raises LeaseLost."""
        self._check()
        self._index.collect_many(versions)


def _schedule(last: Mapping[str, Any] | None) -> GcSchedule | None:
    if last is None:
        return None
    regular = last.get("regular_at", last.get("at", 0))  # a first run that failed recorded neither
    return GcSchedule(float(regular), None if last.get("freeing_at") is None else float(last["freeing_at"]))


@frozen
class GcWorkerPorts:
    """Functions that the floor above hands to a `GcWorker`."""

    settings: Callable[[], GcSettings]
    """Returns the settings in force."""
    containers: Callable[[ObjectStore], ContainerStore]
    rewriter: Callable[[ContainerStore], Rewriter]
    apply_policies: Callable[[ObjectStore, Callable[[], None]], tuple[int, int]] | None = None
    """Deletes the versions that retention policies do not keep; calls its second argument before each index call.
    Returns the number of versions, and the bytes of their tombstones."""
    remaining: Callable[[Sequence[Erasure]], tuple[RemainingCopy, ...]] = lambda finished: ()
    """Returns the copies that completed erasures do not reach."""
    tables: GcTables | None = None
    """Tables of `gc.mode = hybrid` on this machine's disk; without, every run marks."""


class GcWorker:
    """A thread that runs GC at an interval, and again once pending deletes are due.

    The interval is `gc.interval_seconds`. The schedule is shared by all maintenance workers and survives restarts.
    """

    def __init__(
        self,
        index: FleetIndex,
        objects: ObjectStore,
        ports: GcWorkerPorts,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._objects = objects
        self._ports = ports
        self._lease = Lease(index.state, lease_seconds)
        self._clock = clock
        self._status = GcStatusStore(index.state)
        self._pauses = GcPauseFlag(objects, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-gc", daemon=True)

    def start(self) -> GcWorker:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread; a GC run stops before its next effect, and the next run does the rest."""
        self._stopping.set()
        self._lease.give_up()
        self._thread.join(STOP_SECONDS)

    def last(self) -> dict[str, Any] | None:
        """Return the status of the last GC run of any worker, or None."""
        return self._status.last()

    def run_once(self) -> GcReport | None:
        """Run GC if it is due or requested, and nothing prevents it.

        Returns None if no run was done: GC is paused, the index is incomplete, or another worker holds the lease.

        Raises: the errors of `GcRun.run`.
        """
        settings = self._ports.settings()
        if not self._is_due(settings) or self._pauses.read() is not None:
            return None
        if self._index.check() or not self._lease.take():
            return None
        with self._lease:
            if not self._is_due(settings):  # another worker ran meanwhile
                return None
            self._check_clock()
            requested = self._status.requested_run
            try:
                report = self._run_gc(settings)
            except GcPaused:
                _log.warning("gc: paused during a GC run")
                return None
            except Exception as err:
                metrics.count_collected(None)
                with suppress(NearkinError):
                    self._status.record_failure(self._clock(), str(err))
                raise
            metrics.count_collected(report)
            self._lease.check()
            self._status.record_run({**self._run_record(settings, report), **gc_json(report)}, requested)
            if isinstance(self._objects, EncryptedObjectStore):
                self._objects.confirm_swept()  # after the report: a run that ends before it leaves that to the next
            failpoint("gc.reported")
        _log.warning(
            "gc: %d bytes freed, %d containers deleted, %d rewritten, %d with pending deletes, %.1f s",
            report.freed_bytes,
            report.containers_deleted,
            report.containers_rewritten,
            report.pending_delete_containers,
            report.seconds,
        )
        return report

    def _run_gc(self, settings: GcSettings) -> GcReport:
        """Run GC, by change if the tables of the run before are here."""
        tables = self._ports.tables
        if tables is None or settings.mode != HYBRID:
            if tables is not None:
                tables.remove()
            return self._run_with(settings, None)
        try:
            with tables.opened(self._lease.check) as ledger:
                return self._run_with(settings, ledger)
        except TablesUnavailable as err:
            _log.warning("gc: this run marks: %s", err)
        tables.remove()
        return self._run_with(settings, None)

    def _collect(
        self, gc_run: GcRun, index: FencedIndex, ledger: ReferenceCounts | None, *, by_change: bool
    ) -> GcReport:
        """Collect by the changes since the last run if that is enough, else mark."""
        before = None
        if ledger is not None and by_change and ledger.is_trusted:
            before = gc_run.run_by_change(index)
            if before.report is not None:
                return before.report
        report = gc_run.run(index)
        if ledger is not None:
            gc_run.confirm()
        if before is None:
            return report
        return replace(
            report,
            versions=report.versions + before.versions,
            freed_bytes=report.freed_bytes + before.freed_bytes,
            seconds=report.seconds + before.seconds,
        )

    def _run_with(self, settings: GcSettings, ledger: ReferenceCounts | None) -> GcReport:
        run = FleetRun(self._index.fence_scope, self._lease.fence)
        by_change = ledger is not None and is_current(ledger, run, self._objects)
        objects = FencedObjectStore(self._objects, self._lease.check)
        containers = self._ports.containers(objects)
        gc_run = GcRun(
            objects,
            containers,
            settings,
            self._ports.rewriter(containers),
            hooks=GcHooks(clock=self._clock, check=self._pauses.check),
            online=True,
            ledger=ledger,
        )
        index = FencedIndex(self._index, self._lease.check)
        check_clock(objects, list(containers.generations()), self._clock(), settings)
        if settings.sign_old_records:
            sign_old_marks(self._objects, self._index, self._lease.check)
        erasures = sweep_erased(self._objects, index, self._lease.check)
        freed_bytes = erasures.freed_bytes
        check_none_rolled_back(self._objects, record=True)
        has_erasures = isinstance(self._objects, EncryptedObjectStore) and bool(self._objects.keyring.erasures())
        by_change = by_change and not has_erasures and not settings.sign_old_records
        report = self._collect(gc_run, index, ledger, by_change=by_change)
        forgotten = 0
        if self._ports.apply_policies is not None:
            forgotten, marks_bytes = self._ports.apply_policies(objects, self._lease.check)
            freed_bytes -= marks_bytes
        waiting, refused = count_erasures(self._objects)
        rolled_back = record_heads(self._objects)
        if ledger is not None:
            record_run(ledger, run, self._objects)
        return replace(
            report,
            forgotten=forgotten,
            freed_bytes=report.freed_bytes + freed_bytes,
            rolled_back_keys=rolled_back,
            pending_erasures=waiting,
            finished_erasures=len(erasures.finished),
            remaining=self._ports.remaining(erasures.finished),
            refused_records=report.refused_records + refused,
        )

    def _check_clock(self) -> None:
        """Raise RetryableError if this machine's clock is wrong.

        By a wrong clock, data that another worker marked for deletion would be deleted before their grace is over.
        Workers may use pending deletes as bases until they are notified, and have half a grace to finish that.
        """
        skew_seconds = abs(self._lease.skew_seconds())
        if skew_seconds > CLOCK_SKEW_SECONDS_MAX:
            raise RetryableError(
                f"the clocks of this machine and of the lease's server are {skew_seconds:.0f} s apart (at most "
                f"{CLOCK_SKEW_SECONDS_MAX}): set the wrong one; no garbage is collected meanwhile"
            )

    def _is_due(self, settings: GcSettings) -> bool:
        if self._status.requested_run is not None:
            return True
        schedule = _schedule(self.last())
        if schedule is None:
            return bool(settings.interval_seconds)
        return schedule.is_due(self._clock(), settings.interval_seconds)

    def _run_record(self, settings: GcSettings, report: GcReport) -> dict[str, float | None]:
        """Return the end of a run and the times from which the next one follows."""
        now, before = self._clock(), _schedule(self.last())
        due_seconds = None if report.due is None else report.due.timestamp() - now
        after = (before or GcSchedule(-math.inf)).after(now, settings.interval_seconds, due_seconds)
        return {"at": now, "regular_at": after.regular, "freeing_at": after.freeing}

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._stopping.wait(wait_seconds):
            wait_seconds = min(POLL_SECONDS, self._ports.settings().interval_seconds or POLL_SECONDS)
            try:
                if self.run_once() is not None:
                    give_back_free()
            except NearkinError as err:
                wait_seconds = min(RETRY_SECONDS, self._ports.settings().interval_seconds or RETRY_SECONDS)
                if not self._stopping.is_set():
                    _log.warning("gc: run failed, retry in %.0f s: %s", wait_seconds, err)
            except Exception:
                wait_seconds = RETRY_SECONDS
                _log.exception("gc: run failed, retry in %.0f s", wait_seconds)
