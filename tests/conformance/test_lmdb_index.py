"""LMDB as an index."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from tests.support.conformance import IndexContract
from tests.support.conformance.index_contract import first_claims
from tests.support.data import samples


class TestLmdbIndex(IndexContract):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[LmdbIndex]:
        index = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20)
        yield index
        index.close()

    def counts(self, index: LmdbIndex) -> dict[tuple[int, int], int]:
        found = {}
        for key, value in index.entries()["counts"].items():
            container, ordinal = struct.unpack("<QI", key)
            (found[container, ordinal],) = struct.unpack("<I", value)
        return found


def test_index_complete_after_bulk_write_becomes_durable(tmp_path: Path) -> None:
    """An index opened without durability is synced before it is marked complete."""
    index = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20, durable=False)
    assert not index._env.flags()["sync"]
    synced: list[tuple[bool, bool]] = []

    class Watched:
        """Environment that records whether the index was complete at each sync."""

        def __init__(self, env: Any) -> None:
            self._real = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def sync(self, force: bool) -> None:
            synced.append((force, index.complete))
            self._real.sync(force)

    index._env = Watched(index._env)
    index.publish(first_claims())
    assert synced == []
    index.mark_complete()
    assert synced == [(True, True)]
    index.close()
    durable = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20)
    assert durable._env.flags()["sync"]
    assert durable.complete
    durable.close()
