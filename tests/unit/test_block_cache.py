"""The cache of decoded blocks: bounded in bytes, and in a put by what a put may take."""

from __future__ import annotations

from pathlib import Path

from nearkin import open_store
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
