"""Test delete and undelete on every object store: numbers, order, races, and crash points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearkin.store import open_store
from nearkin_shared.errors import BadInput, Corrupt, NotFound, StoreUnavailable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.tombstone import SEQUENCE_MAX, Mark, MarkKind, encode_mark
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.objectstore.base import LocalObjectStore, ObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.results import Ledger, VersionInfo
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import History, ManifestStore, mark_name, object_name
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, settings
from tests.support.fakes.clock import Clock
from tests.support.fakes.faulty_objects import FaultyObjectStore

WEEK = 604_800.0
SETTINGS = {"undelete_seconds": WEEK}


@pytest.fixture(params=["memory", "local", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return memory_objects()
    if request.param == "local":
        return LocalObjectStore(tmp_path)
    found: ObjectStore = request.getfixturevalue("s3_objects")
    return found


def put(manifests: ManifestStore, key: str = "k", tenant: str = "default") -> int:
    """Commit the next version, as the runners number them."""
    version = max(manifests.versions(tenant, key), default=0) + 1
    none = Locations.empty()
    manifest = Manifest(
        tenant, key, version, 5, version, bytes([version]) * 32, None, 1.0, Ledger(), none, np.zeros(0, np.bool_)
    )
    manifests.put(manifest)
    return version


def seen(manifests: ManifestStore, key: str = "k", tenant: str = "default") -> list[int]:
    found = manifests.histories(tenant, key)
    by_listing = [v for v in sorted(found) if manifests.shows(tenant, key, found[v])]
    assert by_listing == [v for v in sorted(found) if manifests.is_seen(tenant, key, v)]
    newest = manifests.newest(tenant, key)
    assert (newest.version if newest else None) == max(by_listing, default=None)
    return by_listing


def silent(_marks: Sequence[MarkedVersion]) -> None:
    pass


def test_a_key_goes_with_all_its_versions_and_comes_back(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    for _ in range(3):
        put(manifests)
    put(manifests, "other")
    put(manifests, tenant="other")
    assert deletions.delete("default", "k", **SETTINGS) == 3
    assert seen(manifests) == []
    for version in (1, 2, 3):
        with pytest.raises(NotFound):
            manifests.read_visible("default", "k", version)
        assert manifests.get("default", "k", version).version == version  # nothing is freed
    assert seen(manifests, "other") == seen(manifests, tenant="other") == [1]
    with pytest.raises(NotFound):
        deletions.delete("default", "k", **SETTINGS)
    assert deletions.undelete("default", "k") == 3
    assert seen(manifests) == [1, 2, 3]
    with pytest.raises(NotFound):
        deletions.undelete("default", "k")


def test_a_number_is_never_given_again(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    assert (put(manifests), put(manifests)) == (1, 2)
    deletions.delete("default", "k", **SETTINGS)
    assert put(manifests) == 3
    deletions.delete("default", "k", 3, **SETTINGS)
    assert put(manifests) == 4
    assert seen(manifests) == [4]
    # Its bytes are freed: the collector's tombstone is written, then the manifest is deleted.
    manifests.put_mark(Mark("default", "k", 3, 2, MarkKind.COLLECTED, 5, 0))
    objects.delete(object_name("default", "k", 3))
    objects.delete(object_name("default", "k", 4))
    assert put(manifests) == 4  # never deleted, it is a manifest that was lost: verify names it
    deletions.delete("default", "k", 4, **SETTINGS)
    objects.delete(object_name("default", "k", 4))
    assert put(manifests) == 5


def test_one_version_goes_alone(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    for _ in range(3):
        put(manifests)
    assert deletions.delete("default", "k", 3, **SETTINGS) == 1
    assert seen(manifests) == [1, 2]
    assert deletions.delete("default", "k", 1, **SETTINGS) == 1
    assert seen(manifests) == [2]
    with pytest.raises(NotFound):
        deletions.delete("default", "k", 1, **SETTINGS)
    with pytest.raises(NotFound):
        deletions.delete("default", "k", 9, **SETTINGS)
    with pytest.raises(BadInput):
        deletions.delete("default", "k", 0, **SETTINGS)
    assert deletions.undelete("default", "k", 3) == 1
    assert seen(manifests) == [2, 3]


def test_undelete_brings_back_what_the_latest_call_took() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    for _ in range(4):
        put(manifests)
    deletions.delete("default", "k", 2, **SETTINGS)
    clock.now += 60
    assert deletions.delete("default", "k", **SETTINGS) == 3
    assert deletions.undelete("default", "k") == 3
    assert seen(manifests) == [1, 3, 4]
    assert deletions.undelete("default", "k") == 1
    assert seen(manifests) == [1, 2, 3, 4]


def test_the_time_to_undelete_is_the_one_that_was_promised() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    deletions.delete("default", "k", undelete_seconds=100)
    (told,) = deletions.list_deleted("default", ["k"])
    assert (told.until - told.deleted).total_seconds() == 100
    clock.now += 101
    with pytest.raises(NotFound, match=r"until 2025-11-24T16:01:40Z.*deletion\.undelete_seconds"):
        deletions.undelete("default", "k")
    clock.now -= 1  # to the microsecond
    assert deletions.undelete("default", "k") == 1
    deletions.delete("default", "k", undelete_seconds=0)
    clock.now += 0.001
    with pytest.raises(NotFound):
        deletions.undelete("default", "k")


def test_what_is_deleted_is_listed_with_who_and_why() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    deletions.delete("default", "k", 2, who="kim", reason="wrong host", **SETTINGS)
    (told,) = deletions.list_deleted("default", ["k", "none"])
    assert (told.key, told.version, told.who, told.reason) == ("k", 2, "kim", "wrong host")
    assert told.deleted.timestamp() == clock.now


def test_what_is_collected_never_comes_back() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    deletions.delete("default", "k", **SETTINGS)
    manifests.put_mark(Mark("default", "k", 1, 2, MarkKind.COLLECTED, 5, 0))
    assert seen(manifests) == []
    assert list(deletions.list_deleted("default", ["k"])) == []
    for call in (deletions.undelete, lambda *given: deletions.delete(*given, **SETTINGS)):
        with pytest.raises(NotFound):
            call("default", "k", 1)


def test_a_repeated_request_is_answered_as_the_first_one() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    put(manifests)
    one, other = bytes(range(16)), bytes(range(1, 17))
    for _ in range(3):
        assert deletions.delete("default", "k", request=one, **SETTINGS) == 2
    with pytest.raises(NotFound):
        deletions.delete("default", "k", request=other, **SETTINGS)
    for _ in range(3):
        assert deletions.undelete("default", "k", request=other) == 2
    assert seen(manifests) == [1, 2]


@pytest.mark.parametrize("version", [None, 2])
def test_a_repeated_request_undoes_nothing_that_others_did_since(version: int | None) -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    one, other, count = bytes(range(16)), bytes(range(1, 17)), 2 if version is None else 1
    assert deletions.delete("default", "k", version, request=one, **SETTINGS) == count
    assert deletions.undelete("default", "k", version) == count
    assert deletions.delete("default", "k", version, request=one, **SETTINGS) == count  # its answer was lost
    assert seen(manifests) == [1, 2]
    clock.now += 1
    assert deletions.delete("default", "k", version, **SETTINGS) == count
    assert deletions.undelete("default", "k", version, request=other) == count
    clock.now += 1
    assert deletions.delete("default", "k", version, **SETTINGS) == count
    gone = seen(manifests)
    for call in range(2):
        assert deletions.undelete("default", "k", version, request=other) == count, call
        assert deletions.delete("default", "k", version, request=one, **SETTINGS) == count, call
    assert seen(manifests) == gone


def test_a_repeated_undeletion_of_a_key_leaves_what_an_earlier_deletion_took() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    deletions.delete("default", "k", 1, **SETTINGS)
    clock.now += 1
    deletions.delete("default", "k", **SETTINGS)
    for _ in range(2):
        assert deletions.undelete("default", "k", request=bytes(16)) == 1
    assert seen(manifests) == [2]


def test_a_request_that_was_cut_short_is_ended_by_its_repeat() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    put(manifests)
    manifests.put_mark(Mark("default", "k", 1, 1, MarkKind.DELETED, 10, 2**52, bytes(16)))
    assert deletions.delete("default", "k", request=bytes(16), **SETTINGS) == 1
    assert seen(manifests) == []
    manifests.put_mark(Mark("default", "k", 2, 2, MarkKind.UNDELETED, 20, 0, bytes(range(16))))
    assert deletions.undelete("default", "k", request=bytes(range(16))) == 1
    assert seen(manifests) == [1, 2]


def test_a_condition_that_fails_deletes_nothing() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    put(manifests)

    class Refused(Exception):
        pass

    def refuse(info: VersionInfo) -> None:
        assert info.version == 2  # the newest of those that would go
        raise Refused

    with pytest.raises(Refused):
        deletions.delete("default", "k", condition=refuse, **SETTINGS)
    assert seen(manifests) == [1, 2]


def test_a_version_that_is_put_after_the_condition_stays() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    assert deletions.delete("default", "k", condition=lambda _: put(manifests) and None, **SETTINGS) == 1
    assert seen(manifests) == [2]


def test_bounds_are_named_before_anything_changes() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    deletions = Deletions(manifests, silent)
    with pytest.raises(BadInput, match="reason of 1025 bytes"):
        deletions.delete("default", "k", reason="x" * 1025, **SETTINGS)
    assert seen(manifests) == [1]
    for sequence in range(1, SEQUENCE_MAX + 1):
        kind = MarkKind.DELETED if sequence % 2 else MarkKind.UNDELETED
        manifests.put_mark(Mark("default", "k", 1, sequence, kind, 5, 6 if sequence % 2 else 0))
    with pytest.raises(BadInput, match="want 1 to 1000"):
        deletions.delete("default", "k", **SETTINGS)
    assert seen(manifests) == [1]


# --- each step may be the last ---------------------------------------------------------------------------------------


def test_the_newest_version_is_the_last_to_go_and_the_first_to_come_back() -> None:
    """Show no reader an older version instead, whatever cuts the call short."""
    for letters in ("E", ".E", "..E", "...E"):
        objects = memory_objects()
        manifests = ManifestStore(objects)
        for _ in range(4):
            put(manifests)
        with pytest.raises(StoreUnavailable):
            Deletions(ManifestStore(FaultyObjectStore(objects, letters)), silent).delete("default", "k", **SETTINGS)
        newest = manifests.newest("default", "k")
        assert newest is not None
        assert newest.version == 4
        assert Deletions(manifests, silent).delete("default", "k", **SETTINGS) >= 1  # the same again ends it
        assert seen(manifests) == []
        cut_short = Deletions(ManifestStore(FaultyObjectStore(objects, ".E")), silent)
        if len(letters) == 1:  # nothing was deleted by the first call, all four by the second
            with pytest.raises(StoreUnavailable):
                cut_short.undelete("default", "k")
        else:
            Deletions(manifests, silent).undelete("default", "k")
        newest = manifests.newest("default", "k")
        assert newest is not None
        assert newest.version == 4


def test_a_lost_reply_is_a_deletion_that_is_done() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    request = bytes(range(16))
    with pytest.raises(StoreUnavailable):
        Deletions(ManifestStore(FaultyObjectStore(objects, "L")), silent).delete(
            "default", "k", request=request, **SETTINGS
        )
    assert seen(manifests) == []
    assert Deletions(manifests, silent).delete("default", "k", request=request, **SETTINGS) == 1


def test_the_index_hears_of_a_mark_before_it_is_made() -> None:
    manifests = ManifestStore(memory_objects())
    put(manifests)
    put(manifests)
    noted: list[MarkedVersion] = []

    def note(marks: Sequence[MarkedVersion]) -> None:
        assert seen(manifests) == [1, 2]
        noted.extend(marks)

    Deletions(manifests, note).delete("default", "k", **SETTINGS)
    histories = manifests.histories("default", "k")
    assert [(mark.version, mark.sequence, mark.marks_bytes) for mark in noted] == [
        (version, 1, histories[version].marks_bytes) for version in (1, 2)
    ]

    def unreachable(_marks: Sequence[MarkedVersion]) -> None:
        raise StoreUnavailable("index: away")

    with pytest.raises(StoreUnavailable):
        Deletions(manifests, unreachable).undelete("default", "k")
    assert seen(manifests) == []


def test_a_folder_read_while_it_changes_hides_no_version(tmp_path: Path) -> None:
    """Hide no version if a listing has the deletion of 1 and misses the earlier put of 2."""
    manifests = ManifestStore(LocalObjectStore(tmp_path))
    put(manifests)

    class Late(ManifestStore):
        first = True

        def histories(self, tenant: str, key: str) -> dict[int, History]:
            found = super().histories(tenant, key)
            if self.first:
                self.first = False
                put(manifests)
                Deletions(manifests, silent).delete("default", "k", 1, **SETTINGS)
                return {1: replace(found[1], sequence=1)}
            return found

    newest = Late(LocalObjectStore(tmp_path)).newest("default", "k")
    assert newest is not None
    assert newest.version == 2


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_broken_deletion_still_hides_and_a_broken_undeletion_is_corrupt() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    put(manifests)
    deletions.delete("default", "k", **SETTINGS)
    name = mark_name("default", "k", 1, 1)
    whole = objects.get(name)
    objects.delete(name)
    objects.put_new(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert seen(manifests) == []
    with pytest.raises(Corrupt, match=name):
        deletions.undelete("default", "k")
    told: list[object] = []
    assert list(deletions.list_deleted("default", ["k"], told.append)) == []
    assert len(told) == 1
    objects.put_new(mark_name("default", "k", 1, 2), b"rot")
    with pytest.raises(Corrupt):
        manifests.newest("default", "k")
    with pytest.raises(Corrupt):
        manifests.read_visible("default", "k", 1)


def test_a_mark_under_anothers_name_is_corrupt() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    put(manifests)
    Deletions(manifests, silent).delete("default", "k", 1, **SETTINGS)
    objects.put_new(mark_name("default", "k", 2, 1), objects.get(mark_name("default", "k", 1, 1)))
    with pytest.raises(Corrupt, match="is mark 1 of 'k' version 1"):
        manifests.mark("default", "k", 2, 1)


# --- races -----------------------------------------------------------------------------------------------------------


def race(*calls: Callable[[], object]) -> list[object]:
    """Run calls at the same time; return what each gave, or its NotFound."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return call()
        except NotFound as err:
            return err

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_of_two_deletions_of_a_version_one_is_told_that_it_did_it(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    for version in range(1, 13):
        put(manifests)
        answers = race(
            *[lambda v=version: Deletions(ManifestStore(objects), silent).delete("default", "k", v, **SETTINGS)] * 4
        )
        assert sorted(isinstance(answer, NotFound) for answer in answers) == [False, True, True, True]
    assert seen(manifests) == []


def test_versions_deleted_by_two_calls_at_once_are_each_counted_once(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    for _ in range(6):
        put(manifests)
    answers = race(*[lambda: Deletions(ManifestStore(objects), silent).delete("default", "k", **SETTINGS)] * 2)
    assert sum(answer for answer in answers if isinstance(answer, int)) == 6
    assert seen(manifests) == []


def test_a_deletion_and_the_collector_never_both_have_their_way(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    for version in range(1, 11):
        put(manifests)
        Deletions(manifests, silent).delete("default", "k", version, **SETTINGS)

        def collect(v: int = version) -> str:
            try:
                ManifestStore(objects).put_mark(Mark("default", "k", v, 2, MarkKind.COLLECTED, 5, 0))
            except Exception as err:
                return type(err).__name__
            return "collected"

        back, collected = race(
            lambda v=version: Deletions(ManifestStore(objects), silent).undelete("default", "k", v), collect
        )
        assert (back == 1) == (collected == "AlreadyExists")
        assert (version in seen(manifests)) == (back == 1)


def test_a_put_during_a_deletion_stays_or_was_there_before(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    put(manifests)
    numbers = [1]
    for _ in range(8):
        number, count = race(
            lambda: put(ManifestStore(objects)),
            lambda: Deletions(ManifestStore(objects), silent).delete("default", "k", **SETTINGS),
        )
        assert isinstance(number, int)
        numbers.append(number)
        left = seen(manifests)
        assert left in ([], [number])
        assert count == (2 if not left else 1) or len(left) == 0
        if not left:
            numbers.append(put(manifests))
    assert numbers == sorted(set(numbers))


def test_a_version_with_all_marks_that_it_may_have_keeps_no_other_from_being_forgotten(tmp_path):
    chosen = settings(SMALL, {"retention": {"superseded_seconds": 0, "policies": [{"keep_last": 1}]}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for key in ("a", "b"):
            for content in (b"1", b"2"):
                store.put(key, content)
        mark = Mark("default", "a", 1, 1000, MarkKind.UNDELETED, 1, 0)
        (tmp_path / "s" / mark_name("default", "a", 1, 1000)).write_bytes(encode_mark(mark))
        assert store.gc().forgotten == 1
        left = [(info.key, info.version) for info in store.versions(all_versions=True)]
        assert left == [("a", 1), ("a", 2), ("b", 2)]
        reasons = {decision.info.version: decision.reasons for decision in store.forget("a")}
        assert reasons == {1: ("marks",), 2: ("last",)}
