"""Key-encryption keys. Invariant: a data key leaves this module wrapped, and neither kind is ever in a message.

`KeyWrapper` is the socket for a key-management service: it wraps and unwraps some hundred bytes, and names its keys.
`LocalKeys` does it with keys from a file or an environment variable, the first to wrap with, all to unwrap with.
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
"""In a file: the newest, and those that were rotated out."""
FILE_BYTES_MAX = 64 * 1024
_ID_CONTEXT = "nearkin 2026 id of a key-encryption key"


class KeyWrapper(Protocol):
    """Wraps data keys. An implementation may ask a service; it is asked once for each data key and process."""

    @property
    def key_id(self) -> str:
        """Name the key that `wrap` uses: up to 256 characters, the same for the same key, no secret."""

    def wrap(self, secret: bytes, context: bytes) -> bytes:
        """Return `secret` (1 KiB at most) encrypted and authenticated together with `context`.

        Raises StoreUnavailable where the service is away.
        """

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        """Return what was wrapped. Raises WrongKey (that key is not here), Corrupt, StoreUnavailable."""


class LocalKeys:
    """Keys of 32 bytes that are at hand. Safe between threads."""

    def __init__(self, keys: Sequence[bytes], where: str) -> None:
        """`where` names them in messages. Raises ConfigError."""
        if not keys or len(keys) > KEYS_MAX or any(len(key) != KEY_BYTES for key in keys):
            raise ConfigError(f"{where}: want 1 to {KEYS_MAX} keys of {KEY_BYTES} bytes: `nearkin keys generate FILE`")
        self._keys = {key_id_of(key): key for key in reversed(keys)}
        self._newest = key_id_of(keys[0])
        self._where = where

    @property
    def key_id(self) -> str:
        """Name the first key."""
        return self._newest

    def wrap(self, secret: bytes, context: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + aes_gcm(self._keys[self._newest]).encrypt(nonce, secret, context)

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        """Return what was wrapped. Raises WrongKey, Corrupt."""
        key = self._keys.get(key_id)
        if key is None:
            raise WrongKey(
                f"{self._where}: the store's data keys are wrapped by key-encryption key {key_id}, here are "
                f"{', '.join(sorted(self._keys))}: give that key too, behind the newest one"
            )
        from cryptography.exceptions import InvalidTag

        try:
            return aes_gcm(key).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
        except (InvalidTag, ValueError) as err:
            raise Corrupt(f"what key-encryption key {key_id} has wrapped does not unwrap") from err


def wrapper_of(storage: StorageSettings) -> KeyWrapper:
    """Return what the settings name: `storage.key_file`, else `storage.key`. Raises WrongKey, ConfigError."""
    if storage.key_file is not None:
        path = Path(storage.key_file).expanduser()
        return LocalKeys(keys_in(_read(path), f'storage.key_file "{path}"'), f'storage.key_file "{path}"')
    if storage.key is not None:
        return LocalKeys(keys_in(storage.key, "storage.key"), "storage.key")
    raise WrongKey(
        "storage.encryption: no key-encryption key: set storage.key_file, or NEARKIN_STORAGE__KEY; "
        "`nearkin keys generate FILE` makes one"
    )


def keys_in(text: str, where: str) -> list[bytes]:
    """Return the keys of a text, the newest first: each 32 bytes in base64; # begins a comment. Raises ConfigError."""
    found = []
    for number, line in enumerate(re.sub(r"#[^\n]*", "", text).replace(",", "\n").splitlines(), 1):
        for word in line.split():
            try:
                key = base64.b64decode(word, validate=True)
            except (binascii.Error, ValueError):
                key = b""
            if len(key) != KEY_BYTES:  # the word itself is a secret, or nearly one
                raise ConfigError(f"{where}: line {number} is not a key: want {KEY_BYTES} bytes in base64")
            found.append(key)
    if not found:
        raise ConfigError(f"{where}: holds no key; `nearkin keys generate FILE` makes one")
    return found


def key_id_of(key: bytes) -> str:
    """Return 16 hex digits that name a key and tell nothing of it."""
    return blake3(key, derive_key_context=_ID_CONTEXT).hexdigest(length=8)


def generate(path: Path) -> str:
    """Write a new key into a file, before those that are in it; return its id. Raises BadInput.

    The file is readable by its owner alone, and whole at any time.
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
    """Return a key file's text. Raises ConfigError, also for one that everybody may read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(
                    f'storage.key_file "{path}": everybody may read or write it (mode {stat.S_IMODE(mode):03o}): '
                    "chmod 600, or 640 for a group of services"
                )
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f'storage.key_file "{path}": more than {FILE_BYTES_MAX} bytes')
        return data.decode("ascii")
    except OSError as err:
        raise ConfigError(f'storage.key_file "{path}": {err.strerror}') from err
    except UnicodeDecodeError:
        raise ConfigError(f'storage.key_file "{path}": is not text: want keys in base64') from None
