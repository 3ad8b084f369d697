"""Garbage collection killed before and after each of its effects: the next GC run completes it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import NotFound
from tests.support.data.stores import SMALL, objects, process, settings

DAY = 86_400
START = 1_764_000_000.0
CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": DAY}, "gc": {"grace_seconds": DAY, "compact_below": 0.9}})
SOAK = "SOAK" in os.environ
STRIDE = 1 if SOAK else 8
"""A GC run is killed at every eighth effect, from a random first one; `make soak` kills at each and checks all."""

DIES = """
import os, shutil, signal, sys
from nearkin import open_store
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.objectstore.local import LocalObjectStore
import nearkin_maintenance
from tests.support.data.stores import SMALL, settings

root, now, before = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "before"
DAY = 86_400
chosen = settings(SMALL, {"deletion": {"undelete_seconds": DAY}, "gc": {"grace_seconds": DAY, "compact_below": 0.9}})
EFFECTS = [(LocalObjectStore, "put_new"), (LocalObjectStore, "delete"), (LmdbIndex, "withdraw"), (LmdbIndex,
"collect_many"),
    (LmdbIndex, "renew")]

def dies_at(times):
    done = []
    for kind, name in EFFECTS:
        def dying(*arguments, real=getattr(kind, name), **more):
            done.append(1)
            if before and len(done) == times:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **more)
            if len(done) == times:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(kind, name, dying)
    with open_store(f"{root}.{times}", settings=chosen, clock=lambda: now, create=True) as store:
        store.gc()

for times in range(int(sys.argv[4]), 1000, int(sys.argv[5])):
    shutil.copytree(root, f"{root}.{times}")
    child = os.fork()  # nothing here has threads yet
    if not child:
        dies_at(times)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(times, status, flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


def contents() -> dict[tuple[str, int], bytes]:
    first = text_like(500_000, 1)
    found = {("k", number): mutate(first, number, edits=60) for number in range(1, 5)}
    found |= {("other", 1): random_bytes(300_000, 2), ("other", 2): random_bytes(300_000, 3)}
    found |= {("beside", 1): random_bytes(50_000, 4), ("beside", 2): random_bytes(50_000, 5)}  # in other's containers
    chained = text_like(100_000, 6)
    for number in range(1, 13):  # each depends on the one before: bases of the last ones die
        found["chain", number] = chained = mutate(chained, number, edits=40)
    return found


DELETED = {("k", 1), ("k", 2), ("other", 1), ("other", 2), *(("chain", number) for number in range(1, 11))}


def make_store(root: Path, *, gc_runs: int) -> float:
    """Make a store after `gc_runs` GC runs; return the time of the next."""
    now = START
    with open_store(root, settings=CHOSEN, clock=lambda: now, create=True) as store:
        list(store.put_many((key, content) for (key, _), content in contents().items() if key != "chain"))
        for (key, _), content in contents().items():
            if key == "chain":  # in a container each: bases of others die
                store.put(key, content)
        for key, number in sorted(DELETED):
            store.delete(key, number)
        now += 2 * DAY
        for _ in range(gc_runs):
            store.gc()
            now += 2 * DAY
    return now


def finish_gc(root: Path, now: float) -> dict[str, bytes]:
    """Check a store whose GC run was cut short, complete the run, and return the remaining objects."""
    with open_store(root, settings=CHOSEN, clock=lambda: now, create=True) as store:
        check_contents(store)
        for _ in range(4):
            store.gc()
            now += 2 * DAY
            check_contents(store)
        assert store.stats().ledger.stored_bytes == sum(map(len, objects(root).values()))
        live = store._index.writable().entries()
        assert store.rebuild_index().skipped == ()
        rebuilt = store._index.writable().entries()
        for table in ("chunks", "segments"):
            assert live.pop(table).keys() <= rebuilt.pop(table).keys()
        del live["features"], rebuilt["features"]  # a rebuilt index has none of a deleted segment
        assert live == rebuilt
        assert store.put("other", b"more").info.version == 3
    return objects(root)


def normalise_names(names: set[str]) -> list[str]:
    """Leave out the number of the pending-delete record: a killed process may have used one."""
    return sorted("gc/record.nkg" if name.endswith(".nkg") else name for name in names)


def check_contents(store: Store) -> None:
    assert store.verify().damage == ()
    for (key, number), content in contents().items():
        if (key, number) in DELETED:
            try:
                store.get(key, number)
            except NotFound:
                continue
            raise AssertionError(f"{key} {number} was deleted")
        assert store.get(key, number).read() == content


def kill_at_effects(tmp_path: Path, gc_runs: int) -> int:
    now = make_store(tmp_path / "whole", gc_runs=gc_runs)
    left = set(ended_names(tmp_path / "whole", now))
    died = 0
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    draw = random.Random(seed)
    shutil.rmtree(tmp_path / "whole.0")
    for when in ("before", "after"):
        script = process(DIES, tmp_path / "whole", str(now), when, str(draw.randint(1, STRIDE)), str(STRIDE))
        output, complained = script.communicate(timeout=120)
        assert script.returncode == 0, complained
        outcomes = [line.split() for line in output.splitlines()]
        assert [status for _, status in outcomes[:-1]] == ["9"] * (len(outcomes) - 1)
        assert outcomes[-1][1] == "0"
        chosen = [int(times) for times, _ in outcomes]
        for times in chosen if SOAK else draw.sample(chosen, min(2, len(chosen))):
            root = tmp_path / f"whole.{times}"
            assert normalise_names(set(finish_gc(root, now)) - containers_of_the_last_put(root)) == normalise_names(
                left
            ), times
        for times in chosen:
            shutil.rmtree(tmp_path / f"whole.{times}")
        died += len(outcomes) - 1
    return died


def containers_of_the_last_put(root: Path) -> set[str]:
    newest = max((root / "containers").rglob("*.nkc"))
    return {str(newest.relative_to(root))}


def ended_names(root: Path, now: float) -> set[str]:
    shutil.copytree(root, f"{root}.0")
    copy = Path(f"{root}.0")
    return set(finish_gc(copy, now)) - containers_of_the_last_put(copy)


def test_first_gc_run_killed_anywhere_is_completed(tmp_path: Path) -> None:
    """A first GC run may be killed anywhere."""
    assert kill_at_effects(tmp_path, gc_runs=0) * STRIDE > 20


@pytest.mark.soak
def test_later_gc_run_killed_anywhere_is_completed(tmp_path: Path) -> None:
    """A later GC run may be killed anywhere."""
    assert kill_at_effects(tmp_path, gc_runs=1) * STRIDE > 4
