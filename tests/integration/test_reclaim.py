"""Test exact predictions of reclaim: delta chains, shared segments, two tenants, rebase.

Each set is tried on a copy of one store: predicted, then collected by GC runs until
nothing more is freed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.utils import failpoints
from tests.support.data.stores import SMALL, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

SETS = 50 if "EVERY_SET" in os.environ else 3
"""Of each kind; two kinds are a hundred."""
GC_RUNS_MAX = 12
CHOSEN = settings(
    SMALL,
    {
        "deletion": {"undelete_seconds": DAY},
        "gc": {"grace_seconds": DAY, "compact_below": 0.9},
        "delta": {"max_depth": 3},
        "features": {"algorithm": "odess"},
    },
)
TENANTS = ("default", "other")
Version = tuple[str, str, int]


def open_mode(root: Path, clock: Clock, mode: str, tenant: str = "default") -> Store:
    chosen = settings(CHOSEN, {"gc": {"mode": mode}})
    if tenant != "default":
        chosen = settings(chosen, {"tenant": tenant})
    return open_store(root, settings=chosen, clock=clock, create=True)


def fill(root: Path, clock: Clock, mode: str) -> dict[Version, bytes]:
    """Make a store of versions based on one another, some with one content under two keys."""
    contents: dict[Version, bytes] = {}
    for number, tenant in enumerate(TENANTS):
        first, other = text_like(90_000, number), random_bytes(40_000, 2)
        with open_mode(root, clock, mode, tenant) as store:
            for version in range(1, 5):
                contents[tenant, "a", version] = first
                contents[tenant, "b", version] = other[: 10_000 * version] + first[:30_000]
                contents[tenant, "copy", version] = first if version % 2 else other
                for key in ("a", "b", "copy"):
                    store.put(key, contents[tenant, key, version])
                first = mutate(first, version, edits=60)
    return contents


def count_deep_and_shared(root: Path, clock: Clock, mode: str) -> tuple[int, int]:
    """Return the numbers of chunks at depth 2 or more and of shared segments."""
    with open_mode(root, clock, mode) as store:
        all_containers = store._containers.of(None)
        deep_chunks = sum(
            int((all_containers.directory(container).chunks.depths > 1).sum()) for container, _ in all_containers.ids()
        )
        named: Counter[tuple[int, int]] = Counter()
        for name, _ in store._manifests.names():
            segments = store._manifests.read(name).segments
            named.update(set(zip(segments.containers.tolist(), segments.ordinals.tolist(), strict=True)))
    return deep_chunks, sum(count > 1 for count in named.values())


@pytest.mark.parametrize("mode", [pytest.param("mark-sweep", marks=pytest.mark.soak), "hybrid"])
def test_predicted_reclaim_is_freed_exactly(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free in the end exactly the predicted bytes of any deletion set."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)  # no power cut is tested here
    clock, draw = Clock(), random.Random(f"reclaim {mode}")
    contents = fill(tmp_path / "all", clock, mode)
    with open_mode(tmp_path / "all", clock, mode) as store:  # a ledger that knows it all
        store.gc()
    deep_chunks, shared = count_deep_and_shared(tmp_path / "all", clock, mode)
    assert deep_chunks > 0
    assert shared > 0
    rebased = rewritten = freed_bytes = 0
    for number in range(SETS):
        root, clock.now = tmp_path / "one", Clock.now
        shutil.copytree(tmp_path / "all", root)
        # the first: all bases of the newest versions
        going = draw.sample(sorted(contents), draw.randint(1, 12)) if number else [v for v in contents if v[2] < 4]
        for tenant in TENANTS:
            with open_mode(root, clock, mode, tenant) as store:
                for whose, key, version in going:
                    if whose == tenant:
                        store.delete(key, version)
        clock.now += 2 * DAY
        with open_mode(root, clock, mode) as store:
            predicted, before = store.gc(dry_run=True), stored_bytes(root)
            failpoints.arm()
            done = store.gc()
            assert before - stored_bytes(root) == predicted.freed_bytes == done.freed_bytes
            for _ in range(GC_RUNS_MAX):
                clock.now += DAY
                run_before, run_predicted = stored_bytes(root), store.gc(dry_run=True)
                done = store.gc()
                assert run_before - stored_bytes(root) == done.freed_bytes == run_predicted.freed_bytes
                if not done.freed_bytes and not done.pending_delete_containers:
                    break
            else:
                raise AssertionError(f"{GC_RUNS_MAX} GC runs, and the last still freed {done.freed_bytes} bytes")
            passed = failpoints.disarm()
            assert before - stored_bytes(root) == predicted.freed_bytes + predicted.pending_delete_bytes
            freed_bytes += before - stored_bytes(root)
            rebased += passed.get("rebase.container", 0)
            rewritten += passed.get("compact.replaced", 0)
        for tenant in TENANTS:
            with open_mode(root, clock, mode, tenant) as store:
                for whose, key, version in draw.sample(sorted(contents.keys() - set(going)), 4):
                    if whose == tenant:
                        assert store.get(key, version).read() == contents[tenant, key, version]
        shutil.rmtree(root)
    assert rebased > 0
    assert rewritten > rebased
    assert freed_bytes > 0
