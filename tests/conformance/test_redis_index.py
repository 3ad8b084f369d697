"""Redis as an index: a real server, emptied before each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis import RedisIndex, catalog_encoding, redis_index
from nearkin_shared.types import U32, ContainerId
from tests.support.conformance import IndexContract
from tests.support.conformance.collection import CollectionContract
from tests.support.conformance.index_contract import claims
from tests.support.data import samples
from tests.support.servers.redis_server import redis_server


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


class TestRedisCollection(CollectionContract):
    @pytest.fixture
    def index(self, url: str) -> Iterator[RedisIndex]:
        with redis.Redis.from_url(url) as client:
            client.flushall()
        index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
        self.fill(index)
        yield index
        index.close()

    def spare_marks_bytes(self, index: RedisIndex) -> int:
        _, versions = index._home(index.epochs.current, "default")
        listed = {catalog_encoding.member_start(entry.key, entry.version) for entry in index.catalog("default")}
        noted = index.server.one(("HGETALL", f"{versions}:marks"))
        pairs = noted.items() if isinstance(noted, dict) else zip(noted[::2], noted[1::2], strict=True)
        return sum(int(listing.split()[1]) for start, listing in pairs if start not in listed)


def test_withdraw_100000_entries_keeps_concurrent_writes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the entries to withdraw are removed while others are written."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    monkeypatch.setattr(redis_index, "PARTITIONS", 2)
    index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
    filled = [
        claims(
            ContainerId(100 + number),
            [f"{number} {i}" for i in range(4000)],
            [f"s{number}", f"t{number}"],
            [[number * 4000 + i + 1, 1 << 40 | number * 4000 + i] for i in range(4000)],
        )
        for number in range(10)
    ]
    for one in filled[:5]:
        index.publish(one)
    unwanted: dict[int, U32 | None] = {
        one.directory.container: np.arange(0, 4000, 2, dtype=np.uint32) for one in filled[:3]
    }
    other = threading.Thread(target=lambda: [index.publish(one) for one in filled[5:]])
    other.start()
    index.withdraw(unwanted, {}, ())
    other.join()
    for number, one in enumerate(filled):
        _, found = index.locate_chunks(one.directory.chunks.names)
        withdrawn = np.zeros(4000, np.bool_)
        withdrawn[::2] = number < 3
        assert np.array_equal(found, ~withdrawn)
    sizes = [index.server.one(("HGET", index.epochs.current.partition("c", p), "")) for p in range(2)]
    assert sum(int(size.split()[2]) for size in sizes) == 34_000
    index.close()
