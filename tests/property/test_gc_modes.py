"""Compare the four GC modes.

Counts and times nominate, marking confirms, and the same data stay.

The same history is applied to a store of each mode. At the end all stores hold what marking alone leaves.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as runs
from hypothesis import strategies as st

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_maintenance import ReferenceCounts
from nearkin_maintenance.gc.gc_run import require_service_mode
from nearkin_maintenance.gc.ledger_rows import LedgerRows
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.storage import EXPIRY, GC_MODES, HYBRID, MARK_SWEEP, REFCOUNT
from nearkin_shared.errors import ConfigError, Corrupt, StoreUnavailable
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.results import Ledger as Bytes
from nearkin_shared.storage.manifests import object_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, containers, manifests, objects, settings
from tests.support.fakes.clock import DAY, Clock

WEEK = 7 * DAY


def opened(root: Path, mode: str, clock: Clock) -> Store:
    changes = {"deletion": {"undelete_seconds": DAY}, "gc": {"mode": mode, "grace_seconds": DAY, "compact_below": 0.8}}
    return open_store(root, settings=settings(SMALL, changes), clock=clock, create=True)


def left(root: Path) -> Counter[bytes]:
    """Return the names of all chunks in containers."""
    found: Counter[bytes] = Counter()
    for path in containers(root):
        chunks = decode_container(path.read_bytes(), path.name).chunks
        found.update(name.tobytes() for name, there in zip(chunks.names, chunks.there, strict=True) if there)
    return found


def marked(store: Store) -> bool:
    """Run GC; return whether it read manifests to mark."""
    looked = []

    class Looking(LiveSet):
        def __init__(self, *args: Any) -> None:
            looked.append(True)
            super().__init__(*args)

    with mock.patch("nearkin_maintenance.gc.gc_run.LiveSet", Looking):
        store.gc()
    return bool(looked)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("change"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("delete"), st.sampled_from("ab"), st.integers(1, 5)),
        st.tuples(st.just("undelete"), st.sampled_from("ab"), st.integers(1, 5)),
        st.tuples(st.just("gc"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("reopen"), st.just(""), st.just(0)),
    ),
    max_size=30 if "LONG" in os.environ else 8,
)


@runs(max_examples=40 if "LONG" in os.environ else 1, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
@example([("put", "a", 1), ("gc", "", 1), ("change", "a", 2), ("delete", "a", 1), ("gc", "", 2), ("gc", "", 2)])
@example([("put", "a", 1), ("put", "a", 2), ("gc", "", 0), ("put", "a", 1), ("delete", "a", 2), ("gc", "", 2)])
@example([("put", "a", 1), ("put", "b", 1), ("gc", "", 1), ("delete", "a", 1), ("gc", "", 2), ("delete", "b", 1)])
def test_each_gc_mode_leaves_what_marking_leaves(steps: list[tuple[Any, ...]]) -> None:
    """The stores are equal after any history."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        opened(Path(folder, "new"), MARK_SWEEP, clock).close()
        for mode in GC_MODES:  # stores of one secret, so that a chunk has the same name in each
            shutil.copytree(Path(folder, "new"), Path(folder, mode))
        stores = {mode: opened(Path(folder, mode), mode, clock) for mode in GC_MODES}
        stack.callback(lambda: [store.close() for store in stores.values()])
        live: dict[tuple[str, int], bytes] = {}
        deleted: dict[tuple[str, int], tuple[bytes, float]] = {}
        count = Counter[str]()
        for step, key, number in steps:
            clock.now += 1
            name = key, number
            match step:
                case "put" | "change":
                    content = text_like(100_000, number) + random_bytes(100_000, number // 3)
                    if step == "change" and (key, count[key]) in live:
                        content = mutate(live[key, count[key]], number, 5)
                    count[key] += 1
                    live[key, count[key]] = content
                    for store in stores.values():
                        assert store.put(key, content).info.version == count[key]
                case "delete" if name in live:
                    deleted[name] = live.pop(name), clock.now + DAY
                    for store in stores.values():
                        store.delete(key, number)
                case "undelete" if name in deleted and clock.now < deleted[name][1]:
                    live[name] = deleted.pop(name)[0]
                    for store in stores.values():
                        store.undelete(key, number)
                case "gc":
                    clock.now += number * DAY
                    for store in stores.values():
                        store.gc()
                case "reopen":
                    for mode in GC_MODES:
                        stores[mode].close()
                        stores[mode] = opened(Path(folder, mode), mode, clock)
        for _ in range(5):  # a week each: marking runs at least that often, and all deadlines pass
            clock.now += WEEK
            for store in stores.values():
                store.gc()
        expected = left(Path(folder, MARK_SWEEP))
        for mode, store in stores.items():
            assert left(Path(folder, mode)) == expected, mode
            assert len(manifests(Path(folder, mode))) == len(live), mode
            assert store.verify().damage == (), mode
            assert all(store.get(*version).read() == content for version, content in live.items()), mode


def manifest_of(key: str, version: int, held: frozenset[int]) -> Manifest:
    rows = np.array(sorted(held), np.uint64)
    segments = Locations(rows // 4 + 1, (rows % 4).astype(np.uint32))
    known = np.zeros(len(rows), np.bool_)
    return Manifest("default", key, version, 0, 0, bytes(32), None, 0.0, Bytes(), segments, known)


@runs(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.tuples(st.sampled_from("ab"), st.integers(1, 6)), st.frozensets(st.integers(0, 9)), max_size=8
        ),
        max_size=6,
    ),
    st.sampled_from([HYBRID, REFCOUNT]),
)
@example(  # versions 2 and 3 are deleted, and return after version 1 was deleted
    [
        {("a", 1): frozenset({0}), ("a", 2): frozenset({0}), ("a", 3): frozenset()},
        {("a", 1): frozenset()},
        {("a", 2): frozenset(), ("a", 3): frozenset()},
        {},
    ],
    HYBRID,
)
def test_reference_counts_match_live_versions(rounds: list[dict[tuple[str, int], frozenset[int]]], mode: str) -> None:
    """Counts are exact after any sequence of puts and deletions."""
    references: dict[tuple[str, int], frozenset[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        before: set[tuple[int, int]] = set()
        for day, visible in enumerate(rounds):
            for name, held in visible.items():
                references.setdefault(name, held)  # a version never changes
            kept = {object_name("default", *name): manifest_of(*name, references[name]) for name in visible}
            ledger = ReferenceCounts(Path(folder), 1 << 24, mode)
            try:
                result = ledger.update(kept, (), kept.__getitem__, lambda _: None, day)
                again = ledger.update(kept, (), kept.__getitem__, lambda _: None, day)
                needed = {(row // 4 + 1, row % 4) for name in visible for row in references[name]}
                assert ledger.held_segments() == needed
                assert result.nominated >= len(before - needed)
                assert (again.nominated, again.touched) == (result.nominated, 0)
                ledger.record_marking(day)
            finally:
                ledger.close()
            before = needed


def test_unreadable_manifest_leaves_counts_unchanged(tmp_path: Path) -> None:
    """Marking reports the manifest that cannot be read."""
    held = {("a", 1): frozenset({0, 1}), ("a", 2): frozenset({1, 2}), ("b", 1): frozenset({7})}
    kept = {object_name("default", *name): manifest_of(*name, segments) for name, segments in held.items()}
    broken = object_name("default", "a", 2)

    def read(name: str) -> Manifest:
        if name == broken:
            raise Corrupt(name)
        return kept[name]

    ledger = ReferenceCounts(tmp_path / "gc", 1 << 24, HYBRID)
    try:
        ledger.record_marking(0)
        assert ledger.update(kept, (), read, lambda _: None, 1).marking
        assert ledger.held_segments() == set()
        ledger.update(kept, (), kept.__getitem__, lambda _: None, 1)
        assert len(ledger.held_segments()) == 4
    finally:
        ledger.close()


def test_nominations_persist_until_a_gc_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with opened(tmp_path / "s", HYBRID, clock) as store:
        for number in (1, 2):
            store.put("a", random_bytes(600_000, number))
        assert marked(store)
        assert not marked(store)
        store.delete("a", 1)
        clock.now += DAY + 2

        def died(*_: object) -> None:
            raise StoreUnavailable("the GC run fails here")

        with monkeypatch.context() as patched:
            patched.setattr(PendingDeleteStore, "replace", died)
            with pytest.raises(StoreUnavailable):
                store.gc()
        assert store.gc().pending_delete_containers
        clock.now += DAY + 2
        store.gc()
        assert not marked(store)
        assert store.get("a").read() == random_bytes(600_000, 2)
        assert sum(map(len, objects(tmp_path / "s").values())) < 700_000


def test_hybrid_marks_after_zero_counts_and_once_a_week(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "s", HYBRID, clock) as store:
        content = random_bytes(600_000, 1)
        store.put("a", content)
        assert marked(store)  # the first run always marks
        for day in range(5):
            clock.now += DAY
            store.put("a", mutate(content, day, 3))
            assert not marked(store)
        clock.now += 3 * DAY
        assert marked(store)  # a week later
        store.delete("a", 2)
        clock.now += DAY + 2
        before = len(containers(tmp_path / "s"))
        assert store.gc().pending_delete_containers
        clock.now += DAY + 2
        assert store.gc().containers_deleted
        assert len(containers(tmp_path / "s")) < before
        assert store.verify().damage == ()


def test_version_with_shared_segments_needs_no_marking(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "s", HYBRID, clock) as store:
        content = random_bytes(600_000, 1)
        for _ in range(3):
            store.put("a", content)
        assert marked(store)
        store.delete("a", 2)
        clock.now += DAY + 2
        assert not marked(store)
        assert len(manifests(tmp_path / "s")) == 2
        assert store.get("a", 3).read() == store.get("a", 1).read() == content


def test_data_of_a_killed_put_are_nominated(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "s", HYBRID, clock) as store:
        store.put("a", random_bytes(600_000, 1))
        assert marked(store)
        store.put("b", random_bytes(600_000, 2))
    max(manifests(tmp_path / "s"), key=lambda path: path.stat().st_mtime_ns).unlink()
    with opened(tmp_path / "s", HYBRID, clock) as store:
        store.rebuild_index()  # the step after which the index learns of the version
        assert marked(store)


@pytest.mark.parametrize(("mode", "share"), [(HYBRID, 0.2), (REFCOUNT, 1.0), (EXPIRY, 1.0)])
def test_small_put_changes_few_reference_counts(
    mode: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a small change the hybrid mode touches few counts, the other one most."""
    result: list[int] = []
    real, real_keys = ReferenceCounts.update, ReferenceCounts.update_keys

    def update(self: ReferenceCounts, *rest: Any) -> Any:
        candidates = real(self, *rest)
        result.append(candidates.touched)
        return candidates

    def update_keys(self: ReferenceCounts, rows: LedgerRows, *rest: Any) -> None:
        real_keys(self, rows, *rest)
        result.append(rows.touched)

    monkeypatch.setattr(ReferenceCounts, "update", update)
    monkeypatch.setattr(ReferenceCounts, "update_keys", update_keys)
    clock, draw = Clock(), random.Random(1)
    content = random_bytes(24_000_000, 1)
    with opened(tmp_path / "s", mode, clock) as store:
        store.put("a", content)
        store.gc()
        whole = result.pop()
        at = draw.randrange(len(content) - 100)
        store.put("a", content[:at] + b"changed" + content[at + 7 :])
        store.gc()
    assert whole > 15
    if mode == HYBRID:
        assert 0 < sum(result) <= share * whole + 4
    else:
        assert result[-1] >= 0.8 * share * whole


def test_deleted_or_outdated_counts_are_rebuilt(tmp_path: Path) -> None:
    """Counts of another mode are outdated."""
    clock = Clock()
    versions = {number: random_bytes(300_000, number) for number in range(1, 5)}
    for mode in (HYBRID, REFCOUNT, HYBRID, EXPIRY, MARK_SWEEP, HYBRID):
        with opened(tmp_path / "s", mode, clock) as store:
            if not store.stats().ledger.chunks:
                for content in versions.values():
                    store.put("a", content)
            assert marked(store)
            store.rebuild_index()  # removes the counts with the index
            assert marked(store)
            clock.now += DAY
    with opened(tmp_path / "s", HYBRID, clock) as store:
        assert all(store.get("a", number).read() == content for number, content in versions.items())


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gc\.mode.*expiry, hybrid, mark-sweep or refcount"):
        with_changes(settings(), {"gc": {"mode": "guess"}})


def test_services_with_another_mode_are_refused_by_name() -> None:
    for mode in (MARK_SWEEP, HYBRID):
        require_service_mode(settings({"gc": {"mode": mode}}).gc)
    for mode in (REFCOUNT, EXPIRY):
        with pytest.raises(ConfigError, match=r"gc\.mode.*mark-sweep.*hybrid"):
            require_service_mode(settings({"gc": {"mode": mode}}).gc)
