"""Test a store with daily GC runs: its size against a fresh store of the same versions."""

from __future__ import annotations

import random
from pathlib import Path

from nearkin import open_store
from nearkin.lab.generated_data import text_like
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from tests.support.data.stores import stored_bytes
from tests.support.fakes.clock import DAY

KEPT = 5
CHANGES = {"deletion": {"undelete_seconds": 0}, "gc": {"bytes_per_second": 1 << 40}}


def edited(content: bytes, draw: random.Random) -> bytes:
    """Change 2 % in edits of 200 bytes all over: almost every chunk."""
    data = bytearray(content)
    for _ in range(len(data) // 10_000):
        at = draw.randrange(len(data) - 200)
        data[at : at + 200] = draw.randbytes(100).hex().encode()
    return bytes(data)


def test_daily_gc_is_close_to_a_fresh_store(tmp_path: Path) -> None:
    """Encode chunks that died since a GC run again too: else the store is 1.34x a fresh one.

    The schedule is one run per day, as by a daily `nearkin gc`.
    """
    now, draw, content = [1_764_000_000.0], random.Random(1), text_like(600_000, 1)
    chosen, versions = with_changes(Settings(), CHANGES), dict[int, bytes]()
    with open_store(tmp_path / "s", settings=chosen, clock=lambda: now[0], create=True) as store:
        for day in range(9):
            content = edited(content, draw)
            versions[store.put("k", content).info.version] = content
            for old in [version for version in versions if version <= max(versions) - KEPT]:
                store.delete("k", old)
                del versions[old]
            now[0] += DAY
            store.gc()
            if day > KEPT:
                with open_store(tmp_path / f"fresh{day}", settings=chosen, create=True) as fresh:
                    for one in versions.values():
                        fresh.put("k", one)
                assert stored_bytes(tmp_path / "s") <= 1.2 * stored_bytes(tmp_path / f"fresh{day}"), day
        assert not store.verify().damage
        assert all(store.get("k", version).read() == one for version, one in versions.items())
