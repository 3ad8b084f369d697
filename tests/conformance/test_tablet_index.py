"""Test the index kind `tablets`: its contract, its snapshot, and what it reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin_shared.errors import Corrupt, IndexDamaged, StoreUnavailable
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.tablets import tablet_search, tablet_tables
from nearkin_shared.index.tablets.container_tags import ContainerTags
from nearkin_shared.index.tablets.tablet_cache import CachePolicy, Tablet, TabletCache, words_of
from nearkin_shared.index.tablets.tablet_index import TabletIndex
from nearkin_shared.index.tablets.tablet_search import RECENT_MAX
from nearkin_shared.index.tablets.tablet_tables import TabletOptions
from nearkin_shared.index.tablets.tag_snapshot import FILE_NAME
from nearkin_shared.limits import MIB
from nearkin_shared.types import ContainerId
from tests.support.conformance import IndexContract
from tests.support.conformance.index_contract import (
    FIRST,
    SECOND,
    chunk_names,
    claims,
    first_claims,
    ids,
    rows,
    second_claims,
)
from tests.support.data import samples

CONTAINERS = 60


Kinds = pytest.mark.parametrize(
    "options", [TabletOptions(), TabletOptions(is_sampled=True, level=1)], ids=["tablets", "sampled"]
)
SMALL = TabletOptions(memory_bytes=tablet_tables.CACHE_BYTES_MIN + 9000, is_sampled=True)
"""Memory for less than half the tags of a hundred containers."""


class Shelf:
    """Directories of published containers, as a container store has them."""

    def __init__(self) -> None:
        self.stored: dict[int, Directory] = {}
        self.reads: list[int] = []

    def directory(self, container: ContainerId) -> Directory:
        self.reads.append(container)
        if container not in self.stored:
            raise Corrupt(f"container {container:016x}: missing")
        return self.stored[container]


class ShelvedIndex(TabletIndex):
    """Index whose containers are on the shelf before they are published, as a writer does it."""

    def __init__(self, folder: Path, shelf: Shelf, **options: Any) -> None:
        self.shelf = shelf
        super().__init__(folder, samples.DOMAIN, 64 << 20, shelf, **options)

    def publish_many(self, many: Sequence[ContainerEntries], *, summaries: bool = True) -> None:
        for claimed in many:
            self.shelf.stored[claimed.directory.container] = claimed.directory
        super().publish_many(many, summaries=summaries)

    @property
    def level_max(self) -> int:
        """Return the highest level of hooks."""
        assert self.report.kind  # loads the tags
        return int(self.tags.hooks.levels.max(initial=0))

    @property
    def tags(self) -> ContainerTags:
        """Return the tags that a lookup has loaded."""
        assert self._tablet_tables._tags is not None
        return self._tablet_tables._tags


class TestTabletIndex(IndexContract):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[TabletIndex]:
        index = ShelvedIndex(tmp_path / "index", Shelf())
        yield index
        index.close()


class TestSampledIndex(IndexContract):
    """An index with memory for all tags finds all; its hooks are thinned below that."""

    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[TabletIndex]:
        index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(is_sampled=True))
        yield index
        index.close()


class TestIndexWithFewHooks(IndexContract):
    """One hook in 64: the containers that were published last are known without hooks."""

    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[TabletIndex]:
        index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(is_sampled=True, level=6))
        yield index
        index.close()


class TestTabletIndexWithoutCache(IndexContract):
    """Each lookup reads the directories that it needs."""

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TabletIndex]:
        monkeypatch.setattr(tablet_tables, "CACHE_BYTES_MIN", 1)
        options = TabletOptions(1, CachePolicy.SINGLE, 8)
        index = ShelvedIndex(tmp_path / "index", Shelf(), options=options)
        yield index
        index.close()


def container_of(number: int) -> ContainerEntries:
    return claims(
        ContainerId((5 << 40) + number),
        [f"{number}.{i}" for i in range(30)],
        [f"g{number}", f"h{number}"],
        [[number * 30 + i + 1] for i in range(30)],
    )


def fill(index: TabletIndex, containers: int = CONTAINERS) -> None:
    index.publish_many([container_of(number) for number in range(containers)])


def names_of(number: int) -> Any:
    return container_of(number).directory.chunks.names


def test_removed_chunk_of_a_rewrite_has_no_tag_to_remove(tmp_path: Path) -> None:
    """Its name is zeros in the directory, whose tag may be that of another chunk of the container."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf)
    fill(index, 2)
    container = container_of(0).directory.container
    stored = shelf.stored[container]
    names = stored.chunks.names.copy()
    names[3] = 0
    shelf.stored[container] = replace(stored, chunks=replace(stored.chunks, names=names))
    removals: dict[str, Any] = {"chunks": {container: None}, "segments": {}, "features": {}}
    found = index._tablet_tables.find_removed(lambda _: iter(()), removals)["chunks"]
    assert np.array_equal(found, np.delete(names, 3, axis=0))
    index.close()


def test_tablet_that_is_being_read_ahead_is_read_once() -> None:
    """A lookup waits for it; one that is still queued is read by the lookup instead."""
    begun, released, reads = threading.Event(), threading.Event(), list[int]()

    def read(container: int) -> Tablet:
        reads.append(container)
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert released.wait(30)
        names = chunk_names(str(container))
        return Tablet.make(names, words_of(names, 20), np.arange(len(names), dtype=np.uint32))

    cache = TabletCache(read, 64 * MIB, CachePolicy.PREFETCH)
    cache.get(1, lambda _: 2)
    assert begun.wait(30)
    cache.get(3, lambda _: 4)  # 4 waits behind 2
    cache.get(4)
    assert reads == [1, 2, 3, 4]
    threading.Timer(0.2, released.set).start()
    assert len(cache.get(2).tags) == len(cache.get(4).tags)
    cache.close()
    assert reads == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_known_stream_reads_each_directory_once(tmp_path: Path, policy: CachePolicy) -> None:
    """In stream order, under every policy; names that nothing has read none."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=TabletOptions(policy=policy))
    fill(index)
    index._tablet_tables.tablets.clear()
    shelf.reads.clear()
    absent = np.concatenate([names_of(number) for number in range(100, 140)])
    assert not index.locate_chunks(absent)[1].any()
    assert shelf.reads == []
    for number in range(CONTAINERS):
        found = rows(index.locate_chunks(names_of(number)))
        assert found == [((5 << 40) + number, i) for i in range(30)]
    index.close()  # waits for what is read ahead
    assert sorted(set(shelf.reads)) == sorted(shelf.stored)
    assert len(shelf.reads) <= CONTAINERS + (CONTAINERS if policy is CachePolicy.PREFETCH else 0)


@Kinds
def test_reopened_index_reads_new_directories_alone(tmp_path: Path, options: TabletOptions) -> None:
    """The snapshot has the others, and the index finds all."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    fill(index)
    index.close()
    assert (tmp_path / "index" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    index.publish(first_claims())
    shelf.reads.clear()
    index.close()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    assert rows(index.locate_segments(ids("s1"))) == [(FIRST, 0)]
    assert set(shelf.reads) == {FIRST}
    assert rows(index.locate_chunks(names_of(7)))[0] == ((5 << 40) + 7, 0)
    index.close()


@Kinds
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "lost", "other state", "bomb"])
def test_damaged_snapshot_is_read_from_directories(
    tmp_path: Path, options: TabletOptions, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happened to the file, the answers are the same."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    fill(index)
    index.close()
    path = tmp_path / "index" / FILE_NAME
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[len(data) // 2] ^= 4
        case "cut":
            del data[-100:]
        case "longer":
            data += b"0"
        case "empty":
            data.clear()
        case "other state":
            data[8] ^= 1
        case "bomb":
            data[24:32] = (1 << 29).to_bytes(8, "little")
    path.unlink()
    if damage != "lost":
        path.write_bytes(data)
    shelf.reads.clear()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    for number in range(CONTAINERS):
        assert index.locate_chunks(names_of(number))[1].all()
    assert set(shelf.reads) == set(shelf.stored)
    assert ("tags are read" in caplog.text) == (damage not in ("lost", "other state"))
    index.close()
    shelf.reads.clear()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    assert not index.locate_chunks(chunk_names("zz"))[1].any()
    index._tablet_tables.tablets.close()  # waits for what is read ahead
    assert len(shelf.reads) <= (RECENT_MAX + 2 if options.is_sampled else 0) < CONTAINERS
    index.close()


@Kinds
@pytest.mark.parametrize("is_looked_up", [True, False])
@pytest.mark.parametrize("is_reopened", [True, False])
def test_withdrawn_entries_are_not_found(
    tmp_path: Path, options: TabletOptions, is_looked_up: bool, is_reopened: bool
) -> None:
    """Nor after the index was opened again, although directory and snapshot have them."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    fill(index)
    index.close()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    first, second, third = ((5 << 40) + number for number in range(3))
    chunks = {first: np.arange(0, 30, 2, dtype=np.uint32), second: None, third: None}
    segments = {first: np.array([1], np.uint32)}
    found = index.look_up(chunks, segments) if is_looked_up else None
    index.withdraw(chunks, segments, [second], found)
    del shelf.stored[second]
    if is_reopened:
        index.close()
        index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    assert index.locate_chunks(names_of(0))[1].tolist() == [False, True] * 15
    assert not index.locate_chunks(np.concatenate([names_of(1), names_of(2)]))[1].any()
    assert rows(index.locate_segments(ids("g0", "h0", "g1", "g2", "g3"))) == [
        (first, 0), None, None, None, ((5 << 40) + 3, 0)
    ]  # fmt: skip
    assert second not in index.container_ids()
    assert third in index.container_ids()
    assert len(index.entries()["chunks"]) == (CONTAINERS - 3) * 30 + 15
    index.close()


@Kinds
def test_restored_entries_are_found_despite_older_snapshot(tmp_path: Path, options: TabletOptions) -> None:
    """A repaired container is published again; the process dies before it saves the tags."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    fill(index)
    before = index.entries()
    index.withdraw({5 << 40: None}, {}, [])
    index.close()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    index.publish_many([container_of(0)], summaries=False)
    index._tablet_tables._is_read_only = True  # saves nothing
    index.close()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    entries = index.entries()
    assert all(entries[table] == before[table] for table in ("chunks", "segments", "features"))
    index.close()


@Kinds
def test_failed_publication_leaves_no_entries(
    tmp_path: Path, options: TabletOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries of an aborted transaction are not found."""
    index = ShelvedIndex(tmp_path / "index", Shelf(), options=options)
    index.publish(first_claims())

    def fail(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(tablet_tables, "add_features", fail)
        with pytest.raises(OSError, match="full"):
            index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), None]
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), (SECOND, 1)]
    index.close()


@Kinds
def test_other_process_sees_changes_of_the_writer(tmp_path: Path, options: TabletOptions) -> None:
    """A reader that has loaded the tags learns of publication and withdrawal."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    index.publish(first_claims())
    reader = ShelvedIndex(tmp_path / "index", shelf, options=options, read_only=True)
    assert rows(reader.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), None]
    index.publish(second_claims())
    assert rows(reader.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), (SECOND, 1)]
    index.withdraw({FIRST: np.array([0], np.uint32)}, {}, [])
    assert rows(reader.locate_chunks(chunk_names("a", "dddd"))) == [None, (SECOND, 1)]
    reader.close()
    index.close()


@Kinds
def test_missing_directory_is_not_found_and_outage_is_raised(tmp_path: Path, options: TabletOptions) -> None:
    """A missing container has no chunks; an unreachable store is an error (I10)."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    index.publish(first_claims())
    index._tablet_tables.tablets.clear()
    directory = shelf.stored.pop(FIRST)
    assert rows(index.locate_chunks(chunk_names("a"))) == [None]
    shelf.stored[FIRST] = directory

    def unavailable(_: int) -> Directory:
        raise StoreUnavailable("no answer")

    shelf.directory = unavailable  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailable, match="no answer"):
        index.locate_chunks(chunk_names("a"))
    del shelf.directory
    assert rows(index.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
    index.close()


@Kinds
def test_outage_during_an_update_loses_no_entries(
    tmp_path: Path, options: TabletOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a container of another process cannot be read at first."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    index.publish(first_claims())
    reader = ShelvedIndex(tmp_path / "index", shelf, options=options, read_only=True)
    assert rows(reader.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), None]
    index.publish(second_claims())

    def unavailable(_: int) -> Directory:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(shelf, "directory", unavailable)
        with pytest.raises(StoreUnavailable, match="no answer"):
            reader.locate_chunks(chunk_names("dddd"))
    assert rows(reader.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), (SECOND, 1)]
    reader.close()
    index.close()


@pytest.mark.parametrize(("table", "key"), [("chunks", (1).to_bytes(8, "big")), ("meta", b"tablets")])
def test_row_of_a_wrong_length_is_damage(tmp_path: Path, table: str, key: bytes) -> None:
    """The index is rebuilt then."""
    index = ShelvedIndex(tmp_path / "index", Shelf())
    with index._writing() as txn:
        txn.put(key, b"12345", db=index._databases[table])
    with pytest.raises(IndexDamaged, match="5 bytes"):
        index.locate_chunks(chunk_names("a"))
    index.close()


@Kinds
@pytest.mark.parametrize("is_restored", [False, True])
def test_view_from_before_a_change_loads_no_tags(tmp_path: Path, options: TabletOptions, is_restored: bool) -> None:
    """A reader that waits for another one may ask after two changes: memory keeps what it has."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    fill(index)
    index.withdraw({5 << 40: None}, {}, [])
    with index._reading(buffers=True) as before:
        index.publish(container_of(0) if is_restored else first_claims())
        index.publish(second_claims())
        assert index.locate_chunks(names_of(1))[1].all()
        index._tablet_tables.tablets.close()  # nothing is read ahead from now on
        shelf.reads.clear()
        assert index._tables.locate(before, "chunks", names_of(1))[1].all()
    assert rows(index.locate_chunks(chunk_names("dddd"))) == [(SECOND, 1)]
    if options.is_sampled:  # those published last are read
        assert len(set(shelf.reads)) <= 3 + RECENT_MAX < CONTAINERS
    else:
        assert set(shelf.reads) <= {(5 << 40) + 1, (5 << 40) + 2, SECOND}
    index.close()


def test_published_containers_stay_recent_after_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream through old containers does not make the last version's few names unfindable."""
    monkeypatch.setattr(tablet_search, "RECENT_MAX", 4)
    index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(is_sampled=True, level=1))
    fill(index, 20)
    for name in names_of(19):
        for number in range(10):
            assert index.locate_chunks(names_of(number))[1].all()
        assert index.locate_chunks(name[None])[1].all()
    index.close()


def test_bound_on_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tablets leave when the bound is reached, and lookups stay right."""
    monkeypatch.setattr(tablet_tables, "CACHE_BYTES_MIN", 10_000)
    index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(memory_bytes=10_000))
    fill(index, 60)
    assert index._tablet_tables.tablets.used_bytes <= 10_000
    for number in range(60):
        assert index.locate_chunks(names_of(number))[1].all()
    assert index._tablet_tables.tablets.used_bytes <= 10_000
    index.close()


def test_hooks_are_thinned_within_the_bound(tmp_path: Path) -> None:
    """Whole containers are found by the hooks that are left, of stored and of new ones; absent names are not."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=SMALL)
    index.publish_many([container_of(number) for number in range(100)])
    assert len(index.tags.table) * 5.7 < 9000  # all 3,200 would take 18 KB
    assert 1 < index.level_max < 6
    expected = [((5 << 40) + number, i) for number in range(100) for i in range(30)]
    found = [row for number in range(100) for row in rows(index.locate_chunks(names_of(number)))]
    missed = sum(row is None for row in found)
    assert missed < 100
    assert all(row in (None, right) for row, right in zip(found, expected, strict=True))
    assert not index.locate_chunks(np.concatenate([names_of(number) for number in range(200, 240)]))[1].any()
    index.close()
    shelf.reads.clear()
    index = ShelvedIndex(tmp_path / "index", shelf, options=SMALL)
    assert len(index.locate_segments(ids("g99"))[1]) == 1
    assert shelf.reads == []  # the snapshot has levels and hooks
    assert index.level_max > 1
    index.close()


@pytest.mark.parametrize("is_sampled", [True, False])
def test_more_memory_finds_all_again(tmp_path: Path, is_sampled: bool) -> None:
    """At the next opening tags are read from directories; the kind `tablets` keeps all, whatever their bytes."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=SMALL)
    index.publish_many([container_of(number) for number in range(100)])
    assert index.level_max > 1
    index.close()
    options = TabletOptions(is_sampled=True) if is_sampled else TabletOptions(memory_bytes=SMALL.memory_bytes)
    index = ShelvedIndex(tmp_path / "index", shelf, options=options)
    for number in range(100):
        assert index.locate_chunks(names_of(number))[1].all()
    assert index.level_max == 0
    index.close()


def test_hooks_of_found_containers_go_first(tmp_path: Path) -> None:
    """A container in which a batch found names needs fewer hooks."""
    index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(is_sampled=True))
    fill(index, 20)
    for number in range(5, 10):
        assert index.locate_chunks(names_of(number))[1].all()
    hooks = index.tags.hooks
    assert hooks.raise_lowest(np.ones(20, np.bool_))
    assert np.flatnonzero(hooks.levels).tolist() == [5, 6, 7, 8, 9]
    index.close()


def test_deleted_container_is_not_followed(tmp_path: Path) -> None:
    """It was among the last ones, and its object is still there."""
    index = ShelvedIndex(tmp_path / "index", Shelf(), options=TabletOptions(is_sampled=True, level=6))
    fill(index, 3)
    assert index.locate_chunks(names_of(1))[1].all()
    index.withdraw({(5 << 40) + 1: None}, {}, [(5 << 40) + 1])
    assert not index.locate_chunks(names_of(1))[1].any()
    index.close()


def test_stream_is_followed_without_hooks(tmp_path: Path) -> None:
    """From a container that has one to the next ones, and the containers in which the last batch was found."""
    shelf = Shelf()
    index = ShelvedIndex(tmp_path / "index", shelf, options=TabletOptions(is_sampled=True, level=4))
    fill(index, 60)
    names = [names_of(number) for number in range(60)]
    alone = [bool(index.tags.candidates(words_of(some, 20))[0].size) for some in names]
    assert 40 < sum(alone) < 60  # 2 of 30 names are hooks
    first = alone.index(True)
    assert index.locate_chunks(np.concatenate(names[first:50]))[1].all()
    index.close()


def test_ids_out_of_order_are_numbered_as_published() -> None:
    """Ids that ascend need no second order; one that does not ascend, or is removed, gives them one."""
    tags = ContainerTags(24)
    given = [10, 20, 30, 25, 40, 5]
    for container in given:
        tags.add(container)
        tags.put(container, np.array([container << 40], np.uint64))
    assert [tags.successor(container) for container in given] == [20, 30, 25, 40, 5, None]
    assert tags.in_order([5, 25, 10, 99]) == [10, 25, 5]
    ascending = ContainerTags(24)
    for container in (10, 20, 30):
        ascending.add(container)
    assert ascending.memory_bytes < 3 * 10
    ascending.retire([20])
    assert 20 not in ascending
    assert [ascending.successor(container) for container in (10, 30)] == [None, None]
    ascending.add(40)
    ascending.add(20)
    assert ascending.in_order([20, 40, 30, 10]) == [10, 30, 40, 20]
