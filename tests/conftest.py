"""Provide real servers for the tests of the services.

Invariant: the names that a test writes are used by no other test.

kafka.bootstrap   one Kafka for the whole run, shared by the workers of pytest-xdist; start your own to break it
redis.url         one Redis for each worker; a test that breaks it restarts it, or starts its own s3.endpoint
one S3 server for each worker; the same holds topic_prefix, key_prefix, bucket     new for each test
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from nearkin_shared.objectstore.s3 import S3ObjectStore
from tests.support.servers.servers import S3, MissingTool, Redis, shared_kafka

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores SIGINT: child processes would inherit that and never react to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The time that an example takes depends on the machine's load: a deadline of 200 ms failed a test of arithmetic.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


SOAK_TESTS = Path(__file__).with_name("soak_tests.txt")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `soak_tests.txt`.

    Raises UsageError for a test that a whole collection does not have; workers of pytest-xdist, which could not report
    it, leave that to `make check`.
    """
    lines = SOAK_TESTS.read_text(encoding="utf-8").splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.soak)
    is_whole = (
        not hasattr(config, "workerinput")
        and config.args == config.getini("testpaths")
        and not config.option.ignore
        and not config.option.keyword
    )
    absent = listed - {item.nodeid for item in items}
    if is_whole and absent:
        raise pytest.UsageError(f"{SOAK_TESTS.name}: no such test: {min(absent)}; correct its name or remove the line")


@contextmanager
def needed() -> Iterator[None]:
    """Skip the test if a program is not installed.

    In CI that is a failure, as the run would otherwise pass without the servers.
    """
    try:
        yield
    except MissingTool as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@pytest.fixture(autouse=True)
def log_levels_restored() -> Iterator[None]:
    """Restore the levels of all loggers: commands and workers that a test runs in its process set them."""
    known = logging.Logger.manager.loggerDict.values()
    loggers = [logging.getLogger(), *(entry for entry in known if isinstance(entry, logging.Logger))]
    before = [(logger, logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    logging.disable(logging.NOTSET)
    for logger, level, propagate, disabled in before:
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


@pytest.fixture(scope="session")
def need() -> Callable[[Callable[[], Any]], Any]:
    """Return `need`: `need(make)` returns the result of `make()`, or skips (in CI: fails) if a program is missing."""

    def call(make: Callable[[], Any]) -> Any:
        with needed():
            return make()

    return call


@dataclass(frozen=True)
class SharedKafka:
    bootstrap: str


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedKafka]:
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    run = tmp_path_factory.getbasetemp().parent if in_worker else tmp_path_factory.getbasetemp()
    owner = os.getppid() if in_worker else os.getpid()
    with needed(), shared_kafka(run / "kafka", owner) as bootstrap:
        yield SharedKafka(bootstrap)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with needed(), Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with needed(), S3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with needed():
        server = S3(tmp_path_factory.mktemp("versitygw"), program="versitygw")
    with server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with S3(tmp_path_factory.mktemp("moto"), program="moto") as server:
        yield server


@pytest.fixture
def topic_prefix() -> str:
    return f"t{secrets.token_hex(6)}."


@pytest.fixture
def key_prefix() -> str:
    return f"k{secrets.token_hex(6)}:"


@pytest.fixture
def s3_objects(versitygw: S3) -> S3ObjectStore:
    """Objects under a prefix of a bucket of their own."""
    return S3ObjectStore(versitygw.settings(versitygw.make_bucket(f"b{secrets.token_hex(6)}"), "some/prefix"))


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.make_bucket(f"b{secrets.token_hex(6)}")
