"""The check of Redis's memory that the gateway's /readyz includes, on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as client

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.clients import create_topics
from nearkin_shared.kafka.readiness_checks import redis_memory_check
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.servers import Redis


def test_redis_memory_check_follows_the_server(redis: Redis) -> None:
    """The gateway's check fails while Redis may evict or is full, and passes again afterwards."""
    check = redis_memory_check(with_changes(Settings(), {"redis": {"url": redis.url, "prefix": "ready"}}))
    check()
    with client.Redis.from_url(redis.url) as admin:
        try:
            admin.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(StoreUnavailable, match="allkeys-lru"):
                check()
            admin.config_set("maxmemory-policy", "noeviction")
            check()
            admin.config_set("maxmemory", max(1, int(admin.info("memory")["used_memory"]) // 2))
            with pytest.raises(StoreUnavailable, match="maxmemory"):
                check()
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", 0)
    check()


@pytest.fixture
def gateway(kafka: Any, redis: Redis, topic_prefix: str, key_prefix: str, tmp_path: Path) -> Iterator[RunningGateway]:
    """Return a gateway in front of Kafka and Redis; no worker is needed to be ready."""
    changes = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 1},
        "redis": {"url": redis.url, "prefix": key_prefix.rstrip(":")},
        "object_store": {"url": str(tmp_path / "objects")},
        "storage": {"create": True},
        "gateway": {"port": 0},
    }
    settings = with_changes(Settings(), changes)
    create_topics(settings)
    with running(settings) as found:
        yield found


def test_readyz_follows_the_memory_of_redis(gateway: RunningGateway, redis: Redis) -> None:
    """Return 503 from /readyz and name Redis while it may evict or is full, then 200 again."""
    with gateway.client() as asked, client.Redis.from_url(redis.url) as admin:

        def reason() -> str:
            answer = asked.get("/readyz")
            assert answer.status_code in (200, 503), answer.text
            return "" if answer.status_code == 200 else answer.text

        until(lambda: reason() == "")
        try:
            admin.config_set("maxmemory-policy", "volatile-lru")
            until(lambda: "volatile-lru" in reason())
            admin.config_set("maxmemory-policy", "noeviction")
            until(lambda: reason() == "")
            admin.config_set("maxmemory", max(1, int(admin.info("memory")["used_memory"]) // 2))
            until(lambda: "maxmemory" in reason())
            assert "redis" in reason()
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", 0)
        until(lambda: reason() == "")


def test_redis_memory_check_without_redis_passes() -> None:
    """Uploads are accepted while Redis is away, so that alone does not make a gateway unready."""
    redis_memory_check(with_changes(Settings(), {"redis": {"url": "redis://127.0.0.1:9"}}))()
