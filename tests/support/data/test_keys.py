"""Provide keys for tests.

Invariant: a keyring is a real one; its objects, clocks and keys are the test's.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from nearkin_shared.crypto.key_wrapping import LocalKeys
from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.objectstore.parity import ParityObjectStore
from tests.support.fakes.clock import Clock

KEY_ENCRYPTION_KEYS = tuple(bytes([number] * 32) for number in range(1, 4))


def encode_keys(*keys: bytes) -> str:
    """Return keys in the format of a key file."""
    return "\n".join(base64.b64encode(key).decode() for key in keys)


@dataclass
class MemoryKeys:
    """A keyring over memory."""

    below: ObstoreObjectStore = field(default_factory=memory_objects)
    clock: Clock = field(default_factory=Clock)
    keks: tuple[bytes, ...] = KEY_ENCRYPTION_KEYS[:1]

    def __post_init__(self) -> None:
        self.keyring = self.another()
        if not self.keyring.has_store_key:
            self.keyring.make_store_key()

    def another(self, keks: tuple[bytes, ...] | None = None, objects: ObjectStore | None = None) -> Keyring:
        """Return the keyring of another process."""
        wrapper = LocalKeys(keks or self.keks, "the test's keys")
        return Keyring(ParityObjectStore(objects or self.below, None), wrapper, self.clock, self.clock)

    def objects(self) -> ObstoreObjectStore:
        """Return an empty object store."""
        return memory_objects()


def memory_keyring() -> MemoryKeys:
    """Return the keys of a new store in memory."""
    return MemoryKeys()
