"""Stores that the tests of a module damage, each a copy of its own, and the log of a committer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data.histories import make_store
from tests.support.fakes.committer_log import CommitterLog, committer_log
from tests.support.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a history, of the module's settings CHOSEN; not to be changed."""
    return make_store(tmp_path_factory.mktemp("sound") / "store", request.module.CHOSEN)


@pytest.fixture(scope="module")
def covered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its settings COVERED, with parity; not to be changed."""
    return make_store(tmp_path_factory.mktemp("covered") / "store", request.module.COVERED)


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


@pytest.fixture
def covered_root(covered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(covered, tmp_path / "covered"))


@pytest.fixture(scope="module")
def committer_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def log(committer_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommitterLog]:
    with committer_log(committer_redis, tmp_path, monkeypatch) as made:
        yield made
