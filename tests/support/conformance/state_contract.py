"""Contract of the state that the processes of a fleet share.

Invariant: each test states one sentence of the SharedState protocol.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.fleet.lease import Lease
from nearkin_shared.fleet.shared_state import SharedState
from nearkin_shared.fleet.store_owner import claim_index, read_owner
from tests.support.checks.waiting import until

THREADS = 8
SECONDS = 30.0


class SharedStateContract:
    """A subclass has the fixture `state`: a new one for each test."""

    def test_lease_has_one_holder_and_a_growing_number(self, state: SharedState) -> None:
        first = state.take_lease("a", SECONDS)
        assert first is not None
        assert first.endswith(b":a")
        assert state.take_lease("b", SECONDS) is None
        state.release_lease(b"0:b")
        assert state.take_lease("b", SECONDS) is None, "another one's release"
        state.release_lease(first)
        second = state.take_lease("b", SECONDS)
        assert second is not None
        assert int(second.split(b":")[0]) == int(first.split(b":")[0]) + 1

    def test_lease_of_two_takers_is_given_to_one(self, state: SharedState) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            taken = list(threads.map(lambda number: state.take_lease(f"{number}", SECONDS), range(THREADS)))
        assert len([holder for holder in taken if holder is not None]) == 1

    def test_lease_without_renewal_expires(self, state: SharedState) -> None:
        first = state.take_lease("a", 0.5)
        assert first is not None
        until(lambda: state.take_lease("b", SECONDS) is not None)
        assert not state.renew_lease(first, SECONDS)

    def test_lease_is_renewed_by_its_holder_alone(self, state: SharedState) -> None:
        first = state.take_lease("a", 2.0)
        assert first is not None
        assert not state.renew_lease(first + b"x", SECONDS)
        assert state.renew_lease(first, SECONDS)

    def test_lease_object_holds_and_releases(self, state: SharedState) -> None:
        with Lease(state) as one, Lease(state) as other:
            assert one.take()
            one.check()
            assert not other.take()
            assert abs(one.skew_seconds()) < 5
            one.release()
            assert other.take()
            assert other.fence == 2

    def test_value_is_read_until_it_is_removed(self, state: SharedState) -> None:
        assert state.get("gc") is None
        state.put("gc", b"one")
        state.put("gc", b"two\0\xff")
        assert state.get("gc") == b"two\0\xff"
        state.remove("gc", b"one")
        assert state.get("gc") == b"two\0\xff"
        state.remove("gc", b"two\0\xff")
        assert state.get("gc") is None

    def test_value_expires_by_itself(self, state: SharedState) -> None:
        state.put("refused:00", b"why", 1)
        state.put("refused:01", b"why", 1)
        state.put("refused:01", b"for ever")
        assert state.get("refused:00") == b"why"
        until(lambda: state.get("refused:00") is None)
        assert state.get("refused:01") == b"for ever"
        assert state.put_absent("refused:00", b"other", 60) == b"other"

    def test_absent_value_is_written_once(self, state: SharedState) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            found = set(threads.map(lambda number: state.put_absent("lock:k", b"%d" % number, 60), range(THREADS)))
        assert len(found) == 1
        assert state.get("lock:k") in found

    def test_key_locks_exclude_each_other(self, state: SharedState) -> None:
        locks, inside, most = FleetKeyLocks(state), list[int](), list[int]()

        def change(number: int) -> None:
            with locks.for_put("t", "k"):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(change, range(3 * THREADS)))
        assert most == [1] * (3 * THREADS)

    def test_refusal_is_read_back(self, state: SharedState) -> None:
        locks = FleetKeyLocks(state)
        assert locks.refusal(b"blob") is None
        locks.note_refusal(b"blob", "version 3 is not 2")
        assert locks.refusal(b"blob") == "version 3 is not 2"

    def test_gc_status_keeps_a_later_request(self, state: SharedState) -> None:
        status = GcStatusStore(state)
        assert (status.last(), status.requested_run) == (None, None)
        status.request_run()
        request, before = status.requested_run, status.state()
        status.request_run()
        status.record_run({"at": 1.0}, request)
        assert status.state() != before
        assert status.requested_run is not None
        status.record_failure(2.0, "disk")
        assert status.last() == {"at": 1.0, "failed_at": 2.0, "failure": "disk"}
        status.record_run({"at": 3.0}, status.requested_run)
        assert status.last() == {"at": 3.0}
        assert GcStatusStore(state).requested_run is None

    def test_owner_is_the_first_store(self, state: SharedState) -> None:
        assert read_owner(state) is None
        assert claim_index(state, "a" * 32) == "a" * 32
        assert claim_index(state, "b" * 32) == "a" * 32
        assert read_owner(state) == "a" * 32
