"""GC runs concurrent with puts and restores, by the same process and others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.local.process_lock import GC_RUN, WriterLock
from nearkin_maintenance.verify import integrity
from nearkin_shared.errors import StoreLocked
from nearkin_shared.formats.container import decode_container
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId
from nearkin_shared.utils import failpoints
from tests.support.checks.waiting import until
from tests.support.data.stores import containers, flip, settings
from tests.support.engines import crash_child, gc_during_put
from tests.support.engines.model import DAY
from tests.support.engines.races import Scene, scene

EVERY = 1 if "SOAK" in os.environ else 11
SECONDS = 8.0 if "SOAK" in os.environ else 3.0
CHOSEN = settings(crash_child.CHOSEN, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}})

PREAMBLE = """
import random, sys, time
from nearkin import open_store
from nearkin_shared.errors import NotFound, StoreLocked
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from tests_chosen import CHOSEN
root, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
def content(key, number):
    return mutate(text_like(120_000, key), number, edits=20) + random_bytes(60_000, 1000 * key + number)
"""
FIRST = """
with open_store(root, settings=CHOSEN, create=True) as store:
    for key in range(3):
        store.put(f"k{key}", content(key, 1))
"""
READER = """
done = 0
with open_store(root, settings=CHOSEN, read_only=True) as store:
    while time.monotonic() < until or done < 4:
        for key in range(3):
            try:
                blob = store.get(f"k{key}")
                data, version = blob.read(), blob.info.version
            except Exception:
                newest = store.get(f"k{key}").info.version
                if newest - blob.info.version < 2:  # else deleted while it was read
                    raise
                continue
            assert data == content(key, version), (key, version)
            done += 1
print(done)
"""
WRITER = """
done = 0
while time.monotonic() < until or done < 12:  # of each key two versions are deleted by then
    key = done % 3
    with open_store(root, settings=CHOSEN, create=True) as store:
        version = store.info(f"k{key}").version + 1
        assert store.put(f"k{key}", content(key, version)).info.version == version
        if version > 2:
            store.delete(f"k{key}", version - 2)
    done += 1
print(done)
"""
GC_RUNS = """
freed = done = 0
while time.monotonic() < until or ((not freed or done < 4) and time.monotonic() < until + 120):
    try:
        with open_store(root, settings=CHOSEN, create=True) as store:
            report = store.gc(wait_seconds=30)
    except StoreLocked as err:
        raise SystemExit(f"refused: {err}")
    freed += report.containers_deleted + report.containers_rewritten
    done += 1
assert freed, done
print(done)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nearkin-", dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


def child(script: str, root: Path, seconds: float) -> subprocess.Popen[str]:
    (root.parent / "tests_chosen.py").write_text(
        "from tests.support.engines import crash_child\n"
        "from tests.support.data.stores import settings\n"
        'CHOSEN = settings(crash_child.CHOSEN, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}})\n'
    )
    path = os.pathsep.join([str(root.parent), *(entry for entry in sys.path if entry)])
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, str(root), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.soak
def test_three_processes_read_put_and_collect_without_error(folder: Path) -> None:
    """Three processes that read, put and collect never meet an error."""
    root = folder / "s"
    with child(FIRST, root, 0) as first:
        assert first.wait(60) == 0, first.stderr and first.stderr.read()
    children = [child(script, root, SECONDS) for script in (READER, WRITER, GC_RUNS)]
    done = [one.communicate(timeout=300) for one in children]
    assert [one.returncode for one in children] == [0, 0, 0], done
    assert all(int(puts) > 3 for puts, _ in done), done
    with open_store(root, settings=CHOSEN, create=True) as store:
        for _ in range(3):
            store.gc()
        assert store.verify().damage == ()
        assert store._index.to_check() is not None


@pytest.mark.parametrize(
    "race",
    [
        gc_during_put.put_during_gc,
        gc_during_put.put_from_elsewhere,
        gc_during_put.second_gc_run,
        gc_during_put.rebuild_during_gc,
    ],
    ids=lambda race: race.__name__,
)
def test_writer_at_each_step_of_a_gc_run_loses_nothing(folder: Path, race: Callable[..., int]) -> None:
    """Another writer at any step of a GC run loses nothing."""
    assert race(folder, every=EVERY) >= 20


def test_put_does_not_wait_while_gc_marks_and_plans(folder: Path) -> None:
    """A put does not wait while a GC run marks and plans."""
    made = gc_during_put.neighbours(folder)
    points: list[str] = []

    def watch(name: str) -> None:
        if name in ("gc.marked", "gc.swept-planned", "compact.made", "gc.marking-planned"):
            with made.open() as elsewhere:
                elsewhere.put("other", name.encode())
            points.append(name)

    with made.open() as store:
        failpoints.arm((), lambda name: watch(name) if threading.current_thread() is threading.main_thread() else None)
        try:
            store.gc()
        finally:
            failpoints.disarm()
        assert points == ["gc.marked", "gc.swept-planned", "compact.made", "gc.marking-planned"]
        assert store.get("other").info.version == len(points)
        made.check(store)


def test_put_waits_for_a_step_of_a_gc_run(folder: Path) -> None:
    """A put waits for a step of a GC run and is then done."""
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"1")
    step = WriterLock(folder / "s")
    step.acquire(what=GC_RUN)
    done: list[int] = []

    def put() -> None:
        with open_store(folder / "s", settings=CHOSEN, create=True) as store:
            done.append(store.put("k", b"2").info.version)

    thread = threading.Thread(target=put)
    thread.start()
    waiting = WriterLock(folder / "s")
    until(lambda: waiting.is_wanted)
    assert not done
    step.release()
    thread.join(30)
    assert done == [2]
    assert not waiting.is_wanted


def test_put_that_timed_out_names_the_gc_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that waited too long names the operation that it waited for."""
    monkeypatch.setattr("nearkin.local.process_lock.STEP_SECONDS_MAX", 0.1)
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"1")
    step = WriterLock(folder / "s")
    step.acquire(what=GC_RUN)
    with (
        open_store(folder / "s", settings=CHOSEN, create=True) as store,
        pytest.raises(StoreLocked, match=f"in a step of garbage collection, by process {os.getpid()}"),
    ):
        store.put("k", b"2")
    step.release()


def test_gc_run_during_a_gc_run_is_refused(folder: Path) -> None:
    """A GC run during another one is refused, and the error names it."""
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("k", random_bytes(10_000, 1))
    rounds = WriterLock(folder / "s", "lock.round")
    rounds.acquire(what="garbage collection")
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        with pytest.raises(StoreLocked, match=f"is being collected by process {os.getpid()}"):
            store.gc()
        assert store.put("k", b"2").info.version == 2
        rounds.release()
        assert store.gc().freed_bytes == 0


def test_store_after_a_gc_run_lets_others_write(folder: Path) -> None:
    """A store that did a GC run lets other processes write."""
    with (
        open_store(folder / "s", settings=CHOSEN, create=True) as store,
        open_store(folder / "s", settings=CHOSEN, create=True) as other,
    ):
        store.put("k", random_bytes(10_000, 1))
        store.close()
        store.gc()
        assert other.put("k", b"2").info.version == 2
        with pytest.raises(StoreLocked):
            store.put("k", b"3")
        other.close()
        assert store.put("k", b"3").info.version == 3


def test_deletion_waits_for_a_gc_step_with_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion waits for a step of a GC run that has just acquired the lock.

    It took the lock of the step for its Store's own, and wrote its mark after the lock was released.
    """
    done: list[int] = []
    threads: list[threading.Thread] = []
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"1")
        store.close()
        store.gc()
        evict = ContainerStore.evict

        def lock_taken(containers: ContainerStore, container: ContainerId | None = None) -> None:
            evict(containers, container)
            if store._index.crossing.is_exclusive_here and not threads:
                threads.append(thread := threading.Thread(target=lambda: done.append(store.delete("k"))))
                thread.start()
                thread.join(0.5)
                assert done == []

        monkeypatch.setattr(ContainerStore, "evict", lock_taken)
        store.gc()
        (thread,) = threads
        thread.join(60)
        assert done == [1]
        with open_store(folder / "s", settings=CHOSEN, create=True) as other, pytest.raises(StoreLocked):
            other.put("k", b"2")  # a deletion keeps the lock until the close


def test_close_in_another_thread_waits_for_a_gc_step(folder: Path) -> None:
    """The close of a store in another thread waits for a step of a GC run."""
    made = gc_during_put.neighbours(folder)
    with made.open() as store:
        store.put("lock", b"is this Store's")
        for point in ("gc.section-began", "gc.due-withdrawn", "compact.put", "gc.recorded"):
            threads: list[threading.Thread] = []

            def watch(name: str, point: str = point, threads: list[threading.Thread] = threads) -> None:
                if name == point and not threads:
                    threads.append(thread := threading.Thread(target=store.close))
                    thread.start()
                    thread.join(0.2)

            failpoints.arm((), watch)
            try:
                store.gc()
            finally:
                failpoints.disarm()
            for thread in threads:
                thread.join()
            store.put("lock", point.encode())
        made.check(store)


def test_data_repaired_after_the_plan_are_kept(folder: Path) -> None:
    """Data that were broken at the plan, and are repaired and used since, are kept.

    The data were unknown when the run planned, so no concurrent write seemed to name them.
    """
    now, chosen = crash_child.START, settings(crash_child.CHOSEN, {"chunker": {"algorithm": "fixed"}})
    left, right, other = (random_bytes(40 * 1024, number) for number in range(3))
    dead = text_like(64 * 1024, 3)
    edited = bytearray(dead)
    edited[::700] = bytes(len(edited[::700]))
    second, third = left + other + right, left + bytes(edited) + right
    committed: list[int] = []
    with open_store(folder / "s", settings=chosen, clock=lambda: now, create=True) as store:
        store.put("going", dead)
        (alone,) = containers(store.root)
        for content in (left + dead + right, second):
            store.put("k", content)
        store.delete("going")
        store.delete("k", 1)
        now += 2 * DAY
        store.gc()
        now += 2 * DAY
        store.close()
        whole = alone.read_bytes()
        flip(alone, len(whole) - 40)

        def is_repaired(name: str) -> None:
            if name == "gc.swept-planned":
                alone.write_bytes(whole)
                with open_store(store.root, settings=chosen, clock=lambda: now, create=True) as elsewhere:
                    committed.append(elsewhere.put("k", third).info.version)

        failpoints.arm((), is_repaired)
        try:
            store.gc()
        finally:
            failpoints.disarm()
        assert committed == [3]
        newest = containers(store.root)[-1]
        assert int(alone.name[:16], 16) in decode_container(newest.read_bytes(), newest.name).base_containers()
        assert store.get("k", 2).read() == second
        assert store.get("k", 3).read() == third


def test_verify_during_gc_removals_reports_no_damage(folder: Path) -> None:
    """Verify reports no damage while GC runs remove versions and containers."""
    step, steps = 0, 1
    while step < steps:
        made = scene(folder / str(step))
        passed: list[int] = []

        def collected(done: int, total: int, at: int = step, passed: list[int] = passed, made: Scene = made) -> None:
            passed.append(total)
            if len(passed) == at + 1:
                with made.open() as elsewhere:
                    for _ in range(2):
                        elsewhere.gc()
                        made.now += 2 * DAY
                    elsewhere.put("new", b"meanwhile")

        with made.open() as store:
            assert store.verify(progress=collected).damage == ()
            assert not (made.root / "quarantine").is_dir()
        step, steps = step + 1, passed[0]
    assert steps > 6


@pytest.mark.soak
def test_verify_during_gc_rewrites_reports_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify reports no damage while a GC run rewrites containers.

    Another process runs between two containers, and during a check; it gathers, and gives up bases.
    """
    small = {"block": {"raw_bytes": "64KiB", "delta_bytes": "16KiB"}, "container": {"target_bytes": "256KiB"}}
    gathering = {"max_depth": 3}, {"merge_block_bytes": "256KiB", "merge_versions_min": 2, "grace_seconds": 0}
    chosen = settings(CHOSEN, small, {"delta": gathering[0], "gc": gathering[1]})
    content, kept = text_like(300_000, 1), {}
    with open_store(folder / "s", settings=settings(chosen, {"gc": {"merge_block_bytes": 0}}), create=True) as store:
        for number in range(1, 13):
            content = kept[number] = mutate(content, number, edits=60)
            store.put("k", content)
            store.put("alone", random_bytes(20_000, number))
        for number in range(1, 6):
            store.delete("k", number)
            store.delete("alone", 2 * number)
        store.gc()
    real, step, steps, rewritten = integrity._read_chunks, 0, 1, 0
    while step < steps:
        shutil.copytree(folder / "s", folder / str(step))
        passed = [0]

        def passes(at: int = step, passed: list[int] = passed) -> None:
            nonlocal rewritten
            if passed[0] == at:
                with open_store(folder / str(at), settings=chosen, create=True) as elsewhere:
                    rewritten += elsewhere.gc().containers_rewritten
            passed[0] += 1

        def read(*arguments: Any, passes: Callable[[], None] = passes) -> Any:
            passes()
            return real(*arguments)

        monkeypatch.setattr(integrity, "_read_chunks", read)
        with open_store(folder / str(step), settings=chosen, create=True) as store:
            assert store.verify(progress=lambda *_, passes=passes: passes()).damage == ()
            assert store.get("k").read() == content
        assert not (folder / str(step) / "quarantine").is_dir()
        step, steps = step + 1, passed[0]
    assert steps > 20
    assert rewritten > steps


def test_dry_run_retries_after_a_concurrent_removal(folder: Path) -> None:
    """A dry run starts again if a GC run removed data that it was about to read."""
    with open_store(folder / "s", settings=CHOSEN, create=True) as store:
        store.put("stays", b"1")
        store.put("goes", random_bytes(50_000, 1))
        store.close()
        passed: list[str] = []

        def collect(name: str) -> None:
            if name == "gc.marking-planned" and not passed:
                passed.append(name)
                with open_store(folder / "s", settings=CHOSEN, create=True) as elsewhere:
                    elsewhere.delete("goes")
                    elsewhere.gc()

        failpoints.arm((), collect)
        try:
            preview = store.gc(dry_run=True)
        finally:
            failpoints.disarm()
        assert passed
        assert preview.freed_bytes > 50_000
        assert store.gc().freed_bytes > 50_000
