"""Test a Redis restored from an older dump or restarted: its answers and their check."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from nearkin import open_store
from nearkin.embedded.runner import EmbeddedWriter
from nearkin.lab.generated_data import random_bytes
from nearkin.local.index_recovery import super_features_of
from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_maintenance import DomainOwners
from nearkin_maintenance.redis_index_recovery import recover_index
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.message import End, Envelope, Placed, encode
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.background_rebuild import Rebuilder, RebuildTarget
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.kafka.tenant_context import tenant_contexts
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.storage.pending_deletes import GcGeneration, PendingDeleteStore
from nearkin_shared.types import ContainerId
from tests.support.checks.waiting import until
from tests.support.servers.maintenance_workers import CHOSEN, Fleet, copy_objects
from tests.support.servers.redis_server import RedisServer

YEAR = 31_536_000.0
CONTENT = random_bytes(600_000, 5)
NODES = 6


def deployed(folder: Path, url: str) -> Fleet:
    """A store of a deleted version of CONTENT and of one that stays, its index in Redis."""
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("a", CONTENT)
        store.put("keep", random_bytes(3000, 6))
        now = store._clock() + YEAR
        store.delete("a", 1)
    (folder / "objects").mkdir()
    elsewhere = LocalObjectStore(folder / "objects")
    copy_objects(folder / "s", elsewhere)
    fleet = Fleet(elsewhere, url, "nk", now)
    fleet.fill_index()
    return fleet


def collect(fleet: Fleet) -> None:
    """Free the deleted version."""
    worker = fleet.make_gc_worker()
    for _ in range(3):
        assert worker.run_once() is not None
        fleet.now += 3601
    assert len(list(fleet.objects.names("containers"))) == 1


def joining(fleet: Fleet) -> RedisIndex:
    """The index as a process sees it that starts now."""
    settings = RedisSettings(url=fleet.index.server_url, prefix="nk")  # type: ignore[attr-defined]
    return RedisIndex(settings, domain_of("default"), GcGeneration(fleet.objects, 0.0))


def put(fleet: Fleet, index: RedisIndex, key: str) -> int:
    """Put CONTENT through a writer over `index`; return how many of its chunks were known."""
    fingerprinter, containers = fleet.fingerprinter("default"), fleet.containers(fleet.objects)
    with EmbeddedWriter(CHOSEN, fingerprinter, containers, fleet.manifests, index, 0) as writer:
        blob, view, at = writer.begin(key, {}, None), memoryview(CONTENT), 0
        while at < len(CONTENT):
            window = writer.window()
            count = min(len(window), len(CONTENT) - at)
            window[:count] = view[at : at + count]
            writer.advance(blob, count)
            at += count
        writer.end(blob)
        writer.flush()
    result = blob.done.result()
    assert fleet.read(key, result.info.version) == CONTENT
    return int(result.ledger.duplicate_chunks)


def recover(fleet: Fleet, target: RebuildTarget) -> None:
    tenants = DomainOwners(fleet.fingerprinter, ["default"], fleet.manifests)
    record = PendingDeleteStore(fleet.objects).read()
    recover_index(fleet.containers(fleet.objects), fleet.manifests, target, tenants, super_features_of, record)


def restored_index(fleet: Fleet) -> None:
    """Let a maintenance worker check the index; it is what one made from nothing would be."""
    assert fleet.index.check() or fleet.index.is_stale()
    assert Rebuilder(fleet.index, partial(recover, fleet)).run_once()
    assert not fleet.index.check()
    assert not fleet.index.is_stale()
    fleet.check_index()
    assert fleet.index.versions_of("default", "a") == []


@pytest.fixture
def single(tmp_path: Path) -> Iterator[tuple[RedisServer, Fleet]]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        fleet = deployed(tmp_path, server.url)
        fleet.index.server_url = server.url  # type: ignore[attr-defined]
        with closing(fleet.index):
            yield server, fleet


def save(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.save()


def test_put_after_older_dump_is_restorable(single: tuple[RedisServer, Fleet]) -> None:
    """Store again content that GC freed since the dump, by running and by new processes."""
    server, fleet = single
    save(server.url)
    collect(fleet)
    server.kill()
    server.start()
    with closing(joining(fleet)) as fresh:
        assert put(fleet, fresh, "again") == 0
    assert put(fleet, fleet.index, "more") == 0, "stale entries hide what was stored since, until they are checked"
    restored_index(fleet)
    assert put(fleet, fleet.index, "last") > 0


def test_gc_run_leaves_stale_partitions_stale(single: tuple[RedisServer, Fleet]) -> None:
    """Leave restored entries of before an earlier run unchecked after a GC run."""
    server, fleet = single
    save(server.url)
    collect(fleet)
    server.kill()
    server.start()
    fleet.index.epochs.advance(1)
    with closing(joining(fleet)) as fresh:
        assert put(fleet, fresh, "again") == 0
        assert fresh.is_stale()


def test_fresh_index_entries_survive_a_gc_run(single: tuple[RedisServer, Fleet]) -> None:
    """Partitions that were present at a GC run keep answering."""
    _, fleet = single
    collect(fleet)
    with closing(joining(fleet)) as fresh:
        assert not fresh.check()
        assert put(fleet, fresh, "again") == 0
        assert put(fleet, fresh, "more") > 0


@contextmanager
def cluster(folder: Path) -> Iterator[list[RedisServer]]:
    options = "--cluster-enabled", "yes", "--cluster-node-timeout", "2000"
    servers: list[RedisServer] = []
    try:
        for number in range(NODES):
            (folder / f"node{number}").mkdir()
            servers.append(RedisServer(folder / f"node{number}", *options).start())
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        made = subprocess.run(
            ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert made.returncode == 0, made.stdout[-500:]
        until(lambda: all(map(is_settled, servers)))
        yield servers
    finally:
        for server in servers:
            server.kill()


def is_settled(server: RedisServer) -> bool:
    with redis.Redis.from_url(server.url) as client:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def test_cluster_node_of_older_dump_is_noticed(tmp_path: Path) -> None:
    """Answer no freed container from a Cluster node restored from before GC; check the node."""
    with cluster(tmp_path) as servers:
        url = servers[0].url.replace("redis://", "redis+cluster://").removesuffix("/0")
        fleet = deployed(tmp_path, url)
        fleet.index.server_url = url  # type: ignore[attr-defined]
        with closing(fleet.index):
            for server in servers:
                save(server.url)
            collect(fleet)
            home = fleet.index.server._client.get_node_from_key("nk:{m}:epoch").port
            for server in [one for one in servers if one.port != home]:  # the one with the epoch was never away
                server.kill()
                server.start()
            until(lambda: all(map(is_settled, servers)))
            with closing(joining(fleet)) as fresh:
                assert put(fleet, fresh, "again") == 0
            restored_index(fleet)
            assert put(fleet, fleet.index, "last") > 0


# --- the committer --------------------------------------------------------------------------------------------------


class RecordingOutbox:
    """An outbox whose events are looked at instead of sent."""

    authenticator = None

    def __init__(self, *_: object) -> None:
        self.sent: list[tuple[str, bytes]] = []

    def send(self, name: str, _key: bytes, value: bytes, _headers: object) -> None:
        self.sent.append((name, value))

    def send_to(self, name: str, _key: bytes, value: bytes, _headers: object) -> None:
        self.sent.append((name, value))

    def flush(self) -> None:
        """All is kept."""

    def close(self) -> None:
        """Nothing is open."""


class Idle(Backlog):
    def __init__(self) -> None:
        """No stage is behind."""


def test_committer_refuses_freed_containers(single: tuple[RedisServer, Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a blob with segments of a stale index visibly, and have the index checked (I2)."""
    _, fleet = single
    manifest = fleet.manifests.get("default", "a", 1)
    collect(fleet)
    monkeypatch.setattr(committer_handler, "Outbox", RecordingOutbox)
    of_all = tenant_contexts(CHOSEN, fleet.objects, fleet.secret, fleet.bits, fleet.index.for_domain)
    handler = CommitterHandler(CHOSEN, fleet.manifests, of_all, "w", Idle(), None)
    handler.on_assigned(0, "")
    envelope, began_us = Envelope(b"0123456789abcdef", "default", "a", 0), time.time_ns() // 1000
    assert manifest.lengths is not None
    placed = Placed(envelope, manifest.segments, manifest.known, manifest.lengths, manifest.ledger)
    count = len(manifest.segments)
    ended = Envelope(envelope.blob, "default", "a", count)
    end = End(ended, began_us, envelope.blob, manifest.size_bytes, manifest.blake3, segments=count)
    records = [encode(placed), encode(end)]
    handler.handle([Record("placed", 0, n, b"k", value, {}, ()) for n, value in enumerate(records)])
    outbox: Any = handler._outbox
    states = [value for name, value in outbox.sent if name == "committed"]
    assert len(states) == 1
    assert b'"state": "failed"' in states[0]
    assert len(list(fleet.manifests.names())) == 1, "of the version that stays"
    assert fleet.index.is_stale(), "the index is to be checked"


# --- a restart ------------------------------------------------------------------------------------------------------


@pytest.fixture
def persistent(tmp_path: Path) -> Iterator[tuple[RedisServer, Fleet]]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "everysec") as server:
        fleet = deployed(tmp_path, server.url)
        fleet.index.server_url = server.url  # type: ignore[attr-defined]
        assert Rebuilder(fleet.index, partial(recover, fleet)).run_once()
        with closing(fleet.index):
            yield server, fleet


def test_restart_keeps_the_index(persistent: tuple[RedisServer, Fleet]) -> None:
    """Answer entries and versions at once after a clean restart; decode no container again."""
    server, fleet = persistent
    before = fleet.index.entries()
    server.stop()
    server.start()
    with closing(joining(fleet)) as fresh:
        assert fresh.check(), "it is not known yet whether the last writes are there"
        assert fresh.entries()["chunks"] == before["chunks"]
        assert put(fleet, fresh, "again") > 0
    published: list[ContainerId] = []

    def record_target(target: RebuildTarget) -> None:
        publish = target.publish_many

        def publish_many(many: list[ContainerEntries]) -> None:
            published.extend(claims.directory.container for claims in many)
            publish(many)

        target.publish_many = publish_many  # type: ignore[method-assign, assignment]
        recover(fleet, target)

    assert Rebuilder(fleet.index, record_target).run_once()
    assert published == []
    assert fleet.index.entries()["chunks"] == before["chunks"]
    assert fleet.index.versions_of("default", "again") == [1]


def test_restart_that_lost_writes_adds_them_again(tmp_path: Path) -> None:
    """Add again exactly what was published and committed after the last persisted write."""
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        fleet = deployed(tmp_path, server.url)
        fleet.index.server_url = server.url  # type: ignore[attr-defined]
        with closing(fleet.index):
            save(server.url)
            kept = set(fleet.index.container_ids().tolist())
            fleet.manifests.delete("default", "keep", 1)
            assert put(fleet, fleet.index, "a-copy") > 0
            writer = random_bytes(400_000, 9)
            with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
                store.put("late", writer)
            for name, size in LocalObjectStore(tmp_path / "s").names("containers"):
                if int(name.rpartition("/")[2].partition(".")[0], 16) not in kept:
                    assert size
                    fleet.objects.put_new(name, LocalObjectStore(tmp_path / "s").get(name))
            server.kill()
            server.start()
            assert Rebuilder(fleet.index, partial(recover, fleet)).run_once()
            assert fleet.index.versions_of("default", "a-copy") == [1]
            assert fleet.index.versions_of("default", "keep") == []
            assert len(fleet.index.container_ids()) == len(kept) + 1


def test_catalog_is_complete_before_containers_are(persistent: tuple[RedisServer, Fleet]) -> None:
    """Listings come from the index while containers are still being published."""
    server, fleet = persistent
    server.stop()
    server.start()
    assert fleet.index.check()
    assert not fleet.index.has_catalog
    seen: list[bool] = []

    def record_target(target: RebuildTarget) -> None:
        declare = target.declare_catalog

        def declared() -> None:
            declare()
            seen.append(fleet.index.has_catalog and fleet.index.check())

        target.declare_catalog = declared  # type: ignore[method-assign]
        recover(fleet, target)

    assert Rebuilder(fleet.index, record_target).run_once()
    assert seen == [True]
