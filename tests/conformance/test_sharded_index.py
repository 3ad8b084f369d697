"""Index shards as one index: real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearkin_index.shard_index import KEYS_AT_ONCE
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.container_entries import FEATURE_KEY_BYTES
from nearkin_shared.index.lmdb.entry_encoding import MARKED
from tests.support.conformance import IndexContract
from tests.support.conformance.collection import CollectionContract
from tests.support.conformance.index_contract import FIRST, claims
from tests.support.data import samples
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


def test_shard_answers_at_once_only_from_memory(tmp_path: Path) -> None:
    """A lookup that must read a directory, wait for a call, or read LMDB for super-features, is left to a thread."""
    with shards(tmp_path, 1) as index:
        one = claims(FIRST, ["a", "bb", "ccc"], ["s", "t"], [[1, 2, 3]] * 3)
        index.publish(one)
        shard = index.servers[0].index
        assert shard is not None
        names = one.directory.chunks.names
        assert shard.at_once("chunks", names) is None, "no call has seen the change yet"
        locations, found = shard.at("chunks", names)
        at_once = shard.at_once("chunks", names)
        assert at_once is not None
        assert found.all()
        assert at_once[1].all()
        assert at_once[0].ordinals.tolist() == locations.ordinals.tolist()
        segments = shard.at_once("segments", one.segment_ids)
        assert segments is not None
        assert segments[1].all()
        assert shard.at_once("features", np.zeros((1, FEATURE_KEY_BYTES), np.uint8)) is None
        assert shard.at_once("chunks", np.repeat(names, KEYS_AT_ONCE["chunks"], axis=0)) is None
        with shard.tablets._lock:
            assert shard.at_once("chunks", names) is None
        shard.tablets.tablets.clear()
        assert shard.at_once("chunks", names) is None
        assert index.locate_chunks(names)[1].all()


def test_shard_away_leaves_no_answer_to_another_call(tmp_path: Path) -> None:
    """The answer of the other shard to a failed call is not taken for the answer to the next one."""
    with shards(tmp_path, 2) as index:
        one = claims(FIRST, ["a", "bb", "ccc"], ["s", "t"], [[1, 2, 3]] * 3)
        index.publish(one)
        other = samples.names_of([1] * 64)
        calls, index.servers[1].shard.calls = index.servers[1].shard.calls, None
        with pytest.raises(StoreUnavailable, match="being completed"):
            index.locate_chunks(other)
        index.servers[1].shard.calls = calls
        assert index.locate_chunks(one.directory.chunks.names)[1].all()
        calls, index.servers[0].shard.calls = index.servers[0].shard.calls, None
        with pytest.raises(StoreUnavailable, match="being completed"):
            index.locate_chunks(other)
        index.servers[0].shard.calls = calls
        assert index.locate_chunks(one.directory.chunks.names)[1].all()
        assert not index.locate_chunks(other)[1].any()


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
