"""Keys and values of versions in a local index: in clear, or sealed for an encrypted store.

    plain     tenant's hash 8 | key, 400 at most | 0 | key's hash 16 | version 8 -> check 8, fields as JSON
    sealed    tenant's MAC 8  | MAC of tenant and key 32             | version 8 -> nonce 12, fields as JSON by AES-GCM

Invariant: without the store's keys no reader of a sealed index learns the name of a tenant or key, or
can test a guess of one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from blake3 import blake3

from nearkin_shared.formats.encrypted_object import aes_gcm
from nearkin_shared.index.lmdb.entry_encoding import KEY_HEAD_BYTES, checked_text, encode_fields
from nearkin_shared.index.lmdb.environments import damage_error

NONCE_BYTES = 12
"""Random: an index takes 2**32 versions before two of them share one with a chance of 2**-33."""
_TABLE = "versions"
_CIPHER_CONTEXT = "nearkin 2026 values of a local index"
_MAC_CONTEXT = "nearkin 2026 keys of a local index"
_MARKER_CONTEXT = "nearkin 2026 marker of a local index"


class EntryNames(Protocol):
    """Translates the names of versions to keys and values of an index."""

    @property
    def marker(self) -> bytes:
        """Return what an index made under these names stores, so that one made under other names is recognised."""

    def tenant_head(self, tenant: str) -> bytes:
        """Return what all keys of a tenant's versions begin with."""

    def prefix_head(self, tenant: str, prefix: str) -> bytes:
        """Return what the keys of all versions begin with whose blob key starts with `prefix`, and maybe others."""

    def group_head(self, tenant: str, key: str) -> bytes | None:
        """Return what all keys of a group begin with in which `key` is, None where keys are in no order.

        Groups are in the order of their blob keys; in one there is mostly a single blob key.
        """

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version; those of one blob key differ in the last 8 bytes and ascend by version."""

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return the value of a version's key."""

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the fields that were encoded under a key, as JSON. Raises IndexDamaged."""

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields that were encoded under a key. Raises IndexDamaged."""


class PlainNames:
    """Names in clear, in the order of blob keys."""

    marker = b""

    def tenant_head(self, tenant: str) -> bytes:
        """Return what all keys of a tenant's versions begin with."""
        return blake3(tenant.encode()).digest(length=8)

    def prefix_head(self, tenant: str, prefix: str) -> bytes:
        """Return what the keys begin with: of a long prefix its first KEY_HEAD_BYTES."""
        return self.tenant_head(tenant) + prefix.encode()[:KEY_HEAD_BYTES]

    def group_head(self, tenant: str, key: str) -> bytes | None:
        """Return the keys' start up to the first NUL of the blob key, or its KEY_HEAD_BYTES."""
        return self.tenant_head(tenant) + key.encode().partition(b"\0")[0][:KEY_HEAD_BYTES] + b"\0"

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version: in the order of blob keys, of one by version."""
        encoded = key.encode()
        digest = blake3(encoded).digest(length=16)
        return self.tenant_head(tenant) + encoded[:KEY_HEAD_BYTES] + b"\0" + digest + version.to_bytes(8, "big")

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return the fields behind a check."""
        return encode_fields(_TABLE, key, fields)

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the fields that were encoded under a key, as JSON. Raises IndexDamaged."""
        return checked_text(_TABLE, key, value)

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields that were encoded under a key. Raises IndexDamaged."""
        fields: dict[str, Any] = json.loads(self.text(key, value))
        return fields


class EncryptedNames:
    """Names of an encrypted store. Listings read all of a tenant's versions, since keys are in no order."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes that follow from the store's own data key. Raises ConfigError without the library."""
        self._mac_key = blake3(secret, derive_key_context=_MAC_CONTEXT).digest()
        self._cipher = aes_gcm(blake3(secret, derive_key_context=_CIPHER_CONTEXT).digest())
        self.marker = b"sealed " + blake3(secret, derive_key_context=_MARKER_CONTEXT).hexdigest(length=8).encode()

    def tenant_head(self, tenant: str) -> bytes:
        """Return what all keys of a tenant's versions begin with."""
        return blake3(tenant.encode(), key=self._mac_key).digest(length=8)

    def prefix_head(self, tenant: str, _prefix: str) -> bytes:
        """Return what all keys of the tenant begin with."""
        return self.tenant_head(tenant)

    def group_head(self, _tenant: str, _key: str) -> bytes | None:
        """Return None: keys are in no order."""
        return None

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version."""
        named = blake3(tenant.encode() + b"\0" + key.encode(), key=self._mac_key).digest(length=32)
        return self.tenant_head(tenant) + named + version.to_bytes(8, "big")

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return the fields sealed, bound to the key they are stored under."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, json.dumps(fields).encode(), key)

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the fields that were encoded under a key, as JSON. Raises IndexDamaged."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(bytes(value[:NONCE_BYTES]), bytes(value[NONCE_BYTES:]), bytes(key))
        except (InvalidTag, ValueError) as err:
            raise damage_error(f"{_TABLE} at {bytes(key).hex()} are not what was written there") from err

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields that were encoded under a key. Raises IndexDamaged."""
        fields: dict[str, Any] = json.loads(self.text(key, value))
        return fields


PLAIN_NAMES = PlainNames()
