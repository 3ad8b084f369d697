"""The cache of decoded blocks: bounded in bytes, and in a put by what a put may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.errors import Corrupt, NotFound
from nearkin.limits import MIB
from nearkin.store.containers import ByteBoundedCache
from nearkin.testing.generated import mutated, text_like
from nearkin.testing.stores import settings


def test_a_lower_bound_drops_what_is_too_much_and_holds() -> None:
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


def test_a_put_keeps_to_its_own_bound_and_a_restore_to_the_larger_one(tmp_path: Path) -> None:
    chosen = settings({"base": {"cache_bytes": 2 * MIB}, "restore": {"cache_bytes": 32 * MIB}})
    data = text_like(9_000_000, 3)
    with open_store(tmp_path / "s", settings=chosen) as store:
        blocks = store._containers.blocks
        store.put("k", data)
        store.put("k", mutated(data, 4, edits=300, edit_bytes_max=4000))
        assert blocks.used_bytes <= 2 * MIB
        assert store.get("k", 1).read() == data
        assert blocks.used_bytes > 8 * MIB
        store.put("k", b"another")
        assert blocks.used_bytes <= 2 * MIB


def test_blocks_of_a_container_come_in_one_read_as_many_as_are_wanted_at_once(tmp_path: Path) -> None:
    chosen = settings({"block": {"raw_bytes": 64 * 1024}})
    with open_store(tmp_path / "s", settings=chosen) as store:
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
        with pytest.raises(Corrupt, match="missing since its directory was read"):
            source.records(container, [0, 1], MIB)
