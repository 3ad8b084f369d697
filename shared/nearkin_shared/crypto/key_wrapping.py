"""Wrap data keys with key-encryption keys.

`KeyWrapper` is the interface for a key-management service: it wraps and unwraps some hundred bytes, and names its keys.
`LocalKeys` uses keys from a file or an environment variable: the first to wrap, all to unwrap.

Invariant: a data key leaves this module wrapped only, and no key appears in a message.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from nearkin_shared.config.storage import StorageSettings
from nearkin_shared.errors import BadInput, ConfigError, Corrupt, WrongKey
from nearkin_shared.formats.encrypted_object import aes_gcm
from nearkin_shared.utils.durable_files import replace_file

KEY_BYTES = 32
NONCE_BYTES = 12
KEYS_MAX = 64
"""Keys in one file: the newest, and earlier ones."""
FILE_BYTES_MAX = 64 * 1024
_ID_CONTEXT = "nearkin 2026 id of a key-encryption key"


class KeyWrapper(Protocol):
    """Wraps data keys. It is called once for each data key and process."""

    @property
    def key_id(self) -> str:
        """The name of the key that `wrap` uses: constant, no secret, up to 256 characters."""

    def wrap(self, secret: bytes, context: bytes) -> bytes:
        """Encrypt `secret` (at most 1 KiB) and authenticate it together with `context`.

        Raises StoreUnavailable if the service is unreachable.
        """

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        """Return the wrapped secret. Raises WrongKey (unknown key), Corrupt, StoreUnavailable."""


class LocalKeys:
    """Keys of 32 bytes in memory. Safe between threads."""

    def __init__(self, keys: Sequence[bytes], where: str) -> None:
        """Raises ConfigError. `where` is their source, for messages."""
        if not keys or len(keys) > KEYS_MAX or any(len(key) != KEY_BYTES for key in keys):
            raise ConfigError(f"{where}: want 1 to {KEYS_MAX} keys of {KEY_BYTES} bytes: `nearkin keys generate FILE`")
        self._keys = {key_id_of(key): key for key in reversed(keys)}
        self._newest = key_id_of(keys[0])
        self._source = where

    @property
    def key_id(self) -> str:
        """The name of the first key."""
        return self._newest

    def wrap(self, secret: bytes, context: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + aes_gcm(self._keys[self._newest]).encrypt(nonce, secret, context)

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        """Return the wrapped secret. Raises WrongKey, Corrupt."""
        key = self._keys.get(key_id)
        if key is None:
            raise WrongKey(
                f"{self._source}: the store's data keys are wrapped by key-encryption key {key_id}, the configured "
                f"keys are {', '.join(sorted(self._keys))}: add that key after the newest one"
            )
        from cryptography.exceptions import InvalidTag

        try:
            return aes_gcm(key).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
        except (InvalidTag, ValueError) as err:
            raise Corrupt(f"a data key wrapped by key-encryption key {key_id} does not unwrap") from err


def wrapper_of(storage: StorageSettings) -> KeyWrapper:
    """Return the wrapper for `storage.key_file` or `storage.key`.

    Raises WrongKey, ConfigError.
    """
    if storage.key_file is not None:
        path = Path(storage.key_file).expanduser()
        return LocalKeys(keys_in(_read(path), f'storage.key_file "{path}"'), f'storage.key_file "{path}"')
    if storage.key is not None:
        return LocalKeys(keys_in(storage.key, "storage.key"), "storage.key")
    raise WrongKey(
        "storage.encryption: no key-encryption key: set storage.key_file, or NEARKIN_STORAGE__KEY; "
        "`nearkin keys generate FILE` creates one"
    )


def keys_in(text: str, where: str) -> list[bytes]:
    """Parse keys, the newest first: each 32 bytes in base64; # begins a comment.

    Raises ConfigError.
    """
    found = []
    for number, line in enumerate(re.sub(r"#[^\n]*", "", text).replace(",", "\n").splitlines(), 1):
        for word in line.split():
            try:
                key = base64.b64decode(word, validate=True)
            except (binascii.Error, ValueError):
                key = b""
            if len(key) != KEY_BYTES:  # the word itself is a secret, or similar to one
                raise ConfigError(f"{where}: line {number} is not a key: want {KEY_BYTES} bytes in base64")
            found.append(key)
    if not found:
        raise ConfigError(f"{where}: contains no key; `nearkin keys generate FILE` creates one")
    return found


def key_id_of(key: bytes) -> str:
    """Return 16 hex digits that identify a key and reveal nothing of it."""
    return blake3(key, derive_key_context=_ID_CONTEXT).hexdigest(length=8)


def generate(path: Path) -> str:
    """Write a new key into a file, before its other keys; return the key's id.

    The file is readable by its owner only, and replaced atomically. Raises BadInput.
    """
    before = _read(path) if path.exists() else ""
    if before:
        keys_in(before, f"{path}")
    key = secrets.token_bytes(KEY_BYTES)
    try:
        replace_file(path, f"{base64.b64encode(key).decode()}  # {key_id_of(key)}\n{before}".encode())
    except OSError as err:
        raise BadInput(f"{path}: {err.strerror}") from err
    return key_id_of(key)


def _read(path: Path) -> str:
    """Return a key file's text. Raises ConfigError, also for a world-readable file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(
                    f'storage.key_file "{path}": all users may read or write it (mode {stat.S_IMODE(mode):03o}): '
                    "chmod 600, or 640 for a group of services"
                )
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f'storage.key_file "{path}": more than {FILE_BYTES_MAX} bytes')
        return data.decode("ascii")
    except OSError as err:
        raise ConfigError(f'storage.key_file "{path}": {err.strerror}') from err
    except UnicodeDecodeError:
        raise ConfigError(f'storage.key_file "{path}": is not text; write keys in base64') from None
