"""Redis as an index: a real server, emptied before each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import ContainerDirectories
from nearkin_shared.index.redis import RedisIndex, catalog_encoding, redis_index, redis_removal
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.types import U32, ContainerId
from tests.support.conformance import IndexContract
from tests.support.conformance.collection import CollectionContract
from tests.support.conformance.index_contract import SKETCH, claims, of_rank
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


@pytest.fixture
def index(url: str) -> Iterator[RedisIndex]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
    yield index
    index.close()


@pytest.fixture
def read_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of partitions that the client has read since, one for each command."""
    found: list[str] = []
    run = RedisServer.run

    def recorded(self: RedisServer, commands: Sequence[Command]) -> list[Any]:
        found.extend(str(command[1]) for command in commands if command[0] in {"HGET", "HMGET", "HGETALL"})
        return run(self, commands)

    monkeypatch.setattr(RedisServer, "run", recorded)
    return found


def filled(number: int, count: int) -> ContainerEntries:
    """Return the entries of a container of `count` chunks with two super-features each."""
    return claims(
        ContainerId((1 << 40) + number),
        [f"{number} {i}" for i in range(count)],
        [f"s{number}", f"t{number}"],
        [[number * count + i + 1, 1 << 40 | number * count + i] for i in range(count)],
    )


def left(index: RedisIndex, entries: ContainerEntries) -> tuple[int, int]:
    """Return the number of chunks and of super-features of rank 0 that are found."""
    _, found = index.locate_chunks(entries.directory.chunks.names)
    _, alike = of_rank(index, SKETCH, 0, entries.super_features[SKETCH][1][:, 0])
    return int(found.sum()), int(alike.sum())


def test_withdraw_by_name_reads_no_bucket_of_chunks(index: RedisIndex, read_keys: list[str]) -> None:
    """The name gives partition and bucket of a chunk; super-features have to be searched."""
    made = [filled(number, 1000) for number in range(4)]
    index.publish_many(made)
    dead = int(made[1].directory.container)
    read_keys.clear()
    index.withdraw({dead: None}, {}, [dead], ContainerDirectories({dead: made[1].directory}.get))
    assert not [key for key in read_keys if "{c" in key]
    assert [key for key in read_keys if "{f" in key]
    assert [left(index, one) for one in made] == [(1000, 1000), (0, 0), (1000, 1000), (1000, 1000)]


def test_withdraw_of_named_chunks_in_several_batches(
    index: RedisIndex, read_keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch holds whole containers; the last is not full."""
    monkeypatch.setattr(redis_removal, "NAMES_A_BATCH", 300)
    made = {int(one.directory.container): one.directory for one in (filled(number, 200) for number in range(5))}
    index.publish_many([filled(number, 200) for number in range(5)])
    read_keys.clear()
    index.withdraw(dict.fromkeys(made), {}, [], ContainerDirectories(made.get))
    assert not [key for key in read_keys if "{c" in key]
    assert not any(index.entries().values())


@pytest.mark.parametrize("kept", [0, 2, 3], ids=["lost", "shorter", "gap"])
def test_chunks_without_a_name_are_found_by_number(index: RedisIndex, kept: int) -> None:
    """The directory is lost, or a later generation lacks the last chunk or one before it."""
    entries = filled(1, 4)
    index.publish(entries)
    table = entries.directory.chunks
    if kept == 2:
        table = replace(
            table,
            **{field: getattr(table, field)[:kept] for field in ("names", "lengths", "blocks", "positions", "encoded")},
        )
    else:
        table = replace(table, names=table.names.copy(), lengths=table.lengths.copy())
        table.names[1] = table.lengths[1] = 0
    rewritten = replace(entries.directory, chunks=table)
    dead = int(entries.directory.container)
    index.withdraw({dead: None}, {}, [dead], ContainerDirectories(lambda _: rewritten if kept else None))
    assert not any(index.entries().values())


def test_withdraw_by_name_is_of_one_tenant_alone(index: RedisIndex) -> None:
    """Tenants do not share names: the entries of the other one stay."""
    other = index.for_domain(bytes(range(16)))
    mine, theirs = filled(1, 300), filled(2, 300)
    theirs = replace(theirs, directory=replace(theirs.directory, domain=bytes(range(16))))
    index.publish_many([mine, theirs])
    directories = {int(one.directory.container): one.directory for one in (mine, theirs)}
    dead = int(theirs.directory.container)
    index.withdraw({dead: None}, {}, [dead], ContainerDirectories(directories.get))
    _, found = other.locate_chunks(theirs.directory.chunks.names)
    assert not found.any()
    assert left(index, mine) == (300, 300)


@pytest.mark.parametrize("is_named", [False, True])
def test_withdraw_100000_entries_keeps_concurrent_writes(
    url: str, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Only the entries to withdraw are removed while others are written."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    monkeypatch.setattr(redis_index, "PARTITIONS", 2)
    index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
    made = [filled(number, 4000) for number in range(10)]
    for one in made[:5]:
        index.publish(one)
    unwanted: dict[int, U32 | None] = {
        one.directory.container: np.arange(0, 4000, 2, dtype=np.uint32) for one in made[:3]
    }
    other = threading.Thread(target=lambda: [index.publish(one) for one in made[5:]])
    other.start()
    directories = {int(one.directory.container): one.directory for one in made}
    index.withdraw(unwanted, {}, (), ContainerDirectories(directories.get) if is_named else None)
    other.join()
    for number, one in enumerate(made):
        _, found = index.locate_chunks(one.directory.chunks.names)
        withdrawn = np.zeros(4000, np.bool_)
        withdrawn[::2] = number < 3
        assert np.array_equal(found, ~withdrawn)
    sizes = [index.server.one(("HGET", index.epochs.current.partition("c", p), "")) for p in range(2)]
    assert sum(int(size.split()[2]) for size in sizes) == 34_000
    index.close()
