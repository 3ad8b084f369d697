"""Shared state in the first index shard: killed, restarted, damaged, lost, and with wrong clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin_index import state_file
from nearkin_index.state_file import FILE_NAME, StateFile
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, ConfigError, FormatTooNew, RetryableError, StoreUnavailable
from nearkin_shared.fleet.lease import Lease
from nearkin_shared.fleet.store_owner import claim_index
from nearkin_shared.index.shards.shard_connection import shard_token
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.factory import open_store_of
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL
from tests.support.data.stores import settings as chosen
from tests.support.servers.shard_process import ShardProcess

WORKERS = 4
LEASE_SECONDS = 2.0


class OneShard:
    """The only shard of a new store, as a process."""

    def __init__(self, folder: Path) -> None:
        self.settings: Settings = chosen(SMALL, {"store": str(folder / "store"), "index": {"map_bytes": 64 * MIB}})
        with open_store(folder / "store", settings=self.settings, create=True):
            pass
        found = open_store_of(self.settings)[1]
        self.store_id, self._token = found.store_id, shard_token(bytes.fromhex(found.secret))
        environment = {"NEARKIN_STORE": str(folder / "store"), "NEARKIN_INDEX__MAP_BYTES": str(64 * MIB)}
        self.process = ShardProcess(folder / "shard", 0, 1, environment)

    def client(self, retries: int = 5) -> ShardedIndex:
        """Return a client of the shard."""
        return ShardedIndex([self.process.url], self.store_id, b"", self._token, retries=retries, timeout_seconds=5)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[OneShard]:
    shard = OneShard(tmp_path)
    shard.process.give_new_lease()
    with shard.process:
        yield shard


def test_lease_and_values_outlive_a_killed_shard(shard: OneShard) -> None:
    """No other worker has the lease after a restart, and the number goes on."""
    index = shard.client()
    first = index.state.take_lease("a", 300.0)
    assert first == b"1:a"
    index.state.put("gc", b"status")
    assert index.state.put_absent("lock:k", b"one", 60) == b"one"
    scope = index.fence_scope
    for _ in range(2):
        shard.process.kill()
        with pytest.raises(StoreUnavailable):
            shard.client(retries=0).state.get("gc")
        shard.process.start()
        assert index.state.take_lease("b", 300.0) is None
        assert index.state.renew_lease(first, 300.0)
        assert index.state.get("gc") == b"status"
        assert index.state.put_absent("lock:k", b"other", 60) == b"one"
    index.state.release_lease(first)
    assert index.state.take_lease("b", 300.0) == b"2:b"
    assert index.fence_scope == scope
    assert claim_index(index.state, "f" * 32) == shard.store_id
    index.close()


def test_killed_shard_gives_no_lease_twice(shard: OneShard) -> None:
    """Two workers never hold the lease at once, while the shard is killed and restarted."""
    stop, held, most, taken = threading.Event(), set[int](), [0], list[int]()
    lock = threading.Lock()

    def work(number: int) -> None:
        index = shard.client(retries=1)
        lease = Lease(index.state, LEASE_SECONDS)
        while not stop.wait(0.05):
            try:
                if not lease.take():
                    continue
                for _ in range(10):
                    lease.check()
                    with lock:
                        held.add(number)
                        most[0] = max(most[0], len(held))
                    time.sleep(0.02)
                    with lock:
                        held.discard(number)
                taken.append(lease.fence)
            except RetryableError:
                continue
            finally:
                with lock:
                    held.discard(number)
                if number % 2:
                    lease.release()
                else:  # as a worker that was killed: it renews no more
                    lease._stopping.set()
                    lease.give_up()
        index.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        count = len(taken)
        until(lambda count=count: len(taken) > count)  # type: ignore[misc]
        shard.process.kill()
        shard.process.start()
    count = len(taken)
    until(lambda: len(taken) > count + 1)
    stop.set()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(set(taken)) == len(taken), "a number was given twice"


def test_lost_reply_gives_the_lease_again(tmp_path: Path) -> None:
    """A repeated request of one token has one holder; another token has none."""
    state = StateFile(tmp_path, lease_wait_seconds=0)
    assert state.take_lease("a", 30.0) == b"1:a"
    assert state.take_lease("a", 30.0) == b"1:a"
    assert state.take_lease("b", 30.0) is None
    state.close()


def test_wrong_clocks_end_no_lease_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wall clock, nor a reboot that begins the clock again, nor an hour without power counts."""
    now = [10_000.0]
    monkeypatch.setattr(state_file, "_now", lambda: now[0])
    state = StateFile(tmp_path, lease_wait_seconds=0)
    assert state.take_lease("a", 30.0) is not None
    state.put("lock:k", b"one", 60)
    now[0] += 20
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert state.take_lease("b", 30.0) is None
    state.close()
    now[0] = 5.0  # rebooted
    state = StateFile(tmp_path, lease_wait_seconds=0)
    assert state.take_lease("b", 30.0) is None
    assert state.get("lock:k") == b"one"
    now[0] += 9.5
    assert state.take_lease("b", 30.0) is None
    now[0] += 1
    assert state.take_lease("b", 30.0) == b"2:b"
    now[0] += 30
    assert state.get("lock:k") is None
    now[0] -= 1000  # such a clock does not exist, and would do no harm
    assert state.take_lease("c", 30.0) is None
    state.close()


def test_new_state_begins_with_a_taken_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder may have it from a state that was lost; fences of the two have different scopes."""
    now = [0.0]
    monkeypatch.setattr(state_file, "_now", lambda: now[0])
    state = StateFile(tmp_path)
    scope = state.get("scope")
    assert state.take_lease("a", 30.0) is None
    now[0] += 29
    assert state.take_lease("a", 30.0) is None
    now[0] += 1
    assert state.take_lease("a", 30.0) == b"1:a"
    state.close()
    (tmp_path / FILE_NAME).unlink()
    state = StateFile(tmp_path)
    assert state.take_lease("b", 30.0) is None
    assert state.get("scope") != scope
    state.close()


@pytest.mark.parametrize("start", [0, 100, 4096 + 20])
def test_damaged_state_is_put_aside(tmp_path: Path, start: int) -> None:
    """A new one begins, with the lease taken."""
    state = StateFile(tmp_path, lease_wait_seconds=0)
    for number in range(500):
        state.put(f"v{number}", b"x" * 100, 61)
    state.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[start : start + 3000] = b"\xff" * 3000
    path.write_bytes(data)
    state = StateFile(tmp_path)
    assert state.take_lease("a", 30.0) is None
    assert state.get("v1") is None
    assert (tmp_path / f"{FILE_NAME}.damaged").stat().st_size == len(data)
    state.close()


def test_state_of_another_process_or_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors name the file and the remedy."""
    monkeypatch.setattr(state_file, "LOCK_WAIT_SECONDS", 0.1)
    state = StateFile(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        StateFile(tmp_path)
    state.claim("a" * 32)
    state.claim("a" * 32)
    with pytest.raises(ConfigError, match=r"is of store a{32}"):
        state.claim("b" * 32)
    state._connection.execute("PRAGMA user_version = 9")
    state.close()
    with pytest.raises(FormatTooNew, match="format 9"):
        StateFile(tmp_path)


def test_full_state_refuses_more_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes values again once some have expired."""
    now = [0.0]
    monkeypatch.setattr(state_file, "_now", lambda: now[0])
    monkeypatch.setattr(state_file, "ENTRIES_MAX", 4)
    state = StateFile(tmp_path, lease_wait_seconds=0)
    for name in ("a", "b", "c"):
        state.put(name, b"", 10)
    with pytest.raises(StoreUnavailable, match="4 values"):
        state.put("d", b"", 10)
    now[0] += 10
    state.put("d", b"", 10)
    state.close()


def test_state_calls_out_of_bounds_are_refused(shard: OneShard) -> None:
    """Names, values and times have a bound."""
    index = shard.client(retries=0)
    for name, value, seconds in (("", b"", 1), ("n" * 201, b"", 1), ("n", b"v" * (MIB + 1), 1), ("n", b"", 0)):
        with pytest.raises(BadInput, match="400"):
            index.state.put(name, value, seconds)
    for token, lease_seconds in (("", 1.0), ("t", 0.0), ("t", 3601.0), ("t", float("nan"))):
        with pytest.raises(BadInput, match="400"):
            index.state.take_lease(token, lease_seconds)
    assert index.state.take_lease("t", 1.0) == b"1:t"
    index.close()
