"""Data keys at rest. Invariant: what a record holds is a wrapped key, of no use without the key-encryption key.

    keys/<owner: 32 hex>/<number: 8 hex>.<wrapping: 4 hex>.nkk      JSON; of one number the highest wrapping holds
    keys/erased/<owner: 32 hex>.nke                                 JSON; the owner's keys are gone, for good

`wrapped` is, once unwrapped, JSON again: the key, and whose it is. docs/internals/formats/key-record.md.
"""

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
"""Format version of the descriptor of an encrypted store: a Nearkin from before says that it is too new."""
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
    """What a record's name says."""

    owner: bytes
    number: int
    wrapping: int

    def __str__(self) -> str:
        """Return the object name."""
        return f"{FOLDER}/{self.owner.hex()}/{self.number:08x}.{self.wrapping:04x}.nkk"


@frozen
class DataKey:
    """A data key as it is used."""

    owner: bytes
    number: int
    secret: bytes = field(repr=False)
    created_us: int
    """Microseconds since 1970, UTC."""
    domain: bytes
    """16 bytes; none of the store's own."""
    tenant: str | None
    """Where it was known when the key was made or wrapped anew."""

    @property
    def context(self) -> bytes:
        """Return what is authenticated with the wrapped key: it is no other owner's, and of no other number."""
        return context_of(self.owner, self.number)

    def unwrap(self) -> bytes:
        """Return what is wrapped."""
        said = {
            "secret": self.secret.hex(), "created_us": self.created_us,
            "domain": self.domain.hex(), "tenant": self.tenant,
        }  # fmt: skip
        return json.dumps(said, separators=(",", ":")).encode()


def context_of(owner: bytes, number: int) -> bytes:
    """Return what is authenticated with a wrapped key."""
    return b"nearkin data key " + owner + number.to_bytes(4, "little")


def data_key(owner: bytes, number: int, unwrapped: bytes, what: str) -> DataKey:
    """Return the key that was unwrapped. Raises Corrupt."""
    try:
        said = json.loads(unwrapped)
        found = DataKey(
            owner, number, bytes.fromhex(said["secret"]), _when(said["created_us"]), bytes.fromhex(said["domain"]),
            said["tenant"],
        )  # fmt: skip
        if len(found.secret) != KEY_BYTES:
            raise ValueError("a key of another length")  # noqa: TRY301 - one place names the record
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise Corrupt(f"{what}: what it unwraps to is no data key") from err
    return found


def name_of(name: str) -> KeyName | None:
    """Return what the name of a record says, None for another object's."""
    matched = _NAME.fullmatch(name)
    return None if matched is None else KeyName(bytes.fromhex(matched[1]), int(matched[2], 16), int(matched[3], 16))


def erased_name(owner: bytes) -> str:
    """Return the name of what says that an owner's keys are erased."""
    return f"{ERASED_FOLDER}/{owner.hex()}.nke"


def swept_name(owner: bytes) -> str:
    """Return the name of what says that the objects of an erased owner are gone too."""
    return f"{ERASED_FOLDER}/{owner.hex()}.swept"


def erased_owner(name: str) -> tuple[bytes, bool] | None:
    """Return (owner, whether swept) of such a name, None for another object's."""
    matched = _ERASED_NAME.fullmatch(name)
    return None if matched is None else (bytes.fromhex(matched[1]), matched[2] == "swept")


def encode_key(name: KeyName, wrapped_by: str, wrapped: bytes) -> bytes:
    """Return a record."""
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
    said, name = _decode(data, what, FORMAT), name_of(what)
    try:
        where = KeyName(bytes.fromhex(said["owner"]), said["number"], said["wrapping"])
        if name != where or len(where.owner) != OWNER_BYTES:
            raise Corrupt(f"{what}: is {where}: was it renamed?")
        return str(said["wrapped_by"]), base64.b64decode(said["wrapped"], validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error) as err:
        raise Corrupt(f"{what}: not a wrapped data key") from err


@frozen
class ErasedRecord:
    """What a record of an erasure says. Times are microseconds since 1970, UTC."""

    erased_us: int
    due_us: int
    """From when on the keys are removed."""
    authenticated: bool
    """False for format 1, which has no MAC."""
    epoch: int = 0
    """The owner's erasure epoch; 0 for formats before 3."""


def encode_erased(
    owner: bytes, erased_us: int, due_us: int, mac_key: bytes, *, epoch: int = 0, swept: bool = False
) -> bytes:
    """Return the record of an erasure; `swept`: the one that says that no object is left."""
    said = {
        "format": ERASED_FORMAT,
        "format_version": ERASED_VERSION,
        "owner": owner.hex(),
        "erased_us": erased_us,
        "due_us": due_us,
        "epoch": epoch,
        "swept": swept,
    }
    return _encode({**said, "mac": mac_of_json(said, mac_key)})


def decode_erased(data: bytes, what: str, mac_key: bytes) -> ErasedRecord:
    """Return the record of an erasure. Raises Corrupt (also for a MAC that does not verify), FormatTooNew."""
    said, name = _decode(data, what, ERASED_FORMAT, ERASED_VERSION), erased_owner(what)
    try:
        if name is None or bytes.fromhex(said["owner"]) != name[0]:
            raise Corrupt(f"{what}: is the record of owner {said['owner']:.64}: was it renamed?")
        erased_us = _when(said["erased_us"])
        if said["format_version"] < _AUTHENTICATED_VERSION:
            return ErasedRecord(erased_us, erased_us, authenticated=False)
        check_json_mac(said, mac_key, what)
        if said["swept"] is not name[1]:
            raise Corrupt(f"{what}: is of another kind: was it renamed?")
        epoch = int(said["epoch"]) if said["format_version"] >= _EPOCH_VERSION else 0
        return ErasedRecord(erased_us, _when(said["due_us"]), authenticated=True, epoch=epoch)
    except (KeyError, TypeError, ValueError, OverflowError) as err:
        raise Corrupt(f"{what}: not the record of an erasure: {err}") from err


def encode_envelope(sealed: bytes | memoryview) -> bytes:
    """Return the descriptor of an encrypted store: what it is in clear, and the descriptor itself sealed."""
    return _encode(
        {
            "format": STORE_FORMAT,
            "format_version": ENCRYPTED_VERSION,
            "encryption": ALGORITHM,
            "sealed": base64.b64encode(sealed).decode(),
        }
    )


def decode_envelope(data: bytes, what: str) -> bytes | None:
    """Return the sealed descriptor, None where it is one in clear. Raises Corrupt, FormatTooNew."""
    try:
        if json.loads(data[:BYTES_MAX])["format_version"] < ENCRYPTED_VERSION:
            return None
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}; restore it from a copy") from err
    said = _decode(data, what, STORE_FORMAT, ENCRYPTED_VERSION)
    try:
        if said["encryption"] != ALGORITHM:
            raise FormatTooNew(f"{what}: encrypted by {said['encryption']!r}; this Nearkin knows {ALGORITHM}: upgrade")
        return base64.b64decode(said["sealed"], validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error) as err:
        raise Corrupt(f"{what}: not the descriptor of an encrypted store") from err


def _when(us: Any) -> int:
    """Return microseconds since 1970. Raises ValueError, TypeError, or OverflowError for no time that can be told."""
    found = int(us)
    moment_of(found)
    return found


def _encode(said: Mapping[str, object]) -> bytes:
    return json.dumps({**said, "check": _check(said)}, indent=1).encode()


def _decode(data: bytes, what: str, wanted: str, version_max: int = VERSION) -> dict[str, Any]:
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
        said: dict[str, Any] = json.loads(data)
        if said.pop("check") != _check(said):
            raise ValueError("its check does not agree")  # noqa: TRY301
        if said["format"] != wanted or type(said["format_version"]) is not int:
            raise ValueError(f"is no {wanted}")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}") from err
    if said["format_version"] > version_max:
        raise FormatTooNew(
            f"{what}: format {said['format_version']}; this Nearkin reads up to {version_max}: upgrade Nearkin"
        )
    return said


def _check(said: Mapping[str, object]) -> str:
    """Return 16 hex digits over all fields, whatever their order and spacing in the file."""
    return blake3(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=8)
