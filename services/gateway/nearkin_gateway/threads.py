"""Threads for blocking calls. Invariant: calls that hang on one server hold no thread that other work needs.

default executor   the object store: THREADS_MAX, set by the application
HASHING            digests of frames
DISK               local files: bodies in a spool
CONTROL            what is asked of Kafka and Redis for a page or a command
probes             `nearkin.runners.readiness`, one thread for each check
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
        self._executor = ThreadPoolExecutor(threads_max, f"nearkin-gateway-{name}")

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """Return what `function` returns, called on a thread with this task's context."""
        call = partial(copy_context().run, partial(function, *args, **named))
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


HASHING = WorkerPool("hash", 8)
DISK = WorkerPool("disk", 16)
CONTROL = WorkerPool("control", 8)
