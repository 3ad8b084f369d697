"""Keys and values of versions in a local index, plain or encrypted.

    plain      tenant's hash 8 | key, 400 at most | 0 | key's hash 16 | version 8 -> check 8, fields as JSON
    encrypted  tenant's MAC 8  | MAC of tenant and key 32             | version 8 -> nonce 12, fields as JSON by AES-GCM

Invariant: without the store's keys no reader of an encrypted index learns the name of a tenant or key, or can test a
guess of one.
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
"""Random: with 2**32 versions two of them share a nonce with probability 2**-33."""
_TABLE = "versions"
_CIPHER_CONTEXT = "nearkin 2026 values of a local index"
_MAC_CONTEXT = "nearkin 2026 keys of a local index"
_MARKER_CONTEXT = "nearkin 2026 marker of a local index"


class EntryNames(Protocol):
    """Translation of version names to keys and values of an index."""

    @property
    def marker(self) -> bytes:
        """Return a marker that reveals an index made under other names."""

    def tenant_head(self, tenant: str) -> bytes:
        """Return the common prefix of the keys of a tenant's versions."""

    def prefix_head(self, tenant: str, prefix: str) -> bytes:
        """Return a common prefix of the keys of versions whose blob key starts with `prefix`.

        Other versions may share it.
        """

    def group_head(self, tenant: str, key: str) -> bytes | None:
        """Return the common prefix of the keys of the group of `key`; None without order.

        Groups are in the order of their blob keys; most groups have a single blob key.
        """

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version.

        Keys of one blob key differ in the last 8 bytes and ascend by version.
        """

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Encode a version's fields as the value of its key."""

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the JSON text encoded under a key. Raises IndexDamaged."""

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields encoded under a key. Raises IndexDamaged."""


class PlainNames:
    """Names in clear, in the order of blob keys."""

    marker = b""

    def tenant_head(self, tenant: str) -> bytes:
        """Return the common prefix of the keys of a tenant's versions."""
        return blake3(tenant.encode()).digest(length=8)

    def prefix_head(self, tenant: str, prefix: str) -> bytes:
        """Return the common prefix of the keys: at most KEY_HEAD_BYTES of `prefix`."""
        return self.tenant_head(tenant) + prefix.encode()[:KEY_HEAD_BYTES]

    def group_head(self, tenant: str, key: str) -> bytes | None:
        """Return the keys' prefix up to the first NUL of the blob key, or its KEY_HEAD_BYTES."""
        return self.tenant_head(tenant) + key.encode().partition(b"\0")[0][:KEY_HEAD_BYTES] + b"\0"

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version, ordered by blob key, then version."""
        encoded = key.encode()
        digest = blake3(encoded).digest(length=16)
        return self.tenant_head(tenant) + encoded[:KEY_HEAD_BYTES] + b"\0" + digest + version.to_bytes(8, "big")

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return the fields preceded by their check."""
        return encode_fields(_TABLE, key, fields)

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the JSON text encoded under a key. Raises IndexDamaged."""
        return checked_text(_TABLE, key, value)

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields encoded under a key. Raises IndexDamaged."""
        fields: dict[str, Any] = json.loads(self.text(key, value))
        return fields


class EncryptedNames:
    """Encrypted names.

    Keys have no order, so listings read all of a tenant's versions.
    """

    def __init__(self, secret: bytes) -> None:
        """Derive the keys from `secret`, 32 bytes that follow from the store's own data key.

        Raises: ConfigError, without the cryptography library.
        """
        self._mac_key = blake3(secret, derive_key_context=_MAC_CONTEXT).digest()
        self._cipher = aes_gcm(blake3(secret, derive_key_context=_CIPHER_CONTEXT).digest())
        self.marker = b"sealed " + blake3(secret, derive_key_context=_MARKER_CONTEXT).hexdigest(length=8).encode()

    def tenant_head(self, tenant: str) -> bytes:
        """Return the common prefix of the keys of a tenant's versions."""
        return blake3(tenant.encode(), key=self._mac_key).digest(length=8)

    def prefix_head(self, tenant: str, _prefix: str) -> bytes:
        """Return the common prefix of all keys of the tenant."""
        return self.tenant_head(tenant)

    def group_head(self, _tenant: str, _key: str) -> bytes | None:
        """Return None: keys have no order."""
        return None

    def version_key(self, tenant: str, key: str, version: int) -> bytes:
        """Return the key of a version."""
        mac = blake3(tenant.encode() + b"\0" + key.encode(), key=self._mac_key).digest(length=32)
        return self.tenant_head(tenant) + mac + version.to_bytes(8, "big")

    def encode(self, key: bytes, fields: Mapping[str, Any]) -> bytes:
        """Encrypt the fields, bound to the key under which they are stored."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, json.dumps(fields).encode(), key)

    def text(self, key: bytes, value: bytes) -> bytes:
        """Return the JSON text encoded under a key. Raises IndexDamaged."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(bytes(value[:NONCE_BYTES]), bytes(value[NONCE_BYTES:]), bytes(key))
        except (InvalidTag, ValueError) as err:
            raise damage_error(f"value of {_TABLE} key {bytes(key).hex()} fails its check") from err

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Return the fields encoded under a key. Raises IndexDamaged."""
        fields: dict[str, Any] = json.loads(self.text(key, value))
        return fields


PLAIN_NAMES = PlainNames()
