"""Memory as an object store, and a faulty one whose script is empty: a wrapper is a store itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nearkin_shared.errors import NotFound
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.encrypted_store import EncryptedObjects
from nearkin_shared.objectstore.encrypting import SealedObjects, Sealing
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjects, memory_objects
from nearkin_shared.objectstore.overlay import Overlay
from nearkin_shared.objectstore.parity import ParityObjects
from tests.support.conformance import ObjectStoreContract
from tests.support.data.test_keys import MemoryKeys
from tests.support.fakes.faulty_objects import FaultyObjects


class TestMemoryObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ObstoreObjects:
        return memory_objects()


class TestFaultyObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> FaultyObjects:
        return FaultyObjects(memory_objects(), "")


class TestParityObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ParityObjects:
        return ParityObjects(memory_objects(), Scheme(4, 2))


class TestOverlay(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> Iterator[Overlay]:
        with Overlay(memory_objects()) as overlay:
            yield overlay


def test_an_overlay_changes_nothing_below_it() -> None:
    below = memory_objects()
    below.put_new("a/1", b"one")
    below.put_new("a/2", b"two")
    with Overlay(below) as overlay:
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


class TestSealedObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> SealedObjects:
        return SealedObjects(memory_objects(), Sealing(MemoryKeys().keyring))


class TestEncryptedObjects(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> EncryptedObjects:
        keys = MemoryKeys()
        return EncryptedObjects(keys.below, Scheme(4, 2), keys.keyring)
