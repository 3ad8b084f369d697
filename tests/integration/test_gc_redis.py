"""Test GC runs over S3 and Redis: one maintenance worker at a time, none after its lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import RetryableError
from nearkin_shared.fleet import lease as lease_module
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.fleet.lease import Lease, LeaseLost
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.factory import with_parity
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.s3 import S3ObjectStore
from tests.support.checks.waiting import until
from tests.support.data.stores import objects, settings
from tests.support.servers.maintenance_workers import CHOSEN, Fleet, copy_objects
from tests.support.servers.servers import Redis

YEAR = 31_536_000.0


class Deployed(Fleet):
    """Six versions, four of them deleted, an index in Redis, and maintenance workers."""

    def __init__(self, folder: Path, elsewhere: ObjectStore, redis: Redis, prefix: str) -> None:
        self.contents: dict[int, bytes] = {}
        text = text_like(200_000, 1)
        with open_store(folder / "s", settings=CHOSEN, create=True) as store:
            for number in range(1, 7):
                text = mutate(text, number, edits=30)
                content = text + random_bytes(100_000, number)
                store.put("k", content)
                self.contents[number] = content
                if number > 2:
                    store.delete("k", number - 2)
                    del self.contents[number - 2]
            now = store._clock() + YEAR
        copy_objects(folder / "s", elsewhere)
        super().__init__(elsewhere, redis.url, prefix, now)
        self.fill_index()

    def check(self) -> None:
        for number, content in self.contents.items():
            assert self.read("k", number) == content


@pytest.fixture
def fleet(tmp_path: Path, s3_objects: S3ObjectStore, redis: Redis, key_prefix: str) -> Iterator[Deployed]:
    made = Deployed(tmp_path, s3_objects, redis, key_prefix.rstrip(":"))
    with closing(made.index):
        yield made


def test_gc_run_requested_during_one_follows(fleet: Deployed) -> None:
    """Run again for a request during a run, which may have marked before the latest deletion."""
    status, worker = GcStatusStore(fleet.index.state), fleet.make_gc_worker()
    status.request_run()

    def request_again(_objects: ObjectStore, _check: Callable[[], None]) -> tuple[int, int]:
        status.request_run()
        return 0, 0

    worker._ports = replace(worker._ports, apply_policies=request_again)
    assert worker.run_once() is not None
    assert status.requested_run is not None
    worker._ports = replace(worker._ports, apply_policies=None)
    assert worker.run_once() is not None
    assert status.requested_run is None
    assert worker.run_once() is None


def test_gc_runs_free_and_index_drops_entries(fleet: Deployed) -> None:
    """Free deleted data; the index names nothing that was deleted."""
    before, worker = fleet.stored_bytes(), fleet.make_gc_worker()
    assert fleet.index.versions_of("default", "k") == list(range(1, 7))
    freed = 0
    for _ in range(5):
        report = worker.run_once()
        assert report is not None
        freed += report.freed_bytes
        fleet.now += 3601
        fleet.check()
    assert before - fleet.stored_bytes() == freed > before * 0.1
    assert fleet.index.versions_of("default", "k") == [5, 6]
    fleet.check_index()
    containers = fleet.containers(fleet.objects)
    sizes = dict(containers.ids())
    assert all(summary.container_bytes == sizes[summary.container] for summary in fleet.index.containers())


def test_gc_run_finds_chunks_by_name(fleet: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It withdraws chunks of directories that it has read, and reads no bucket of chunks."""
    keys: list[str] = []
    run = RedisServer.run

    def recorded(self: RedisServer, commands: Sequence[Command]) -> list[Any]:
        keys.extend(str(command[1]) for command in commands if command[0] == "HMGET")
        return run(self, commands)

    monkeypatch.setattr(RedisServer, "run", recorded)
    before = len(fleet.index.entries()["chunks"])
    report = fleet.make_gc_worker().run_once()
    assert report is not None
    assert report.pending_delete_containers
    assert len(fleet.index.entries()["chunks"]) < before
    assert [key for key in keys if "{f" in key]
    assert not [key for key in keys if "{c" in key]


def test_gc_runs_once_an_interval(fleet: Deployed) -> None:
    """Run once an interval, whichever process asks."""
    one, other = fleet.make_gc_worker(), fleet.make_gc_worker()
    assert one.run_once() is not None
    assert other.run_once() is None
    status = other.last()
    assert status is not None
    assert status["at"] == fleet.now
    fleet.now += 61
    assert other.run_once() is not None
    assert fleet.make_gc_worker(gc=GcSettings(interval_seconds=0)).run_once() is None


def test_second_gc_run_frees_pending_deletes(fleet: Deployed) -> None:
    """Free pending deletes by a second run in the interval, at any worker."""
    gc = GcSettings(grace_seconds=600, interval_seconds=3600)
    one, other = fleet.make_gc_worker(gc=gc), fleet.make_gc_worker(gc=gc)
    first_run = one.run_once()
    assert first_run is not None
    assert first_run.pending_delete_containers
    began = fleet.now
    fleet.now += 590
    assert other.run_once() is None
    fleet.now += 20
    freed = other.run_once()
    assert freed is not None
    assert freed.freed_bytes > 0
    for waited in (700, 1300, 2500, 3590):
        fleet.now = began + waited
        assert one.run_once() is None
    fleet.now = began + 3601
    assert one.run_once() is not None
    fleet.check()


def test_gc_run_by_a_wrong_clock_delays_no_other(fleet: Deployed) -> None:
    worker, now = fleet.make_gc_worker(), fleet.now
    fleet.now += 400 * 86_400
    assert worker.run_once() is not None
    fleet.now = now
    assert worker.run_once() is not None
    assert worker.run_once() is None


@pytest.mark.parametrize("hours", [-2, 2])
def test_gc_run_by_a_clock_unlike_redis_is_refused(
    fleet: Deployed, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    shifted = SimpleNamespace(time=lambda: time.time() + 3600 * hours, clock_gettime=time.clock_gettime)
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "time", shifted)
        with pytest.raises(RetryableError, match=r"7[12]\d\d s apart"):
            fleet.make_gc_worker().run_once()
    assert fleet.make_gc_worker().last() is None
    assert not list(fleet.objects.names("gc"))
    assert fleet.make_gc_worker().run_once() is not None


def test_suspended_machine_holds_no_lease(fleet: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold no lease after a suspension, in which CLOCK_MONOTONIC stops."""
    slept_seconds = 0.0

    def clock_gettime(clock: int) -> float:
        return time.clock_gettime(clock) + (slept_seconds if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(lease_module, "time", SimpleNamespace(time=time.time, clock_gettime=clock_gettime))
    with Lease(fleet.index.state) as lease:
        assert lease.take()
        lease.check()
        slept_seconds = 3600.0
        with pytest.raises(LeaseLost):
            lease.check()


def test_gc_run_repairs_from_parity(fleet: Deployed) -> None:
    """Continue over damage that parity can repair."""
    covered = with_parity(fleet.objects, settings(CHOSEN, {"storage": {"parity": "rs-8-2"}}))
    for folder in ("containers", "manifests"):
        for name, _ in list(fleet.objects.names(folder)):
            covered.add_parity(name, fleet.objects.get(name))
        name = max(name for name, _ in fleet.objects.names(folder) if not name.endswith(".nkt"))
        broken = bytearray(fleet.objects.get(name))
        broken[-20] ^= 1
        covered.replace(name, bytes(broken))
    report = fleet.make_gc_worker(covered).run_once()
    assert report is not None
    assert report.pending_delete_containers


def test_gc_run_waits_for_the_lease(fleet: Deployed) -> None:
    """Begin no run while another maintenance worker holds the lease."""
    with Lease(fleet.index.state) as lease:
        assert lease.take()
        assert fleet.make_gc_worker().run_once() is None
    assert fleet.make_gc_worker().run_once() is not None


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
            assert self._go_on.wait(60)


def test_worker_asleep_past_its_lease_stops(fleet: Deployed) -> None:
    """Do nothing more after the lease; another worker ends the GC run."""
    fleet.make_gc_worker().run_once()
    fleet.now += 3601
    asleep, awake = threading.Event(), threading.Event()
    sleepy = fleet.make_gc_worker(Slow(fleet.objects, asleep, awake))  # type: ignore[arg-type]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            sleepy.run_once()
        except LeaseLost as err:
            failures.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    assert asleep.wait(60)
    fleet.index.server.one(("DEL", f"{fleet.index.prefix}:{{m}}:lease"))  # as if it had run out
    sleepy._lease.give_up()  # its own clock reports no expiry when it wakes
    assert fleet.make_gc_worker().run_once() is not None
    left = dict(fleet.objects.names("containers"))
    awake.set()
    thread.join()
    assert len(failures) == 1
    assert dict(fleet.objects.names("containers")) == left
    fleet.check()


LEASE_SECONDS = 4.0  # what a busy machine may let the process wait before it stops itself


@pytest.mark.parametrize("effect", [1, 3])
def test_stopped_worker_applies_one_effect_at_most(tmp_path: Path, redis: Redis, key_prefix: str, effect: int) -> None:
    """Apply at most one effect after SIGSTOP between lease check and effect.

    The lease ends in Redis, and another maintenance worker does the GC run.
    """
    root, prefix = tmp_path / "objects", key_prefix.rstrip(":")
    root.mkdir()
    fleet = Deployed(tmp_path, LocalObjectStore(root), redis, prefix)
    assert fleet.make_gc_worker().run_once() is not None
    fleet.now += 3601
    words = [
        sys.executable,
        "-m",
        "tests.support.servers.maintenance_workers",
        str(root),
        redis.url,
        prefix,
        str(fleet.now),
    ]
    words += [str(LEASE_SECONDS), f"fence.passed:{effect}:stop"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as asleep:
        try:
            _, status = os.waitpid(asleep.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), f"the GC run has fewer than {effect} effects: {status}"
            done = until(fleet.make_gc_worker().run_once)  # refused for as long as the lease is the other's
            assert done is not None
            assert done.freed_bytes > 0
            fleet.check()
            left = objects(root)
        finally:
            os.kill(asleep.pid, signal.SIGCONT)
        output = asleep.communicate(timeout=60)[0].split()
    assert output[0] not in ("done", "none"), "it went on as if it still held the lease"
    assert len(objects(root).keys() ^ left.keys()) <= 1
    fleet.check()
    for _ in range(3):
        fleet.now += 3601
        assert fleet.make_gc_worker().run_once() is not None
        fleet.check()
    fleet.check_index()
    fleet.index.close()


def test_incomplete_index_is_not_collected(fleet: Deployed) -> None:
    fleet.index.server.one(("DEL", fleet.index.epochs.key))
    assert fleet.make_gc_worker().run_once() is None
    assert np.all(fleet.index.container_ids() == 0)
