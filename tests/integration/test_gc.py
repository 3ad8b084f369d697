"""Garbage collection in a local store: what goes, what stays, when; told beforehand to the byte."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.api import Store
from nearkin.errors import BadInput, Corrupt, NotFound, Permanent, StoreLocked
from nearkin.testing.generated import mutated, random_bytes, text_like
from nearkin.testing.stores import SMALL, containers, flip, manifests, objects, settings

DAY = 86_400
CHOSEN = settings(
    SMALL, {"deletion": {"undelete_seconds": 7 * DAY}, "gc": {"grace_seconds": DAY, "compact_below": 0.8}}
)
DELETION_SETS = 100 if "EVERY_SET" in os.environ else 30
"""Deletion sets whose reclaim is told before."""


class Clock:
    now = 1_764_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []

    def again() -> Store:
        for store in stores:
            store.close()
        stores.append(open_store(tmp_path / "s", settings=CHOSEN, clock=clock))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


def sizes(root: Path) -> dict[str, int]:
    return {name: len(data) for name, data in objects(root).items()}


def size_of(root: Path) -> int:
    return sum(sizes(root).values())


def collected(store: Store, clock: Clock, rounds: int = 4) -> int:
    """Collect round after round, each a day later; return the bytes freed. All is checked against what was told."""
    freed = 0
    for _ in range(rounds):
        clock.now += DAY
        told, before = store.gc(dry_run=True), size_of(store.root)
        done = store.gc()
        assert before - size_of(store.root) == done.freed_bytes == told.freed_bytes
        assert (done.versions, done.condemned_containers) == (told.versions, told.condemned_containers)
        assert store.verify().damage == ()
        assert store.stats().ledger.stored_bytes == size_of(store.root)
        freed += done.freed_bytes
    return freed


def test_a_store_without_deletions_frees_nothing(opened, clock):
    store = opened()
    content = text_like(600_000, 1)
    for edits in (0, 20, 40):
        store.put("k", mutated(content, 1, edits=edits))
    before = objects(store.root)
    assert collected(store, clock) == 0
    assert objects(store.root) == before


def test_what_nothing_needs_goes_and_all_else_restores(opened, clock):
    store = opened()
    kept = text_like(600_000, 1)
    store.put("kept", kept)
    alone = size_of(store.root)
    store.put("gone", random_bytes(900_000, 2))
    store.put("gone", random_bytes(400_000, 3))
    store.delete("gone")
    clock.now += 7 * DAY
    assert collected(store, clock) > 1_300_000
    assert size_of(store.root) - alone < 200  # the mark that keeps the number taken
    assert store.get("kept").read() == kept
    assert store.put("gone", b"again").info.version == 3


def test_nothing_goes_while_it_can_be_brought_back(opened, clock):
    store = opened()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    before = size_of(store.root)
    assert collected(store, clock, rounds=6) == 0
    assert store.gc(dry_run=True).held["undelete"] > 500_000
    assert size_of(store.root) == before
    assert store.undelete("k") == 1
    assert store.get("k").read() == content


def test_what_is_condemned_waits_for_its_grace(opened, clock):
    store = opened()
    store.put("k", random_bytes(500_000, 1))
    store.delete("k")
    clock.now += 8 * DAY
    first = store.gc()
    assert (first.versions, first.containers_deleted, first.condemned_containers) == (1, 0, len(containers(store.root)))
    clock.now += DAY - 1
    second = store.gc()
    assert (second.containers_deleted, second.freed_bytes) == (0, 0)
    clock.now += 1
    third = store.gc()
    assert third.freed_bytes == first.freed_later_bytes > 500_000
    assert containers(store.root) == []
    with pytest.raises(NotFound):
        store.get("k", 1)


def test_condemned_content_put_again_is_stored_anew(opened, clock):
    store = opened()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    assert store.put("again", content).ledger.unique_bytes == len(content)
    collected(store, clock)
    assert store.get("again").read() == content


@pytest.mark.parametrize("how", ["rebuilt", "lost"])
def test_an_index_made_anew_does_not_find_what_is_condemned(opened, clock, how):
    store = opened()
    content = random_bytes(500_000, 1)
    store.put("k", content)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    if how == "rebuilt":
        store.rebuild_index()
    else:
        store.close()
        shutil.rmtree(store.root / "index")
        store = opened()
    assert store.put("again", content).ledger.unique_bytes == len(content)
    collected(store, clock)
    assert store.get("again").read() == content


def test_bases_stay_as_long_as_a_version_leans_on_them(opened, clock):
    store = opened()
    first = text_like(900_000, 1)
    store.put("k", first)
    second = mutated(first, 5, edits=300)
    assert store.put("k", second).ledger.delta_chunks > 0
    store.delete("k", 1)
    clock.now += 8 * DAY
    collected(store, clock)
    assert store.get("k").read() == second
    assert store.gc(dry_run=True).held["bases"] > 0


def chain(store: Store, clock: Clock, versions: int, keep: int) -> dict[int, bytes]:
    """Put versions that each lean on the one before, and delete all but the last ones; return these."""
    content, kept = text_like(400_000, 1), {}
    for number in range(1, versions + 1):
        content = mutated(content, number, edits=60)
        assert store.put("k", content).info.version == number
        kept[number] = content
        if number > keep:
            store.delete("k", number - keep)
            del kept[number - keep]
    clock.now += 8 * DAY
    return kept


def test_dead_bases_go_once_what_leans_on_them_takes_living_ones(opened, clock, tmp_path):
    store = opened()
    kept = chain(store, clock, versions=14, keep=3)
    before = size_of(store.root)
    collected(store, clock, rounds=6)
    with open_store(tmp_path / "fresh", settings=CHOSEN) as fresh:
        for content in kept.values():
            fresh.put("k", content)
    assert size_of(store.root) < 1.2 * size_of(tmp_path / "fresh") < before
    for number, content in kept.items():
        assert store.get("k", number).read() == content
    assert max(store._containers.directory(c).chunks.depths.max() for c, _ in store._containers.ids()) <= 4
    assert store.rebuild_index().skipped == ()
    assert store.put("again", kept[14]).ledger.unique_bytes == 0


def test_what_rebasing_frees_is_told_over_all_rounds(opened, clock):
    store = opened()
    chain(store, clock, versions=14, keep=3)
    told, before = store.gc(dry_run=True), size_of(store.root)
    first = store.gc()
    assert before - size_of(store.root) == first.freed_bytes == told.freed_bytes
    middle = size_of(store.root)
    for _ in range(6):
        clock.now += DAY
        store.gc()
    assert middle - size_of(store.root) == told.freed_later_bytes > 0


def test_whoever_had_begun_to_read_reads_on_while_bases_change(opened, clock):
    store = opened()
    kept = chain(store, clock, versions=14, keep=3)
    store.gc()
    small_cache = settings(CHOSEN, {"restore": {"cache_bytes": 8 << 20}, "base": {"cache_bytes": 1 << 20}})
    with open_store(store.root, settings=small_cache, read_only=True, clock=clock) as reader:
        begun = {number: reader.get("k", number) for number in kept}
        for number, content in kept.items():
            assert reader.get("k", number, start=0, stop=10).read() == content[:10]
        reader._containers.blocks.clear()
        clock.now += DAY
        assert store.gc().containers_rewritten > 1
        for number, blob in begun.items():
            assert blob.read() == kept[number]


def test_another_tenants_versions_are_roots_too(opened, clock, tmp_path):
    store = opened()
    store.put("k", random_bytes(300_000, 1))
    store.close()
    content = random_bytes(300_000, 2)
    with open_store(tmp_path / "s", settings=settings(CHOSEN, {"tenant": "other"}), clock=clock) as other:
        other.put("k", content)
    store = opened()
    store.delete("k")
    clock.now += 8 * DAY
    assert collected(store, clock) > 300_000
    store.close()
    with open_store(tmp_path / "s", settings=settings(CHOSEN, {"tenant": "other"}), clock=clock) as other:
        assert other.get("k").read() == content


@pytest.mark.parametrize("what", ["container", "manifest"])
def test_nothing_is_condemned_while_what_a_version_needs_cannot_be_read(opened, clock, what):
    store = opened()
    store.put("broken", random_bytes(300_000, 1))
    broken = containers(store.root)[0] if what == "container" else manifests(store.root)[0]
    store.put("gone", random_bytes(300_000, 2))
    store.delete("gone")
    clock.now += 8 * DAY
    flip(broken, broken.stat().st_size - 20)
    store = opened()
    before = size_of(store.root)
    with pytest.raises(Corrupt, match="nothing is freed"):
        store.gc(dry_run=True)
    with pytest.raises(Corrupt, match="nothing is freed"):
        store.gc()
    assert len(containers(store.root)) == 2
    assert before - size_of(store.root) < 2_000  # the manifest and marks of what was deleted
    store.delete("broken")  # its time to come back is still to pass
    with pytest.raises(Corrupt):
        store.gc()
    clock.now += 8 * DAY
    for _ in range(2):
        clock.now += DAY
        store.gc()
    assert containers(store.root) == []
    assert store.verify().damage == ()


def test_what_services_have_written_is_left_alone_until_they_have_ended(opened, clock):
    store = opened()
    store.put("gone", random_bytes(300_000, 1))
    store.put("k", b"theirs")
    manifest = store._manifests.get("default", "k", 1)
    store._manifests.put(replace(manifest, version=2, origin=bytes([1] * 16)))
    store.delete("gone")
    clock.now += 8 * DAY
    store.rebuild_index()
    before = objects(store.root)
    for dry_run in (True, False):
        with pytest.raises(Permanent, match=r"set gc\.services_ended"):
            store.gc(dry_run=dry_run)
    assert objects(store.root) == before
    store.settings = settings(CHOSEN, {"gc": {"services_ended": True}})
    assert collected(store, clock) > 300_000


def test_a_mark_that_cannot_be_read_keeps_its_version(opened, clock):
    store = opened()
    store.put("k", random_bytes(300_000, 1))
    store.delete("k")
    (mark,) = (store.root / "manifests").rglob("*.nkt")
    flip(mark, 40)
    clock.now += 30 * DAY
    before = size_of(store.root)
    for _ in range(3):
        store.gc()
        clock.now += DAY
    assert size_of(store.root) == before


def test_of_a_key_the_last_mark_of_its_highest_version_stays_until_a_higher_one_comes(opened, clock):
    store = opened()
    for number in range(3):
        store.put("k", random_bytes(1000, number))
    store.delete("k", 1)
    store.delete("k")
    clock.now += 8 * DAY
    store.gc()
    left = [path.name for path in (store.root / "manifests").rglob("*") if path.is_file()]
    assert left == ["0000000000000003.0002.nkt"]
    assert (store.versions("k"), store.deleted("k")) == ([], [])
    assert store.put("k", b"four").info.version == 4
    store.gc()
    assert [path.name for path in (store.root / "manifests").rglob("*") if path.is_file()] == ["0000000000000004.nkm"]
    assert store.stats().ledger.stored_bytes == size_of(store.root)


def test_a_round_is_refused_while_a_put_is_at_work(opened):
    store = opened()
    putting = store.put_many([("a", b"1"), ("b", b"2")])
    next(putting)
    with pytest.raises(StoreLocked):
        store.gc()
    list(putting)
    assert store.gc().freed_bytes == 0


def test_what_was_condemned_by_a_clock_ahead_waits_anew(opened, clock):
    store = opened()
    store.put("k", random_bytes(300_000, 1))
    store.delete("k")
    clock.now += 3650 * DAY
    store.gc()
    clock.now -= 3640 * DAY
    assert store.gc().containers_deleted == 0
    clock.now += DAY
    assert store.gc().containers_deleted == len([1])


def beside(store: Store) -> tuple[dict[str, bytes], int]:
    """Put blobs that share containers, delete most of them; return what is left and the bytes stored."""
    contents = {f"k{number}": random_bytes(30_000, number) for number in range(20)}
    list(store.put_many(contents.items()))
    before = size_of(store.root)
    for number in range(20):
        if number % 4:
            store.delete(f"k{number}")
            del contents[f"k{number}"]
    return contents, before


def test_a_container_with_little_left_is_written_anew(opened, clock):
    store = opened()
    contents, before = beside(store)
    clock.now += 8 * DAY
    collected(store, clock)
    assert size_of(store.root) < before * 0.4
    assert all(len(path.name.split(".")) == 3 for path in containers(store.root))
    for key, content in contents.items():
        assert store.get(key).read() == content
        assert sum(segment.length_bytes for segment in store.explain(key).segments) == len(content)
    # A second time: those that were written anew are written anew again.
    for key in list(contents)[1:]:
        store.delete(key)
        del contents[key]
    clock.now += 8 * DAY
    collected(store, clock)
    assert size_of(store.root) < before * 0.1
    for key, content in contents.items():
        assert store.get(key).read() == content
    assert store.rebuild_index().skipped == ()
    assert store.put("again", contents["k0"]).ledger.unique_bytes == 0


def test_whoever_had_begun_to_read_reads_on(opened, clock, tmp_path):
    store = opened()
    contents, _ = beside(store)
    clock.now += 8 * DAY
    store.gc()
    small_cache = settings(CHOSEN, {"restore": {"cache_bytes": 8 << 20}, "base": {"cache_bytes": 1 << 20}})
    with open_store(store.root, settings=small_cache, read_only=True, clock=clock) as reader:
        begun = {key: reader.get(key) for key in contents}
        for key in contents:
            assert reader.get(key, start=0, stop=10).read() == contents[key][:10]  # directories are known from now on
        reader._containers.blocks.clear()
        clock.now += DAY
        assert store.gc().containers_rewritten > 0
        for key, blob in begun.items():
            assert blob.read() == contents[key]


def test_a_patch_block_that_loses_chunks_keeps_the_bases_of_the_others_alone(opened, clock):
    store = opened()
    firsts = {f"k{number}": text_like(60_000, number) for number in range(12)}
    list(store.put_many(firsts.items()))
    seconds = {key: mutated(content, 3, edits=25) for key, content in firsts.items()}
    results = list(store.put_many(seconds.items()))
    assert sum(result.ledger.delta_chunks for result in results) > 12
    for key in firsts:
        store.delete(key, 1)
        if key != "k5":
            store.delete(key, 2)
    clock.now += 8 * DAY
    collected(store, clock, rounds=8)
    assert store.get("k5").read() == seconds["k5"]
    assert size_of(store.root) < 80_000


def test_the_next_round_frees_what_was_told_of_it(opened, clock):
    store = opened()
    beside(store)
    clock.now += 8 * DAY
    told = store.gc(dry_run=True)
    store.gc()
    clock.now += DAY
    before = size_of(store.root)
    done = store.gc()
    assert before - size_of(store.root) == done.freed_bytes == told.freed_later_bytes > 0
    assert done.containers_rewritten > 0


def test_what_a_deletion_frees_in_the_end_is_told_at_once(opened, clock):
    store = opened()
    beside(store)
    assert store.gc(dry_run=True).freed_bytes == 0
    told = store.gc(dry_run=True, deleted_too=True)
    assert told.versions == 15
    with pytest.raises(BadInput):
        store.gc(deleted_too=True)
    clock.now += 8 * DAY
    before = size_of(store.root)
    first = store.gc()
    assert before - size_of(store.root) == told.freed_bytes == first.freed_bytes
    clock.now += DAY
    store.gc()
    assert before - size_of(store.root) == told.freed_bytes + told.freed_later_bytes


def test_what_is_damaged_is_not_written_anew(opened, clock):
    store = opened()
    contents, _ = beside(store)
    clock.now += 8 * DAY
    store.gc()
    flip(containers(store.root)[0], 5_000)
    store = opened()
    before = objects(store.root)
    clock.now += DAY
    with pytest.raises(Corrupt, match="checksum"):
        store.gc()
    assert {name for name in before if name.startswith("containers")} <= set(objects(store.root))
    assert contents.keys() - {"k0"} <= {key for key in contents if _reads(store, key, contents[key])} | {"k4", "k8"}


def _reads(store: Store, key: str, content: bytes) -> bool:
    try:
        return store.get(key).read() == content
    except Corrupt:
        return False


def test_what_was_told_of_any_deletion_set_is_what_goes(tmp_path, monkeypatch):
    """Random sets; each byte was told before it goes."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)  # half of the time, and no power cut is tested here
    clock = Clock()
    first, other = text_like(60_000, 1), random_bytes(30_000, 2)
    contents: dict[tuple[str, int], bytes] = {}
    with open_store(tmp_path / "all", settings=CHOSEN, clock=clock) as store:
        for number in range(1, 5):
            contents["a", number] = mutated(first, number, edits=40)
            contents["b", number] = other[: 5_000 * number] + mutated(first, number + 1, edits=20)[:20_000]
            for key in "ab":
                store.put(key, contents[key, number])
    draw = random.Random(6)
    for deletion_set in range(DELETION_SETS):
        root = tmp_path / "one"
        shutil.copytree(tmp_path / "all", root)
        going = draw.sample(sorted(contents), draw.randint(1, 5))
        clock.now = Clock.now
        with open_store(root, settings=CHOSEN, clock=clock) as store:
            for key, number in going:
                store.delete(key, number)
            clock.now += 8 * DAY
            told, before = store.gc(dry_run=True), size_of(root)
            done = store.gc()
            assert before - size_of(root) == told.freed_bytes == done.freed_bytes
            clock.now += DAY
            before = size_of(root)
            store.gc()
            condemned = sum(size for name, size in sizes(root).items() if name.startswith("gc/"))
            assert before - size_of(root) + condemned == told.freed_later_bytes
            for key, number in draw.sample(sorted(contents.keys() - set(going)), min(2, len(contents) - len(going))):
                assert store.get(key, number).read() == contents[key, number]
            if not deletion_set % 10:
                assert store.verify().damage == ()
        shutil.rmtree(root)
