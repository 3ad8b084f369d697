"""Memory as an object store, and a faulty one whose script is empty: a wrapper is a store itself."""

from __future__ import annotations

import pytest

from nearkin.store.objects import ObstoreObjects, memory_objects
from nearkin.testing.conformance import ObjectStoreContract
from nearkin.testing.faulty import FaultyObjects


class TestMemoryObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ObstoreObjects:
        return memory_objects()


class TestFaultyObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> FaultyObjects:
        return FaultyObjects(memory_objects(), "")
