"""The store's descriptor. Invariant: without it nothing is read or written, and it is never overwritten.

`nearkin.json` holds the store's format version, its id, and the secret that keys every check tag.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass

from nearkin.errors import BadInput, Corrupt, FormatTooNew
from nearkin.store.objects import ObjectStore

NAME = "nearkin.json"
VERSION = 1
FINGERPRINT_BITS = 160


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a store is. `secret`: 32 bytes in hex; who has it can craft aliases (docs/decisions/0002-check-tag.md)."""

    store_id: str
    secret: str
    fingerprint_bits: int = FINGERPRINT_BITS
    """160; fewer only in tests, which make SHA-1 collisions abound."""
    format: str = "nearkin-store"
    format_version: int = VERSION


def create(objects: ObjectStore, fingerprint_bits: int = FINGERPRINT_BITS) -> Descriptor:
    """Write the descriptor of a new store. Raises AlreadyExists when there is one."""
    if not 8 <= fingerprint_bits <= FINGERPRINT_BITS:
        raise BadInput(f"fingerprint_bits {fingerprint_bits}: want 8 to {FINGERPRINT_BITS}")
    made = Descriptor(secrets.token_hex(16), secrets.token_hex(32), fingerprint_bits)
    objects.put_new(NAME, json.dumps(asdict(made), indent=1).encode())
    return made


def read(objects: ObjectStore) -> Descriptor:
    """Return the store's descriptor. Raises NotFound, Corrupt, or FormatTooNew naming both versions."""
    data = objects.get(NAME)
    try:
        fields = json.loads(data)
        version = fields["format_version"]
        if fields["format"] != "nearkin-store" or not isinstance(version, int):
            raise Corrupt(f"{NAME}: not a Nearkin store's descriptor")
        if version > VERSION:
            raise FormatTooNew(f"store format {version}; this Nearkin reads up to {VERSION}: upgrade Nearkin")
        found = Descriptor(**fields)
        if len(bytes.fromhex(found.secret)) != 32:
            raise Corrupt(f"{NAME}: the secret is not 32 bytes")
    except (ValueError, KeyError, TypeError) as err:
        raise Corrupt(
            f"{NAME}: does not parse: {err}; restore it from a copy, every chunk's tag depends on it"
        ) from err
    return found
