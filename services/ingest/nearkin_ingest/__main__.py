"""Run the ingest service: `python -m nearkin_ingest`.

settings -> Kafka's topics and the object store -> live settings -> one consumer, until SIGTERM or SIGINT

Invariant: at exit, every record in work is durable or left to the next consumer.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import click

from nearkin_ingest.consumer import IngestConsumer
from nearkin_ingest.frames import STAGE
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, ConfigError, NearkinError, NoStore, RetryableError
from nearkin_shared.kafka.clients import check_durability, create_topics
from nearkin_shared.kafka.consumer_loop import run_forever
from nearkin_shared.kafka.heartbeat import report
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator, authenticator_of
from nearkin_shared.kafka.readiness_checks import INDEX_CHECKS, checks_of
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.factory import open_objects, read_descriptor
from nearkin_shared.observability import log_setup, tracing
from nearkin_shared.observability.health import Monitor
from nearkin_shared.utils.garbage_collection import exempt_started_objects

_log = logging.getLogger("nearkin.ingest")

CONNECT_SECONDS_MAX = 120.0
STOP_SECONDS = 60.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file of settings; watched.")
@click.option(
    "--worker",
    default=socket.gethostname,
    help="This worker's name, its own in the fleet and the same after a restart. Default: the host's name.",
)
@click.option("--verbose", is_flag=True, help="Log more.")
def main(config_file: Path | None, worker: str, verbose: bool) -> None:
    """Store the records of `ingest.topics` as blobs, until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        settings = load(config_file)[0]
        log_setup.start(settings, logging.INFO if verbose else logging.WARNING)
        tracing.start(settings, STAGE, worker)
        try:
            run(settings, config_file, worker, stop)
        finally:
            tracing.stop()
    except NearkinError as err:
        if stop.is_set() and isinstance(err, RetryableError):
            return  # stopped while it waited for a server: no failure
        click.echo(f"nearkin: {err}", err=True)
        sys.exit(2 if isinstance(err, BadInput) else 1)


def run(settings: Settings, config_file: Path | None, worker: str, stop: threading.Event) -> None:
    """Run a consumer until `stop`.

    It pauses while `service.read_only` or `service.paused` is set.
    """
    if not settings.ingest.topics:
        raise ConfigError('ingest.topics: is empty; name at least one, such as ["backups", "dumps=team-a"]')
    monitor = Monitor(settings.monitor)
    monitor.start()
    objects, authenticator = _connect(settings, stop)
    hot = LiveConfig(settings, config_file, authenticator)
    hot.start()
    reporting = (settings, hot, authenticator, STAGE, worker, stop)
    reporter = threading.Thread(target=report, args=reporting, name="nearkin-report", daemon=True)
    reporter.start()
    _log.warning("%s %s: ready, revision %s, topics %s", STAGE, worker, hot.revision, ", ".join(settings.ingest.topics))
    pulse = monitor.pulse(STAGE)
    monitor.on_connect({name: check for name, check in checks_of(settings).items() if name not in INDEX_CHECKS})
    exempt_started_objects()
    try:
        run_forever(
            lambda: IngestConsumer(settings, objects, worker, authenticator, pulse.beat),
            stop,
            lambda: hot.settings.service.read_only or hot.settings.service.paused,
            STAGE,
        )
    finally:
        stop.set()
        monitor.stopping()
        hot.stop()
        reporter.join(STOP_SECONDS)
        monitor.stop()


def _connect(settings: Settings, stop: threading.Event) -> tuple[ObjectStore | None, EnvelopeAuthenticator]:
    """Return the object store, if records may name objects, and the message signer.

    Waits for servers that are not up yet, and for the pipeline's workers to create the store.

    Raises: NoStore; ConfigError for topics that may lose acknowledged messages.
    """
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            create_topics(settings)
            check_durability(settings)
            authenticator = authenticator_of(settings, read_descriptor(settings))
            return open_objects(settings) if settings.ingest.dataref_prefix is not None else None, authenticator
        except (RetryableError, NoStore) as err:
            if isinstance(err, NoStore) and not settings.storage.create:
                raise
            if stop.is_set() or time.monotonic() > deadline:
                raise
            _log.warning("%s: waiting: %s", STAGE, err)
            stop.wait(1.0)


if __name__ == "__main__":
    main()
