"""Index shards as one index: real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.lmdb.entry_encoding import MARKED
from tests.support.conformance import IndexContract
from tests.support.conformance.collection import CollectionContract
from tests.support.servers.index_shards import ShelvedShards, shards


def test_incomplete_shard_answers_for_the_state_alone(tmp_path: Path) -> None:
    """The shared state needs no index: it is answered for while the first shard completes its own."""
    with shards(tmp_path, 2) as index:
        assert not index.check()
        assert index.has_catalog
        for number, has_catalog in ((1, True), (0, False)):
            index.servers[number].shard.calls = None
            assert index.check()
            assert index.has_catalog == has_catalog
        with pytest.raises(StoreUnavailable, match="being completed"):
            index.versions_of("t", "k")
        index.state.put("gc", b"status")
        assert index.state.get("gc") == b"status"


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
