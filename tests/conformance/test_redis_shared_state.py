"""State that a fleet shares, in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.redis_shared_state import RedisSharedState
from tests.support.conformance.state_contract import SharedStateContract
from tests.support.servers.redis_server import redis_server


class TestRedisSharedState(SharedStateContract):
    @pytest.fixture
    def state(self, tmp_path: Path) -> Iterator[RedisSharedState]:
        with redis_server(tmp_path) as url:
            state = RedisSharedState(RedisServer(RedisSettings(url=url)), "t")
            yield state
            state.close()
