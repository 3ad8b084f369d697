"""Test the cache of decoded blocks.

Bounded in bytes, and during a put by the bound of puts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin.local.writer import GC_MEMORY_BYTES
from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from nearkin_shared.limits import MIB
from nearkin_shared.reading.block_cache import ByteBoundedCache
from tests.support.data.stores import settings


def test_lower_bound_evicts_the_excess() -> None:
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(100, "test")
    for number in range(10):
        cache.put(number, "x", 10)
    assert (cache.used_bytes, cache.entries) == (100, 10)
    cache.bound(35)
    assert (cache.used_bytes, cache.entries) == (30, 3)
    cache.put(11, "y", 10)
    assert (cache.used_bytes, cache.get(11)) == (30, "y")
    cache.put(12, "z", 36)
    assert cache.get(12) is None
    cache.bound(100)
    cache.put(12, "z", 36)
    assert (cache.used_bytes, cache.get(12)) == (66, "z")


def test_make_room_evicts_the_next_entries() -> None:
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(100, "test")
    cache.put_many(range(10), ["x"] * 10, [10] * 10)
    assert cache.get_many([9, 8, 99]) == ["x", "x", None]
    assert (cache.hits, cache.misses) == (2, 1)
    cache.make_room([15, 10, 101])  # the last is too large to be kept
    assert (cache.used_bytes, cache.get(9), cache.get(8)) == (70, "x", "x")
    cache.put_many([11, 12], ["y", "z"], [15, 10])
    assert (cache.used_bytes, cache.entries) == (95, 9)
    assert dict(cache.items())[11] == "y"
    cache.make_room([60, 60])
    assert (cache.used_bytes, cache.items()) == (0, [])
    cache.put_many(range(10), ["x"] * 10, [10] * 10)
    cache.make_room([15], uncached_bytes=20)
    assert cache.used_bytes == 60
    cache.make_room([], uncached_bytes=120)
    assert cache.used_bytes == 0


def test_given_up_entries_are_evicted_first_as_needed() -> None:
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(100, "test")
    cache.put_many(range(8), ["x"] * 8, [10] * 8)
    cache.give_up([0, 1, 2, 3, 99])
    cache.make_room([])
    assert cache.used_bytes == 80
    cache.make_room([15])  # fits without eviction, but reuses the memory of two given up entries
    assert sorted(key for key, _ in cache.items()) == [0, 1, 4, 5, 6, 7]
    cache.put_many([11, 12], ["y", "y"], [35, 10])  # slightly over the bound: given up entries are evicted
    assert sorted(key for key, _ in cache.items()) == [0, 4, 5, 6, 7, 11, 12]
    assert cache.used_bytes == 95
    cache.drop([0])
    cache.put(0, "new", 10)  # a new entry is not given up
    cache.make_room([10])
    assert cache.get(0) == "new"
    cache.give_up([0])
    assert cache.get(0) == "new"  # a use revokes the giving up
    cache.make_room([10])
    assert cache.get(0) == "new"
    cache.give_up([0])
    cache.clear()
    cache.put(0, "x", 10)
    cache.make_room([10])
    assert cache.get(0) == "x"


def test_recently_used_entries_stay_and_others_are_sampled() -> None:
    """After a scan of more than fits a quarter are the last ones, the rest a sample."""
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(1000, "test")
    for number in range(300):
        cache.put(number, "x", 10)
    held = [number for number in range(300) if number in cache._entries]
    assert len(held) == 100
    assert held[-25:] == list(range(275, 300))
    assert held[0] < 150
    assert cache.get(held[0]) == "x"  # now it is the last one used
    for number in range(300, 324):
        cache.put(number, "x", 10)
    assert cache.get(held[0]) == "x"


def test_entries_used_in_each_scan_stay() -> None:
    """Ten scans of 150 entries and, now and then, some that are never used again.

    A hundred fit.
    """
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(1000, "test")
    found = list[int]()
    for repeat in range(10):
        hits = cache.hits
        for number in range(150):
            if cache.get(number) is None:
                cache.put(number, "x", 10)
            if number % 5 == 0:
                cache.put(1000 * (repeat + 1) + number, "y", 10)
        found.append(cache.hits - hits)
    assert min(found[7:]) > 50, "random eviction alone would find 30 again, least recently used none"


def test_once_frequent_entries_are_evicted_when_unused() -> None:
    cache: ByteBoundedCache[int, str] = ByteBoundedCache(1000, "test")
    cache.put_many(range(100), ["x"] * 100, [10] * 100)
    for _ in range(10):
        cache.get_many(range(100))
    for repeat in range(80):
        for number in range(100, 180):
            if cache.get(number) is None:
                cache.put(number, "x", 10)
        if repeat == 2:
            assert sum(number in cache._entries for number in range(100)) > 50
    assert all(number in cache._entries for number in range(100, 180))


def test_cache_counts_stay_exact_and_evictions_reproducible() -> None:
    def played() -> list[int]:
        cache: ByteBoundedCache[int, int] = ByteBoundedCache(2000, "test")
        chance, sizes = random.Random(7), list[int]()
        for _ in range(1000):
            key, what = chance.randrange(300), chance.randrange(100)
            if what < 50:
                cache.put(key, key, 1 + key % 40)
            elif what < 90:
                assert cache.get(key) in (None, key)
            elif what < 97:
                cache.drop([key, key + 1])
            elif what < 98:
                cache.drop_if(lambda one: one % 7 == 0)
            elif what < 99:
                cache.bound(chance.choice([500, 2000]))
            else:
                cache.clear()
            cached = [one for one in range(300) if one in cache._entries]
            assert cache.entries == len(cached)
            assert sorted(one for keys in cache._keys for one in keys) == cached
            assert all(cache._keys[held.uses][held.position] == one for one, held in cache._entries.items())
            assert cache.used_bytes == sum(1 + one % 40 for one in cached) <= 2000
            sizes.append(len(cached))
        return sizes

    assert played() == played()


def test_entries_an_interrupt_left_inconsistent_are_evicted() -> None:
    cache: ByteBoundedCache[int, int] = ByteBoundedCache(1000, "test")
    for number in range(100):
        cache.put(number, number, 10)
    once = cache._keys[1]
    cache._entries.pop(once[3])  # its key is still listed
    cache._entries[once[5]].position = 90  # a wrong position
    cache._entries[once[9]].uses = 4  # a wrong list
    once.pop()  # its value is still held
    once.append(once[7])  # listed twice
    for number in range(100, 400):
        cache.put(number, number, 10)
        assert cache.get(number) == number
        cache.drop([number - 90])
    cache.bound(0)
    assert cache.used_bytes <= 0
    assert cache.entries <= 2
    cache.bound(1000)
    cache.put(1, 1, 10)
    assert cache.get(1) == 1


def test_sum_that_an_interrupt_made_wrong_is_computed_again() -> None:
    cache: ByteBoundedCache[int, int] = ByteBoundedCache(1000, "blocks")
    for key in range(10):
        cache.put(key, key, 100)
    cache._used_bytes -= 300  # three were evicted, and a Ctrl-C arrived before the fourth was counted
    for _ in range(20):
        cache.get_many(range(10))
    assert cache.used_bytes == 1000
    cache.put(10, 10, 100)
    assert cache.entries == 10


def test_put_and_restore_keep_their_own_bounds(tmp_path: Path) -> None:
    chosen = settings({"base": {"cache_bytes": 2 * MIB}, "restore": {"cache_bytes": 32 * MIB}})
    data = text_like(9_000_000, 3)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        blocks = store._containers.blocks
        store.put("k", data)
        store.put("k", mutate(data, 4, edits=300, edit_bytes_max=4000))
        assert blocks.used_bytes <= 2 * MIB
        assert store.get("k", 1).read() == data
        assert blocks.used_bytes > 8 * MIB
        store.put("k", b"another")
        assert blocks.used_bytes <= 2 * MIB


def test_blocks_cached_by_a_put_stay_for_a_restore(tmp_path: Path) -> None:
    """A restore alone fills no more than its own bound."""
    chosen = settings({"base": {"cache_bytes": 32 * MIB}, "restore": {"cache_bytes": 8 * MIB}})
    data = text_like(20_000_000, 3)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        blocks = store._containers.blocks
        store.put("k", data)
        left = blocks.used_bytes
        assert 8 * MIB < left <= 32 * MIB
        assert store.get("k").read() == data
        assert blocks.used_bytes == left
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        assert store.get("k").read() == data
        assert 4 * MIB < store._containers.blocks.used_bytes <= 8 * MIB


@pytest.mark.soak
def test_gc_run_lowers_the_cache_bound_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = list[bool]()
    monkeypatch.setattr("nearkin.store_maintenance.give_back_free", lambda: given_back.append(True))
    chosen = settings({"restore": {"cache_bytes": 128 * MIB}})
    data = text_like(60_000_000, 3)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        blocks, held = store._containers.blocks, list[int]()
        store.put("k", data)

        def read() -> None:
            assert store.get("k").read() == data
            held.append(blocks.used_bytes)

        read()
        assert store.gc(go_on=read).containers_rewritten
        read()

        def ended() -> None:
            raise StoreUnavailable("ended")

        with pytest.raises(StoreUnavailable, match="ended"):
            store.gc(go_on=ended)
        read()
        first, begun, marked, *during, after, at_last = held
        assert first == begun == marked == after == at_last > 50_000_000
        assert len(given_back) == 2, "each GC run must return memory, however it ends"
        assert during
        assert max(during) <= GC_MEMORY_BYTES < 52_000_000


def test_gc_run_evicts_deleted_and_rewritten_blocks_alone(tmp_path: Path) -> None:
    """If no other process can have written; else everything that was read is evicted."""
    chosen = settings({"gc": {"grace_seconds": 0, "merge_block_bytes": 0}, "deletion": {"undelete_seconds": 0}})
    data, other = text_like(6_000_000, 3), text_like(3_000_000, 4)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        source = store._containers
        for version in (data, other, mutate(data, 1, edits=40)):
            store.put("k", version)

        def read(*versions: int) -> dict[tuple[int, int], object]:
            for version in versions:
                assert store.get("k", version).read() == [data, other, mutate(data, 1, edits=40)][version - 1]
            return dict(source.blocks.items())

        before = read(1, 2, 3)
        assert store.gc().containers_rewritten
        rewritten = {container for container, generations in source.generations().items() if max(generations)}
        assert rewritten
        kept = {name for name, _ in before.items() if name[0] not in rewritten}
        assert kept
        assert dict(source.blocks.items()).keys() == kept
        before = read(1, 2, 3)
        assert not store.gc().containers_rewritten
        after: dict[Any, object] = dict(source.blocks.items())
        assert after.keys() == before.keys()
        assert all(after[name] is content for name, content in before.items())

        ids = {container for container, _ in source.ids()}
        store.delete("k", 2)
        while {container for container, _ in source.ids()} == ids:
            store.gc()
        removed = ids - {container for container, _ in source.ids()}
        assert {container for container, _ in before} & removed
        after = dict(source.blocks.items())
        assert after
        assert not {container for container, _ in after} & removed
        assert not {container for container, _ in source._directories.items()} & removed
        read(1, 3)
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        assert store.get("k", 1).read() == data
        assert store._containers.blocks.entries
        store.gc()
        assert not store._containers.blocks.entries, "another process may have written meanwhile"


def test_deleted_and_rewritten_blocks_of_others_are_evicted(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", create=True) as store:
        for number in range(3):
            store.put(str(number), text_like(500_000, number))
            assert store.get(str(number)).read() == text_like(500_000, number)
        source = store._containers
        other = source.with_own_caches(source._objects)
        removed, rewritten, same = sorted(container for container, _ in source.ids())
        assert {container for container, _ in dict(source.blocks.items())} == {removed, rewritten, same}
        other.put(rewritten, [other.raw(rewritten)], generation=1)
        other.delete(removed, 0)
        source.evict_deleted()
        assert {container for container, _ in dict(source.blocks.items())} == {same}
        assert {container for container, _ in source._directories.items()} == {same}


@pytest.mark.parametrize("error", [StoreUnavailable("away"), Corrupt("containers/x: not a container's name")])
def test_gc_run_that_cannot_list_at_its_end_evicts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    data = text_like(3_000_000, 3)
    with open_store(tmp_path / "s", create=True) as store:
        store.put("k", data)
        assert store._containers.blocks.entries

        def unlistable() -> None:
            raise error

        monkeypatch.setattr(store._containers, "evict_deleted", unlistable)
        assert store.gc().versions == 0
        assert not store._containers.blocks.entries
        assert store.get("k").read() == data


def test_blocks_of_a_container_are_read_in_one_request(tmp_path: Path) -> None:
    chosen = settings({"block": {"raw_bytes": 64 * 1024}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.put("k", text_like(1_000_000, 3))
        source = store._containers.counting()
        ((container, _),) = source.ids()
        blocks = source.directory(container).blocks
        assert len(blocks) >= 4
        one_by_one = [source.record(container, block) for block in range(4)]
        assert source.records(container, [0, 1, 2, 3], MIB) == one_by_one
        assert source.records(container, [1, 2], 1) == one_by_one[1:2]
        assert source.records(container, [2, 3], int(blocks.raw[2]) + 1) == one_by_one[2:]
        assert source.records(container, [0, 1, len(blocks)], MIB) == one_by_one[:2]
        with pytest.raises(NotFound, match=f"no block {len(blocks)}"):
            source.records(container, [len(blocks), 0], MIB)
        (path,) = (tmp_path / "s" / "containers").rglob("*.nkc")
        path.rename(tmp_path / "away")
        with pytest.raises(Corrupt, match="deleted after its directory was read"):
            source.records(container, [0, 1], MIB)
