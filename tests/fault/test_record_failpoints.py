"""Work on keys, pauses and scrub progress that is cut short at each of its failpoints: the next process continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import Corrupt, StoreUnavailable, TenantErased
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from nearkin_shared.utils.failpoints import RECORD_POINTS, arm, disarm
from tests.support.data.test_keys import MemoryKeys

DB, WEB = domain_of("db"), domain_of("web")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    disarm()


def run_until_failpoint(point: str, action: Callable[[], object]) -> None:
    """Do an action that ends at a failpoint."""
    arm(f"{point}:1:error")
    with pytest.raises(StoreUnavailable, match="failpoint"):
        action()
    assert disarm()[point] == 1


def test_failpoints_of_records_are_all_tried() -> None:
    """F.32: Every failpoint of keys, pauses and scrub progress is tried in this file."""
    tried = {"key.made", "key.noted", "key.erasure-recorded", "key.erasure-cancelled", "key.removed"}
    assert tried | {"pause.recorded", "pause.removed", "scrub.recorded", "scrub.done"} == set(RECORD_POINTS)


@pytest.mark.parametrize("point", ["key.made", "key.noted"])
def test_rotation_cut_short_keeps_every_key(point: str) -> None:
    """F.32: After a rotation that was cut short older keys read, new ones encrypt, and a repetition succeeds."""
    keys = MemoryKeys()
    first = keys.keyring.newest(DB)
    run_until_failpoint(point, lambda: keys.keyring.rotate("db"))
    following = keys.another()
    second = following.newest(DB)
    assert following.key(first.owner, first.number, "an object").secret == first.secret
    number = following.rotate("db")
    assert number > second.number > first.number
    last = keys.another()
    assert last.newest(DB).number == number
    assert last.key(second.owner, second.number, "an object").secret == second.secret


def test_head_of_a_rotation_cut_short_is_noted_by_the_next_put() -> None:
    """F.22: A key whose maker died before its number was recorded encrypts; then its loss is noticed as any other's."""
    keys = MemoryKeys()
    keys.keyring.newest(DB)
    run_until_failpoint("key.made", lambda: keys.keyring.rotate("db"))
    newest = keys.another().newest(DB)
    record = next(
        name for name, _ in keys.below.names(f"keys/{newest.owner.hex()}") if f"/{newest.number:08x}." in name
    )
    keys.below.delete(record)
    with pytest.raises(Corrupt, match=f"key {newest.number} of"):
        keys.another().newest(DB)


@pytest.mark.parametrize("point", ["key.made", "key.noted"])
def test_first_key_cut_short_is_used_by_the_next(point: str) -> None:
    """F.32: A tenant's first key that was made as its process died is the one that all others use."""
    keys = MemoryKeys()
    run_until_failpoint(point, lambda: keys.keyring.newest(DB))
    found = [keys.another().newest(DB) for _ in range(2)]
    assert found[0].secret == found[1].secret


def test_cancel_cut_short_has_cancelled() -> None:
    """F.22: A cancel that was cut short leaves the tenant open; a repetition removes the record."""
    keys = MemoryKeys()
    first = keys.keyring.newest(DB)
    keys.keyring.erase("db", 3600)
    run_until_failpoint("key.erasure-cancelled", lambda: keys.keyring.cancel_erasure("db"))
    assert keys.another().newest(DB).secret == first.secret
    assert [erasure.is_cancelled for erasure in keys.another().erasures()] == [True]
    keys.another().cancel_erasure("db")
    assert keys.another().newest(DB).secret == first.secret
    assert keys.another().erasures() == []


@pytest.mark.parametrize("point", ["key.erasure-recorded", "key.removed"])
def test_erasure_cut_short_reads_no_more(point: str) -> None:
    """F.32: An erasure that was cut short holds: the tenant's keys read nothing, and a repetition completes it."""
    keys = MemoryKeys()
    for keyring, domain in ((keys.keyring, DB), (keys.keyring, WEB)):
        keyring.newest(domain)
    keys.keyring.rotate("db")
    web = keys.keyring.newest(WEB)
    run_until_failpoint(point, lambda: keys.keyring.erase("db"))
    following: Keyring = keys.another()
    with pytest.raises(TenantErased):
        following.newest(DB)
    following.erase("db")
    owner = following.owner_of(DB).hex()
    assert not [name for name, _ in keys.below.names(f"keys/{owner}")]
    assert following.newest(WEB).secret == web.secret


def test_pause_cut_short_pauses_and_resumes() -> None:
    """F.32: A pause holds though its process died; a resumption that was cut short can be repeated."""
    objects = memory_objects()
    run_until_failpoint("pause.recorded", lambda: GcPauseFlag(objects).pause("me"))
    found = GcPauseFlag(objects).read()
    assert found is not None
    assert found.who == "me"
    run_until_failpoint("pause.removed", GcPauseFlag(objects).resume)
    assert GcPauseFlag(objects).read() is None
    assert not GcPauseFlag(objects).resume()


@pytest.mark.parametrize("point", ["scrub.recorded", "scrub.done"])
def test_scrub_progress_cut_short_is_the_newest(point: str) -> None:
    """F.32: Of scrub states the newest holds though its writer died, and the next leaves one alone."""
    objects = memory_objects()
    states = [replace(ScrubState(), begun_us=number) for number in (1, 2, 3)]
    ScrubStates(objects).write(states[0])
    run_until_failpoint(point, lambda: ScrubStates(objects).write(states[1]))
    assert ScrubStates(objects).read() == states[1]
    ScrubStates(objects).write(states[2])
    assert ScrubStates(objects).read() == states[2]
    assert len(ScrubStates(objects).list_records()) == 1
