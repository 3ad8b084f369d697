"""Threads that put, list, verify and rebuild in one Store: none removes lock or index while another uses them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from nearkin import Store, open_store
from nearkin.lab.generated_data import random_bytes
from nearkin.local.process_lock import WriterLock
from nearkin_shared.errors import IndexClosed, StoreLocked, StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.results import RepairReport
from nearkin_shared.types import ContainerId
from nearkin_shared.utils import failpoints

CONTENT = random_bytes(300_000, 1)
WAIT_SECONDS = 30.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "s", create=True) as made:
        made.put("a", CONTENT)
        yield made
    failpoints.disarm()


def start_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def run_at_failpoint(point: str, act: Callable[[], object]) -> list[object]:
    """Let another thread act when a failpoint is first passed; return its results until then."""
    outcomes: list[object] = []

    def watch(name: str) -> None:
        if name == point and not outcomes:
            outcomes.append(None)

            def try_put() -> None:
                try:
                    outcomes[0] = act()
                except StoreLocked as err:
                    outcomes[0] = err

            start_thread(try_put).join(WAIT_SECONDS)

    failpoints.arm((), watch)
    return outcomes


def is_locked(store: Store) -> bool:
    other = WriterLock(store.root)
    try:
        other.acquire()
    except StoreLocked:
        return True
    other.release()
    return False


def damage_container(store: Store) -> None:
    store.put("broken", random_bytes(200_000, 2))
    path = max(store.root.glob("containers/*/*.nkc"))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def list_keys(store: Store) -> list[str]:
    return [version.key for version in store.versions()]


def list_sound_keys(store: Store) -> list[str]:
    store.close()
    with open_store(store.root, create=True) as other:
        other.put("later", b"later")
        assert not [damage for damage in other.verify().damage if damage.object_name == "index"]
        return list_keys(other)


def test_closed_index_is_read_to_the_end(tmp_path: Path) -> None:
    """A thread that reads an index reads to the end though another one closes it."""
    index = LmdbIndex(tmp_path, bytes(16), 1 << 24)
    index.mark_complete()
    with index._reading() as txn:
        start_thread(index.close).join(WAIT_SECONDS)
        assert txn.get(b"complete", db=index._meta)
    with pytest.raises(IndexClosed, match="closed during the call"):
        assert index.complete


def test_listings_during_puts_and_closes_meet_no_error(store: Store) -> None:
    """Listings meet no error while puts and closes replace their index."""
    ended, failures, count = threading.Event(), list[BaseException](), 0

    def listing() -> None:
        nonlocal count
        try:
            while not ended.is_set():
                count += len(list(store.catalog("default")))
        except BaseException as err:
            failures.append(err)

    threads = [start_thread(listing) for _ in range(3)]
    for number in range(12):
        store.put("b", b"%d" % number)
        store.close()
    ended.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert (failures, count > 0) == ([], True)


def test_rebuild_during_a_put_is_refused(store: Store) -> None:
    """An index is not rebuilt during a put whose version it would not list."""
    outcomes = run_at_failpoint("commit.begun", store.rebuild_index)
    store.put("b", CONTENT)
    assert isinstance(outcomes[0], StoreLocked)
    assert list_keys(store) == ["a", "b"]
    assert list_sound_keys(store) == ["a", "b", "later"]


def test_put_during_an_index_rebuild_waits(store: Store) -> None:
    """A put that begins during an index rebuild waits for it."""
    putting: list[threading.Thread] = []

    def watch(name: str) -> None:
        if name == "rebuild.marks":
            putting.append(start_thread(lambda: store.put("b", CONTENT)))
            putting[0].join(0.2)
            assert putting[0].is_alive()

    failpoints.arm((), watch)
    store.rebuild_index()
    putting[0].join(WAIT_SECONDS)
    assert list_keys(store) == ["a", "b"]
    assert list_sound_keys(store) == ["a", "b", "later"]


def test_two_puts_after_the_same_rebuild_one_is_refused(store: Store) -> None:
    """Of two puts that waited for the same rebuild one is refused."""
    putting: list[threading.Thread] = []
    outcomes: list[object] = []

    def try_put(key: str) -> None:
        try:
            outcomes.append(store.put(key, CONTENT).info.version)
        except StoreLocked as err:
            outcomes.append(err)

    def watch(name: str) -> None:
        if name == "rebuild.marks":
            putting.extend(start_thread(partial(try_put, key)) for key in ("b", "c"))
            putting[0].join(0.3)
            assert all(thread.is_alive() for thread in putting)
        elif name == "commit.begun" and len(putting) == 2:
            next(thread for thread in putting if thread is not threading.current_thread()).join(0.3)

    failpoints.arm((), watch)
    store.rebuild_index()
    for thread in putting:
        thread.join(WAIT_SECONDS)
    assert sorted(map(type, outcomes), key=str) == [int, StoreLocked]
    assert "another put is in progress" in str(next(one for one in outcomes if isinstance(one, StoreLocked)))
    assert not store._puts.at_work
    failpoints.disarm()
    assert store.put("d", CONTENT).info.version == 1


def test_close_waits_for_a_put_that_has_just_begun(store: Store) -> None:
    """The close of a store waits for a put that has just begun."""
    closing: list[threading.Thread] = []

    def watch(name: str) -> None:
        if name == "put.begun":
            closing.append(start_thread(store.close))
            closing[0].join(0.2)
            assert closing[0].is_alive()

    failpoints.arm((), watch)
    assert store.put("b", CONTENT).info.version == 1
    closing[0].join(WAIT_SECONDS)
    failpoints.disarm()
    assert list_sound_keys(store) == ["a", "b", "later"]


def test_verify_reports_that_an_active_put_may_use_damage(store: Store) -> None:
    """Verify reports that an active put may depend on the damage that it found."""
    damage_container(store)
    outcomes = run_at_failpoint("put.container", lambda: (store.verify().forgotten, is_locked(store)))
    store.put("b", random_bytes(200_000, 3))
    assert outcomes == [(False, True)]
    failpoints.disarm()
    assert store.verify().forgotten


def test_verify_leaves_the_lock_of_a_later_put(tmp_path: Path) -> None:
    """Verify that ends leaves the lock to a put that began meanwhile."""
    with open_store(tmp_path / "s", create=True) as made:
        damage_container(made)
    begun, verified = threading.Event(), threading.Event()
    with open_store(tmp_path / "s", create=True) as store:

        def items() -> Iterator[tuple[str, bytes]]:
            begun.set()
            assert verified.wait(WAIT_SECONDS)
            yield "b", CONTENT

        done: list[str] = []
        putting: list[threading.Thread] = []

        def watch(name: str) -> None:
            if name == "quarantine.recorded" and not putting:
                putting.append(start_thread(lambda: done.extend(result.info.key for result in store.put_many(items()))))
                assert begun.wait(WAIT_SECONDS)

        failpoints.arm((), watch)
        try:
            assert store.verify().forgotten is False
        finally:
            failpoints.disarm()
        assert is_locked(store)
        verified.set()
        putting[0].join(WAIT_SECONDS)
        assert done == ["b"]
        assert list_sound_keys(store) == ["b", "broken", "later"]


def test_listing_without_index_leaves_the_lock_of_a_put(store: Store) -> None:
    """A listing that finds no index does not take the lock from a put."""

    def remove_index() -> tuple[list[str], bool]:
        shutil.rmtree(store.root / "index")
        return list_keys(store), is_locked(store)

    outcomes = run_at_failpoint("commit.begun", remove_index)
    store.put("b", CONTENT)
    assert outcomes == [(["a"], True)]
    assert list_keys(store) == ["a", "b"]
    assert list_sound_keys(store) == ["a", "b", "later"]


def test_entries_published_during_verify_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that a put publishes while verify lists are not withdrawn as missing."""
    damage_container(store)
    content = random_bytes(200_000, 4)
    ids, begun = store._containers.ids, threading.Event()

    def list_before_a_put() -> Iterator[tuple[ContainerId, int]]:
        found = list(ids())
        if recorded and not begun.is_set():  # this listing finds the missing entries
            begun.set()
            start_thread(lambda: store.put("b", content)).join(WAIT_SECONDS)
        return iter(found)

    recorded: list[str] = []
    monkeypatch.setattr(store._containers, "ids", list_before_a_put)
    failpoints.arm((), lambda name: recorded.append(name) if name == "quarantine.done" else None)
    store.verify()
    failpoints.disarm()
    assert begun.is_set()
    ledger = store.put("c", content).ledger
    assert ledger.duplicate_chunks == ledger.chunks


def test_closed_store_keeps_its_lock_until_a_put_ends(store: Store) -> None:
    """A store that is closed during a put keeps its lock until the put has ended."""
    closing: list[threading.Thread] = []
    locked: list[bool] = []

    def watch(name: str) -> None:
        if name == "put.container":
            closing.append(start_thread(store.close))
            closing[0].join(0.2)
            locked.append(is_locked(store))

    failpoints.arm((), watch)
    store.put("b", random_bytes(200_000, 3))
    failpoints.disarm()
    closing[0].join(WAIT_SECONDS)
    assert (locked, is_locked(store)) == ([True], False)
    assert list_sound_keys(store) == ["a", "b", "later"]


def test_abandoned_put_writes_nothing_after_the_close(store: Store) -> None:
    """A put that was abandoned writes nothing once its store is closed."""
    before = sorted(store.root.rglob("*.nk?"))

    def items() -> Iterator[tuple[str, bytes]]:
        yield "b", random_bytes(200_000, 3)
        store.close()
        assert not is_locked(store)
        yield "c", random_bytes(200_000, 4)

    with pytest.raises(StoreUnavailable, match="cancelled before commit"):
        list(store.put_many(items()))
    assert sorted(store.root.rglob("*.nk?")) == before
    assert list_sound_keys(store) == ["a", "later"]


@pytest.mark.parametrize("number", range(1, 4))
def test_put_waits_for_a_repair_of_the_same_container(store: Store, number: int) -> None:
    """A put waits for a repair of the same container.

    Both found the same copies, and made the same next generation: one of them failed with AlreadyExists.
    """
    damage_container(store)
    assert store.verify().damage
    content = store.root.parent / "content"
    content.write_bytes(random_bytes(200_000, 2))
    passed, outcomes = [0], list[object]()

    def put() -> None:
        try:
            outcomes.append(store.put("again", content).info.key)
        except BaseException as err:
            outcomes.append(err)

    repairing, threads = threading.get_ident(), list[threading.Thread]()

    def watch(name: str) -> None:
        if name == "object.begun" and threading.get_ident() == repairing:
            passed[0] += 1
            if passed[0] == number:
                threads.append(start_thread(put))
                threads[0].join(1.0)

    failpoints.arm((), watch)
    report = store.repair([content])
    failpoints.disarm()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert len(report.repaired) == 1
    assert outcomes == ["again"] * len(threads)
    assert store.verify().damage == ()


def test_repair_waits_for_a_put_in_another_thread(store: Store) -> None:
    """A repair waits for a put in another thread."""
    damage_container(store)
    outcomes, threads = list[object](), list[threading.Thread]()

    def watch(name: str) -> None:
        if name == "put.container" and not threads:
            threads.append(start_thread(lambda: outcomes.append(store.repair())))
            threads[0].join(0.5)
            assert not outcomes

    failpoints.arm((), watch)
    store.put("other", random_bytes(100_000, 3))
    threads[0].join(WAIT_SECONDS)
    assert isinstance(outcomes[0], RepairReport)
