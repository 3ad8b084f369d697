"""Test the rebuild of the Redis index from a real store by one of many processes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from nearkin import open_store
from nearkin.local.index_recovery import super_features_of
from nearkin.store import Store
from nearkin_maintenance import DomainOwners, KnownObjects, entries_of_container, rebuild_index
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.protocols import Index
from nearkin_shared.index.redis import RedisIndex, rebuild_in_background
from nearkin_shared.index.redis.background_rebuild import Rebuilder, RebuildSuperseded
from nearkin_shared.types import U8, U64, Bools, Locations
from tests.support.checks.waiting import until
from tests.support.conformance.index_contract import FIRST, chunk_names, first_claims, of_rank, rows
from tests.support.data import samples
from tests.support.data.stores import SMALL, settings
from tests.support.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Six versions of two keys, several containers, deltas and shared segments."""
    draw = random.Random(5)
    with open_store(tmp_path_factory.mktemp("store") / "s", settings=settings(SMALL), create=True) as store:
        data = bytearray(draw.randbytes(1_500_000))
        for version in range(6):
            for _ in range(15):
                at = draw.randrange(len(data) - 200)
                data[at : at + 100] = draw.randbytes(100)
            store.put(f"k{version % 2}", bytes(data))
        yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def connect(server: RedisServer, store: Store) -> RedisIndex:
    return RedisIndex(RedisSettings(url=server.url), store._fingerprinter.domain)


def fill(store: Store, index: Index, known: Collection[int] = ()) -> None:
    """Publish the store's containers and versions, less the known ones, as a service does."""
    tenants = DomainOwners(store._fingerprinters, ["default"], store._manifests)
    rebuild_index(store._containers, store._manifests, index, tenants, super_features_of, known=KnownObjects(known))


def assert_same_answers(store: Store, one: Index, other: Index) -> None:
    """Every chunk, segment and super-feature of every container, and the catalog."""
    ids = sorted(container for container, _ in store._containers.ids())
    assert len(ids) > 4
    for container in ids:
        claims = entries_of_container(
            store._containers.directory(container), store._containers, store._fingerprinter, super_features_of, ids
        )
        queries = [partial(_chunks, claims.directory.chunks.names), partial(_segments, claims.segment_ids)]
        for sketch, (_, found) in claims.super_features.items():
            queries += [partial(_rank, sketch, rank, found[:, rank]) for rank in range(found.shape[1])]
        for ask in queries:
            assert rows(ask(one)) == rows(ask(other))
            assert any(rows(ask(one)))
    assert list(one.catalog("default")) == list(other.catalog("default"))
    assert list(one.containers()) == list(other.containers())
    assert one.versions_of("default", "k1") == [1, 2, 3]


def _chunks(names: U8, index: Index) -> tuple[Locations, Bools]:
    return index.locate_chunks(names)


def _segments(names: U8, index: Index) -> tuple[Locations, Bools]:
    return index.locate_segments(names)


def _rank(sketch: str, rank: int, found: U64, index: Index) -> tuple[Locations, Bools]:
    return of_rank(index, sketch, rank, found)


def test_rebuild_equals_the_lmdb_index(store: Store, server: RedisServer, tmp_path: Path) -> None:
    lmdb = LmdbIndex(tmp_path / "lmdb", store._fingerprinter.domain, 1 << 28)
    fill(store, lmdb)
    index = connect(server, store)
    assert index.needs_rebuild
    rebuilder = rebuild_in_background(index, partial(fill, store), poll_seconds=0.05)
    until(lambda: not index.needs_rebuild)
    assert_same_answers(store, lmdb, index)
    first = index.entries()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert not index.locate_chunks(np.zeros((1, 32), np.uint8))[1].any()
    assert index.needs_rebuild
    until(lambda: not index.needs_rebuild)
    until(lambda: rebuilder.rebuilt == 2)
    rebuilder.stop()
    assert index.entries() == first
    assert_same_answers(store, lmdb, index)
    index.close()
    lmdb.close()


def test_publishing_continues_during_a_rebuild(store: Store, server: RedisServer) -> None:
    index, live = connect(server, store), connect(server, store)
    began, released = threading.Event(), threading.Event()

    def slow(target: Index) -> None:
        began.set()
        assert released.wait(30)
        fill(store, target)

    rebuilder = rebuild_in_background(index, slow, poll_seconds=0.05)
    assert began.wait(30)
    tenant = live.for_domain(samples.DOMAIN)
    tenant.publish(first_claims())
    assert rows(tenant.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
    released.set()
    until(lambda: rebuilder.rebuilt == 1)
    rebuilder.stop()
    assert not live.check()
    assert rows(tenant.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
    assert rows(live.locate_chunks(chunk_names("a"))) == [None]  # another domain's, whatever its name
    index.close()
    live.close()


def test_of_many_rebuilders_one_rebuilds(store: Store, server: RedisServer) -> None:
    clients = [connect(server, store) for _ in range(5)]
    runs: list[int] = []

    def fill_counted(number: int, target: Index) -> None:
        runs.append(number)
        time.sleep(0.3)  # longer than all others take to look
        fill(store, target)

    rebuilders = [
        rebuild_in_background(client, partial(fill_counted, number), poll_seconds=0.02)
        for number, client in enumerate(clients)
    ]
    until(lambda: not any(client.needs_rebuild for client in clients))
    for rebuilder in rebuilders:
        rebuilder.stop()
    assert len(runs) == 1
    assert sum(rebuilder.rebuilt for rebuilder in rebuilders) == 1
    for client in clients:
        client.close()


def test_late_rebuilder_does_not_repeat(store: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not rebuild again if another process finished after the check."""
    first, late = connect(server, store), connect(server, store)
    check = late.check

    def check_too_early() -> bool:
        monkeypatch.undo()
        needed = check()
        assert Rebuilder(first, partial(fill, store)).run_once()
        return needed

    monkeypatch.setattr(late, "check", check_too_early)
    runs: list[Index] = []
    assert not Rebuilder(late, runs.append).run_once()
    assert runs == []
    assert not late.needs_rebuild
    first.close()
    late.close()


REBUILD_AND_HANG = """
import sys, time
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.background_rebuild import Rebuilder
def hang(target):
    print("began", flush=True)
    time.sleep(600)
Rebuilder(RedisIndex(RedisSettings(url=sys.argv[1]), bytes(16)), hang, lease_seconds=float(sys.argv[2])).run_once()
"""


def test_dead_rebuilder_is_succeeded(store: Store, server: RedisServer) -> None:
    index = connect(server, store)
    rebuilder = Rebuilder(index, partial(fill, store), lease_seconds=1.0)
    words = [sys.executable, "-c", REBUILD_AND_HANG, server.url, "3.0"]  # seconds: of a busy machine a process may wait
    with subprocess.Popen(words, stdout=subprocess.PIPE) as dying, redis.Redis.from_url(server.url) as client:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"began\n"
        left_ms = [int(client.pttl("nearkin:{m}:lease"))]

        def renewed() -> bool:
            left_ms.append(int(client.pttl("nearkin:{m}:lease")))
            return sum(after > before for before, after in pairwise(left_ms)) >= 2

        until(renewed, lambda: left_ms)
        assert not rebuilder.run_once()
        dying.send_signal(signal.SIGKILL)
    until(rebuilder.run_once)
    assert not index.needs_rebuild
    index.close()


def test_rebuild_after_its_lease_writes_nothing(store: Store, server: RedisServer) -> None:
    """Write nothing, and report no complete index, after the lease was passed on."""
    index, other = connect(server, store), connect(server, store)

    def robbed(target: Index) -> None:
        with redis.Redis.from_url(server.url) as client:
            client.delete("nearkin:{m}:lease")
        with pytest.raises(RebuildSuperseded):
            until(lambda: bool(target.publish(first_claims())))
        assert Rebuilder(other, lambda _: None).run_once()
        client.close()

    with pytest.raises(RebuildSuperseded):
        Rebuilder(index, robbed, lease_seconds=0.6).run_once()
    assert not index.check()  # the other one's
    index.close()
    other.close()


def test_rebuild_of_an_ended_epoch_restarts(store: Store, server: RedisServer) -> None:
    index, other = connect(server, store), connect(server, store)

    def emptied(target: Index) -> None:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        other.check()
        fill(store, target)

    with pytest.raises(RebuildSuperseded):
        Rebuilder(index, emptied).run_once()
    assert index.check()
    assert Rebuilder(index, partial(fill, store)).run_once()
    assert not other.check()
    index.close()
    other.close()


def test_failed_rebuild_continues_where_it_stopped(
    store: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearkin_maintenance.index_rebuild.PUBLISH_CHUNKS", 1)  # each container by itself
    index = connect(server, store)
    tries: list[int] = []

    def failing(target: Index) -> None:
        tries.append(len(list(target.containers())))
        real, left = target.publish_many, [2]

        def publish_many(many: Any) -> None:
            if len(tries) < 3 and not left[0]:
                raise StoreUnavailable("the object store is away")
            left[0] -= 1
            real(many)

        target.publish_many = publish_many  # type: ignore[method-assign]
        fill(store, target, set(index.container_ids().tolist()))

    rebuilder = rebuild_in_background(index, failing, poll_seconds=0.02)
    until(lambda: rebuilder.rebuilt == 1)
    rebuilder.stop()
    assert tries == [0, 2, 4]
    assert len(list(index.containers())) == len(list(store._containers.ids()))
    index.close()
