"""Check the dependencies of a worker.

The work waits up to a minute for a dependency and retries; a probe that did so would not answer in time.

Invariant: a check is quick and has connections of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import SHARDS
from nearkin_shared.errors import RetryableError, StoreUnavailable
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.kafka.clients import connection, topic, unavailable
from nearkin_shared.kafka.fleet_store import shards_of
from nearkin_shared.objectstore.bucket_limits import RequestLimits
from nearkin_shared.objectstore.factory import open_objects, read_descriptor
from nearkin_shared.observability.readiness import Check
from nearkin_shared.storage import descriptor

CHECK_SECONDS = 3
INDEX_SHARDS = "index shards"
INDEX_CHECKS = ("redis", INDEX_SHARDS)
"""Names of the checks of an index, of which a service has one."""

Made = TypeVar("Made")


class _Kept(Generic[Made]):
    """A client, made at the first check and kept."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: Made | None = None

    def __call__(self) -> Made:
        if self._made is None:
            self._made = self._make()
        return self._made


def _quick_index(settings: Settings) -> RedisIndex:
    return RedisIndex(settings.redis, timeout_seconds=CHECK_SECONDS, retries=0)


def redis_memory_check(settings: Settings) -> Check:
    """Return a check that fails if Redis may evict entries or is full.

    It passes if Redis is unreachable: a gateway accepts uploads then, which wait in Kafka.
    """
    redis = _Kept(lambda: _quick_index(settings))

    def has_no_memory_fault() -> None:
        try:
            fault = redis().server.find_memory_fault()
        except RetryableError:
            return
        if fault is not None:
            raise StoreUnavailable(fault)

    return has_no_memory_fault


def gateway_checks(settings: Settings) -> dict[str, Check]:
    """Return the checks of the index on which a gateway's readiness depends.

    It needs no shards: it accepts uploads without them, which wait in Kafka.
    """
    return {} if settings.index.backend == SHARDS else {"redis": redis_memory_check(settings)}


def _shards_check(settings: Settings) -> Check:
    """Return a check that fails while an index shard is away or not complete."""

    def connect() -> ShardedIndex:
        return shards_of(settings, read_descriptor(settings), timeout_seconds=CHECK_SECONDS, retries=0)

    index = _Kept(connect)

    def shards_are_complete() -> None:
        if index().check():
            raise StoreUnavailable("index shards: one is not complete yet")

    return shards_are_complete


def _redis_check(settings: Settings) -> Check:
    redis = _Kept(lambda: _quick_index(settings))

    def redis_answers() -> None:
        redis().check()
        redis().server.check_memory()

    return redis_answers


def checks_of(settings: Settings) -> dict[str, Check]:
    """Return the checks of Kafka, index and object store, each within some seconds."""
    limits = RequestLimits(connect_seconds=CHECK_SECONDS, request_seconds=CHECK_SECONDS, retries=0)
    admin = _Kept(lambda: AdminClient(connection(settings, "nearkin-check")))
    objects = _Kept(lambda: open_objects(settings, limits=limits))

    def kafka_answers() -> None:
        try:
            admin().list_topics(topic(settings, "config"), timeout=float(CHECK_SECONDS))
        except KafkaException as err:
            raise unavailable(settings, err) from err

    def objects_answer() -> None:
        objects().size_bytes(descriptor.NAME)

    has_shards = settings.index.backend == SHARDS
    index = {INDEX_SHARDS: _shards_check(settings)} if has_shards else {"redis": _redis_check(settings)}
    return {"kafka": kafka_answers, **index, "object store": objects_answer}
