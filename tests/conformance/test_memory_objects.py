"""Run the object store contract over memory and over wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nearkin_shared.errors import NotFound
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.encrypting import EncryptingObjectStore, ObjectEncryption
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.objectstore.overlay import OverlayObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from tests.support.conformance import ObjectStoreContract
from tests.support.data.test_keys import MemoryKeys
from tests.support.fakes.faulty_objects import FaultyObjectStore


class TestMemoryObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ObstoreObjectStore:
        return memory_objects()


class TestFaultyObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> FaultyObjectStore:
        return FaultyObjectStore(memory_objects(), "")


class TestParityObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ParityObjectStore:
        return ParityObjectStore(memory_objects(), Scheme(4, 2))


class TestOverlay(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> Iterator[OverlayObjectStore]:
        with OverlayObjectStore(memory_objects()) as overlay:
            yield overlay


def test_overlay_writes_leave_lower_store_unchanged() -> None:
    below = memory_objects()
    below.put_new("a/1", b"one")
    below.put_new("a/2", b"two")
    with OverlayObjectStore(below) as overlay:
        overlay.delete("a/1")
        overlay.put_new("a/3", b"three")
        assert sorted(overlay.names("a")) == [("a/2", 3), ("a/3", 5)]
        with pytest.raises(NotFound):
            overlay.get("a/1")
        overlay.put_new("a/1", b"anew")
        assert (overlay.get("a/1"), overlay.get_ranges("a/2", [1], [3])) == (b"anew", [b"wo"])
        with pytest.raises(AlreadyExists):
            overlay.put_new("a/2", b"")
    assert {name: below.get(name) for name, _ in below.names("a")} == {"a/1": b"one", "a/2": b"two"}


class TestEncryptingObjectStore(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> EncryptingObjectStore:
        return EncryptingObjectStore(memory_objects(), ObjectEncryption(MemoryKeys().keyring))


class TestEncryptedObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> EncryptedObjectStore:
        keys = MemoryKeys()
        return EncryptedObjectStore(keys.below, Scheme(4, 2), keys.keyring)
