"""Check the dependencies of a process once for all callers.

Each check has one thread and runs at most once at a time, however many callers wait and however long it hangs.

Invariant: no caller waits longer than a deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from nearkin_shared.errors import NearkinError

VALID_SECONDS = 2.0
"""A result counts for so long after its check began to run."""
DEADLINE_SECONDS = 4.0
"""A check that runs for longer counts as failed; longer than the clients' own timeout of 3 s (`kafka.checking`)."""

Check = Callable[[], None]
"""Raises NearkinError where what it asks for is away."""


class Readiness:
    """Results of checks by name, shared by all callers."""

    def __init__(self, checks: Mapping[str, Check], deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._checks = dict(checks)
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, len(self._checks)), "nearkin-ready")
        self._runs: dict[str, tuple[float, Future[str | None]]] = {}

    def missing(self) -> dict[str, str]:
        """Return what is away, with the reason; blocks until the deadline at most."""
        pending, left_seconds = self._start()
        wait(pending, timeout=left_seconds)
        return self._results()

    async def missing_soon(self) -> dict[str, str]:
        """Return what `missing` does, without a thread of the caller's."""
        pending, left_seconds = self._start()
        if pending:
            await asyncio.wait([asyncio.wrap_future(run) for run in pending], timeout=left_seconds)
        return self._results()

    def close(self) -> None:
        """Start no more checks."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> tuple[Iterable[Future[str | None]], float]:
        """Begin the checks whose result is old; return those worth waiting for, and for how long."""
        with self._lock:
            now = time.monotonic()
            for name, check in self._checks.items():
                began, run = self._runs.get(name, (0.0, None))
                if run is None or (run.done() and now - began >= VALID_SECONDS):
                    self._runs[name] = now, self._pool.submit(_reason, check)
            left = [(began + self._deadline_seconds - now, run) for began, run in self._runs.values() if not run.done()]
        waiting = [(seconds, run) for seconds, run in left if seconds > 0]
        return [run for _, run in waiting], max((seconds for seconds, _ in waiting), default=0.0)

    def _results(self) -> dict[str, str]:
        found = {}
        for name, (began, run) in list(self._runs.items()):
            reason = run.result() if run.done() else f"no answer for {time.monotonic() - began:.0f} s"
            if reason is not None:
                found[name] = reason
        return found


def _reason(check: Check) -> str | None:
    try:
        check()
    except NearkinError as err:
        return str(err)
    return None
