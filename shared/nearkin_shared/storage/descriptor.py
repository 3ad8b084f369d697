"""Descriptor of a store.

Invariant: without it nothing is read or written, and it is never overwritten.

`nearkin.json` has the store's format version, its id, and the secret that keys every check tag.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict

from blake3 import blake3

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew, WrongKey
from nearkin_shared.formats.key_record import ALGORITHM, ENCRYPTED_VERSION, decode_envelope
from nearkin_shared.limits import DESCRIPTOR
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore, read_decoded
from nearkin_shared.utils.frozen import frozen

NAME = DESCRIPTOR
FORMAT = "nearkin-store"
VERSION = 1
BYTES_MAX = 64 * 1024
FINGERPRINT_BITS = 160


@frozen
class Descriptor:
    """Identity of a store.

    `secret`: 32 bytes in hex; its owner can craft aliases (docs/adr/0002-keyed-check-tag.md).
    """

    store_id: str
    secret: str
    fingerprint_bits: int = FINGERPRINT_BITS
    """160; fewer in tests only, to make SHA-1 collisions frequent."""
    format: str = FORMAT
    format_version: int = VERSION


def create(objects: ObjectStore, fingerprint_bits: int = FINGERPRINT_BITS) -> Descriptor:
    """Write the descriptor of a new store. Raises AlreadyExists."""
    if not 8 <= fingerprint_bits <= FINGERPRINT_BITS:
        raise BadInput(f"fingerprint_bits {fingerprint_bits}: want 8 to {FINGERPRINT_BITS}")
    made = Descriptor(secrets.token_hex(16), secrets.token_hex(32), fingerprint_bits)
    objects.put_new(NAME, json.dumps(asdict(made) | {"check": _check(made)}, indent=1).encode())
    _authenticate(objects, made)
    return made


def read(objects: ObjectStore, fingerprint_bits: int | None = FINGERPRINT_BITS) -> Descriptor:
    """Return the store's descriptor; its secret authenticates the records of `objects`.

    `fingerprint_bits` is the accepted value; only tests pass fewer, None accepts any.

    Raises: NotFound, Corrupt, FormatTooNew with both versions.
    """
    found = read_decoded(objects, NAME, _decode)
    if fingerprint_bits is not None and found.fingerprint_bits not in (fingerprint_bits, FINGERPRINT_BITS):
        raise Corrupt(
            f"{NAME}: fingerprint_bits {found.fingerprint_bits}: want {FINGERPRINT_BITS}, fewer are for tests only; "
            "restore it from a copy"
        )
    _authenticate(objects, found)
    return found


def _authenticate(objects: ObjectStore, found: Descriptor) -> None:
    if isinstance(objects, ParityObjectStore):
        objects.authenticate_records(bytes.fromhex(found.secret))


def _decode(data: bytes, _name: str) -> Descriptor:
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place adds the remedy
        fields = json.loads(data)
        if (
            not isinstance(fields, dict)
            or fields.get("format") != FORMAT
            or type(fields.get("format_version")) is not int
        ):
            raise ValueError("not a Nearkin store's descriptor")  # noqa: TRY301
        if fields["format_version"] == ENCRYPTED_VERSION and "encryption" in fields and decode_envelope(data, NAME):
            raise WrongKey(
                f'{NAME}: this store is encrypted: set storage.encryption = "{ALGORITHM}", and storage.key_file or '
                "NEARKIN_STORAGE__KEY with the key-encryption key that it was made with"
            )
        if fields["format_version"] > VERSION:
            raise FormatTooNew(
                f"store format {fields['format_version']}; this Nearkin reads up to {VERSION}: upgrade Nearkin"
            )
        check = fields.pop("check")
        found = Descriptor(**fields)
        # One flipped bit in the secret changes every tag: all chunks would look corrupt, and no new one would match.
        if check != _check(found) or found.format_version != VERSION or len(bytes.fromhex(found.secret)) != 32:
            raise ValueError("its check fails")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise Corrupt(f"{NAME}: {err}; restore it from a copy, every chunk's tag depends on it") from err
    return found


def _check(found: Descriptor) -> str:
    """Return a check, 16 hex digits, over all fields in canonical order."""
    return blake3(json.dumps(asdict(found), sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=8)
