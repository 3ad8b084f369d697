"""Check GC runs that follow the changes: they remove less than marking would, and mark whenever there is a doubt."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as runs
from hypothesis import strategies as st

from benchmarks.gc_deletion import count_requests
from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_maintenance.gc import incremental_run
from nearkin_maintenance.gc.incremental_run import IncrementalPass
from nearkin_maintenance.gc.ledger_rows import LedgerRows
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.reach_summaries import MarkingNeeded, is_reached
from nearkin_maintenance.gc.reference_counts import ReferenceCounts
from nearkin_shared.config.storage import HYBRID, MARK_SWEEP
from nearkin_shared.errors import Corrupt
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from tests.support.checks.gc_removals import checked_runs
from tests.support.data.stores import SMALL, containers, manifests, settings
from tests.support.fakes.clock import DAY, Clock

MAP_BYTES = 1 << 24


def opened(root: Path, clock: Clock, mode: str = HYBRID) -> Store:
    changes = {
        "deletion": {"undelete_seconds": DAY},
        "gc": {"mode": mode, "grace_seconds": DAY, "compact_below": 0.8},
        "index": {"map_bytes": MAP_BYTES},
    }
    return open_store(root, settings=settings(SMALL, changes), clock=clock, create=True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "change", "other"]), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["delete", "delete", "undelete"]), st.sampled_from("abc"), st.integers(1, 5)),
        st.tuples(st.just("gc"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("reopen"), st.just(""), st.just(0)),
    ),
    min_size=4,
    max_size=40 if "LONG" in os.environ else 12,
)


@runs(max_examples=150 if "LONG" in os.environ else 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
@example(
    [
        *(("put", "a", 1), ("gc", "", 0), ("change", "a", 2), ("change", "a", 3), ("put", "b", 1), ("gc", "", 0)),
        *(("delete", "a", 1), ("delete", "a", 2), ("gc", "", 2), ("gc", "", 2), ("delete", "b", 1), ("gc", "", 2)),
        *(("delete", "a", 3), ("gc", "", 2), ("put", "c", 1), ("gc", "", 2), ("gc", "", 2)),
    ]
)
@example(
    [
        *(("put", "a", 1), ("put", "b", 5), ("gc", "", 0), ("other", "a", 7), ("delete", "a", 1), ("gc", "", 2)),
        *(("put", "c", 1), ("gc", "", 2), ("undelete", "a", 1), ("delete", "c", 1), ("gc", "", 1), ("gc", "", 3)),
    ]
)
def test_incremental_gc_removes_only_what_marking_would(steps: list[tuple[str, str, int]]) -> None:
    """After any history every removal is garbage for a run that marks, and all versions are readable."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, checked_runs():
        store = opened(Path(folder, "s"), clock)
        try:
            live: dict[tuple[str, int], bytes] = {}
            deleted: dict[tuple[str, int], tuple[bytes, float]] = {}
            count = Counter[str]()
            for step, key, number in steps:
                clock.now += 1
                name = key, number
                match step:
                    case "put" | "change" | "other":
                        content = text_like(100_000, number) + random_bytes(100_000, number // 3)
                        if step == "change" and (key, count[key]) in live:
                            content = mutate(live[key, count[key]], number, 5)
                        if step == "other" and live:  # segments and chunks shared between keys
                            content = random_bytes(150_000, number) + live[max(live)]
                        count[key] += 1
                        live[key, count[key]] = content
                        assert store.put(key, content).info.version == count[key]
                    case "delete" if name in live:
                        deleted[name] = live.pop(name), clock.now + DAY
                        store.delete(key, number)
                    case "undelete" if name in deleted and clock.now < deleted[name][1]:
                        live[name] = deleted.pop(name)[0]
                        store.undelete(key, number)
                    case "gc":
                        clock.now += number * DAY
                        store.gc()
                    case "reopen":
                        store.close()
                        store = opened(Path(folder, "s"), clock)
            for _ in range(3):
                clock.now += 2 * DAY
                store.gc()
            assert store.verify().damage == ()
            assert all(store.get(*version).read() == content for version, content in live.items())
            assert len(manifests(Path(folder, "s"))) == len(live)
        finally:
            store.close()


def filled(root: Path, clock: Clock, blobs: int = 12) -> Store:
    """Return a store of random blobs, of which a run has marked all."""
    store = opened(root, clock)
    for number in range(blobs):
        store.put(f"k{number}", random_bytes(300_000, number))
    store.gc()
    return store


def test_incremental_gc_frees_deleted_blobs_unmarked(tmp_path: Path) -> None:
    """Two runs a grace apart free the containers of a deleted blob, and neither marks."""
    clock = Clock()
    with checked_runs() as found, filled(tmp_path / "s", clock) as store:
        before = len(containers(tmp_path / "s"))
        store.delete("k3")
        store.delete("k4")
        for _ in range(3):
            clock.now += DAY + 2
            store.gc()
        assert found["follows"] == 3
        assert not found["marks"]
        assert found["deleted containers"] > 0
        assert len(containers(tmp_path / "s")) == before - found["deleted containers"]
        assert store.verify().damage == ()


def test_removals_found_later_are_looked_up_again(tmp_path: Path) -> None:
    """A deletion between the lookup and the section removes its entries from the index too."""
    clock = Clock()
    with checked_runs() as found, filled(tmp_path / "s", clock) as store:
        store.delete("k3")
        store.delete("k4")
        clock.now += DAY + 2
        real, times = IncrementalPass._decide_and_prove, [0]

        def decide(self: IncrementalPass, index: Any) -> Any:
            decision = real(self, index)
            times[0] += 1
            return replace(decision, new=set(sorted(decision.new)[:1])) if times[0] == 1 else decision

        with mock.patch.object(IncrementalPass, "_decide_and_prove", decide):
            assert store.gc().pending_delete_containers == found["marked containers"] > 1
        assert times[0] == 2
        store.put("k3", random_bytes(300_000, 3))
        store.put("k4", random_bytes(300_000, 4))
        for _ in range(2):
            clock.now += DAY + 2
            store.gc()
        assert found["deleted containers"] > 1
        assert store.verify().damage == ()
        assert store.get("k4").read() == random_bytes(300_000, 4)


def test_incremental_gc_reads_only_changed_keys(tmp_path: Path) -> None:
    """One deletion among 600 versions costs at most 50 reads, and its key's folder alone is listed."""
    clock, draw = Clock(), random.Random(1)
    with opened(tmp_path / "s", clock) as store:
        for _ in range(2):
            list(store.put_many((f"f{number}", draw.randbytes(300)) for number in range(300)))
        store.gc()
        store.delete("f7", 1)
        clock.now += DAY + 2
        with count_requests() as counts:
            store.gc()
        assert counts["get"] <= 50
        assert counts["list"] <= 60
        assert len(manifests(tmp_path / "s")) == 599
        assert [version.version for version in store.versions("f7") if version.key == "f7"] == [2]


def test_incremental_gc_keeps_containers_others_need(tmp_path: Path) -> None:
    """A container that no version names stays as long as one that is named refers to its chunks."""
    clock = Clock()
    with checked_runs() as found, opened(tmp_path / "s", clock) as store:
        content = random_bytes(400_000, 1)
        store.put("a", content)
        store.put("b", mutate(content, 1, 200))
        store.gc()
        store.delete("a")
        for _ in range(3):
            clock.now += DAY + 2
            store.gc()
        assert found == {"follows": 3, "marked containers": 0, "deleted containers": 0}
        assert store.get("b").read() == mutate(content, 1, 200)
        store.delete("b")
        for _ in range(2):
            clock.now += DAY + 2
            store.gc()
        assert found["deleted containers"] == 2
        assert not containers(tmp_path / "s")


def ledger_rows(store: Store, change: Callable[[LedgerRows], object]) -> None:
    ledger = ReferenceCounts(store._index.gc_folder, MAP_BYTES, HYBRID)
    try:
        with ledger.transaction() as rows:
            change(rows)
    finally:
        ledger.close()


def drop_counts(rows: LedgerRows) -> None:
    for table in ("counts", "sums"):
        rows.txn.drop(rows.tables[table], delete=False)


def drop_sums(rows: LedgerRows) -> None:
    rows.txn.drop(rows.tables["counts"], delete=False)


def damage_reach(rows: LedgerRows) -> None:
    drop_counts(rows)
    for row, check in rows.items("reach"):
        rows.put("reach", row, bytes([check[0] ^ 1]) + check[1:])


def change_digests(rows: LedgerRows) -> None:
    for row, value in rows.items("versions"):
        rows.put("versions", row, value[:16] + bytes(16))


def lose_dependents(rows: LedgerRows) -> None:
    for row, check in rows.items("depends"):
        rows.put("depends", row, bytes([check[0] ^ 1]) + check[1:])


def forget_container(rows: LedgerRows) -> None:
    name, value = rows.items("needs")[0]
    rows.put("needs", name, value[:4] + bytes(8) + value[12:])


def check_counted(rows: LedgerRows) -> None:
    assert rows.count("counts")
    assert rows.count("sums")


def nominate_all(rows: LedgerRows) -> None:
    for name, _ in rows.items("needs"):
        rows.nominate(name + bytes(4))


LIES = [drop_counts, drop_sums, damage_reach, change_digests, forget_container]


@pytest.mark.parametrize("lie", LIES)
def test_incremental_gc_with_lying_summary_marks(lie: Callable[[LedgerRows], None], tmp_path: Path) -> None:
    """A summary that states less than the manifests, or does not fit them, is noticed before anything is freed."""
    clock = Clock()
    with checked_runs() as found, filled(tmp_path / "s", clock) as store:
        store.put("k3", random_bytes(300_000, 3))  # another version of the same data, which the summary leaves out
        store.put("k5", random_bytes(300_000, 50))
        before = len(containers(tmp_path / "s"))
        store.delete("k3", 1)
        store.delete("k5", 1)
        store.gc()
        ledger_rows(store, lie)
        ledger_rows(store, nominate_all)
        for _ in range(3):
            clock.now += DAY + 2
            store.gc()
        assert found["marks"] >= 1
        assert len(containers(tmp_path / "s")) < before
        assert store.verify().damage == ()
        assert store.get("k3").read() == random_bytes(300_000, 3)


def test_is_reached_with_counts_other_than_the_sum_marks(tmp_path: Path) -> None:
    """Counts that were lost without the sum of their intervals are a doubt."""
    with filled(tmp_path / "s", Clock()) as store:
        names = [int.from_bytes(name) for name in index_names(store)]
        ledger_rows(store, lambda rows: next(is_reached(rows, name) for name in names))
        ledger_rows(store, drop_sums)
        with pytest.raises(MarkingNeeded, match="the summary of its references is wrong"):
            ledger_rows(store, lambda rows: next(is_reached(rows, name) for name in names))


def index_names(store: Store) -> list[bytes]:
    found: list[bytes] = []
    ledger_rows(store, lambda rows: found.extend(name for name, _ in rows.items("needs")))
    return found


def test_incremental_gc_with_damaged_dependents_marks(tmp_path: Path) -> None:
    clock = Clock()
    with checked_runs() as found, opened(tmp_path / "s", clock) as store:
        content = random_bytes(400_000, 1)
        store.put("a", content)
        store.put("b", mutate(content, 1, 200))
        store.gc()
        ledger_rows(store, lose_dependents)
        store.delete("a")
        for _ in range(2):
            clock.now += DAY + 2
            store.gc()
        assert found["marks"] >= 1
        assert store.verify().damage == ()
        assert store.get("b").read() == mutate(content, 1, 200)


def rebuild(store: Store) -> None:
    store.rebuild_index()


def purge(store: Store) -> None:
    store.delete("k7")
    store.purge()


def other_mode(store: Store) -> None:
    root, clock = store.root, store._clock
    with opened(root.with_name("other"), Clock()):
        pass
    store.close()
    assert isinstance(clock, Clock)
    with opened(root, clock, MARK_SWEEP) as again:
        again.delete("k7")
        again.gc()


def leave_record(store: Store) -> None:
    records = PendingDeleteStore(store._condemned.objects)
    records.replace({})
    path = next((store.root / "gc").rglob("*.nkg"), None)
    if path is not None:
        path.write_bytes(path.read_bytes()[:-1])


def wait_a_week(store: Store) -> None:
    clock = store._clock
    assert isinstance(clock, Clock)
    clock.now += 8 * DAY


def restore_manifest(store: Store) -> None:
    """Put a manifest into the folder of a changed key that the index does not list, as a copy by hand does."""
    path = manifests(store.root)[0]
    store.delete("k3")
    folder = next(p.parent for p in store.root.rglob("*.nkt"))
    (folder / f"{9:016x}.nkm").write_bytes(path.read_bytes())


@pytest.mark.parametrize("doubt", [rebuild, purge, other_mode, wait_a_week])
def test_gc_after_outside_change_marks(doubt: Callable[[Store], None], tmp_path: Path) -> None:
    """A rebuilt index, a purge, a run in another mode and the weekly audit all end in marking."""
    clock = Clock()
    with checked_runs() as found, filled(tmp_path / "s", clock) as store:
        store.gc()
        assert found == {"follows": 1, "marked containers": 0, "deleted containers": 0}
        doubt(store)
        live_sets = []

        class Looking(LiveSet):
            def __init__(self, *args: Any) -> None:
                live_sets.append(True)
                super().__init__(*args)

        if doubt is other_mode:
            store = opened(tmp_path / "s", clock)
        with mock.patch("nearkin_maintenance.gc.gc_run.LiveSet", Looking):
            store.gc()
        assert live_sets
        assert store.verify().damage == ()
        store.close()


def test_incremental_gc_with_unlisted_manifest_marks(tmp_path: Path) -> None:
    """A manifest of a changed key that the index does not list ends in marking, which refuses it."""
    clock = Clock()
    with checked_runs() as found, filled(tmp_path / "s", clock) as store:
        restore_manifest(store)
        clock.now += DAY + 2
        with pytest.raises(Exception, match="is the manifest of"):
            store.gc()
        assert found["marks"] == 1


def test_gc_marks_once_ended_versions_added_two_percent(tmp_path: Path) -> None:
    """Data in containers that stay are found by marking, which follows the bytes that ended versions had added."""
    clock = Clock()
    with checked_runs(0.2) as found, opened(tmp_path / "s", clock) as store:
        list(store.put_many((f"k{number}", random_bytes(2_000, number)) for number in range(300)))
        store.gc()
        for number in range(30):
            store.delete(f"k{10 * number}")
            clock.now += DAY / 5
            store.gc()
        assert found["follows"] >= 3
        assert found["marks"] >= 1
        assert store.verify().damage == ()


def test_audit_of_wrong_counts_deletes_the_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weekly run compares the counts with what it marked."""
    clock = Clock()
    with checked_runs(), filled(tmp_path / "s", clock) as store:
        ledger_rows(store, drop_counts)
        clock.now += 8 * DAY
        store.gc()
        assert "wrong summary in index/gc" in caplog.text
        store.gc()
        ledger_rows(store, check_counted)


def put_without_index(store: Store) -> Store:
    """Put a version of the data of another key, and restore the copy of the index made before."""
    root, clock = store.root, store._clock
    assert isinstance(clock, Clock)
    store.close()
    shutil.copytree(root / "index", root.with_name("older"))
    with opened(root, clock) as again:
        again.put("unlisted", random_bytes(300_000, 3))
    shutil.rmtree(root / "index")
    shutil.copytree(root.with_name("older"), root / "index")
    return opened(root, clock)


def copy_manifest(store: Store) -> Store:
    """Store a version of the data of another key as services do, which do not write this index."""
    found = next(
        manifest for name in store._manifests.names() if (manifest := store._manifests.read(name[0])).key == "k3"
    )
    store._manifests.put(replace(found, key="unlisted"))
    return store


def restore_objects(store: Store) -> Store:
    """Restore the folders of objects from a backup in which a version that has expired still exists."""
    root, clock = store.root, store._clock
    assert isinstance(clock, Clock)
    store.put("unlisted", mutate(random_bytes(300_000, 3), 1, 200))
    store.gc()
    names = ("manifests", "containers")
    for name in names:
        shutil.copytree(root / name, root.with_name("backup") / name)
    store.delete("unlisted")
    for _ in range(3):
        clock.now += DAY + 2
        store.gc()
    store.close()
    for name in names:
        shutil.rmtree(root / name)
        shutil.copytree(root.with_name("backup") / name, root / name)
    return opened(root, clock)


@pytest.mark.parametrize("change", [put_without_index, copy_manifest, restore_objects])
def test_gc_keeps_data_of_versions_not_in_the_index(change: Callable[[Store], Store], tmp_path: Path) -> None:
    """Before containers are deleted, each stored version has been counted, or the run marks."""
    clock = Clock()
    with mock.patch.object(incremental_run, "ENDED_SHARE", 1e9), filled(tmp_path / "s", clock) as store:
        store.gc()
        with change(store) as store:
            store.delete("k3")
            for _ in range(3):
                clock.now += DAY + 2
                store.gc()
            store.rebuild_index()
            assert store.verify().damage == ()
            assert store.get("unlisted").info.size_bytes == len(store.get("unlisted").read())


def test_gc_frees_nothing_while_a_manifest_is_lost(tmp_path: Path) -> None:
    """A run that follows the changes refuses, as one that marks does, before it deletes a container."""
    clock = Clock()
    with filled(tmp_path / "s", clock, 40) as store:
        store.delete("k3")
        clock.now += DAY + 2
        assert store.gc().pending_delete_containers > 0
        before = len(containers(tmp_path / "s"))
        found = next(name for name, _ in store._manifests.names() if store._manifests.read(name).key == "k5")
        (tmp_path / "s" / found).unlink()
        clock.now += DAY + 2
        with pytest.raises(Corrupt, match="missing, but the index lists 'k5'"):
            store.gc()
        assert len(containers(tmp_path / "s")) == before
