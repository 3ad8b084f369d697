"""State that a fleet shares, in the first index shard: a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.index.shards.shard_shared_state import ShardSharedState
from tests.support.conformance.state_contract import SharedStateContract
from tests.support.servers.index_shards import shards


class TestShardSharedState(SharedStateContract):
    @pytest.fixture(params=[1, 2])
    def state(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ShardSharedState]:
        with shards(tmp_path, request.param) as index:
            yield index.state
