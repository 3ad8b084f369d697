"""Test a Redis that changes or fills while services run: readiness and metrics report it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as client

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.observability import metrics
from tests.support.servers.servers import Redis


@pytest.fixture
def index(redis: Redis) -> Iterator[RedisIndex]:
    settings = with_changes(Settings(), {"redis": {"url": redis.url, "prefix": "health"}})
    found = RedisIndex(settings.redis, b"")
    yield found
    found.close()
    with client.Redis.from_url(redis.url) as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", 0)


def test_policy_changed_at_runtime_is_reported(redis: Redis, index: RedisIndex) -> None:
    """A policy that may evict, set while services run, fails the check and shows as a metric."""
    index.server.check_memory()
    assert metrics.REDIS_EVICTS._value.get() == 0
    with client.Redis.from_url(redis.url) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnavailable, match="allkeys-lru"):
        index.server.check_memory()
    assert metrics.REDIS_EVICTS._value.get() == 1


def test_full_redis_is_reported(redis: Redis, index: RedisIndex) -> None:
    """Fail the check if Redis's maxmemory is used up; its fullness is a metric before that."""
    with client.Redis.from_url(redis.url) as admin:
        used = int(admin.info("memory")["used_memory"])
        admin.config_set("maxmemory", used * 4)
        index.server.check_memory()
        assert 0 < metrics.REDIS_FULLNESS._value.get() < 1
        admin.config_set("maxmemory", max(1, used // 2))
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        index.server.check_memory()
    assert metrics.REDIS_FULLNESS._value.get() >= 1
