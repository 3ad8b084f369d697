"""Rounds beside services. Invariant: one maintenance worker of a fleet works at a time, and stops before another may
begin.

    due, index whole, lease free -> lease -> a round, every effect behind the lease -> told in Redis -> lease let go

The lease is the one under which the index is rebuilt: what a rebuild publishes, no round forgets meanwhile.
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
from nearkin_maintenance.gc.gc_run import GcRun
from nearkin_maintenance.gc.rolled_back_keys import check_none_rolled_back, record_heads
from nearkin_maintenance.gc.schedule import GcSchedule
from nearkin_maintenance.gc.tombstone_signing import sign_old_marks
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.crypto.erasure_records import Erasure
from nearkin_shared.errors import GcPaused, NearkinError, RetryableError
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.gc_status import GcStatusStore
from nearkin_shared.index.redis.lease import LEASE_SECONDS, Lease
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.fenced import FencedObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.results import GcReport, RemainingCopy
from nearkin_shared.results_json import gc_json
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import U32
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.memory import give_back_free

POLL_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""After a round that failed, unless the interval is shorter."""
STOP_SECONDS = 60.0
_log = logging.getLogger("nearkin.maintenance")


class FencedIndex:
    """What a round tells the index, as long as the lease is held."""

    def __init__(self, index: RedisIndex, check: Callable[[], None]) -> None:
        self._index = index
        self._check = check

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Let go of entries. Raises LeaseLost."""
        self._check()
        self._index.withdraw(chunks, segments, containers, looked_up)

    def renew(self, summary: ContainerSummary) -> None:
        """Tell of a container that was written anew. Raises LeaseLost."""
        self._check()
        self._index.renew(summary)

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation. Raises LeaseLost."""
        self._check()
        return self._index.advance_generation(at_least)

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog. Raises LeaseLost."""
        self._check()
        self._index.collect_many(versions)


def _schedule(last: Mapping[str, Any] | None) -> GcSchedule | None:
    if last is None:
        return None
    regular = last.get("regular_at", last.get("at", 0))  # one that failed first has told neither
    return GcSchedule(float(regular), None if last.get("freeing_at") is None else float(last["freeing_at"]))


class GcWorker:
    """A thread that does a round every `gc.interval_seconds`, and one more once what that condemned is due.

    Counted over all maintenance workers and their restarts.
    """

    def __init__(
        self,
        index: RedisIndex,
        objects: ObjectStore,
        settings: Callable[[], GcSettings],
        containers: Callable[[ObjectStore], ContainerStore],
        rewriter: Callable[[ContainerStore], Rewriter],
        *,
        forgetting: Callable[[ObjectStore, Callable[[], None]], tuple[int, int]] | None = None,
        remaining: Callable[[Sequence[Erasure]], tuple[RemainingCopy, ...]] = lambda finished: (),
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`settings` are those in force; `containers` and `rewriter` make what works over an object store.

        `forgetting` deletes what retention's policies do not keep, over an object store, asking before each index call;
        it returns how many versions, and the bytes of their marks. `remaining` returns the copies that erasures do not
        reach which a run completed.
        """
        self._remaining = remaining
        self._forgetting = forgetting
        self._index = index
        self._objects = objects
        self._settings = settings
        self._containers = containers
        self._rewriter = rewriter
        self._lease = Lease(index, lease_seconds)
        self._clock = clock
        self._told = GcStatusStore(index)
        self._pauses = GcPauseFlag(objects, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-gc", daemon=True)

    def start(self) -> GcWorker:
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a round that is at work ends before its next effect, and the next one does the rest."""
        self._stopping.set()
        self._lease.give_up()
        self._thread.join(STOP_SECONDS)

    def last(self) -> dict[str, Any] | None:
        """Return what was told of the last round, by whichever maintenance; None where there was none."""
        return self._told.last()

    def run_once(self) -> GcReport | None:
        """Do a round if one is due or asked for, none is paused, the index is whole and nobody else works.

        Raises what the round does.

        Returns None where none was done.
        """
        settings = self._settings()
        if not self._is_due(settings) or self._pauses.read() is not None:
            return None
        if self._index.check() or not self._lease.take():
            return None
        with self._lease:
            if not self._is_due(settings):  # another did it meanwhile
                return None
            self._check_clock()
            asked = self._told.requested_run
            try:
                report = self._run_gc(settings)
            except GcPaused:
                _log.warning("gc: paused in the middle of a round")
                return None
            except Exception as err:
                metrics.count_collected(None)
                with suppress(NearkinError):
                    self._told.record_failure(self._clock(), str(err))
                raise
            metrics.count_collected(report)
            self._lease.check()
            self._told.record_run({**self._run_record(settings, report), **gc_json(report)}, asked)
            failpoint("round.told")
        _log.warning(
            "gc: %d bytes freed, %d containers removed, %d written anew, %d condemned, %.1f s",
            report.freed_bytes,
            report.containers_deleted,
            report.containers_rewritten,
            report.pending_delete_containers,
            report.seconds,
        )
        return report

    def _run_gc(self, settings: GcSettings) -> GcReport:
        objects = FencedObjectStore(self._objects, self._lease.check)
        containers = self._containers(objects)
        collector = GcRun(
            containers,
            ManifestStore(objects),
            PendingDeleteStore(objects),
            settings,
            self._rewriter(containers),
            clock=self._clock,
            online=True,
            go_on=self._pauses.check,
        )
        index = FencedIndex(self._index, self._lease.check)
        check_clock(objects, list(containers.generations()), self._clock(), settings)
        if settings.sign_old_records:
            sign_old_marks(self._objects, self._index, self._lease.check)
        swept = sweep_erased(self._objects, index, self._lease.check)
        if isinstance(self._objects, EncryptedObjectStore):
            self._objects.confirm_swept()
        freed_bytes = swept.freed_bytes
        check_none_rolled_back(self._objects)
        report = collector.run(index)
        forgotten = 0
        if self._forgetting is not None:
            forgotten, marks_bytes = self._forgetting(objects, self._lease.check)
            freed_bytes -= marks_bytes
        waiting, refused = count_erasures(self._objects)
        rolled_back = record_heads(self._objects)
        return replace(
            report,
            forgotten=forgotten,
            freed_bytes=report.freed_bytes + freed_bytes,
            rolled_back_keys=rolled_back,
            pending_erasures=waiting,
            finished_erasures=len(swept.finished),
            remaining=self._remaining(swept.finished),
            refused_records=report.refused_records + refused,
        )

    def _check_clock(self) -> None:
        """Refuse to work by a clock that is wrong: what another maintenance condemned would go before its grace is
        over.

        Workers lean on what is condemned until they hear of it, and are given half a grace to be done with that.
        """
        skew_seconds = abs(self._lease.skew_seconds())
        if skew_seconds > CLOCK_SKEW_SECONDS_MAX:
            raise RetryableError(
                f"this machine's clock and Redis' are {skew_seconds:.0f} s apart (at most {CLOCK_SKEW_SECONDS_MAX}): "
                "set the wrong one; no garbage is collected meanwhile"
            )

    def _is_due(self, settings: GcSettings) -> bool:
        if self._told.requested_run is not None:
            return True
        schedule = _schedule(self.last())
        if schedule is None:
            return bool(settings.interval_seconds)
        return schedule.is_due(self._clock(), settings.interval_seconds)

    def _run_record(self, settings: GcSettings, report: GcReport) -> dict[str, float | None]:
        """Return when a round ended, and what whoever looks for the next one has to know."""
        now, before = self._clock(), _schedule(self.last())
        due_seconds = None if report.due is None else report.due.timestamp() - now
        after = (before or GcSchedule(-math.inf)).after(now, settings.interval_seconds, due_seconds)
        return {"at": now, "regular_at": after.regular, "freeing_at": after.freeing}

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._stopping.wait(wait_seconds):
            wait_seconds = min(POLL_SECONDS, self._settings().interval_seconds or POLL_SECONDS)
            try:
                if self.run_once() is not None:
                    give_back_free()
            except NearkinError as err:
                wait_seconds = min(RETRY_SECONDS, self._settings().interval_seconds or RETRY_SECONDS)
                if not self._stopping.is_set():
                    _log.warning("gc: the round did not end, next try in %.0f s: %s", wait_seconds, err)
            except Exception:
                wait_seconds = RETRY_SECONDS
                _log.exception("gc: the round did not end, next try in %.0f s", wait_seconds)
