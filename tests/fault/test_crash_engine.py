"""Stores killed at failpoints: no version is lost or appears unexplained, and no GC run leaves an orphan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearkin import open_store
from nearkin_shared.formats.encrypted_object import HEAD
from nearkin_shared.types import ContainerId
from tests.support.checks import inspection
from tests.support.data.stores import ENCRYPTED, flip, objects, process, settings
from tests.support.engines.crash import Campaign
from tests.support.engines.crash_child import CHOSEN, content, perform
from tests.support.engines.model import (
    DAY,
    Break,
    Call,
    Delete,
    Forget,
    Gc,
    Oracle,
    Put,
    Seen,
    Undelete,
    Version,
    Violation,
)
from tests.support.engines.soak import RunRecord, soak


@pytest.mark.soak
def test_soak_of_seconds_finds_nothing_and_prints_its_seed(tmp_path: Path) -> None:
    """In a process of its own: it forks, and obstore must not have been used before that."""
    words = ["--kills", os.environ.get("SOAK_KILLS", "30"), "--runs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.soak", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed ")
    outcome = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert outcome["kills"] >= 30
    assert outcome["violations"] == []
    assert len(outcome["by_point"]) >= 10
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["outcome"] == outcome
    assert {path.name for path in run.iterdir()} == {"run.json", "journal.jsonl"}


def test_soak_makes_its_folder_or_says_why_not(tmp_path: Path) -> None:
    words = ["--kills", "0", "--runs", str(tmp_path / "runs"), "--folder"]
    done = CliRunner().invoke(soak, [*words, str(tmp_path / "new" / "folder")])
    assert (done.exit_code, os.listdir(tmp_path / "new" / "folder")) == (0, []), done.output
    (tmp_path / "file").touch()
    done = CliRunner().invoke(soak, [*words, str(tmp_path / "file" / "folder")])
    assert (done.exit_code, "not a directory" in done.output) == (2, True), done.output


def test_soak_run_with_violation_keeps_seed_calls_and_store(tmp_path: Path) -> None:
    """F.33: A run that ends with a violation keeps its seed, the calls of each child, and the broken store."""
    record = RunRecord(tmp_path / "runs", 7, {"kills": 3})
    assert json.loads((record.folder / "run.json").read_text()) == {"seed": 7, "kills": 3}
    stores = tmp_path / "stores"
    stores.mkdir()

    def plant() -> None:
        raise Violation("planted")

    outcome = Campaign(stores, 7, plant=plant, journal=record.append).run(3)
    for name in ("store-0", "store-0-copies"):
        (stores / name).mkdir(exist_ok=True)
    record.finish(outcome, stores)
    assert json.loads((record.folder / "run.json").read_text())["outcome"]["violations"] == outcome.violations
    assert "planted" in outcome.violations[0]
    assert {"store-0", "store-0-copies"} <= {path.name for path in record.folder.iterdir()}
    journal = [json.loads(line) for line in (record.folder / "journal.jsonl").read_text().splitlines()]
    assert [sorted(entry) for entry in journal] == [
        ["settings", "store"],
        ["child", "plan", "store"],
        ["begun", "child", "status"],
    ]


def test_campaign_with_same_seed_makes_same_plans(tmp_path: Path) -> None:
    """The same seed makes the same plans."""

    def plans() -> list[object]:
        campaign, oracle, number, found = Campaign(tmp_path, 7), Oracle(0.0), 0, list[object]()
        for _ in range(20):
            plan, number = campaign._plan(oracle, number)
            found.append(plan)
        return found

    assert plans() == plans()


def test_deletion_killed_before_its_mark_is_not_counted(tmp_path: Path) -> None:
    """Found by seed 2: the index had counted a mark that was never written, until the next rebuild."""
    script = """
import sys
from nearkin_shared.utils import failpoints
from nearkin import open_store
from tests.support.engines.crash_child import CHOSEN
with open_store(sys.argv[1], settings=CHOSEN, create=True) as store:
    store.put("k", b"content")
    failpoints.arm("delete.noted:1:kill")
    store.delete("k")
"""
    process(script, tmp_path / "s").communicate(timeout=60)
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        stats = store.stats()
        assert stats.deleted_versions == 0
        assert stats.ledger.stored_bytes == sum(map(len, objects(tmp_path / "s").values()))
        assert store.get("k").read() == b"content"


def test_break_with_a_broken_older_generation_is_repaired(tmp_path: Path) -> None:
    """An older generation may be broken already when the engine breaks a store.

    Found by seed 219566021: a process that died during a repair left the broken generation next to the repaired one.
    """
    with open_store(tmp_path / "s", settings=settings(CHOSEN, ENCRYPTED), create=True) as store:
        store.put("k", content(0))
        older = next((tmp_path / "s" / "containers").rglob("*.nkc"))
        data = inspection.copy_opener(store.root, store.settings)(older)
        store._containers.of(None).put(ContainerId(int(older.name[:16], 16)), [data], 1)
        newer = older.with_name(f"{older.name[:16]}.0001.nkc")
        flip(older, HEAD.size, 0)
        broken, whole, flipped = older.read_bytes(), newer.read_bytes(), set()
        for draw in range(16):
            newer.write_bytes(whole)
            older.write_bytes(broken)
            perform(store, Break(draw, manifest=False, verify=False, by_copy=False, contents=1))
            flipped |= {path for path, was in ((older, broken), (newer, whole)) if path.read_bytes() != was}
    assert flipped == {older, newer}


def test_rebuilt_index_is_durable_before_the_old_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuilt index is durable before the old one counts as deleted."""
    synced: list[Path] = []
    monkeypatch.setattr("nearkin.local.index_files.sync_folder", synced.append)
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
        store.rebuild_index()
    assert synced == [tmp_path / "s"]


# --- the oracle itself: it must report each breach --------------------------------------------------------------------


def oracle_with(*calls: Call) -> Oracle:
    oracle = Oracle(1_000.0)
    for call in calls:
        oracle.begin(call)
        oracle.acknowledge()
    return oracle


def seen(
    live: Iterable[Version],
    deleted: Iterable[Version] = (),
    manifests: Iterable[Version] | None = None,
    containers: Iterable[int] = (),
) -> Seen:
    there = frozenset(live) | frozenset(deleted) if manifests is None else frozenset(manifests)
    return Seen(frozenset(live), frozenset(deleted), there, frozenset(containers))


BOTH = Put((("k", 1), ("k", 2)))


def test_oracle_requires_acknowledged_versions() -> None:
    """The oracle requires acknowledged versions."""
    oracle_with(BOTH).settle(seen({("k", 1), ("k", 2)}))
    for lost in ({("k", 1)}, {("k", 2)}, set()):
        with pytest.raises(Violation, match="lost"):
            oracle_with(BOTH).settle(seen(lost))


def test_oracle_refuses_versions_never_put() -> None:
    """The oracle refuses a version that was never put."""
    with pytest.raises(Violation, match="from nowhere"):
        oracle_with(BOTH).settle(seen({("k", 1), ("k", 2), ("k", 3)}))
    with pytest.raises(Violation, match="manifests"):
        oracle_with(BOTH).settle(seen({("k", 1), ("k", 2)}, manifests={("k", 1), ("k", 2), ("other", 1)}))


def test_oracle_accepts_prefix_of_a_put_in_flight() -> None:
    """A put in flight may have committed any of its blobs, those of a key in order."""
    for there in ({("k", 1)}, {("k", 1), ("k", 2)}, set()):
        oracle = Oracle(1_000.0)
        oracle.begin(BOTH)
        oracle.settle(seen(there))
        assert oracle.live == there
    oracle = Oracle(1_000.0)
    oracle.begin(BOTH)
    with pytest.raises(Violation):
        oracle.settle(seen({("k", 2)}))


def test_oracle_requires_newest_version_deleted_last() -> None:
    """A deletion in flight hides the newest version last."""
    oracle = oracle_with(BOTH)
    oracle.begin(Delete("k", None))
    oracle.settle(seen({("k", 2)}, {("k", 1)}))
    oracle = oracle_with(BOTH)
    oracle.begin(Delete("k", None))
    with pytest.raises(Violation, match="came before"):
        oracle.settle(seen({("k", 1)}, {("k", 2)}))


def test_oracle_requires_newest_version_undeleted_first() -> None:
    """An undeletion in flight restores the newest version first."""
    collected = (("k", 1), ("k", 2))
    for back in ({("k", 2)}, {("k", 1), ("k", 2)}, set()):
        oracle = oracle_with(BOTH, Delete("k", None))
        oracle.begin(Undelete("k", None))
        oracle.settle(seen(back, set(collected) - back))
        assert oracle.live == back
    oracle = oracle_with(BOTH, Delete("k", None))
    oracle.begin(Undelete("k", None))
    with pytest.raises(Violation, match="restored before"):
        oracle.settle(seen({("k", 1)}, {("k", 2)}))


def test_oracle_undeletes_the_latest_deletion_of_a_key() -> None:
    """An undeletion of a key restores the versions that its latest deletion hid."""
    oracle = oracle_with(BOTH, Delete("k", 1), Delete("k", 2), Undelete("k", None))
    assert oracle.live == {("k", 2)}


def test_oracle_allows_gc_to_delete_due_containers_only() -> None:
    """A GC run may delete only containers that were pending delete and due."""
    oracle = oracle_with(BOTH)
    oracle.begin(Gc(2), frozenset({7, 8}), frozenset({8}))
    oracle.settle(seen({("k", 1), ("k", 2)}, containers={7}))
    oracle.begin(Gc(2), frozenset({7, 8}), frozenset({8}))
    with pytest.raises(Violation, match="no earlier GC run"):
        oracle.settle(seen({("k", 1), ("k", 2)}, containers={8}))


def test_oracle_allows_undelete_within_the_window() -> None:
    """A deleted version can be undeleted until its window is over."""
    oracle = oracle_with(BOTH, Forget(1))
    oracle.settle(seen({("k", 2)}, {("k", 1)}))
    with pytest.raises(Violation, match="deleted versions"):
        oracle.settle(seen({("k", 2)}, (), manifests={("k", 1), ("k", 2)}))
    oracle.now += 2 * DAY
    oracle.begin(Gc(0))
    oracle.settle(seen({("k", 2)}))
    assert oracle.collected == {("k", 1)}
    assert oracle.next_version("k") == 3
    assert Undelete("k", 1).version == 1
