"""Authenticate records that maintenance acts on.

    body | MAC 16 | check 8       a binary record          "mac": 32 hex digits     a JSON record

The MAC is keyed BLAKE3 under a key that is derived from the secret in the descriptor. Records of an encrypted store
have
none: encryption authenticates them (docs/adr/0054-authenticated-records.md).

Invariant: only a process that knows the store's secret can create a valid record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hmac import compare_digest

from blake3 import blake3

from nearkin_shared.errors import Corrupt

MAC_BYTES = 16
_CONTEXT = "nearkin 2026 authentication of records"


def record_key(secret: bytes) -> bytes:
    """Derive the key that authenticates records from the secret of the descriptor."""
    return blake3(secret, derive_key_context=_CONTEXT).digest()


def mac_of(body: bytes | memoryview, key: bytes) -> bytes:
    """Return the MAC of a record's bytes."""
    return blake3(body, key=key).digest(MAC_BYTES)


def mac_of_json(record: Mapping[str, object], key: bytes) -> str:
    """Return the MAC of a record's fields as hex digits, independent of order and spacing."""
    return mac_of(json.dumps(record, sort_keys=True, separators=(",", ":")).encode(), key).hex()


def split_mac(view: memoryview, key: bytes | None, what: str) -> memoryview:
    """Split off the MAC at the end and verify it; without a key it is not verified.

    Raises Corrupt.
    """
    if len(view) < MAC_BYTES:
        raise Corrupt(f"{what}: too short for its MAC")
    body, mac = view[:-MAC_BYTES], bytes(view[-MAC_BYTES:])
    if key is not None and not compare_digest(mac, mac_of(body, key)):
        raise not_authentic(what)
    return body


def check_json_mac(record: dict[str, object], key: bytes, what: str) -> None:
    """Remove the field `mac` from `record` and verify it. Raises Corrupt."""
    mac = record.pop("mac", None)
    if not isinstance(mac, str) or not compare_digest(mac.encode(), mac_of_json(record, key).encode()):
        raise not_authentic(what)


def not_authentic(what: str) -> Corrupt:
    """Return the error for a record that the store's key does not authenticate."""
    return Corrupt(
        f"{what}: not authenticated by this store's key, so nothing is removed because of it; if it is not of an older "
        "release, remove the file and find out who can write to the store"
    )
