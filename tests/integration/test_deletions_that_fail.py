"""Test failed deletions: their counters are rolled back, and no other deletion's are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from nearkin import Store, open_store
from nearkin_shared.errors import NoRoom, StoreLocked, StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.utils import failpoints
from tests.support.data.stores import settings

WAIT_SECONDS = 20.0


@contextmanager
def armed_failpoints(points: str = "", watch: Callable[[str], None] | None = None) -> Iterator[None]:
    failpoints.arm(points or (), watch)
    try:
        yield
    finally:
        failpoints.disarm()


def run_in_thread(act: Callable[[], object]) -> None:
    """Do it in another thread, and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(WAIT_SECONDS)


def fails(store: Store, key: str) -> None:
    with pytest.raises(StoreUnavailable):
        store.delete(key)


def counts_after_reopening(path: Path) -> tuple[int, int, list[int]]:
    with open_store(path, create=True) as store:
        stats = store.stats()
        return stats.versions, stats.deleted_versions, [one.version for one in store.versions(all_versions=True)]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("point", "left"), [("delete.noted", [1, 2]), ("delete.older", [2])])
def test_failed_deletion_is_counted_no_more(tmp_path: Path, point: str, left: list[int], reopened: bool) -> None:
    path = tmp_path / "s"
    with open_store(path, create=True) as store:
        for _ in range(2):
            store.put("a", b"content" * 100)
        with armed_failpoints(f"{point}:1:error"):
            fails(store, "a")
        if not reopened:
            stats = store.stats()
            assert (stats.versions, stats.deleted_versions) == (len(left), 2 - len(left))
    assert counts_after_reopening(path) == (len(left), 2 - len(left), left)
    with open_store(path, create=True) as store:
        store.put("b", b"other")
        store.delete("a")
    assert counts_after_reopening(path) == (1, 2, [1])


def test_failed_undeletion_is_counted_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path, create=True) as store:
        store.put("a", b"content")
        store.delete("a")
        with armed_failpoints("delete.noted:1:error"), pytest.raises(StoreUnavailable):
            store.undelete("a")
    assert counts_after_reopening(path) == (0, 1, [])


def test_version_in_a_crashed_gc_run_is_deleted(tmp_path: Path) -> None:
    """Count a version as deleted if a GC run crashed while it ended it."""
    path = tmp_path / "s"
    chosen = settings({"deletion": {"undelete_seconds": 0}})
    with open_store(path, settings=chosen, create=True) as store:
        for key in "ab":
            store.put(key, key.encode() * 5000)
        store.delete("a")
        time.sleep(0.01)
        with armed_failpoints("gc.expired:1:error"), pytest.raises(StoreUnavailable):
            store.gc()
        with armed_failpoints("put.begun:1:error"), pytest.raises(StoreUnavailable):
            store.put("c", b"c")
        assert [one.key for one in store.versions()] == ["b"]
    assert counts_after_reopening(path) == (1, 1, [1])
    with open_store(path, settings=chosen, create=True) as store:
        assert [entry.marks_bytes > 0 for entry in store._index.read(lambda index: list(index.catalog("default", "a")))]
        store.gc()
    assert counts_after_reopening(path) == (1, 0, [1])


def deletion_counts(store: Store) -> tuple[int, int, list[str]]:
    stats = store.stats()
    return stats.versions, stats.deleted_versions, sorted(one.key for one in store.list_deleted())


def test_stats_during_a_retry_keep_the_note(tmp_path: Path) -> None:
    """Keep the index note of a second try though `stats` runs before its tombstone."""
    with open_store(tmp_path / "s", create=True) as store:
        for key in "ab":
            store.put(key, key.encode() * 1000)
        passed = []

        def watch(name: str) -> None:
            if name == "delete.noted":
                passed.append(name)
                if len(passed) == 1:
                    raise StoreUnavailable("made up")
                run_in_thread(store.stats)

        with armed_failpoints(watch=watch):
            fails(store, "a")
            assert store.delete("a")
        assert deletion_counts(store) == (1, 1, ["a"])
    with open_store(tmp_path / "s", create=True) as store:
        assert deletion_counts(store) == (1, 1, ["a"])


def test_failed_concurrent_deletion_keeps_note(tmp_path: Path) -> None:
    """The one looks what is there after the other has noted, and before it has written."""
    with open_store(tmp_path / "s", create=True) as store:
        store.put("a", b"content")
        passed: list[str] = []

        def watch(name: str) -> None:
            if name == "delete.noted":
                passed.append(name)
                if len(passed) > 1:
                    raise StoreUnavailable("made up")
                run_in_thread(lambda: fails(store, "a"))

        with armed_failpoints(watch=watch):
            assert store.delete("a")
        assert len(passed) == 2
        assert deletion_counts(store) == (0, 1, ["a"])
    with open_store(tmp_path / "s", create=True) as store:
        assert deletion_counts(store) == (0, 1, ["a"])


def test_failed_deletion_during_a_put_uncounted(tmp_path: Path) -> None:
    """Count a failed deletion that is concurrent with a put no more."""
    with open_store(tmp_path / "s", create=True) as store:
        for key in "ab":
            store.put(key, key.encode() * 1000)

        def watch(name: str) -> None:
            if name == "put.begun":
                run_in_thread(lambda: fails(store, "a"))
            elif name == "delete.noted":
                raise StoreUnavailable("made up")

        with armed_failpoints(watch=watch):
            store.put("c", b"c")
        assert deletion_counts(store) == (3, 0, [])
        store.delete("b")
        assert deletion_counts(store) == (2, 1, ["b"])


def test_refused_deletion_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path, create=True) as reader:
        with open_store(path, create=True) as writer:
            writer.put("k", b"x")
            reader.stats()
            with pytest.raises(StoreLocked):
                reader.delete("k")
        reader.stats()
        with open_store(path, create=True) as writer:
            writer.put("c", b"1")
        assert deletion_counts(reader) == (2, 0, [])


def test_failed_rollback_is_done_at_next_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roll back at the next open what could not be rolled back."""
    path = tmp_path / "s"
    with open_store(path, create=True) as store:
        store.put("a", b"content")
        full = Mock(side_effect=NoRoom("made up"))
        monkeypatch.setattr(LmdbIndex, "correct_marks", full)
        with armed_failpoints("delete.noted:1:error"):
            fails(store, "a")
        monkeypatch.undo()
        full.assert_called_once()
    with open_store(path, create=True) as store:
        store.put("b", b"b")
        assert deletion_counts(store) == (2, 0, [])
