"""Run the process of a worker.

    settings -> connections -> hot settings -> loops, until SIGTERM or SIGINT

Invariant: it ends only when its work is complete, or is left for the next owner.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NearkinError, RetryableError
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.kafka.commit_backlog import CommitBacklog
from nearkin_shared.kafka.consumer_loop import Handler, Loop, run_forever
from nearkin_shared.kafka.fleet_store import connect_fleet
from nearkin_shared.kafka.heartbeat import report
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator, authenticator_of
from nearkin_shared.kafka.readiness_checks import checks_of
from nearkin_shared.kafka.tenant_context import TenantContexts, tenant_contexts
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.observability import log_setup, tracing
from nearkin_shared.observability.health import Monitor
from nearkin_shared.storage import descriptor
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.garbage_collection import exempt_started_objects
from nearkin_shared.utils.signals import wait_for

_log = logging.getLogger("nearkin.worker")

CONNECT_SECONDS_MAX = 120.0
STOP_SECONDS = 60.0
REFUSED = 2
"""Exit code of a setting that is refused, as click's for one that no stage has to look at."""


@frozen
class Context:
    """The resources that a service's loops are made from."""

    settings: Settings
    hot: LiveConfig
    objects: ParityObjectStore
    found: descriptor.Descriptor
    index: FleetIndex
    worker: str
    monitor: Monitor
    authenticator: EnvelopeAuthenticator
    commits: CommitBacklog

    @property
    def secret(self) -> bytes:
        """Return the store's secret."""
        return bytes.fromhex(self.found.secret)

    def lanes(self) -> TenantContexts:
        """Return new tenant contexts: data in old ones may belong to another worker by now."""
        rounds, bits = GcStatusStore(self.index.state).state, self.found.fingerprint_bits
        return tenant_contexts(self.settings, self.objects, self.secret, bits, self.index.for_domain, rounds)

    def current(self) -> Settings:
        """Return the settings in force."""
        return self.hot.settings


@frozen
class WorkerPart:
    """One loop of a service: its consumer group, its topic, and how its handler is made."""

    service: str
    topic: str
    make: Callable[[Context], Handler]
    is_fed_in_memory: bool = False
    """The stage before is in the same process: only other workers send to the topic."""


def command(
    service: str, parts: Sequence[WorkerPart], background: Callable[[Context], Callable[[], None]] | None = None
) -> click.Command:
    """Return the command that runs a service's worker.

    `background` starts additional work and returns the function that stops it.
    """

    @click.command(help=f"Run a {service} worker: it takes messages from Kafka until SIGTERM, and then ends cleanly.")
    @worker_options
    def run(config_file: Path | None, worker: str, verbose: bool) -> None:
        settings = settings_of(config_file)
        run_process(service, parts, settings, config_file, worker, verbose=verbose, background=background)

    return run


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def worker_options(run: Decorated) -> Decorated:
    """Add the options that every worker's command has."""
    for option in (
        click.option("--verbose", is_flag=True, help="More detailed log."),
        click.option(
            "--worker",
            default=lambda: f"{socket.gethostname()}",
            help="This worker's name, its own in the fleet and the same after a restart. Default: the host's name.",
        ),
        click.option(
            "--config", "config_file", type=click.Path(path_type=Path), help="TOML file of settings; watched."
        ),
    ):
        run = option(run)
    return run


def settings_of(config_file: Path | None) -> Settings:
    """Return the settings of a worker's process. Raises click.UsageError."""
    try:
        return load(config_file)[0]
    except ConfigError as err:
        raise click.UsageError(str(err)) from err


def run_process(
    service: str,
    parts: Sequence[WorkerPart],
    settings: Settings,
    config_file: Path | None,
    worker: str,
    *,
    verbose: bool,
    background: Callable[[Context], Callable[[], None]] | None = None,
) -> NoReturn:
    """Run a worker with its log and its traces, and end the process. Raises click.UsageError."""
    log_setup.start(settings, logging.INFO if verbose else logging.WARNING)
    try:
        tracing.start(settings, service, worker)
    except ConfigError as err:
        raise click.UsageError(str(err)) from err
    code = run_worker(service, parts, settings, config_file, worker, background)
    tracing.stop()
    logging.shutdown()
    # All is committed and closed. But librdkafka's threads may still answer a request without a waiter, into
    # an interpreter that is being taken apart: a maintenance worker ended so with SIGSEGV, while Kafka was away.
    os._exit(code)


def run_worker(
    service: str,
    parts: Sequence[WorkerPart],
    settings: Settings,
    config_file: Path | None,
    worker: str,
    background: Callable[[Context], Callable[[], None]] | None,
) -> int:
    """Run until a signal; return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    monitor = Monitor(settings.monitor)
    try:
        monitor.start()
        context = _connect(service, settings, config_file, worker, stop, monitor)
        end_background = background(context) if background is not None and context is not None else None
    except NearkinError as err:
        _log.error("%s: %s", service, err)
        return REFUSED if isinstance(err, ConfigError) else 1
    if context is None:
        return 0
    failures: list[BaseException] = []
    threads = [_thread(context, part, stop, failures) for part in parts]
    reporting = (settings, context.hot, context.authenticator, service, worker, stop)
    reporter = threading.Thread(target=report, args=reporting, name="nearkin-report", daemon=True)
    reporter.start()
    monitor.on_connect(checks_of(settings))
    _log.warning("%s %s: ready, revision %s", service, worker, context.hot.revision)
    exempt_started_objects()
    wait_for(stop)
    monitor.stopping()
    for thread in threads:
        thread.join(STOP_SECONDS)
    if end_background is not None:
        end_background()
    context.hot.stop()
    reporter.join(STOP_SECONDS)
    monitor.stop()
    return exit_code(service, failures, alive=any(thread.is_alive() for thread in threads))


def exit_code(service: str, failures: Sequence[BaseException], *, alive: bool) -> int:
    """Log the failures of a worker's loops; return its exit code: 2 for a refused setting.

    `alive`: whether a loop did not end.
    """
    refused = [failure for failure in failures if isinstance(failure, ConfigError)]
    for failure in failures:
        _log.error("%s: %s", service, failure, exc_info=None if failure in refused else failure)
    if refused:
        return REFUSED
    return 1 if failures or alive else 0


def _connect(
    service: str,
    settings: Settings,
    config_file: Path | None,
    worker: str,
    stop: threading.Event,
    monitor: Monitor,
) -> Context | None:
    """Open all connections, waiting for servers. Raises NearkinError after a while."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while not stop.is_set():
        try:
            objects, found, index = connect_fleet(settings)
        except RetryableError as err:
            if time.monotonic() > deadline:
                raise
            _log.warning("%s: waiting: %s", service, err)
            stop.wait(1.0)
            continue
        authenticator = authenticator_of(settings, found)
        hot = LiveConfig(settings, config_file, authenticator)
        hot.start()
        return Context(settings, hot, objects, found, index, worker, monitor, authenticator, CommitBacklog())
    return None


def _thread(
    context: Context, part: WorkerPart, stop: threading.Event, failures: list[BaseException]
) -> threading.Thread:
    pulse = context.monitor.pulse(part.service)

    def make() -> Loop:
        worker = f"{part.service}-{context.worker}"
        handler = part.make(context)
        return Loop(
            context.settings,
            part.service,
            part.topic,
            worker,
            handler,
            pulse.beat,
            lambda: context.commits.is_long,
            is_fed_in_memory=part.is_fed_in_memory,
        )

    def run() -> None:
        try:
            run_forever(make, stop, lambda: context.current().service.paused, part.service)
        except BaseException as err:
            failures.append(err)
        finally:  # also where what was raised is no exception, as a client of C may do
            if not stop.is_set() and not failures:
                failures.append(RuntimeError(f"{part.service}: its thread ended unexpectedly"))
            stop.set()

    thread = threading.Thread(target=run, name=f"nearkin-{part.service}")
    thread.start()
    return thread
