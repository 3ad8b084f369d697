"""Sign the report of a restore drill, and check the signature.

    {"report": {...}, "signature": {"algorithm": "ed25519", "public_key": hex, "value": hex}}

The records of a store have a MAC under its secret (nearkin_shared.formats.record_authentication), which only a reader
of the store can check. A report is for others, such as auditors: it has an Ed25519 signature over the report as JSON
with sorted names and without spaces, after a context.

Invariant: a report that differs in one value from the signed one is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin_shared.errors import BadInput, ConfigError, Corrupt
from nearkin_shared.utils.private_files import open_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "nearkin drill report 1"
REPORT_BYTES_MAX = 16 << 20
KEY_BYTES_MAX = 64 << 10
_CONTEXT = b"nearkin 2026 signature of drill reports\0"
_ALGORITHM = "ed25519"


def create_key(path: Path) -> Path:
    """Create a private key in a new file, and its public key in FILE.pub; return that path.

    Raises BadInput, ConfigError.
    """
    _load_library()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(f"{path.name}.pub")
    for target, content in ((path, private), (public_path, public)):
        try:
            descriptor = open_private(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as err:
            raise BadInput(f'key file "{target}": {(err.strerror or "cannot be written").lower()}') from err
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return public_path


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the key that signs. Raises BadInput, ConfigError."""
    _load_library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path, KEY_BYTES_MAX), None)
    except (ValueError, TypeError) as err:
        raise BadInput(f'--sign-key "{path}": is no private key in PEM: {err}') from err
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(f'--sign-key "{path}": is no Ed25519 key; `nearkin drill --create-key FILE` creates one')
    return key


def sign(report: dict[str, Any], key: Ed25519PrivateKey | None) -> dict[str, Any]:
    """Return a report with its signature, which is null without a key."""
    if key is None:
        return {"report": report, "signature": None}
    public = key.public_key().public_bytes_raw().hex()
    value = key.sign(_signed_bytes(report)).hex()
    return {"report": report, "signature": {"algorithm": _ALGORITHM, "public_key": public, "value": value}}


def check(path: Path, public_path: Path) -> dict[str, Any]:
    """Return a report that the owner of a public key signed.

    Raises BadInput (no report, or no key), Corrupt (not signed by this key, or changed since).
    """
    _load_library()
    from cryptography.exceptions import InvalidSignature

    key = _read_public_key(public_path)
    document = _parse(path)
    report, signature = document.get("report"), document.get("signature")
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise BadInput(f'report "{path}": is no report of a drill, or of a later release')
    if not isinstance(signature, dict):
        raise Corrupt(f'report "{path}": has no signature; `nearkin drill --sign-key FILE` signs a report')
    try:
        value = bytes.fromhex(str(signature.get("value")))
        key.verify(value, _signed_bytes(report))
    except (InvalidSignature, ValueError) as err:
        raise Corrupt(
            f'report "{path}": was changed after it was signed, or another key signed it than "{public_path}"'
        ) from err
    return report


def _read_public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(path, KEY_BYTES_MAX))
    except ValueError as err:
        raise BadInput(f'--public-key "{path}": is no public key in PEM: {err}') from err
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f'--public-key "{path}": is no Ed25519 key')
    return key


def _parse(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read(path, REPORT_BYTES_MAX), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as err:
        raise BadInput(f'report "{path}": is no JSON: {err}') from err
    return document if isinstance(document, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with one name twice: two readers could take different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _signed_bytes(report: dict[str, Any]) -> bytes:
    return _CONTEXT + json.dumps(report, sort_keys=True, separators=(",", ":")).encode()


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as err:
        raise BadInput(f'"{path}": {(getattr(err, "strerror", None) or str(err)).lower()}') from err
    if len(data) > bytes_max:
        raise BadInput(f'"{path}": more than {bytes_max:,} bytes')
    return data


def _load_library() -> None:
    """Raise ConfigError if the library is missing."""
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as err:
        raise ConfigError("drill: cryptography is not installed; pip install 'nearkin[encryption]'") from err
