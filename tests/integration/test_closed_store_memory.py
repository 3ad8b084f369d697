"""Test that a closed store holds no memory of its reads, before any garbage collection."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from tests.support.data.stores import settings

MIB = 1 << 20


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.soak
def test_closed_stores_leave_no_memory(tmp_path: Path) -> None:
    """Open, read and close stores one after another without growth."""
    first = text_like(20 * MIB, 1)
    with open_store(tmp_path / "s", settings=settings(), create=True) as store:
        store.put("k", first)
        store.put("k", mutate(first, 2, edits=2000, edit_bytes_max=300))
    del first
    sizes = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            with open_store(tmp_path / "s", settings=settings(), create=True) as store:
                for _piece in store.get("k").pieces():
                    pass
                del _piece
            del store
            sizes.append(anonymous_bytes())
    finally:
        gc.enable()
    assert sizes[-1] - sizes[0] < 40 * MIB, sizes
