"""Test GC in a local store: deletions, survivors, timing, and exact predictions in bytes."""

from __future__ import annotations

import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import BadInput, Corrupt, NotFound, PermanentError, StoreLocked, StoreUnavailable
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.record_authentication import MAC_BYTES
from nearkin_shared.results import Ledger
from nearkin_shared.storage.manifests import object_name
from nearkin_shared.storage.pending_deletes import EMPTY_BYTES
from nearkin_shared.types import Locations
from nearkin_shared.utils import failpoints
from tests.support.checks.gc_checks import COLLECTED, collect_repeatedly, kill_during_gc
from tests.support.data.stores import ENCRYPTED, containers, flip, manifests, objects, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

DELETION_SETS = 100 if "EVERY_SET" in os.environ else 30
"""Number of deletion sets whose reclaim is predicted."""


def test_gc_without_deletions_only_recompresses(reopen: Callable[[], Store], clock: Clock) -> None:
    """Free nothing without deletions but what a deeper search saves."""
    store = reopen()
    content = text_like(600_000, 1)
    for edits in (0, 20, 40):
        store.put("k", mutate(content, 1, edits=edits))
    assert collect_repeatedly(store, clock, runs=1) > 0
    before = objects(store.root)
    assert collect_repeatedly(store, clock) == 0
    assert objects(store.root) == before


def test_unneeded_data_is_freed_rest_restores(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    kept = text_like(600_000, 1)
    store.put("kept", kept)
    alone = stored_bytes(store.root)
    store.put("gone", random_bytes(900_000, 2))
    store.put("gone", random_bytes(400_000, 3))
    store.delete("gone")
    clock.now += 7 * DAY
    assert collect_repeatedly(store, clock) > 1_300_000
    assert stored_bytes(store.root) - alone < 200  # the mark that keeps the number taken
    assert store.get("kept").read() == kept
    assert store.put("gone", b"again").info.version == 3


@pytest.mark.parametrize("instead", ["empty", "file", "link"])
def test_gc_run_with_missing_manifests_is_refused(
    reopen: Callable[[], Store], clock: Clock, instead: str, tmp_path: Path
) -> None:
    """Refuse a GC run if manifests are missing.

    Their disk is not mounted, and the index is lost.
    """
    store = reopen()
    content = random_bytes(300_000, 1)
    store.put("k", content)
    store.close()
    kept = tmp_path / "elsewhere"
    (store.root / "manifests").rename(kept)
    shutil.rmtree(store.root / "index")
    if instead == "empty":
        (store.root / "manifests").mkdir()
    elif instead == "file":
        (store.root / "manifests").write_bytes(b"")
    else:
        (store.root / "manifests").symlink_to(tmp_path / "nowhere")
    store = reopen()
    clock.now = time.time()  # containers are named by this one
    for _ in range(3):
        clock.now += 7 * DAY
        with pytest.raises(StoreUnavailable, match=r"^manifests"):
            store.gc()
    if instead != "empty":
        with pytest.raises(StoreUnavailable, match=r"^manifests"):
            store.verify()
    store.close()
    (store.root / "manifests").rmdir() if instead == "empty" else (store.root / "manifests").unlink()
    kept.rename(store.root / "manifests")
    assert reopen().get("k").read() == content


def test_first_put_unfinished_blocks_no_gc_run(reopen: Callable[[], Store], clock: Clock) -> None:
    """Run GC although the first put is in progress or has failed."""
    store = reopen()
    clock.now = time.time()  # containers are named by this one
    seen = []

    def watch(name: str) -> None:
        if name == "commit.begun":
            with open_store(store.root, settings=COLLECTED, clock=clock, create=True) as other:
                seen.append(other.gc(dry_run=True))
            raise KeyboardInterrupt  # a put that is interrupted leaves its containers; one that fails removes them

    failpoints.arm((), watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.put("k", random_bytes(9_000_000, 1))
    finally:
        failpoints.disarm()
    assert len(seen) == 1
    many = len(containers(store.root))
    store.gc()
    clock.now += 7 * DAY
    with pytest.raises(StoreUnavailable, match=f"the store has {many} containers"):
        store.gc()
    store.put("other", b"content")
    assert collect_repeatedly(store, clock) > 9_000_000


@pytest.mark.parametrize("now", [-1.0, 253_402_300_800.0 + DAY])
def test_clock_out_of_range_marks_nothing(reopen: Callable[[], Store], clock: Clock, now: float) -> None:
    """Mark nothing for deletion by a clock that no record can express."""
    good = clock.now
    with reopen() as store:
        store.put("a", random_bytes(100_000, 1))
        store.delete("a")
        clock.now = now
        with pytest.raises(BadInput, match="want a time from 1970 to 9999; set it"):
            store.gc()
        assert store.verify().damage == ()
        clock.now = good + 30 * DAY
        assert (store.gc().versions, store.gc_state().pending_delete_containers) == (1, 1)


def test_undeletable_data_is_not_freed(reopen: Callable[[], Store], clock: Clock) -> None:
    """Free nothing while it can be undeleted."""
    store = reopen()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    before = stored_bytes(store.root)
    assert collect_repeatedly(store, clock, runs=6) == 0
    assert store.gc(dry_run=True).held["undelete"] > 500_000
    assert stored_bytes(store.root) == before
    assert store.undelete("k") == 1
    assert store.get("k").read() == content


def test_pending_delete_waits_for_its_grace(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    store.put("k", random_bytes(500_000, 1))
    store.delete("k")
    clock.now += 8 * DAY
    first = store.gc()
    assert (first.versions, first.containers_deleted, first.pending_delete_containers) == (
        1,
        0,
        len(containers(store.root)),
    )
    clock.now += DAY - 1
    second = store.gc()
    assert (second.containers_deleted, second.freed_bytes) == (0, 0)
    clock.now += 1
    third = store.gc()
    assert third.freed_bytes == first.pending_delete_bytes > 500_000
    assert containers(store.root) == []
    with pytest.raises(NotFound):
        store.get("k", 1)


def test_pending_content_put_again_is_restored(reopen: Callable[[], Store], clock: Clock) -> None:
    """Store content again that is pending delete."""
    store = reopen()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    assert store.put("again", content).ledger.unique_bytes == len(content)
    collect_repeatedly(store, clock)
    assert store.get("again").read() == content


@pytest.mark.parametrize("how", ["rebuilt", "lost"])
def test_rebuilt_index_omits_pending_deletes(reopen: Callable[[], Store], clock: Clock, how: str) -> None:
    store = reopen()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    if how == "rebuilt":
        store.rebuild_index()
    else:
        store.close()
        shutil.rmtree(store.root / "index")
        store = reopen()
    assert store.put("again", content).ledger.unique_bytes == len(content)
    collect_repeatedly(store, clock)
    assert store.get("again").read() == content


def test_rebuilt_index_counts_pending_deletes(reopen: Callable[[], Store], clock: Clock) -> None:
    """Count pending deletes as the index before the rebuild did."""
    store = reopen()
    store.put("gone", random_bytes(500_000, 1))
    store.close()
    store = reopen()  # another container
    store.put("kept", random_bytes(200_000, 2))
    store.delete("gone")
    clock.now += 8 * DAY
    store.gc()
    before = store.stats()
    assert before.parts["raw_blocks"] >= 700_000
    store.rebuild_index()
    assert store.stats().parts == before.parts
    assert collect_repeatedly(store, clock) > 500_000
    assert store.stats().parts["raw_blocks"] < 300_000
    assert store.verify().damage == ()


def test_bases_stay_while_a_version_needs_them(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    first = text_like(900_000, 1)
    store.put("k", first)
    second = mutate(first, 5, edits=300)
    assert store.put("k", second).ledger.delta_chunks > 0
    store.delete("k", 1)
    clock.now += 8 * DAY
    collect_repeatedly(store, clock)
    assert store.get("k").read() == second
    assert store.gc(dry_run=True).held["bases"] > 0


def test_another_tenants_versions_are_roots(reopen: Callable[[], Store], clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    store.put("k", random_bytes(300_000, 1))
    store.close()
    content = random_bytes(300_000, 2)
    with open_store(
        tmp_path / "s", settings=settings(COLLECTED, {"tenant": "other"}), clock=clock, create=True
    ) as other:
        other.put("k", content)
    store = reopen()
    store.delete("k")
    clock.now += 8 * DAY
    assert collect_repeatedly(store, clock) > 300_000
    store.close()
    with open_store(
        tmp_path / "s", settings=settings(COLLECTED, {"tenant": "other"}), clock=clock, create=True
    ) as other:
        assert other.get("k").read() == content


@pytest.mark.parametrize("mode", ["mark-sweep", pytest.param("hybrid", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("containers", r"one of the 200000 containers that it names: containers/.*: missing"),
        ("segments", rf"names segment {ROWS_MAX - 1} of containers/.*, which has [0-9]+"),
        ("above", r"names segment 1[0-9]{3} of containers/.*, which has [0-9]+"),
    ],
)
def test_manifest_with_wild_counts_is_refused(
    tmp_path: Path, clock: Clock, target: str, problem: str, mode: str
) -> None:
    """Take no memory for a manifest that names more than exists; free nothing."""
    with open_store(
        tmp_path / "s", settings=settings(COLLECTED, {"gc": {"mode": mode}}), clock=clock, create=True
    ) as store:
        _refused(store, clock, target, problem)


def _refused(store: Store, clock: Clock, target: str, problem: str) -> None:
    kept = random_bytes(300_000, 1)
    for number in range(40):
        store.put(f"kept{number}", random_bytes(20_000, 100 + number))
    store.put("kept", kept)
    store.put("gone", random_bytes(300_000, 2))
    store.delete("gone")
    clock.now += 8 * DAY
    ids = sorted(container for container, _ in store._containers.ids())
    assert len(ids) > 40
    named = np.arange(5 << 40, (5 << 40) + 200_000) if target == "containers" else np.array(ids)
    segment = {"containers": 0, "segments": ROWS_MAX - 1, "above": 1999}[target]
    hostile = Manifest(
        "default",
        "hostile",
        1,
        int(clock.now * 1e6),
        10,
        bytes(32),
        None,
        1.0,
        Ledger(logical_bytes=10),
        Locations(named.astype(np.uint64), np.full(len(named), segment, np.uint32)),
        np.zeros(len(named), np.bool_),
    )
    assert store._manifests.put(hostile) < 20_000
    name = object_name("default", "hostile", 1)
    before = containers(store.root)
    tracemalloc.start()
    try:
        for _ in range(2):
            with pytest.raises(Corrupt, match=rf"^{name}: {problem}.*nothing is freed"):
                store.gc()
            clock.now += DAY
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000_000
    damage = {found.object_name: found for found in store.verify().damage}
    assert ("hostile", 1) in {version for found in damage.values() for version in found.versions}
    assert len(damage) <= len(ids) + 1  # the index, which does not list it
    if target == "containers":
        assert damage[name].problem == f"{name}: names 200000 containers that do not exist"
    assert containers(store.root) == before
    assert store.get("kept").read() == kept
    (store.root / name).unlink()
    assert collect_repeatedly(store, clock) > 200_000
    assert store.get("kept").read() == kept


@pytest.mark.parametrize("target", ["container", "manifest"])
def test_unreadable_live_data_stops_marking(reopen: Callable[[], Store], clock: Clock, target: str) -> None:
    """Mark nothing for deletion while data that a version needs cannot be read."""
    store = reopen()
    store.put("broken", random_bytes(300_000, 1))
    broken = containers(store.root)[0] if target == "container" else manifests(store.root)[0]
    store.put("gone", random_bytes(300_000, 2))
    store.delete("gone")
    clock.now += 8 * DAY
    flip(broken, broken.stat().st_size - 20)
    store = reopen()
    before = stored_bytes(store.root)
    with pytest.raises(Corrupt, match="nothing is freed"):
        store.gc(dry_run=True)
    with pytest.raises(Corrupt, match="nothing is freed"):
        store.gc()
    assert len(containers(store.root)) == 2
    assert before - stored_bytes(store.root) < 2_000  # the manifest and marks of what was deleted
    store.delete("broken")  # its time to come back is still to pass
    with pytest.raises(Corrupt):
        store.gc()
    clock.now += 8 * DAY
    for _ in range(2):
        clock.now += DAY
        store.gc()
    assert containers(store.root) == []
    assert store.verify().damage == ()


def test_unreadable_base_of_dead_deltas_is_freed(reopen: Callable[[], Store], clock: Clock) -> None:
    """Free a container that cannot be read and that only dead blocks of a live container depend on."""
    store = reopen()
    base, kept = random_bytes(300_000, 1), random_bytes(200_000, 2)
    store.put("base", base)
    (broken,) = containers(store.root)
    list(store.put_many([("changed", mutate(base, 3, edits=20)), ("kept", kept)]))
    (held,) = (path for path in containers(store.root) if path != broken)
    store.delete("base")
    store.delete("changed")
    flip(broken, broken.stat().st_size - 20)
    clock.now += 8 * DAY
    store = reopen()
    for _ in range(4):
        clock.now += DAY
        store.gc()
    assert not broken.exists()
    assert not held.exists(), "its dead blocks are left out of the next generation"
    assert store.get("kept").read() == kept
    assert store.verify().damage == ()


def test_gc_after_service_puts_is_refused(reopen: Callable[[], Store], clock: Clock) -> None:
    """Refuse GC over objects of services unless the setting states that they have ended."""
    store = reopen()
    store.put("gone", random_bytes(300_000, 1))
    store.put("k", b"theirs")
    manifest = store._manifests.get("default", "k", 1)
    store._manifests.put(replace(manifest, version=2, origin=bytes([1] * 16)))
    store.delete("gone")
    clock.now += 8 * DAY
    store.rebuild_index()
    before = objects(store.root)
    for dry_run in (True, False):
        with pytest.raises(PermanentError, match=r"set gc\.assume_services_stopped"):
            store.gc(dry_run=dry_run)
    assert objects(store.root) == before
    store.settings = settings(COLLECTED, {"gc": {"assume_services_stopped": True}})
    assert collect_repeatedly(store, clock) > 300_000


@pytest.mark.parametrize(
    ("sealed", "parity"),
    [
        pytest.param({}, "none", id="clear-none"),
        pytest.param({}, "rs-4-2", id="clear-rs-4-2", marks=pytest.mark.soak),
        pytest.param(ENCRYPTED, "none", id="sealed-none", marks=pytest.mark.soak),
        pytest.param(ENCRYPTED, "rs-4-2", id="sealed-rs-4-2"),
    ],
)
def test_predicted_bytes_include_new_records(
    tmp_path: Path, clock: Clock, parity: str, sealed: Mapping[str, Mapping[str, object]]
) -> None:
    """Predict what a GC run frees less all that the store adds."""
    kept = {"prefix": "few", "keep_last": 2}
    chosen = settings(
        COLLECTED, sealed, {"storage": {"parity": parity}, "retention": {"superseded_seconds": 0, "policies": [kept]}}
    )
    with open_store(tmp_path / "s", settings=chosen, clock=clock, create=True) as store:
        content = text_like(400_000, 1)
        for number in range(1, 9):
            content = mutate(content, number, edits=40)
            store.put("few", content)
            store.put("some", random_bytes(90_000, number))
        for number in range(1, 7):
            store.delete("some", number)
        clock.now += 6 * DAY
        assert collect_repeatedly(store, clock, runs=12) > 540_000
        assert [info.version for info in store.versions("few", all_versions=True)] == [7, 8]
        assert store.get("few").read() == content


@pytest.mark.parametrize("point", ["compact.put", "compact.renewed", "gc.expired", "gc.uncatalogued", "gc.manifest"])
def test_stored_bytes_after_a_killed_gc_run(tmp_path: Path, point: str) -> None:
    """Report the stored bytes exactly after a GC run that was killed."""
    root, chosen = tmp_path / "d", {"deletion": {"undelete_seconds": 0}}
    with open_store(root, settings=settings(COLLECTED, chosen), create=True) as store:
        store.put("kept", text_like(600_000, 1))
        store.put("gone", random_bytes(200_000, 2))
        store.delete("gone")
    kill_during_gc(root, chosen, point, 1)
    with open_store(root, settings=settings(COLLECTED, chosen), create=True) as store:
        for _ in range(2):
            stats = store.stats()
            assert stats.ledger.stored_bytes == sum(stats.parts.values()) == stored_bytes(root)
            assert min(stats.parts.values()) >= 0
            store.gc()


def test_unreadable_tombstone_keeps_its_version(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    store.put("k", random_bytes(300_000, 1))
    store.delete("k")
    (mark,) = (store.root / "manifests").rglob("*.nkt")
    flip(mark, 40)
    clock.now += 30 * DAY
    before = stored_bytes(store.root)
    for _ in range(3):
        store.gc()
        clock.now += DAY
    assert stored_bytes(store.root) == before


def test_last_tombstone_of_a_key_stays(reopen: Callable[[], Store], clock: Clock) -> None:
    """Keep the last tombstone of a key's highest version until a higher one is put."""
    store = reopen()
    for number in range(3):
        store.put("k", random_bytes(1000, number))
    store.delete("k", 1)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    left = [path.name for path in (store.root / "manifests").rglob("*") if path.is_file()]
    assert left == ["0000000000000003.0002.nkt"]
    assert (store.versions("k"), store.list_deleted("k")) == ([], [])
    assert store.put("k", b"four").info.version == 4
    store.gc()
    assert [path.name for path in (store.root / "manifests").rglob("*") if path.is_file()] == ["0000000000000004.nkm"]
    assert store.stats().ledger.stored_bytes == stored_bytes(store.root)


def test_gc_run_during_a_put_is_refused(reopen: Callable[[], Store]) -> None:
    store = reopen()
    putting = store.put_many([("a", b"1"), ("b", b"2")])
    next(putting)
    with pytest.raises(StoreLocked):
        store.gc()
    list(putting)
    assert store.gc().freed_bytes == 0


def test_clock_ahead_restarts_the_grace(tmp_path: Path, clock: Clock, reopen: Callable[[], Store]) -> None:
    """Restart the grace of data marked for deletion by a clock ahead."""
    reopen()
    trusting = settings(COLLECTED, {"gc": {"trust_clock": True}})  # else a GC run by such a clock is refused
    store = open_store(tmp_path / "s", settings=trusting, clock=clock)
    store.put("k", random_bytes(300_000, 1))
    store.delete("k")
    clock.now += 3650 * DAY
    store.gc()
    clock.now -= 3640 * DAY
    assert store.gc().containers_deleted == 0
    clock.now += DAY
    assert store.gc().containers_deleted == len([1])
    store.close()


@pytest.mark.soak
def test_predicted_reclaim_equals_freed_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict each byte that GC frees after random deletions."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)  # half of the time, and no power cut is tested here
    clock = Clock()
    first, other = text_like(60_000, 1), random_bytes(30_000, 2)
    contents: dict[tuple[str, int], bytes] = {}
    with open_store(tmp_path / "all", settings=COLLECTED, clock=clock, create=True) as store:
        for number in range(1, 5):
            contents["a", number] = mutate(first, number, edits=40)
            contents["b", number] = other[: 5_000 * number] + mutate(first, number + 1, edits=20)[:20_000]
            for key in "ab":
                store.put(key, contents[key, number])
    draw = random.Random(6)
    for deletion_set in range(DELETION_SETS):
        root = tmp_path / "one"
        shutil.copytree(tmp_path / "all", root)
        going = draw.sample(sorted(contents), draw.randint(1, 5))
        clock.now = Clock.now
        with open_store(root, settings=COLLECTED, clock=clock, create=True) as store:
            for key, number in going:
                store.delete(key, number)
            clock.now += 8 * DAY
            predicted, before = store.gc(dry_run=True), stored_bytes(root)
            done = store.gc()
            assert before - stored_bytes(root) == predicted.freed_bytes == done.freed_bytes
            clock.now += DAY
            before = stored_bytes(root)
            store.gc()
            record_bytes = sum(len(data) for name, data in objects(root).items() if name.startswith("gc/"))
            assert (
                before - stored_bytes(root) + max(0, record_bytes - EMPTY_BYTES - MAC_BYTES)
                == predicted.pending_delete_bytes
            )
            for key, number in draw.sample(sorted(contents.keys() - set(going)), min(2, len(contents) - len(going))):
                assert store.get(key, number).read() == contents[key, number]
            if not deletion_set % 10:
                assert store.verify().damage == ()
        shutil.rmtree(root)


def test_clock_set_back_reuses_no_container_id(
    reopen: Callable[[], Store], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year's step back gave each new container the number after the highest that was left."""
    real, ahead_ns = time.time_ns, [365 * DAY * 10**9]
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead_ns[0])
    store = reopen()
    contents = [random_bytes(50_000, number) for number in range(6)]
    store.put("first", contents[0])
    ahead_ns[0] = 0
    with open_store(store.root, settings=store.settings, clock=clock, create=True) as reader:
        for content in contents:
            version = store.put("k", content).info.version
            assert reader.get("k", start=100, stop=20_000).read() == content[100:20_000]
            store.delete("k", version)
            clock.now += 7 * DAY + 1
            collect_repeatedly(store, clock)
    assert len(containers(store.root)) == 1
