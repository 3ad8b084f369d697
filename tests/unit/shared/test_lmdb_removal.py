"""Run the contract of index removal over LMDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.index.lmdb.entry_encoding import MARKED
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from tests.support.conformance.collection import CollectionContract
from tests.support.data import samples


class TestLmdbCollection(CollectionContract):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[LmdbIndex]:
        found = LmdbIndex(tmp_path, samples.DOMAIN, 1 << 26)
        self.fill(found)
        yield found
        found.close()

    def spare_marks_bytes(self, index: LmdbIndex) -> int:
        tables = index.entries()
        spare = (value for key, value in tables["marks"].items() if key not in tables["versions"])
        return sum(marks_bytes for _, marks_bytes in map(MARKED.unpack, spare))
