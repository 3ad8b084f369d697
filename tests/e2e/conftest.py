"""A command to call, and a store that holds something."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from tests.support.checks.commands import FIRST, SECOND, InProcess, answer, run
from tests.support.checks.lab_suites import tiny_corpus


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    return InProcess(capfdbinary, monkeypatch)


@pytest.fixture(scope="session")
def puts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return a store with three versions of two keys, and the results of the puts."""
    folder = tmp_path_factory.mktemp("filled")
    store = folder / "store"
    assert run("init", store).returncode == 0
    (folder / "first").write_bytes(FIRST)
    answers = [
        answer("--store", store, "put", "db/dump", folder / "first", "--meta", "host=db1", "--meta", "note=a=b"),
        answer("--store", store, "put", "db/dump", "-", stdin=SECOND),
    ]
    with open_store(store, create=True) as opened:
        opened.put("notes", b"hello")
    return store, answers


@pytest.fixture(scope="session")
def store(puts: tuple[Path, list[dict[str, Any]]]) -> Path:
    """Read it, never change it."""
    return puts[0]


@pytest.fixture
def store_copy(store: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(store, tmp_path / "copied"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file a version, for a room of the lab."""
    return tiny_corpus(tmp_path_factory.mktemp("versions") / "tiny")
