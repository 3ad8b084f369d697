"""Index shards as one index: real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.index.lmdb.entry_encoding import MARKED
from tests.support.conformance import IndexContract
from tests.support.conformance.collection import CollectionContract
from tests.support.servers.index_shards import ShelvedShards, shards


class TestShardedIndex(IndexContract):
    @pytest.fixture(params=[1, 3])
    def index(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ShelvedShards]:
        with shards(tmp_path, request.param) as index:
            yield index


class TestShardedCollection(CollectionContract):
    @pytest.fixture(params=[1, 3])
    def index(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ShelvedShards]:
        with shards(tmp_path, request.param) as index:
            self.fill(index)
            yield index

    def spare_marks_bytes(self, index: ShelvedShards) -> int:
        tables = index.entries()
        spare = (value for key, value in tables["marks"].items() if key not in tables["versions"])
        return sum(marks_bytes for _, marks_bytes in map(MARKED.unpack, spare))
