"""Encrypt and decrypt objects.

    0      4     6       8              16       20     40      56      64
    | NKE1 | ver | flags | object bytes | number | salt | owner | check | page 0, tag | page 1, tag | ...

Pages are of PAGE_BYTES, the last one shorter; each is encrypted by AES-256-GCM under a key of this object alone, with
its number as the nonce, and authenticated together with the head and the object's name. So any range can be read
without the rest, and no page can be moved, removed, or used in another object
(docs/internals/formats/encrypted-object.md).

Invariant: a page decrypts only as that page of that object, whole, under the key that encrypted it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING

from blake3 import blake3

from nearkin_shared.errors import ConfigError, Corrupt, FormatTooNew
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.limits import KIB
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"NKE1"
VERSION = 1
HEAD = Struct("<4sHHQI20s16s8s")
assert HEAD.size == 64  # docs/internals/formats/encrypted-object.md
PAGE_BYTES = 32 * KIB
"""Plaintext bytes of a page: 6.3 GB/s a core; 64 KiB 7.0, 4 KiB 1.9 (benchmarks/encryption.py). Reads decrypt whole
pages.
"""
TAG_BYTES = 16
STRIDE_BYTES = PAGE_BYTES + TAG_BYTES
SALT_BYTES = 20
"""Two objects of one key with the same salt would share a key and nonces: probability 2**-80 for 2**40 objects."""
KEY_BYTES = 32
OWNER_BYTES = 16
SALVAGE_BYTES_MAX = 1 << 30
"""Maximum size of a container: memory is allocated for the size that a head states."""
STORE_OWNER = bytes(OWNER_BYTES)
"""Owner of objects that belong to no tenant: records of maintenance, unfinished uploads, the descriptor."""
_CONTEXT = "nearkin 2026 key of a sealed object"


@frozen
class EncryptionHead:
    """The plaintext head of an encrypted object."""

    object_bytes: int
    owner: bytes
    number: int
    """Number of the owner's data key."""
    salt: bytes

    def pack(self) -> bytes:
        """Return the head's bytes."""
        fields = (MAGIC, VERSION, 0, self.object_bytes, self.number, self.salt, self.owner)
        bare = HEAD.pack(*fields, b"")[:-CHECK_BYTES]
        return bare + check_bytes(bare)


def head_of(data: bytes | memoryview, name: str) -> EncryptionHead:
    """Parse the head of an encrypted object. Raises Corrupt, FormatTooNew."""
    packed = bytes(data[: HEAD.size])
    if len(packed) < HEAD.size:
        raise Corrupt(f"{name}: {len(packed)} bytes are too few for a sealed object")
    magic, version, flags, object_bytes, number, salt, owner, check = HEAD.unpack(packed)
    if magic != MAGIC:
        raise Corrupt(f"{name}: is not sealed, as all objects of an encrypted store are: damaged, or put there by hand")
    if check_bytes(packed[:-CHECK_BYTES]) != check:
        raise Corrupt(f"{name}: the check of its head does not agree")
    if version > VERSION or flags:
        raise FormatTooNew(f"{name}: sealed format {version}, flags {flags}; this Nearkin reads {VERSION}: upgrade")
    if version < VERSION or number < 1:
        raise Corrupt(f"{name}: sealed format {version}, key number {number}: no release wrote that")
    return EncryptionHead(object_bytes, owner, number, salt)


def encrypted_bytes(object_bytes: int) -> int:
    """Return the stored size of an encrypted object; an empty one has one empty page."""
    return HEAD.size + object_bytes + TAG_BYTES * pages_of(object_bytes)


def pages_of(object_bytes: int) -> int:
    """Return the number of pages of an object."""
    return max(1, -(-object_bytes // PAGE_BYTES))


def plain_bytes(stored_bytes: int) -> int:
    """Return the plaintext size of a stored object; -1 if no object has that stored size."""
    body = stored_bytes - HEAD.size
    if body < TAG_BYTES:
        return -1
    object_bytes = body - TAG_BYTES * -(-body // STRIDE_BYTES)
    return object_bytes if object_bytes >= 0 and encrypted_bytes(object_bytes) == stored_bytes else -1


def stored_range(first: int, end: int, object_bytes: int) -> tuple[int, int]:
    """Return the byte range of pages `first` to `end` (exclusive) in the stored object."""
    return HEAD.size + first * STRIDE_BYTES, min(HEAD.size + end * STRIDE_BYTES, encrypted_bytes(object_bytes))


def allocate(size_bytes: int) -> memoryview:
    """Allocate zeroed memory."""
    return memoryview(bytearray(size_bytes))


class PageCipher:
    """Encrypts and decrypts the pages of one object."""

    def __init__(self, head: EncryptionHead, name: str, data_key: bytes) -> None:
        """Derive the object's own key. Raises ConfigError if the library is not installed."""
        self.head = head
        self._name = name
        self._aad = head.pack() + name.encode()
        derived = blake3(head.salt + head.owner, key=blake3(data_key, derive_key_context=_CONTEXT).digest())
        self._cipher = aes_gcm(derived.digest(KEY_BYTES))

    def encrypt(self, data: bytes | memoryview) -> memoryview:
        """Return the whole encrypted object: head and pages."""
        plain = memoryview(data).cast("B")
        encrypted = allocate(encrypted_bytes(len(plain)))
        encrypted[: HEAD.size] = self.head.pack()
        for page in range(pages_of(len(plain))):
            piece = plain[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            at = HEAD.size + page * STRIDE_BYTES
            self._cipher.encrypt_into(_nonce(page), piece, self._aad, encrypted[at : at + len(piece) + TAG_BYTES])
        return encrypted

    def open_into(self, stored: bytes | memoryview, first: int, end: int, into: memoryview) -> int:
        """Decrypt pages `first` to `end` (exclusive) into `into`; return their bytes.

        Raises Corrupt.
        """
        from cryptography.exceptions import InvalidTag

        sealed, name = memoryview(stored), self._name
        plain_bytes = min(end * PAGE_BYTES, self.head.object_bytes) - first * PAGE_BYTES
        if len(sealed) != plain_bytes + TAG_BYTES * (end - first):
            raise Corrupt(f"{name}: {len(sealed)} bytes of pages {first} to {end - 1}: truncated or padded")
        for page in range(first, end):
            at, to = (page - first) * STRIDE_BYTES, (page - first) * PAGE_BYTES
            piece = sealed[at : at + STRIDE_BYTES]
            target = into[to : to + len(piece) - TAG_BYTES]
            try:
                self._cipher.decrypt_into(_nonce(page), piece, self._aad, target)
            except InvalidTag as err:
                target[:] = bytes(len(target))  # the library leaves unauthenticated bytes in the buffer
                raise Corrupt(f"{name}: page {page} was changed after it was encrypted: run `nearkin verify`") from err
        return plain_bytes

    def decrypt_object(self, stored: bytes | memoryview, take: Callable[[int], memoryview] = allocate) -> bytes:
        """Decrypt a whole stored object; `take` allocates memory. Raises Corrupt."""
        if len(stored) != encrypted_bytes(self.head.object_bytes):
            expected_bytes = encrypted_bytes(self.head.object_bytes)
            raise Corrupt(f"{self._name}: {len(stored)} bytes, its head states {expected_bytes}: truncated or padded")
        into = take(self.head.object_bytes)
        self.open_into(memoryview(stored)[HEAD.size :], 0, pages_of(self.head.object_bytes), into)
        return bytes(into[: self.head.object_bytes])

    def salvage(self, stored: bytes | memoryview) -> bytes:
        """Decrypt the remaining pages of a stored object; damaged pages become zeros."""
        object_bytes, sealed = self.head.object_bytes, memoryview(stored)[HEAD.size :]
        if object_bytes > SALVAGE_BYTES_MAX:
            raise Corrupt(f"{self._name}: {object_bytes} bytes: more than any object has")
        plain = allocate(object_bytes)
        for page in range(pages_of(object_bytes)):
            at = page * STRIDE_BYTES
            with suppress(Corrupt):
                self.open_into(sealed[at : at + STRIDE_BYTES], page, page + 1, plain[page * PAGE_BYTES :])
        return bytes(plain)


def encrypt(name: str, data: bytes | memoryview, owner: bytes, number: int, data_key: bytes) -> memoryview:
    """Encrypt an object under a data key."""
    head = EncryptionHead(len(memoryview(data).cast("B")), owner, number, secrets.token_bytes(SALT_BYTES))
    return PageCipher(head, name, data_key).encrypt(data)


def page_runs(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pages that byte ranges touch, as ascending disjoint runs [first, end)."""
    spans = sorted(
        (start // PAGE_BYTES, -(-end // PAGE_BYTES)) for start, end in zip(starts, ends, strict=True) if start < end
    )
    runs: list[tuple[int, int]] = []
    for first, end in spans:
        if runs and first <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((first, end))
    assert all(one[1] < other[0] for one, other in pairwise(runs))
    return runs


def _nonce(page: int) -> bytes:
    return page.to_bytes(12, "little")


def aes_gcm(key: bytes) -> AESGCM:
    """Return the cipher of a key. Raises ConfigError if the library is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as err:
        raise ConfigError(
            "storage.encryption: cryptography is not installed; pip install 'nearkin[encryption]'"
        ) from err
    return AESGCM(key)
