"""Stores that the tests of a module damage, each a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.data.histories import make_store


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
