"""Rounds beside services. Invariant: one janitor of a fleet works at a time, and stops before another may begin.

    due, index whole, lease free -> lease -> a round, every effect behind the lease -> told in Redis -> lease let go

The lease is the one under which the index is rebuilt: what a rebuild publishes, no round forgets meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nearkin import metrics
from nearkin.config import GcSettings
from nearkin.errors import NearkinError
from nearkin.index.protocols import Collected, ContainerSummary
from nearkin.index.redis import RedisIndex
from nearkin.index.redis.lease import LEASE_SECONDS, Lease
from nearkin.records import U32, GcReport
from nearkin.store.condemned import CondemnedStore
from nearkin.store.containers import ContainerStore
from nearkin.store.fenced import FencedObjects
from nearkin.store.manifests import ManifestStore
from nearkin.store.objects import ObjectStore
from nearkin_janitor.collect import Collector
from nearkin_janitor.rewrite import Rewriter

POLL_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""After a round that failed, unless the interval is shorter."""
STOP_SECONDS = 60.0
_log = logging.getLogger("nearkin.janitor")


class FencedIndex:
    """What a round tells the index, as long as the lease is held."""

    def __init__(self, index: RedisIndex, check: Callable[[], None]) -> None:
        self._index = index
        self._check = check

    def forget(
        self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32], containers: Collection[int]
    ) -> None:
        """Let go of entries. Raises LeaseOver."""
        self._check()
        self._index.forget(chunks, segments, containers)

    def renew(self, summary: ContainerSummary) -> None:
        """Tell of a container that was written anew. Raises LeaseOver."""
        self._check()
        self._index.renew(summary)

    def collect_many(self, versions: Sequence[Collected]) -> None:
        """Take versions out of the catalog. Raises LeaseOver."""
        self._check()
        self._index.collect_many(versions)


class Rounds:
    """A thread that does a round every `gc.interval_seconds`, counted over all janitors and their restarts."""

    def __init__(
        self,
        index: RedisIndex,
        objects: ObjectStore,
        settings: Callable[[], GcSettings],
        containers: Callable[[ObjectStore], ContainerStore],
        rewriter: Callable[[ContainerStore], Rewriter],
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`settings` are those in force; `containers` and `rewriter` make what works over an object store."""
        self._index = index
        self._objects = objects
        self._settings = settings
        self._containers = containers
        self._rewriter = rewriter
        self._lease = Lease(index, lease_seconds)
        self._clock = clock
        self._told = f"{index.prefix}:{{m}}:gc"
        self._asked = f"{index.prefix}:{{m}}:gc-ask"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-gc", daemon=True)

    def start(self) -> Rounds:
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a round that is at work ends before its next effect, and the next one does the rest."""
        self._stopping.set()
        self._lease.give_up()
        self._thread.join(STOP_SECONDS)

    def last(self) -> dict[str, Any] | None:
        """Return what was told of the last round, by whichever janitor; None where there was none."""
        told = self._index.server.one(("GET", self._told))
        return None if told is None else dict(json.loads(told))

    def run_once(self) -> GcReport | None:
        """Do a round if one is due or asked for, the index is whole and nobody else works. Raises what the round does.

        Returns None where none was done.
        """
        settings = self._settings()
        if not self._is_due(settings) or self._index.check() or not self._lease.take():
            return None
        with self._lease:
            if not self._is_due(settings):  # another did it meanwhile
                return None
            try:
                report = self._round(settings)
            except Exception:
                metrics.count_collected(None)
                raise
            metrics.count_collected(report)
            told = {"at": self._clock(), **{name: value for name, value in asdict(report).items() if name != "due"}}
            self._lease.check()
            self._index.server.run([("SET", self._told, json.dumps(told)), ("DEL", self._asked)])
        _log.warning(
            "gc: %d bytes freed, %d containers removed, %d written anew, %d condemned, %.1f s",
            report.freed_bytes,
            report.containers_deleted,
            report.containers_rewritten,
            report.condemned_containers,
            report.seconds,
        )
        return report

    def _round(self, settings: GcSettings) -> GcReport:
        objects = FencedObjects(self._objects, self._lease.check)
        containers = self._containers(objects)
        collector = Collector(
            containers,
            ManifestStore(objects),
            CondemnedStore(objects),
            settings,
            self._rewriter(containers),
            clock=self._clock,
            online=True,
        )
        return collector.run(FencedIndex(self._index, self._lease.check))

    def _is_due(self, settings: GcSettings) -> bool:
        if self._index.server.one(("EXISTS", self._asked)):
            return True
        last = self.last()
        interval = settings.interval_seconds
        return bool(interval) and (last is None or self._clock() - float(last["at"]) >= interval)

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._stopping.wait(wait_seconds):
            wait_seconds = min(POLL_SECONDS, self._settings().interval_seconds or POLL_SECONDS)
            try:
                self.run_once()
            except NearkinError as err:
                wait_seconds = min(RETRY_SECONDS, self._settings().interval_seconds or RETRY_SECONDS)
                if not self._stopping.is_set():
                    _log.warning("gc: the round did not end, next try in %.0f s: %s", wait_seconds, err)
            except Exception:
                wait_seconds = RETRY_SECONDS
                _log.exception("gc: the round did not end, next try in %.0f s", wait_seconds)
