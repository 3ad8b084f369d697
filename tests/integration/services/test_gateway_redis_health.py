"""The check of Redis's memory that the gateway's /readyz includes, on a real Redis."""

from __future__ import annotations

import pytest
import redis as client

from nearkin.config import Settings
from nearkin.config_layers import with_changes
from nearkin.errors import StoreUnavailable
from nearkin.runners.kafka.checking import redis_memory_check
from nearkin.testing.servers import Redis


def test_redis_memory_check_follows_the_server(redis: Redis) -> None:
    """F.19: the gateway's check fails while Redis may evict or is full, and passes again afterwards."""
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


def test_redis_memory_check_without_redis_passes() -> None:
    """F.19: uploads are accepted while Redis is away, so that alone does not make a gateway unready."""
    redis_memory_check(with_changes(Settings(), {"redis": {"url": "redis://127.0.0.1:9"}}))()
