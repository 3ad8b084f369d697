# size: the pools of all routes
"""Provide a thread pool for each kind of blocking call.

Invariant: calls that wait for one unresponsive server occupy no thread that other work needs.

default executor   the object store: THREADS_MAX, set by the application
pools.hashing      digests of frames
pools.disk         local files: bodies in a spool
pools.control      requests to Kafka and Redis for a page or a command, and the sums of tenants with quotas
pools.edge         with `gateway.edge`: uploads are cut, and Redis is asked what the store lacks
probes             `nearkin_shared.observability.readiness`, one thread for each check
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WorkerPool:
    """A bounded number of threads for one kind of call; threads start as they are needed."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(threads_max, f"nearkin-gateway-{name}")

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """Return what `function` returns, called on a thread with this task's context.

        A request that outlives the pool is served by the event loop's own threads, which end with the loop.
        """
        call = partial(copy_context().run, partial(function, *args, **named))
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def close(self) -> None:
        """Finish the queued calls and end the threads."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)


class WorkerPools:
    """The pools of one gateway, which closes them when its application ends."""

    def __init__(self) -> None:
        self.hashing = WorkerPool("hash", 8)
        self.disk = WorkerPool("disk", 16)
        self.control = WorkerPool("control", 8)
        self.edge = WorkerPool("edge", 8)

    async def close(self) -> None:
        """Finish the queued calls and end the threads of all pools."""
        for pool in (self.hashing, self.disk, self.control, self.edge):
            await pool.close()
