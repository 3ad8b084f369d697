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


def test_an_index_that_is_not_durable_yet_is_once_it_says_that_it_is_complete(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20, durable=False)
    assert not index._env.flags()["sync"]
    synced: list[tuple[bool, bool]] = []

    class Watched:
        """The environment, and whether it said that it is complete when it was synced."""

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
