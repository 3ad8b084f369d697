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
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.results import Ledger, VersionInfo
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import History, ManifestStore, mark_name, object_name
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, settings
from tests.support.fakes.clock import Clock
from tests.support.fakes.faulty_objects import FaultyObjectStore

WEEK = 604_800.0


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


def test_key_is_deleted_with_all_versions(objects: ObjectStore) -> None:
    """Delete a key with all its versions, and undelete it."""
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    for _ in range(3):
        put(manifests)
    put(manifests, "other")
    put(manifests, tenant="other")
    assert deletions.delete("default", "k", undelete_seconds=WEEK) == 3
    assert seen(manifests) == []
    for version in (1, 2, 3):
        with pytest.raises(NotFound):
            manifests.read_visible("default", "k", version)
        assert manifests.get("default", "k", version).version == version  # nothing is freed
    assert seen(manifests, "other") == seen(manifests, tenant="other") == [1]
    with pytest.raises(NotFound):
        deletions.delete("default", "k", undelete_seconds=WEEK)
    assert deletions.undelete("default", "k") == 3
    assert seen(manifests) == [1, 2, 3]
    with pytest.raises(NotFound):
        deletions.undelete("default", "k")


def test_version_number_is_never_reused(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    assert (put(manifests), put(manifests)) == (1, 2)
    deletions.delete("default", "k", undelete_seconds=WEEK)
    assert put(manifests) == 3
    deletions.delete("default", "k", 3, undelete_seconds=WEEK)
    assert put(manifests) == 4
    assert seen(manifests) == [4]
    # Its bytes are freed: the collector's tombstone is written, then the manifest is deleted.
    manifests.put_mark(Mark("default", "k", 3, 2, MarkKind.COLLECTED, 5, 0))
    objects.delete(object_name("default", "k", 3))
    objects.delete(object_name("default", "k", 4))
    assert put(manifests) == 4  # never deleted, it is a manifest that was lost: verify names it
    deletions.delete("default", "k", 4, undelete_seconds=WEEK)
    objects.delete(object_name("default", "k", 4))
    assert put(manifests) == 5


def test_one_version_is_deleted_alone(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    for _ in range(3):
        put(manifests)
    assert deletions.delete("default", "k", 3, undelete_seconds=WEEK) == 1
    assert seen(manifests) == [1, 2]
    assert deletions.delete("default", "k", 1, undelete_seconds=WEEK) == 1
    assert seen(manifests) == [2]
    with pytest.raises(NotFound):
        deletions.delete("default", "k", 1, undelete_seconds=WEEK)
    with pytest.raises(NotFound):
        deletions.delete("default", "k", 9, undelete_seconds=WEEK)
    with pytest.raises(BadInput):
        deletions.delete("default", "k", 0, undelete_seconds=WEEK)
    assert deletions.undelete("default", "k", 3) == 1
    assert seen(manifests) == [2, 3]


def test_undelete_restores_the_latest_deletion() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    for _ in range(4):
        put(manifests)
    deletions.delete("default", "k", 2, undelete_seconds=WEEK)
    clock.now += 60
    assert deletions.delete("default", "k", undelete_seconds=WEEK) == 3
    assert deletions.undelete("default", "k") == 3
    assert seen(manifests) == [1, 3, 4]
    assert deletions.undelete("default", "k") == 1
    assert seen(manifests) == [1, 2, 3, 4]


def test_undelete_window_is_the_promised_one() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    deletions.delete("default", "k", undelete_seconds=100)
    (entry,) = deletions.list_deleted("default", ["k"])
    assert (entry.until - entry.deleted).total_seconds() == 100
    clock.now += 101
    with pytest.raises(NotFound, match=r"until 2025-11-24T16:01:40Z.*deletion\.undelete_seconds"):
        deletions.undelete("default", "k")
    clock.now -= 1  # to the microsecond
    assert deletions.undelete("default", "k") == 1
    deletions.delete("default", "k", undelete_seconds=0)
    clock.now += 0.001
    with pytest.raises(NotFound):
        deletions.undelete("default", "k")


def test_deleted_version_lists_user_and_reason() -> None:
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    deletions.delete("default", "k", 2, who="kim", reason="wrong host", undelete_seconds=WEEK)
    (entry,) = deletions.list_deleted("default", ["k", "none"])
    assert (entry.key, entry.version, entry.who, entry.reason) == ("k", 2, "kim", "wrong host")
    assert entry.deleted.timestamp() == clock.now
    assert entry.created == manifests.get("default", "k", 2).info.created


def test_collected_version_is_never_undeleted() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    deletions.delete("default", "k", undelete_seconds=WEEK)
    manifests.put_mark(Mark("default", "k", 1, 2, MarkKind.COLLECTED, 5, 0))
    assert seen(manifests) == []
    assert list(deletions.list_deleted("default", ["k"])) == []
    for call in (deletions.undelete, lambda *given: deletions.delete(*given, undelete_seconds=WEEK)):
        with pytest.raises(NotFound):
            call("default", "k", 1)


def test_repeated_request_returns_first_result() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    put(manifests)
    one, other = bytes(range(16)), bytes(range(1, 17))
    for _ in range(3):
        assert deletions.delete("default", "k", request=one, undelete_seconds=WEEK) == 2
    with pytest.raises(NotFound):
        deletions.delete("default", "k", request=other, undelete_seconds=WEEK)
    for _ in range(3):
        assert deletions.undelete("default", "k", request=other) == 2
    assert seen(manifests) == [1, 2]


@pytest.mark.parametrize("version", [None, 2])
def test_repeated_request_keeps_later_changes(version: int | None) -> None:
    """Keep changes that others made since the first request."""
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    one, other, count = bytes(range(16)), bytes(range(1, 17)), 2 if version is None else 1
    assert deletions.delete("default", "k", version, request=one, undelete_seconds=WEEK) == count
    assert deletions.undelete("default", "k", version) == count
    assert deletions.delete("default", "k", version, request=one, undelete_seconds=WEEK) == count  # its answer was lost
    assert seen(manifests) == [1, 2]
    clock.now += 1
    assert deletions.delete("default", "k", version, undelete_seconds=WEEK) == count
    assert deletions.undelete("default", "k", version, request=other) == count
    clock.now += 1
    assert deletions.delete("default", "k", version, undelete_seconds=WEEK) == count
    visible = seen(manifests)
    for call in range(2):
        assert deletions.undelete("default", "k", version, request=other) == count, call
        assert deletions.delete("default", "k", version, request=one, undelete_seconds=WEEK) == count, call
    assert seen(manifests) == visible


def test_repeated_undelete_keeps_older_deletion() -> None:
    """Keep an earlier deletion when the undeletion of a key is repeated."""
    manifests, clock = ManifestStore(memory_objects()), Clock()
    deletions = Deletions(manifests, silent, clock=clock)
    put(manifests)
    put(manifests)
    deletions.delete("default", "k", 1, undelete_seconds=WEEK)
    clock.now += 1
    deletions.delete("default", "k", undelete_seconds=WEEK)
    for _ in range(2):
        assert deletions.undelete("default", "k", request=bytes(16)) == 1
    assert seen(manifests) == [2]


def test_interrupted_request_is_completed_by_retry() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)
    put(manifests)
    manifests.put_mark(Mark("default", "k", 1, 1, MarkKind.DELETED, 10, 2**52, bytes(16)))
    assert deletions.delete("default", "k", request=bytes(16), undelete_seconds=WEEK) == 1
    assert seen(manifests) == []
    manifests.put_mark(Mark("default", "k", 2, 2, MarkKind.UNDELETED, 20, 0, bytes(range(16))))
    assert deletions.undelete("default", "k", request=bytes(range(16))) == 1
    assert seen(manifests) == [1, 2]


def test_failed_condition_deletes_nothing() -> None:
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
        deletions.delete("default", "k", condition=refuse, undelete_seconds=WEEK)
    assert seen(manifests) == [1, 2]


def test_version_put_after_the_condition_stays() -> None:
    manifests = ManifestStore(memory_objects())
    deletions = Deletions(manifests, silent)
    put(manifests)

    def put_next(_: VersionInfo) -> None:
        put(manifests)

    assert deletions.delete("default", "k", condition=put_next, undelete_seconds=WEEK) == 1
    assert seen(manifests) == [2]


def test_bounds_are_named_before_anything_changes() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    deletions = Deletions(manifests, silent)
    with pytest.raises(BadInput, match="reason of 1025 bytes"):
        deletions.delete("default", "k", reason="x" * 1025, undelete_seconds=WEEK)
    assert seen(manifests) == [1]
    for sequence in range(1, SEQUENCE_MAX + 1):
        kind = MarkKind.DELETED if sequence % 2 else MarkKind.UNDELETED
        manifests.put_mark(Mark("default", "k", 1, sequence, kind, 5, 6 if sequence % 2 else 0))
    with pytest.raises(BadInput, match="want 1 to 1000"):
        deletions.delete("default", "k", undelete_seconds=WEEK)
    assert seen(manifests) == [1]


# --- each step may be the last ---------------------------------------------------------------------------------------


def test_newest_version_is_last_to_be_deleted() -> None:
    """Show no reader an older version instead, whatever cuts the call short."""
    for letters in ("E", ".E", "..E", "...E"):
        objects = memory_objects()
        manifests = ManifestStore(objects)
        for _ in range(4):
            put(manifests)
        with pytest.raises(StoreUnavailable):
            Deletions(ManifestStore(FaultyObjectStore(objects, letters)), silent).delete(
                "default", "k", undelete_seconds=WEEK
            )
        newest = manifests.newest("default", "k")
        assert newest is not None
        assert newest.version == 4
        assert Deletions(manifests, silent).delete("default", "k", undelete_seconds=WEEK) >= 1  # the same again ends it
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


def test_lost_response_is_a_done_deletion() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    request = bytes(range(16))
    with pytest.raises(StoreUnavailable):
        Deletions(ManifestStore(FaultyObjectStore(objects, "L")), silent).delete(
            "default", "k", request=request, undelete_seconds=WEEK
        )
    assert seen(manifests) == []
    assert Deletions(manifests, silent).delete("default", "k", request=request, undelete_seconds=WEEK) == 1


def test_index_is_notified_before_a_tombstone() -> None:
    manifests = ManifestStore(memory_objects())
    put(manifests)
    put(manifests)
    noted: list[MarkedVersion] = []

    def note(marks: Sequence[MarkedVersion]) -> None:
        assert seen(manifests) == [1, 2]
        noted.extend(marks)

    Deletions(manifests, note).delete("default", "k", undelete_seconds=WEEK)
    histories = manifests.histories("default", "k")
    assert [(mark.version, mark.sequence, mark.marks_bytes) for mark in noted] == [
        (version, 1, histories[version].marks_bytes) for version in (1, 2)
    ]

    def unreachable(_marks: Sequence[MarkedVersion]) -> None:
        raise StoreUnavailable("index: away")

    with pytest.raises(StoreUnavailable):
        Deletions(manifests, unreachable).undelete("default", "k")
    assert seen(manifests) == []


def test_folder_changed_while_read_hides_nothing(tmp_path: Path) -> None:
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
                Deletions(manifests, silent).delete("default", "k", 1, undelete_seconds=WEEK)
                return {1: replace(found[1], sequence=1)}
            return found

    newest = Late(LocalObjectStore(tmp_path)).newest("default", "k")
    assert newest is not None
    assert newest.version == 2


# --- damage ----------------------------------------------------------------------------------------------------------


def test_broken_tombstone_hides_or_is_corrupt() -> None:
    """Hide by a broken deletion; report a broken undeletion as corrupt."""
    objects = memory_objects()
    manifests = ManifestStore(objects)
    deletions = Deletions(manifests, silent)
    put(manifests)
    deletions.delete("default", "k", undelete_seconds=WEEK)
    name = mark_name("default", "k", 1, 1)
    whole = objects.get(name)
    objects.delete(name)
    objects.put_new(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert seen(manifests) == []
    with pytest.raises(Corrupt, match=name):
        deletions.undelete("default", "k")
    notices: list[object] = []
    assert list(deletions.list_deleted("default", ["k"], notices.append)) == []
    assert len(notices) == 1
    objects.put_new(mark_name("default", "k", 1, 2), b"rot")
    with pytest.raises(Corrupt):
        manifests.newest("default", "k")
    with pytest.raises(Corrupt):
        manifests.read_visible("default", "k", 1)


def test_tombstone_under_another_name_is_corrupt() -> None:
    objects = memory_objects()
    manifests = ManifestStore(objects)
    put(manifests)
    put(manifests)
    Deletions(manifests, silent).delete("default", "k", 1, undelete_seconds=WEEK)
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


def test_of_two_deletions_one_reports_it(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    for version in range(1, 13):
        put(manifests)

        def delete(v: int = version) -> int:
            return Deletions(ManifestStore(objects), silent).delete("default", "k", v, undelete_seconds=WEEK)

        answers = race(*[delete] * 4)
        assert sorted(isinstance(answer, NotFound) for answer in answers) == [False, True, True, True]
    assert seen(manifests) == []


def test_concurrent_deletions_count_each_once(objects: ObjectStore) -> None:
    manifests = ManifestStore(objects)
    for _ in range(6):
        put(manifests)
    answers = race(
        *[lambda: Deletions(ManifestStore(objects), silent).delete("default", "k", undelete_seconds=WEEK)] * 2
    )
    assert sum(answer for answer in answers if isinstance(answer, int)) == 6
    assert seen(manifests) == []


def test_deletion_and_collector_exclude(objects: ObjectStore) -> None:
    """Let a deletion and the collector never both take effect."""
    manifests = ManifestStore(objects)
    for version in range(1, 11):
        put(manifests)
        Deletions(manifests, silent).delete("default", "k", version, undelete_seconds=WEEK)

        def collect(v: int = version) -> str:
            try:
                ManifestStore(objects).put_mark(Mark("default", "k", v, 2, MarkKind.COLLECTED, 5, 0))
            except Exception as err:
                return type(err).__name__
            return "collected"

        def undelete(v: int = version) -> int:
            return Deletions(ManifestStore(objects), silent).undelete("default", "k", v)

        back, collected = race(undelete, collect)
        assert (back == 1) == (collected == "AlreadyExists")
        assert (version in seen(manifests)) == (back == 1)


def test_put_during_a_deletion_is_consistent(objects: ObjectStore) -> None:
    """Keep a put during a deletion, or order it before."""
    manifests = ManifestStore(objects)
    put(manifests)
    numbers = [1]
    for _ in range(8):
        number, count = race(
            lambda: put(ManifestStore(objects)),
            lambda: Deletions(ManifestStore(objects), silent).delete("default", "k", undelete_seconds=WEEK),
        )
        assert isinstance(number, int)
        numbers.append(number)
        left = seen(manifests)
        assert left in ([], [number])
        assert count == (2 if not left else 1) or len(left) == 0
        if not left:
            numbers.append(put(manifests))
    assert numbers == sorted(set(numbers))


def test_version_with_all_tombstones_is_no_bar(tmp_path: Path) -> None:
    """Forget other versions although one has all tombstones that it may have."""
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
