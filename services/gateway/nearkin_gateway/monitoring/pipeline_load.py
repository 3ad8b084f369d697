"""Hold the estimate of how long a new upload waits for its commit.

Invariant: no request waits for Kafka. A caller receives the last estimate, and starts a reading where that is old.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_shared.errors import NearkinError

LOOK_SECONDS = 5.0
"""How often lag is read while uploads arrive: each reading asks Kafka some 25 questions."""
KNOWN_SECONDS = 60.0
"""An estimate older than this is not used: Kafka does not answer, and much may have changed."""
RETRY_SECONDS_MAX = 300
"""Longest `Retry-After`: an idle stage may run again by then."""
_log = logging.getLogger("nearkin.gateway")


def retry_seconds(wait_seconds: float | None, least_seconds: int) -> int:
    """Return the value of `Retry-After` for a wait; None: not known.

    At least `least_seconds`, at most RETRY_SECONDS_MAX.
    """
    if wait_seconds is None:
        return least_seconds
    return max(least_seconds, math.ceil(min(wait_seconds, RETRY_SECONDS_MAX)))


class PipelineLoad:
    """The last estimate of one gateway; for one event loop."""

    def __init__(self, read: Callable[[], float | None] | None, pool: WorkerPool) -> None:
        """`read` blocks on `pool` and returns the wait in seconds; None: there is no pipeline."""
        self._read, self._pool = read, pool
        self._seconds: float | None = None
        self._asked_at = self._known_at = -math.inf
        self._reading: asyncio.Task[None] | None = None

    @property
    def wait_seconds(self) -> float | None:
        """Return the estimated wait of a new upload, as last read; None: not known any more."""
        self.refresh()
        age_seconds = asyncio.get_running_loop().time() - self._known_at
        return self._seconds if age_seconds <= KNOWN_SECONDS else None

    def refresh(self) -> None:
        """Start to read the lag again if it is older than LOOK_SECONDS."""
        loop = asyncio.get_running_loop()
        if self._read is not None and self._reading is None and loop.time() - self._asked_at >= LOOK_SECONDS:
            self._asked_at = loop.time()
            self._reading = loop.create_task(self._refresh(self._read))

    def retry_seconds(self, least_seconds: int) -> int:
        """Return the value of `Retry-After` for what the pipeline delays."""
        return retry_seconds(self.wait_seconds, least_seconds)

    async def close(self) -> None:
        """Read no more."""
        self._read = None
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _refresh(self, read: Callable[[], float | None]) -> None:
        try:
            self._seconds = await self._pool.run(read)
            self._known_at = asyncio.get_running_loop().time()
        except NearkinError as err:
            self._seconds = None
            _log.warning("lag was not read: %s", err)
        except Exception:  # no caller waits for this task, so its error would be lost and the estimate kept
            self._seconds = None
            _log.exception("lag was not read")
        finally:
            self._reading = None
