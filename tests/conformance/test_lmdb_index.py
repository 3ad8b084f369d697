"""LMDB as an index."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin.index.lmdb import LmdbIndex
from nearkin.testing import samples
from nearkin.testing.conformance import IndexContract


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
