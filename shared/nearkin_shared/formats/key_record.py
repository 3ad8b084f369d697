"""Encode and decode the records of data keys and erasures."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from blake3 import blake3

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats.encrypted_object import KEY_BYTES, OWNER_BYTES
from nearkin_shared.formats.manifest import moment_of
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.utils.frozen import frozen

VERSION = 1
ERASED_VERSION = 3
"""2 has a MAC and `due_us`; 3 has `epoch`."""
_AUTHENTICATED_VERSION, _EPOCH_VERSION = 2, 3
FORMAT, ERASED_FORMAT, STORE_FORMAT = "nearkin-key", "nearkin-erased", "nearkin-store"
ENCRYPTED_VERSION = 2
"""Format version of the descriptor of an encrypted store: an older Nearkin refuses it as too new."""
ALGORITHM = "aes-256-gcm"
BYTES_MAX = 64 * 1024
NUMBER_MAX = (1 << 32) - 1
WRAPPING_MAX = (1 << 16) - 1
FOLDER = "keys"
ERASED_FOLDER = f"{FOLDER}/erased"
_NAME = re.compile(r"keys/([0-9a-f]{32})/([0-9a-f]{8})\.([0-9a-f]{4})\.nkk")
_ERASED_NAME = re.compile(r"keys/erased/([0-9a-f]{32})\.(nke|swept)")


@frozen
class KeyName:
    """The parsed name of a key record."""

    owner: bytes
    number: int
    wrapping: int

    def __str__(self) -> str:
        """Return the object name."""
        return f"{FOLDER}/{self.owner.hex()}/{self.number:08x}.{self.wrapping:04x}.nkk"


@frozen
class DataKey:
    """A data key in use."""

    owner: bytes
    number: int
    secret: bytes = field(repr=False)
    created_us: int
    """Microseconds since 1970, UTC."""
    domain: bytes
    """16 bytes; empty for the store's own key."""
    tenant: str | None
    """None if unknown when the key was created or rewrapped."""

    @property
    def context(self) -> bytes:
        """The bytes authenticated with the wrapped key: its owner and number."""
        return context_of(self.owner, self.number)

    def unwrap(self) -> bytes:
        """Return the plaintext to wrap."""
        record = {
            "secret": self.secret.hex(), "created_us": self.created_us,
            "domain": self.domain.hex(), "tenant": self.tenant,
        }  # fmt: skip
        return json.dumps(record, separators=(",", ":")).encode()


def context_of(owner: bytes, number: int) -> bytes:
    """Return the bytes authenticated with a wrapped key."""
    return b"nearkin data key " + owner + number.to_bytes(4, "little")


def data_key(owner: bytes, number: int, unwrapped: bytes, what: str) -> DataKey:
    """Parse an unwrapped key. Raises Corrupt."""
    try:
        record = json.loads(unwrapped)
        found = DataKey(
            owner,
            number,
            bytes.fromhex(record["secret"]),
            _parse_time(record["created_us"]),
            bytes.fromhex(record["domain"]),
            record["tenant"],
        )
        if len(found.secret) != KEY_BYTES:
            raise ValueError("a key of another length")  # noqa: TRY301 - one place names the record
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise Corrupt(f"{what}: the unwrapped bytes are no data key") from err
    return found


def name_of(name: str) -> KeyName | None:
    """Parse the name of a key record; None for another object's name."""
    matched = _NAME.fullmatch(name)
    return None if matched is None else KeyName(bytes.fromhex(matched[1]), int(matched[2], 16), int(matched[3], 16))


def erased_name(owner: bytes) -> str:
    """Return the name of the erasure record of an owner."""
    return f"{ERASED_FOLDER}/{owner.hex()}.nke"


def swept_name(owner: bytes) -> str:
    """Return the name of the record that no object of an erased owner exists."""
    return f"{ERASED_FOLDER}/{owner.hex()}.swept"


def erased_owner(name: str) -> tuple[bytes, bool] | None:
    """Return (owner, whether swept) of such a name; None for another object's name."""
    matched = _ERASED_NAME.fullmatch(name)
    return None if matched is None else (bytes.fromhex(matched[1]), matched[2] == "swept")


def encode_key(name: KeyName, wrapped_by: str, wrapped: bytes) -> bytes:
    """Encode a key record."""
    return _encode(
        {
            "format": FORMAT,
            "format_version": VERSION,
            "owner": name.owner.hex(),
            "number": name.number,
            "wrapping": name.wrapping,
            "wrapped_by": wrapped_by,
            "wrapped": base64.b64encode(wrapped).decode(),
        }
    )


def decode_key(data: bytes, what: str) -> tuple[str, bytes]:
    """Return (id of the key-encryption key, wrapped key). Raises Corrupt, FormatTooNew."""
    record, name = _decode(data, what, FORMAT), name_of(what)
    try:
        where = KeyName(bytes.fromhex(record["owner"]), record["number"], record["wrapping"])
        if name != where or len(where.owner) != OWNER_BYTES:
            raise Corrupt(f"{what}: is {where}: was it renamed?")
        return str(record["wrapped_by"]), base64.b64decode(record["wrapped"], validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error) as err:
        raise Corrupt(f"{what}: not a wrapped data key") from err


@frozen
class ErasedRecord:
    """An erasure record. Times are microseconds since 1970, UTC."""

    erased_us: int
    due_us: int
    """Time of the removal of the keys."""
    authenticated: bool
    """False for format 1, which has no MAC."""
    epoch: int = 0
    """Erasure epoch of the owner at the time of the record; 0 in older formats."""


def encode_erased(
    owner: bytes, erased_us: int, due_us: int, mac_key: bytes, *, epoch: int = 0, swept: bool = False
) -> bytes:
    """Encode an erasure record; `swept`: the one that states that no object exists."""
    record = {
        "format": ERASED_FORMAT,
        "format_version": ERASED_VERSION,
        "owner": owner.hex(),
        "erased_us": erased_us,
        "due_us": due_us,
        "epoch": epoch,
        "swept": swept,
    }
    return _encode({**record, "mac": mac_of_json(record, mac_key)})


def decode_erased(data: bytes, what: str, mac_key: bytes) -> ErasedRecord:
    """Decode an erasure record.

    Raises FormatTooNew, Corrupt (also for a MAC that does not verify).
    """
    record, name = _decode(data, what, ERASED_FORMAT, ERASED_VERSION), erased_owner(what)
    try:
        if name is None or bytes.fromhex(record["owner"]) != name[0]:
            raise Corrupt(f"{what}: is the record of owner {record['owner']:.64}: was it renamed?")
        erased_us = _parse_time(record["erased_us"])
        if record["format_version"] < _AUTHENTICATED_VERSION:
            return ErasedRecord(erased_us, erased_us, authenticated=False)
        check_json_mac(record, mac_key, what)
        if record["swept"] is not name[1]:
            raise Corrupt(f"{what}: is of another kind: was it renamed?")
        epoch = int(record["epoch"]) if record["format_version"] >= _EPOCH_VERSION else 0
        return ErasedRecord(erased_us, _parse_time(record["due_us"]), authenticated=True, epoch=epoch)
    except (KeyError, TypeError, ValueError, OverflowError) as err:
        raise Corrupt(f"{what}: not the record of an erasure: {err}") from err


def encode_envelope(sealed: bytes | memoryview) -> bytes:
    """Encode the descriptor of an encrypted store.

    It contains the encryption, and the encrypted descriptor.
    """
    return _encode(
        {
            "format": STORE_FORMAT,
            "format_version": ENCRYPTED_VERSION,
            "encryption": ALGORITHM,
            "sealed": base64.b64encode(sealed).decode(),
        }
    )


def decode_envelope(data: bytes, what: str) -> bytes | None:
    """Return the encrypted descriptor; None if it is plaintext. Raises Corrupt, FormatTooNew."""
    try:
        if json.loads(data[:BYTES_MAX])["format_version"] < ENCRYPTED_VERSION:
            return None
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}; restore it from a copy") from err
    record = _decode(data, what, STORE_FORMAT, ENCRYPTED_VERSION)
    try:
        if record["encryption"] != ALGORITHM:
            raise FormatTooNew(
                f"{what}: encrypted by {record['encryption']!r}; this Nearkin supports {ALGORITHM}: upgrade"
            )
        return base64.b64decode(record["sealed"], validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error) as err:
        raise Corrupt(f"{what}: not the descriptor of an encrypted store") from err


def _parse_time(us: Any) -> int:
    """Return microseconds since 1970. Raises ValueError, TypeError or OverflowError."""
    found = int(us)
    moment_of(found)
    return found


def _encode(record: Mapping[str, object]) -> bytes:
    return json.dumps({**record, "check": _check(record)}, indent=1).encode()


def _decode(data: bytes, what: str, wanted: str, version_max: int = VERSION) -> dict[str, Any]:
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
        if not data:
            raise ValueError("empty")  # noqa: TRY301
        record: dict[str, Any] = json.loads(data)
        if record.pop("check") != _check(record):
            raise ValueError("its check does not agree")  # noqa: TRY301
        if record["format"] != wanted or type(record["format_version"]) is not int:
            raise ValueError(f"is no {wanted}")  # noqa: TRY301
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise Corrupt(f"{what}: not a record (no valid JSON)") from err
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}") from err
    if record["format_version"] > version_max:
        raise FormatTooNew(
            f"{what}: format {record['format_version']}; this Nearkin reads up to {version_max}: upgrade Nearkin"
        )
    return record


def _check(record: Mapping[str, object]) -> str:
    """Return 16 hex digits over all fields, whatever their order and spacing in the file."""
    return blake3(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=8)
