"""Redis as an index: a real server, emptied before each test."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import redis

from nearkin.config import RedisSettings
from nearkin.index.redis import RedisIndex
from nearkin.testing import samples
from nearkin.testing.conformance import IndexContract
from nearkin.testing.redis_server import redis_server


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


class TestRedisIndex(IndexContract):
    @pytest.fixture
    def index(self, url: str) -> Iterator[RedisIndex]:
        with redis.Redis.from_url(url) as client:
            client.flushall()
        index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
        yield index
        index.close()

    def counts(self, index: RedisIndex) -> dict[tuple[int, int], int]:
        found = {}
        for key, value in index.entries()["counts"].items():
            container, ordinal = struct.unpack("<QI", key)
            (found[container, ordinal],) = struct.unpack("<I", value)
        return found
