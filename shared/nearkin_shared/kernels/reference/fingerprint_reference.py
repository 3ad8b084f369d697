"""Define fingerprints and check tags in plain Python.

Invariant: the compiled kernel equals this definition.

A check tag, from the bytes down to 64 bits (docs/adr/0002-keyed-check-tag.md):

    chunk -> blocks of 2 KiB -> NH, two keys: two 64-bit words a block -> polynomial mod 2^127 - 1 -> SipHash-2-4
                                                                             with the chunk's length ^
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

Payload: TypeAlias = "Buffer | NDArray[np.uint8]"
"""Any C-contiguous buffer of bytes, read-only or not."""

FINGERPRINT_BYTES: Final = 20
NAME_BYTES: Final = 32
SECRET_BYTES: Final = 32
DOMAIN_BYTES_MAX: Final = 255
NH_BLOCK_BYTES: Final = 2048
NH_PAD_BYTES: Final = 64
KEY_BYTES: Final = 2 * NH_BLOCK_BYTES + 16 + 16
PRIME: Final = (1 << 127) - 1
POINT_BITS: Final = ((1 << 61) - 1) << 64 | (1 << 62) - 1

_MASK64: Final = (1 << 64) - 1


class TagKey:
    """The keys of one dedup domain's check tags; immutable, and never part of its text.

    `secret` is the store's 32 bytes; `domain` (0 to 255 bytes) names the dedup domain, normally the tenant: the same
    content has unrelated tags in two domains. Raises `BadInput` for any other type or length.

    Derivation: 64-byte block i of the key material is BLAKE2b(key=secret, person="nearkin-tag-v1") of i as 4 bytes
    little-endian followed by `domain` (RFC 7693; counter mode over a PRF).
    """

    __slots__ = ("_material",)
    _material: bytes

    def __init__(self, secret: bytes, domain: bytes) -> None:
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise BadInput(f"check-tag secret: needs {SECRET_BYTES} bytes (not shown)")
        if not isinstance(domain, bytes) or len(domain) > DOMAIN_BYTES_MAX:
            raise BadInput(f"check-tag domain {domain!r}: needs at most {DOMAIN_BYTES_MAX} bytes")
        stream = b"".join(
            hashlib.blake2b(i.to_bytes(4, "little") + domain, key=secret, person=b"nearkin-tag-v1").digest()
            for i in range(-(-KEY_BYTES // 64))
        )
        object.__setattr__(self, "_material", stream[:KEY_BYTES])

    @property
    def material(self) -> bytes:
        """Return the derived keys, which are secret.

        NH 0, NH 1 (2048 bytes each), polynomial point (16), SipHash key (16).
        """
        return self._material

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"TagKey is immutable: {name}")

    def __repr__(self) -> str:
        return "TagKey(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TagKey is secret and is not pickled: make it again from the store's secret")


def cpu_path() -> str:
    """Return "python": the reference has no CPU-specific code."""
    return "python"


def sha1_many(payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the SHA-1 of every chunk: uint8, shape (n, 20). FIPS 180-4, section 6.1."""
    pieces = list(_pieces(payload, offsets, lengths))
    digests = b"".join(hashlib.sha1(piece, usedforsecurity=False).digest() for piece in pieces)
    return np.frombuffer(digests, dtype=np.uint8).reshape(len(pieces), FINGERPRINT_BYTES).copy()


def check_tags(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], key: TagKey
) -> NDArray[np.uint64]:
    """Return every chunk's keyed check tag: uint64, shape (n,)."""
    if not isinstance(key, TagKey):
        raise BadInput(f"key {type(key).__name__}: needs a TagKey")
    return np.array([_tag(piece, key.material) for piece in _pieces(payload, offsets, lengths)], dtype=np.uint64)


def zero_mask(payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return which chunks hold nothing but zero bytes (an empty one does): bool, shape (n,)."""
    return np.array([not any(piece) for piece in _pieces(payload, offsets, lengths)], dtype=np.bool_)


def names(fingerprints: NDArray[np.uint8], tags: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return every chunk's name, uint8[n, 32]: fingerprint, tag and length.

    Tag and length are little-endian.
    """
    _check_array("fingerprints", fingerprints, np.uint8, 2)
    _check_array("tags", tags, np.uint64, 1)
    _check_array("lengths", lengths, np.uint32, 1)
    rows = len(fingerprints)
    if fingerprints.shape[1] != FINGERPRINT_BYTES:
        raise BadInput(f"fingerprints shape {fingerprints.shape}: needs (n, {FINGERPRINT_BYTES})")
    if not rows == len(tags) == len(lengths):
        raise BadInput(f"{rows} fingerprints, {len(tags)} tags, {len(lengths)} lengths: needs as many of each")
    out = np.empty((rows, NAME_BYTES), dtype=np.uint8)
    out[:, :20] = fingerprints
    out[:, 20:28] = tags.astype("<u8").view(np.uint8).reshape(rows, 8)
    out[:, 28:] = lengths.astype("<u4").view(np.uint8).reshape(rows, 4)
    return out


def _check_array(what: str, array: object, dtype: type[np.generic], dimensions: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise BadInput(f"{what} {found}: needs a {np.dtype(dtype).name} array of {dimensions} dimension(s)")


def _pieces(payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Iterator[bytes]:
    """Return the chunks, after every argument has been checked."""
    try:
        view = memoryview(payload)
    except TypeError as err:
        raise BadInput(f"payload {type(payload).__name__}: needs a C-contiguous buffer of bytes") from err
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        raise BadInput(f"payload {type(payload).__name__}: needs a C-contiguous buffer of bytes")
    _check_array("offsets", offsets, np.uint64, 1)
    _check_array("lengths", lengths, np.uint32, 1)
    if len(offsets) != len(lengths):
        raise BadInput(f"{len(offsets)} offsets, {len(lengths)} lengths: needs as many of each")
    spans = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
    for i, (offset, length) in enumerate(spans):
        if offset + length > view.nbytes:
            raise BadInput(f"chunk {i}: offset {offset} + length {length} bytes is past the payload's {view.nbytes}")
    return (bytes(view[offset : offset + length]) for offset, length in spans)


def _tag(piece: bytes, material: bytes) -> int:
    point = int.from_bytes(material[-32:-16], "little") & POINT_BITS
    polynomial = 0
    for at in range(0, len(piece), NH_BLOCK_BYTES):
        block = piece[at : at + NH_BLOCK_BYTES]
        for nh_key in (material[:NH_BLOCK_BYTES], material[NH_BLOCK_BYTES : 2 * NH_BLOCK_BYTES]):
            polynomial = (polynomial * point + _nh(block, nh_key)) % PRIME
    return siphash(material[-16:], polynomial.to_bytes(16, "little") + len(piece).to_bytes(8, "little"), 2, 4)


def _nh(block: bytes, nh_key: bytes) -> int:
    """Return NH (UMAC, CRYPTO '99, section 4) of a block, zero-padded to 64 bytes.

    Words and their sums are 32 bits.
    """
    padded = block + bytes(-len(block) % NH_PAD_BYTES)
    words = np.frombuffer(padded, dtype="<u4").astype(np.uint32)
    keyed = (words + np.frombuffer(nh_key, dtype="<u4").astype(np.uint32)[: len(words)]).astype(np.uint64)
    return int((keyed[0::2] * keyed[1::2]).sum(dtype=np.uint64))


def siphash(key: bytes, text: bytes, c_rounds: int, d_rounds: int) -> int:
    """Return SipHash-c-d of `text` under a 16-byte key: 64 bits.

    Aumasson and Bernstein, INDOCRYPT 2012, section 2.
    """
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        _sip_rounds(v, c_rounds)
        v[0] ^= word
    v[2] ^= 0xFF
    _sip_rounds(v, d_rounds)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _sip_rounds(v: list[int], rounds: int) -> None:
    for _ in range(rounds):
        v[0] = (v[0] + v[1]) & _MASK64
        v[2] = (v[2] + v[3]) & _MASK64
        v[1] = _rotl(v[1], 13) ^ v[0]
        v[3] = _rotl(v[3], 16) ^ v[2]
        v[0] = _rotl(v[0], 32)
        v[2] = (v[2] + v[1]) & _MASK64
        v[0] = (v[0] + v[3]) & _MASK64
        v[1] = _rotl(v[1], 17) ^ v[2]
        v[3] = _rotl(v[3], 21) ^ v[0]
        v[2] = _rotl(v[2], 32)


def _rotl(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK64
