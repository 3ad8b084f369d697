"""Authentication of records that maintenance acts on. Invariant: who does not know the store's secret cannot make one.

    body | MAC 16 | check 8       a record of bytes          "mac": 32 hex digits     a record of JSON

The MAC is keyed BLAKE3 under a key that is derived from the secret in the descriptor. The records of an encrypted store
have none: they are sealed, which authenticates them. docs/adr/0054-authenticated-records.md.
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
    """Return the key that authenticates the records of a store, from the secret of its descriptor."""
    return blake3(secret, derive_key_context=_CONTEXT).digest()


def mac_of(body: bytes | memoryview, key: bytes) -> bytes:
    """Return the MAC of a record's bytes."""
    return blake3(body, key=key).digest(MAC_BYTES)


def mac_of_json(said: Mapping[str, object], key: bytes) -> str:
    """Return the MAC of a record's fields as hex digits, whatever their order and spacing."""
    return mac_of(json.dumps(said, sort_keys=True, separators=(",", ":")).encode(), key).hex()


def split_mac(view: memoryview, key: bytes | None, what: str) -> memoryview:
    """Return the body of bytes that end in a MAC; without a key the MAC is not compared. Raises Corrupt."""
    if len(view) < MAC_BYTES:
        raise Corrupt(f"{what}: too short for its MAC")
    body, mac = view[:-MAC_BYTES], bytes(view[-MAC_BYTES:])
    if key is not None and not compare_digest(mac, mac_of(body, key)):
        raise not_authentic(what)
    return body


def check_json_mac(said: dict[str, object], key: bytes, what: str) -> None:
    """Take the field `mac` out of `said` and compare it. Raises Corrupt."""
    mac = said.pop("mac", None)
    if not isinstance(mac, str) or not compare_digest(mac.encode(), mac_of_json(said, key).encode()):
        raise not_authentic(what)


def not_authentic(what: str) -> Corrupt:
    """Return the error for a record that the store's key does not authenticate."""
    return Corrupt(
        f"{what}: not authenticated by this store's key, so nothing is removed because of it; if it is not of an older "
        "release, remove the file and find out who can write to the store"
    )
