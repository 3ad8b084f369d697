"""A folder as an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.conformance import ObjectStoreContract


class TestLocalObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> LocalObjectStore:
        return LocalObjectStore(tmp_path)
