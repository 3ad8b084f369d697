"""Test the GC pause: durable, seen by all processes, checked between two steps of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import GcPaused
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.utils import failpoints
from tests.support.data.stores import SMALL, containers, objects, settings

CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}})


def fill(root: Path) -> None:
    """Store several containers that a second GC run would remove."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        for number in range(4):
            store.put(f"k{number}", random_bytes(200_000, number))
            store.delete(f"k{number}")
        store.gc()
    assert len(containers(root)) >= 4


def test_paused_store_collects_once_resumed(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.pauses.pause("an operator on some host")
    before = objects(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.gc_state().paused_by == "an operator on some host"
        with pytest.raises(GcPaused, match=r"an operator on some host.*--resume"):
            store.gc()
        assert objects(root) == before
        assert store.gc(dry_run=True).freed_bytes > 0
        assert store.put("new", b"content").info.version == 1
        assert store.stats().ledger.stored_bytes == sum(map(len, objects(root).values()))
        assert store.pauses.resume()
        assert store.gc().containers_deleted >= 4
    assert not [name for name in objects(root) if name.startswith("pause/")]


def test_pause_ends_a_gc_run_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a GC run before its next step; the next run does the rest."""
    root = tmp_path / "s"
    fill(root)
    count_before = len(containers(root))
    real = LocalObjectStore.delete

    def pausing(store: LocalObjectStore, name: str) -> None:
        real(store, name)
        if name.startswith("containers/"):
            GcPauseFlag(LocalObjectStore(root)).pause("in between")

    with open_store(root, settings=CHOSEN, create=True) as store:
        with monkeypatch.context() as patched:
            patched.setattr(LocalObjectStore, "delete", pausing)
            with pytest.raises(GcPaused):
                store.gc()
        assert len(containers(root)) == count_before - 1
        store.pauses.resume()
        assert store.gc().containers_deleted == count_before - 1
        assert store.verify().damage == ()


@pytest.mark.parametrize("record", [b"{", b'{"at_us": 1e999, "who": ""}', b'{"at_us": 253402300800000000, "who": ""}'])
def test_broken_pause_record_pauses(tmp_path: Path, record: bytes) -> None:
    root = tmp_path / "s"
    fill(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.pauses.pause("me")
        (root / "pause" / "0000000000000001.json").write_bytes(record)
        with pytest.raises(GcPaused, match="unreadable"):
            store.gc()
        assert store.pauses.pause("again").who == ""
        assert store.gc_state().paused_since is not None
        assert store.pauses.resume()
        assert not store.pauses.resume()


def test_writer_sweep_keeps_a_pause(tmp_path: Path) -> None:
    """Keep a pause while a writer removes what crashed writers left."""
    root = tmp_path / "s"
    fill(root)
    versions: list[int] = []

    def put_meanwhile(name: str) -> None:
        if name == "object.synced" and not versions:
            versions.append(0)
            with open_store(root, settings=CHOSEN, create=True) as writer:
                versions.append(writer.put("new", b"content").info.version)

    with open_store(root, settings=CHOSEN, create=True) as store:
        failpoints.arm((), put_meanwhile)
        try:
            store.pauses.pause("me")
        finally:
            failpoints.disarm()
        assert versions == [0, 1]
        assert store.gc_state().paused_by == "me"
        assert store.get("new").read() == b"content"
    assert not list((root / "tmp").iterdir())


def test_concurrent_creators_share_a_store(tmp_path: Path) -> None:
    """Let both creators of a store have it although one already writes."""
    root = tmp_path / "s"
    passed: list[str] = []

    def create_meanwhile(name: str) -> None:
        if name == "object.synced" and not passed:
            passed.append(name)
            with open_store(root, settings=CHOSEN, create=True) as writer:
                writer.put("new", b"content")

    failpoints.arm((), create_meanwhile)
    try:
        store = open_store(root, settings=CHOSEN, create=True)
    finally:
        failpoints.disarm()
    with store:
        assert passed
        assert store.get("new").read() == b"content"
