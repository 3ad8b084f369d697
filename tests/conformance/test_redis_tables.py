"""The scripts of a table in Redis against a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, Table
from nearkin_shared.index.redis.scripts import SOURCES
from tests.support.servers.redis_server import redis_server

KEY = "partition"


class TableClient:
    """One partition, used through its scripts."""

    def __init__(self, client: redis.Redis, table: Table, bucket_entries: int) -> None:
        self.client = client
        self.table = table
        self.sizes = (table.key_bytes, table.width, bucket_entries)
        self.scripts = {name: client.register_script(SOURCES[name]) for name in ("insert", "find", "remove")}

    def insert(self, entries: list[bytes]) -> int:
        """Add entries and return the number added."""
        return int(self.scripts["insert"]([KEY], [b"".join(entries), *self.sizes, 9]))

    def remove(self, entries: list[bytes]) -> int:
        """Remove entries and return the number removed."""
        return -int(self.scripts["remove"]([KEY], [b"".join(entries), *self.sizes]))

    def find(self, keys: list[bytes]) -> list[bytes]:
        """Return the value of each key, zeros for a missing one."""
        width = self.table.value_bytes
        values: bytes = self.scripts["find"]([KEY], [b"".join(keys), *self.sizes, 0, len(keys)])
        return [values[at : at + width] for at in range(0, len(values), width)]

    @property
    def buckets(self) -> int:
        """Return the number of buckets."""
        level, split, _ = map(int, self.client.hget(KEY, "").split())  # type: ignore[union-attr]
        return 2**level + split


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.hset(KEY, mapping={b"": "0 0 0", b"g": 0})
        yield client


def entries_of(random: np.random.Generator, table: Table, count: int, letters: int) -> list[bytes]:
    """Return entries of which each byte is one of `letters`: few let keys occur within and across entries."""
    packed = random.integers(0, letters, (count, table.width), dtype=np.uint8).tobytes()
    return [packed[at : at + table.width] for at in range(0, len(packed), table.width)]


@pytest.mark.parametrize("letters", [2, 3, 256])
@pytest.mark.parametrize("table", [CHUNKS, FEATURES], ids=["chunks", "features"])
def test_table_with_similar_keys_equals_a_dictionary(client: redis.Redis, table: Table, letters: int) -> None:
    """Inserts and removals in turn: every key has its first value, and the count of entries is exact."""
    used, random = TableClient(client, table, 4), np.random.default_rng(letters)
    expected: dict[bytes, bytes] = {}
    for _ in range(30):
        added = entries_of(random, table, 40, letters)
        before = len(expected)
        for entry in added:
            expected.setdefault(entry[: table.key_bytes], entry[table.key_bytes :])
        assert used.insert(added) == len(expected) - before
        chosen = [key for key in expected if random.random() < 0.2]
        stale = entries_of(random, table, 10, letters)
        removed = [key + expected[key] for key in chosen] + [
            entry for entry in stale if expected.get(entry[: table.key_bytes]) != entry[table.key_bytes :]
        ]
        assert used.remove(removed) == len(chosen)
        for key in chosen:
            del expected[key]
        looked_up = [*expected, *(entry[: table.key_bytes] for entry in stale)]
        assert used.find(looked_up) == [expected.get(key, bytes(table.value_bytes)) for key in looked_up]
    assert client.hget(KEY, "").split()[2] == str(len(expected)).encode()  # type: ignore[union-attr]
    assert used.buckets >= len(expected) / 4
