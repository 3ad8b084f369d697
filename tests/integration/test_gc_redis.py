"""Rounds over an S3 store and a Redis index: one janitor at a time, and none after its lease."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.config import GcSettings, RedisSettings
from nearkin.fingerprints import Fingerprinter, domain_of
from nearkin.index.redis import RedisIndex
from nearkin.index.redis.lease import Lease, LeaseOver
from nearkin.index.redis.server import Server
from nearkin.local_index import super_features_of
from nearkin.recoding import BlockRecoder
from nearkin.restore import Blob
from nearkin.store import descriptor
from nearkin.store.containers import ContainerStore
from nearkin.store.manifests import ManifestStore
from nearkin.store.objects import ObjectStore
from nearkin.store.s3 import S3Objects
from nearkin.testing.generated import mutated, random_bytes, text_like
from nearkin.testing.servers import S3, Redis
from nearkin.testing.stores import SMALL, objects, settings
from nearkin_janitor import Rewriter, Tenants, rebuild_index
from nearkin_janitor.service import Rounds

CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": 0}})
GC = GcSettings(grace_seconds=3600, interval_seconds=60)
YEAR = 31_536_000.0


class Fleet:
    """A store in S3 of six versions, four of them deleted, its index in Redis, and janitors over both."""

    def __init__(self, folder: Path, elsewhere: ObjectStore, redis: Redis, prefix: str) -> None:
        self.objects, self.now = elsewhere, 0.0
        self.contents: dict[int, bytes] = {}
        text = text_like(200_000, 1)
        with open_store(folder / "s", settings=CHOSEN) as store:
            for number in range(1, 7):
                text = mutated(text, number, edits=30)
                content = text + random_bytes(100_000, number)
                store.put("k", content)
                self.contents[number] = content
                if number > 2:
                    store.delete("k", number - 2)
                    del self.contents[number - 2]
            self.now = store._clock() + YEAR
        for name, data in objects(folder / "s").items():
            elsewhere.put_new(name, data)
        found = descriptor.read(elsewhere)
        self.secret, self.bits = bytes.fromhex(found.secret), found.fingerprint_bits
        self.index = RedisIndex(RedisSettings(url=redis.url, prefix=prefix), domain_of("default"))
        self.manifests = ManifestStore(elsewhere)
        rebuild_index(self.containers(elsewhere), self.manifests, self.index, self.tenants(), super_features_of)
        name = self.index.epochs.current.name
        with Lease(self.index) as lease:
            assert lease.take()
            held = self.index.server.one(("GET", f"{prefix}:{{m}}:lease"))
            assert self.index.server.one(
                Server.call("whole", [self.index.epochs.key, f"{prefix}:{{m}}:lease"], name, held)
            )
        assert not self.index.check()

    def tenants(self) -> Tenants:
        return Tenants(self.fingerprinter, ["default"], self.manifests)

    def fingerprinter(self, tenant: str) -> Fingerprinter:
        return Fingerprinter(self.secret, tenant, self.bits)

    def containers(self, over: ObjectStore) -> ContainerStore:
        return ContainerStore(over, domain_of("default"), 8 << 20)

    def rounds(self, over: ObjectStore | None = None, gc: GcSettings = GC) -> Rounds:
        def rewriter(containers: ContainerStore) -> Rewriter:
            return Rewriter(containers, self.tenants(), self.fingerprinter("default"), BlockRecoder(CHOSEN))

        return Rounds(self.index, over or self.objects, lambda: gc, self.containers, rewriter, clock=lambda: self.now)

    def stored(self) -> int:
        return sum(size for folder in ("containers", "manifests", "gc") for _, size in self.objects.names(folder))

    def check(self) -> None:
        for number, content in self.contents.items():
            manifest = self.manifests.seen("default", "k", number)
            containers = self.containers(self.objects)
            blob = Blob(manifest.info, manifest, containers, self.fingerprinter("default"), 0, manifest.size_bytes)
            assert blob.read() == content


@pytest.fixture
def fleet(tmp_path: Path, versitygw: S3, redis: Redis, key_prefix: str) -> Iterator[Fleet]:
    elsewhere = S3Objects(versitygw.settings(versitygw.make_bucket(f"b{secrets.token_hex(6)}"), "some/prefix"))
    made = Fleet(tmp_path, elsewhere, redis, key_prefix.rstrip(":"))
    yield made
    made.index.close()


def test_rounds_free_what_is_deleted_and_the_index_names_nothing_that_is_gone(fleet: Fleet) -> None:
    before, rounds = fleet.stored(), fleet.rounds()
    assert fleet.index.versions_of("default", "k") == list(range(1, 7))
    freed = 0
    for _ in range(5):
        report = rounds.run_once()
        assert report is not None
        freed += report.freed_bytes
        fleet.now += 3601
        fleet.check()
    assert before - fleet.stored() == freed > before * 0.1
    assert fleet.index.versions_of("default", "k") == [5, 6]
    containers = fleet.containers(fleet.objects)
    there = {container: containers.directory(container).chunks.there for container, _ in containers.ids()}
    for table in ("chunks", "features"):
        for place in fleet.index.entries()[table].values():
            container, ordinal = int.from_bytes(place[:8], "little"), int.from_bytes(place[8:], "little")
            assert there[container][ordinal], table
    assert {summary.container for summary in fleet.index.containers()} == there.keys()
    sizes = dict(containers.ids())
    assert all(summary.container_bytes == sizes[summary.container] for summary in fleet.index.containers())


def test_a_round_is_done_once_an_interval_whoever_asks(fleet: Fleet) -> None:
    one, other = fleet.rounds(), fleet.rounds()
    assert one.run_once() is not None
    assert other.run_once() is None
    told = other.last()
    assert told is not None
    assert told["at"] == fleet.now
    fleet.now += 61
    assert other.run_once() is not None
    assert fleet.rounds(gc=GcSettings(interval_seconds=0)).run_once() is None


def test_no_round_begins_while_another_janitor_holds_the_lease(fleet: Fleet) -> None:
    with Lease(fleet.index) as lease:
        assert lease.take()
        assert fleet.rounds().run_once() is None
    assert fleet.rounds().run_once() is not None


class Slow:
    """An object store at whose first removal of a container something happens."""

    def __init__(self, objects: ObjectStore, then: threading.Event, go_on: threading.Event) -> None:
        self._objects, self._then, self._go_on = objects, then, go_on

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def delete(self, name: str) -> None:
        self._objects.delete(name)
        if name.startswith("containers") and not self._then.is_set():
            self._then.set()
            assert self._go_on.wait(20)


def test_a_janitor_that_slept_past_its_lease_does_nothing_more_and_another_ends_its_round(fleet: Fleet) -> None:
    fleet.rounds().run_once()
    fleet.now += 3601
    asleep, awake = threading.Event(), threading.Event()
    sleepy = fleet.rounds(Slow(fleet.objects, asleep, awake))  # type: ignore[arg-type]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            sleepy.run_once()
        except LeaseOver as err:
            failures.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    assert asleep.wait(20)
    fleet.index.server.one(("DEL", f"{fleet.index.prefix}:{{m}}:lease"))  # as if it had run out
    sleepy._lease.give_up()  # what its own clock says when it wakes
    assert fleet.rounds().run_once() is not None
    left = dict(fleet.objects.names("containers"))
    awake.set()
    thread.join()
    assert len(failures) == 1
    assert dict(fleet.objects.names("containers")) == left
    fleet.check()


def test_an_index_that_is_not_whole_is_not_collected_from(fleet: Fleet) -> None:
    fleet.index.server.one(("DEL", fleet.index.epochs.key))
    assert fleet.rounds().run_once() is None
    assert np.all(fleet.index.container_ids() == 0)
