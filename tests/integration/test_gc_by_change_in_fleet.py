"""Check runs by change of a fleet: writers are active, the index lists less than is stored, workers die."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_maintenance.gc.gc_plan import REBASED_SHARE
from nearkin_maintenance.gc.gc_tables import FleetRun, GcTables, is_current
from nearkin_maintenance.gc.gc_worker import GcWorker
from nearkin_maintenance.gc.ledger_rows import LedgerRows
from nearkin_maintenance.gc.online_run import OnlinePass
from nearkin_maintenance.gc.reference_counts import TablesUnavailable
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import Corrupt
from nearkin_shared.fleet.lease import Lease, LeaseLost
from nearkin_shared.objectstore.factory import with_parity
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results import GcReport
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import object_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.utils import failpoints
from tests.support.checks.gc_removals import checked_runs
from tests.support.data.stores import objects
from tests.support.engines.fleet_writer import begin_puts, delete, put
from tests.support.servers.maintenance_workers import CHOSEN, MAP_BYTES, Fleet, copy_objects
from tests.support.servers.servers import Redis

GRACE = 3600
BY_CHANGE = GcSettings(mode="hybrid", grace_seconds=GRACE, interval_seconds=60, compact_below=0.0)
"""Without compaction, whose pending deletes a run by change leaves to one that marks."""
MARKING = replace(BY_CHANGE, mode="mark-sweep")
COMPACTING = replace(BY_CHANGE, compact_below=0.9)


class HybridFleet(Fleet):
    """A fleet whose worker collects by change; its index lists the versions of the beginning only."""

    def __init__(self, folder: Path, redis: Redis, prefix: str, contents: dict[str, bytes]) -> None:
        self.contents = {(key, 1): content for key, content in contents.items()}
        with open_store(folder / "s", settings=CHOSEN, create=True) as store:
            for key, content in contents.items():
                store.put(key, content)
        self.root = folder / "objects"
        self.root.mkdir()
        self.tables = folder / "tables" / "gc"
        copy_objects(folder / "s", LocalObjectStore(self.root))
        super().__init__(with_parity(LocalObjectStore(self.root), CHOSEN), redis.url, prefix, time.time() + 10 * GRACE)
        self.fill_index()

    def worker(self, gc: GcSettings = BY_CHANGE, tables: str = "gc") -> GcWorker:
        return self.make_gc_worker(gc=gc, tables=self.tables.with_name(tables))

    def collect(self, gc: GcSettings = BY_CHANGE, tables: str = "gc") -> GcReport:
        """Do a run more than a grace after the last one."""
        self.now += GRACE + 60
        report = self.worker(gc, tables).run_once()
        assert report is not None
        return report

    def put(self, key: str, version: int, content: bytes) -> None:
        put(self.objects, CHOSEN, {key: content}, self.now)
        self.contents[key, version] = content

    def delete(self, key: str, version: int = 1) -> None:
        delete(self.objects, CHOSEN, key, version, self.now)
        del self.contents[key, version]

    def check(self) -> None:
        """Assert that all versions can be read."""
        for (key, version), content in self.contents.items():
            assert self.read(key, version) == content, key

    def containers_left(self) -> set[str]:
        return {name for name, _ in self.objects.names("containers")}

    def change_rows(self, change: Callable[[LedgerRows], object]) -> None:
        with GcTables(self.tables, MAP_BYTES).opened(lambda: None) as ledger:
            assert ledger is not None
            with ledger.transaction() as rows:
                change(rows)


def blobs(count: int) -> dict[str, bytes]:
    return {f"k{number}": random_bytes(300_000, number) for number in range(count)}


@pytest.fixture
def fleet(tmp_path: Path, redis: Redis, key_prefix: str) -> Iterator[HybridFleet]:
    made = HybridFleet(tmp_path, redis, key_prefix.rstrip(":"), blobs(8))
    with closing(made.index):
        yield made
        made.check()


counted_runs = partial(checked_runs, run_class=OnlinePass)


def test_fleet_run_by_change_frees_deleted_blobs(fleet: HybridFleet) -> None:
    """Two runs a grace apart free the containers of deleted blobs; neither marks, the index drops the entries."""
    with counted_runs() as found:
        fleet.collect()
        before = len(fleet.containers_left())
        fleet.delete("k3")
        fleet.delete("k4")
        for _ in range(3):
            fleet.collect()
        assert found["follows"] == 3
        assert not found["marks"]
        assert found["deleted containers"] == before - len(fleet.containers_left()) > 0
    fleet.check_index()


def test_fleet_run_by_change_leaves_what_marking_leaves(
    tmp_path: Path, fleet: HybridFleet, redis: Redis, key_prefix: str
) -> None:
    """After each run it leaves no less than one that marks, and the same after one that marks."""
    fleet.put("k2", 2, mutate(fleet.contents["k2", 1], 1, 300))
    fleet.put("k6", 2, fleet.contents["k1", 1])
    fleet.collect()
    other_root = tmp_path / "other"
    shutil.copytree(fleet.root, other_root)
    other = Fleet(with_parity(LocalObjectStore(other_root), CHOSEN), redis.url, f"{key_prefix}other", fleet.now)
    other.fill_index()
    with closing(other.index), counted_runs() as found:
        for key in ("k1", "k2", "k5", ""):
            for either in (fleet, other) if key else ():
                delete(either.objects, CHOSEN, key, 1, fleet.now)
            fleet.contents.pop((key, 1), None)
            fleet.collect()
            other.now = fleet.now
            assert other.make_gc_worker(gc=MARKING).run_once() is not None
            assert left(fleet.root) >= left(other_root)
        assert found["follows"] == 4
        assert found["deleted containers"] > 0
        for either in (fleet, other) * 2:
            either.now = fleet.now + GRACE + 1
            assert either.make_gc_worker(gc=MARKING).run_once() is not None
        assert left(fleet.root) == left(other_root)


def left(root: Path) -> set[str]:
    """Return the names of containers and manifests."""
    return {name for name in objects(root) if name.startswith(("containers", "manifests"))}


# --- writers that are active ------------------------------------------------------------------------------------------


def test_version_that_the_index_does_not_list_is_counted(fleet: HybridFleet) -> None:
    """A version that is durable and in no catalogue keeps the data that it shares with a deleted one."""
    fleet.collect()
    put(fleet.objects, CHOSEN, {"copy": fleet.contents["k3", 1]}, fleet.now)
    assert not fleet.index.versions_of("default", "copy")
    fleet.contents["copy", 1] = fleet.contents["k3", 1]
    fleet.delete("k3")
    with counted_runs() as found:
        for _ in range(3):
            fleet.collect()
        assert found == {"follows": 3, "marked containers": 0, "deleted containers": 0}


@pytest.mark.parametrize("point", ["change.counted", "change.written", "gc.pending-withdrawn", "gc.done"])
def test_version_in_flight_during_the_marking_keeps_data(fleet: HybridFleet, point: str) -> None:
    """A version that found its data before they were withdrawn, and becomes durable after the listing, keeps them."""
    fleet.collect()
    copied = fleet.contents["k3", 1]
    in_flight = begin_puts(fleet.objects, CHOSEN, {"copy": copied}, fleet.now)
    fleet.delete("k3")
    with counted_runs() as found, at_point(point, in_flight.deliver):
        fleet.collect()
        assert found["marked containers"] > 0
    fleet.contents["copy", 1] = copied
    with counted_runs() as found:
        for _ in range(3):
            fleet.collect()
            fleet.check()
        assert found["marks"] > 0
        assert found["deleted containers"] == 0


def test_container_in_flight_keeps_its_bases(fleet: HybridFleet) -> None:
    """A container whose version is not durable yet keeps the chunks that its deltas need."""
    fleet.collect()
    changed = mutate(fleet.contents["k3", 1], 3, 200)
    in_flight = begin_puts(fleet.objects, CHOSEN, {"other": changed}, fleet.now)
    in_flight.deliver("containers")
    fleet.delete("k3")
    with counted_runs() as found:
        fleet.now += GRACE // 4
        assert fleet.worker().run_once() is not None
        assert found == {"follows": 1, "marked containers": 0, "deleted containers": 0}
    in_flight.deliver()
    fleet.contents["other", 1] = changed
    for _ in range(3):
        fleet.collect()
        fleet.check()


def test_containers_of_a_failed_upload_are_removed(fleet: HybridFleet) -> None:
    """Containers whose upload never ended stay while it may, and are freed without a run that marks."""
    fleet.collect()
    begin_puts(fleet.objects, CHOSEN, {"lost": random_bytes(400_000, 99)}, fleet.now).deliver("containers")
    left = fleet.containers_left()
    with counted_runs() as found:
        fleet.collect()
        assert found == {"follows": 1, "marked containers": 0, "deleted containers": 0}
        for _ in range(3):
            fleet.collect()
        assert found["follows"] == 4
        assert found["deleted containers"] > 0
    assert len(fleet.containers_left()) == len(left) - found["deleted containers"]


def test_failed_upload_beside_a_version_ends_in_marking(fleet: HybridFleet) -> None:
    """Data of a failed upload in a container that stays count as ended: enough of them are a reason to mark."""
    fleet.collect(COMPACTING)
    kept, lost = random_bytes(60_000, 31), random_bytes(120_000, 32)
    in_flight = begin_puts(fleet.objects, CHOSEN, {"kept": kept, "lost": lost}, fleet.now)
    in_flight.deliver("containers")
    in_flight.deliver(object_name("default", "kept", 1))
    fleet.contents["kept", 1] = kept
    before = fleet.stored_bytes()
    with counted_runs(REBASED_SHARE) as found:
        for _ in range(4):
            fleet.collect(COMPACTING)
        assert found["marks"] > 0
    fleet.collect(COMPACTING)
    assert fleet.stored_bytes() < before - 100_000


def test_grace_over_since_the_listing_does_not_count(fleet: HybridFleet) -> None:
    """Data that become due during a run are left to the next: a version may have found them since the listing."""
    fleet.collect()
    fleet.delete("k3")
    fleet.collect()
    with counted_runs() as found:
        fleet.now += GRACE // 2

        def wait() -> None:
            fleet.now += GRACE

        with at_point("change.counted", wait):
            assert fleet.worker().run_once() is not None
        assert found == {"follows": 1, "marked containers": 0, "deleted containers": 0}
        fleet.collect()
        assert found["deleted containers"] > 0


@pytest.mark.parametrize("gc", [BY_CHANGE, MARKING])
def test_grace_over_while_marking_does_not_count(fleet: HybridFleet, gc: GcSettings) -> None:
    """A marking that outlasts the grace keeps data that a version found before and named since its listing."""
    fleet.collect(gc)
    copied, began = fleet.contents["k3", 1], fleet.now + GRACE + 59
    in_flight = begin_puts(fleet.objects, CHOSEN, {"copy": copied}, began)
    fleet.delete("k3")
    fleet.collect(gc)
    assert PendingDeleteStore(fleet.objects).read()
    shutil.rmtree(fleet.tables, ignore_errors=True)  # so that both modes mark
    fleet.now += 61

    def take_long() -> None:
        assert fleet.now - began < GRACE / 4
        in_flight.deliver()
        fleet.contents["copy", 1] = copied
        fleet.now += GRACE

    with at_point("gc.marked", take_long):
        assert fleet.worker(gc).run_once() is not None
    for _ in range(3):
        fleet.check()
        fleet.collect(gc)


def test_history_in_fleet_removes_only_what_marking_would(tmp_path: Path, redis: Redis, key_prefix: str) -> None:
    """Any removal during a random history is one that marking would make, and all versions stay readable."""
    seeds = range(8) if "LONG" in os.environ else range(2)
    for seed in seeds:
        draw, folder = random.Random(seed), tmp_path / str(seed)
        made = HybridFleet(folder, redis, f"{key_prefix}{seed}", {"k0": text_like(200_000, seed)})
        with closing(made.index), counted_runs() as found:
            versions = Counter({"k0": 1})
            waiting: list[tuple[Any, str, int, bytes]] = []
            for step in range(24):
                key = f"k{draw.randrange(4)}"
                content = mutate(draw.choice([*made.contents.values(), text_like(200_000, seed)]), step, 40)
                match draw.randrange(6):
                    case 0 | 1:
                        versions[key] += 1
                        made.put(key, versions[key], content)
                    case 2 if len(made.contents) > 1:
                        made.delete(*draw.choice(sorted(made.contents)))
                    case 3:
                        flight = begin_puts(made.objects, CHOSEN, {f"{key}-{step}": content}, made.now)
                        waiting.append((flight, f"{key}-{step}", 1, content))
                    case _:
                        made.now += draw.choice([GRACE // 4, GRACE])
                        made.worker(draw.choice([BY_CHANGE, COMPACTING])).run_once()
                        while waiting:
                            flight, name, version, content = waiting.pop()
                            flight.deliver()
                            made.contents[name, version] = content
            for _ in range(3):
                made.collect()
            made.check()
            assert found["follows"] > 0
            assert found["deleted containers"] > 0 or seed


@contextmanager
def at_point(point: str, action: Callable[[], object]) -> Iterator[None]:
    """Do something once, at a failpoint."""
    done: list[bool] = []

    def reached(name: str) -> None:
        if name == point and not done:
            done.append(True)
            action()

    failpoints.arm((), reached)
    try:
        yield
    finally:
        failpoints.disarm()
    assert done, point


# --- tables that are not those of the run before ----------------------------------------------------------------------


def another_worker(fleet: HybridFleet) -> None:
    fleet.collect(tables="other")


def lost_redis(fleet: HybridFleet) -> None:
    fleet.index.server.one(("DEL", f"{fleet.index.prefix}:{{m}}:fence"))


def another_lease(fleet: HybridFleet) -> None:
    with Lease(fleet.index.state) as lease:
        assert lease.take()


def older_heads(fleet: HybridFleet) -> None:
    heads = VersionHeads(fleet.objects)
    heads.forget([next(name for name, _ in fleet.objects.names("manifests"))])


def lost_tables(fleet: HybridFleet) -> None:
    shutil.rmtree(fleet.tables)


def uncounted_head(fleet: HybridFleet) -> None:
    fleet.change_rows(lambda rows: rows.put_version(bytes(16), 1, 0, bytes(16)))


def week_later(fleet: HybridFleet) -> None:
    fleet.now += 8 * 86_400


@pytest.mark.parametrize(
    "doubt", [another_worker, lost_redis, another_lease, older_heads, lost_tables, uncounted_head, week_later]
)
def test_fleet_run_marks_in_doubt(fleet: HybridFleet, doubt: Callable[[HybridFleet], None]) -> None:
    """Tables that another run, another index or an older store may contradict are not used."""
    with counted_runs() as found:
        fleet.collect()
        fleet.collect()
        assert found["follows"] == 1
        doubt(fleet)
        fleet.delete("k2")
        fleet.collect()
        assert found["follows"] == 1
        fleet.collect()
        assert found["follows"] == 2


def test_older_copy_of_the_store_is_marked(tmp_path: Path, fleet: HybridFleet) -> None:
    """A number that was counted before the store was put back, and is given again, is no counted version."""
    fleet.collect()
    shutil.copytree(fleet.root, tmp_path / "older")
    fleet.put("k3", 2, fleet.contents["k1", 1])
    fleet.collect()
    shutil.rmtree(fleet.root)
    shutil.copytree(tmp_path / "older", fleet.root)
    fleet.put("k3", 2, fleet.contents["k5", 1])
    fleet.delete("k5")
    with counted_runs() as found:
        for _ in range(3):
            fleet.collect()
            fleet.check()
        assert found["follows"] == 2


def test_tables_of_an_older_store_are_emptied(tmp_path: Path, fleet: HybridFleet) -> None:
    """A store that was put back, and in which another process recorded the same heads, is another one."""
    fleet.collect()
    shutil.copytree(fleet.root, tmp_path / "older")
    fleet.put("k3", 2, fleet.contents["k1", 1])
    fleet.now += 2 * 86_400  # a store without a server clock has a record a day
    fleet.collect()
    with GcTables(fleet.tables, MAP_BYTES).opened(lambda: None) as ledger:
        assert ledger is not None
        with ledger.transaction() as rows:
            epoch, fence, _ = (rows.get("meta", b"run") or b"").split(b" ", 2)
        run = FleetRun(epoch.decode(), int(fence) + 1)
        assert is_current(ledger, run, fleet.objects)
        shutil.rmtree(fleet.root)
        shutil.copytree(tmp_path / "older", fleet.root)
        fleet.put("k3", 2, fleet.contents["k1", 1])
        VersionHeads(fleet.objects).update(fleet.manifests)
        assert not is_current(ledger, run, fleet.objects)
        assert not ledger.held_segments()


def forget_manifest(fleet: HybridFleet) -> None:
    name = next(name for name, _ in fleet.objects.names("manifests") if name.endswith(".nkm"))
    data = fleet.objects.get(name)
    fleet.put("k7", 2, random_bytes(1000, 1))
    fleet.collect()
    fleet.objects.delete(name)
    fleet.objects.put_new(name, data + b"x")


@pytest.mark.parametrize("change", [forget_manifest])
def test_manifest_of_another_size_is_a_doubt(fleet: HybridFleet, change: Callable[[HybridFleet], None]) -> None:
    """A manifest that was replaced under its name stops the run: it is damaged."""
    fleet.collect()
    names = {name: fleet.objects.get(name) for name, _ in fleet.objects.names("manifests")}
    change(fleet)
    with pytest.raises(Corrupt):
        fleet.collect()
    for name, data in names.items():
        if fleet.objects.get(name) != data:
            fleet.objects.delete(name)
            fleet.objects.put_new(name, data)


def test_number_given_again_is_counted_again(fleet: HybridFleet) -> None:
    """A version whose number an older committer gave again keeps its data, also after the run that marks for it."""
    contents = [fleet.contents["k1", 1], random_bytes(700_000, 42)]
    flights = [
        begin_puts(fleet.objects, CHOSEN, {"again": content}, fleet.now + number * (2 * GRACE + 100))
        for number, content in enumerate(contents)
    ]
    flights[0].deliver()
    fleet.collect()
    fleet.collect()
    fleet.objects.delete(object_name("default", "again", 1))
    flights[1].deliver()
    fleet.contents["again", 1] = contents[1]
    with counted_runs() as found:
        for _ in range(6):
            fleet.collect()
            fleet.check()
        assert found["marks"] == 1


# --- mistakes ---------------------------------------------------------------------------------------------------------


def drop_counts(rows: LedgerRows) -> None:
    for table in ("counts", "sums"):
        rows.txn.drop(rows.tables[table], delete=False)
    for name, _ in rows.items("needs"):
        rows.nominate(name + bytes(4))


def test_fleet_run_with_lying_summary_marks(fleet: HybridFleet) -> None:
    """A summary that states less than the manifests is noticed before anything is marked for deletion."""
    fleet.collect()
    fleet.delete("k2")
    fleet.change_rows(drop_counts)
    with counted_runs() as found:
        fleet.collect()
        assert found["marks"] == 1
        for _ in range(2):
            fleet.collect()
            fleet.check()


def test_full_tables_are_removed_and_the_run_marks(fleet: HybridFleet) -> None:
    """Without room for its tables a worker marks, as often as it has to."""
    worker = fleet.worker()

    def refuse(*_arguments: object) -> None:
        raise TablesUnavailable("full")

    fleet.delete("k1")
    with mock.patch.object(LedgerRows, "hold", refuse):
        fleet.now += GRACE
        report = worker.run_once()
    assert report is not None
    assert report.pending_delete_containers
    assert not fleet.tables.exists()


def test_tables_in_a_folder_of_others_are_not_used(fleet: HybridFleet) -> None:
    fleet.tables.parent.mkdir(mode=0o777)
    fleet.tables.parent.chmod(0o777)
    with counted_runs() as found:
        fleet.collect()
        fleet.collect()
    assert not found
    assert not fleet.tables.exists()


# --- workers that die, and leases that end ----------------------------------------------------------------------------

POINTS = [
    *("change.counted:1", "change.written:1", "gc.uncatalogued:1", "gc.manifest:1", "gc.pending-withdrawn:1"),
    *("gc.recorded:1", "gc.done:1", "gc.due-withdrawn:1", "gc.container:1", "change.confirmed:1", "gc.reported:1"),
]


def armed_run(fleet: HybridFleet, armed: str, tables: str = "gc", lease_seconds: float = 30.0) -> str:
    """Do a run in a process of its own, with an armed failpoint; return what it printed."""
    words = [sys.executable, "-m", "tests.support.servers.maintenance_workers", str(fleet.root)]
    words += [fleet.url, fleet.prefix, str(fleet.now), str(lease_seconds), armed]
    words += [str(fleet.tables.with_name(tables))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    return done.stdout.strip()


@pytest.mark.parametrize("tables", ["gc", "other"])
@pytest.mark.parametrize("point", POINTS)
def test_worker_killed_in_a_run_by_change_loses_nothing(fleet: HybridFleet, point: str, tables: str) -> None:
    """After a death at any step, the same worker or another one ends the run, and all versions are readable."""
    fleet.collect()
    fleet.delete("k2")
    if point.startswith(("gc.due", "gc.container")):
        fleet.collect()
    fleet.put("k6", 2, fleet.contents["k1", 1])
    fleet.now += GRACE + 60
    assert armed_run(fleet, f"{point}:kill") == ""
    fleet.index.server.one(("DEL", f"{fleet.index.prefix}:{{m}}:lease"))  # it ends by itself, later
    for _ in range(4):
        fleet.collect(tables=tables)
        fleet.check()
    fleet.check_index()
    assert not PendingDeleteStore(fleet.objects).read()


def test_lease_lost_in_a_run_by_change_ends_it(fleet: HybridFleet) -> None:
    """A worker whose lease ended changes neither the store nor the tables."""
    fleet.collect()
    fleet.delete("k2")
    fleet.now += GRACE + 60
    worker = fleet.worker()
    before: list[dict[str, bytes]] = []

    def lose() -> None:
        worker._lease.give_up()
        before.append(objects(fleet.root))

    counted: list[list[tuple[bytes, bytes]]] = []
    fleet.change_rows(lambda rows: counted.append(rows.items("listed")))
    with at_point("change.counted", lose), pytest.raises(LeaseLost):
        worker.run_once()
    assert objects(fleet.root) == before[0]
    fleet.change_rows(lambda rows: counted.append(rows.items("listed")))
    assert counted[0] == counted[1]
    for _ in range(3):
        fleet.collect()
        fleet.check()
