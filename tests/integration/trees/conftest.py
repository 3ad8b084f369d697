"""Fixtures of the tests of trees."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two files."""
    root = tmp_path / "source"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_bytes(b"a stored")
    (root / "sub" / "b").write_bytes(b"b stored")
    return root
