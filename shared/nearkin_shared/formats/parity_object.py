"""Encode parity objects, and reconstruct objects from them.

    0      80                          80 + 8 (k + m) c              - 80
    | head | check of each of c sectors | parity shard, m times      | head again |
           | of each of k + m shards    |                            |

The object is cut into k shards of equal length, the last one padded with zeros; sectors at the same offset of all k + m
shards are one codeword, so up to m damaged sectors of each are computed (docs/internals/formats/parity-object.md).

Invariant: a reconstructed object has the bytes that were written, or reconstruction fails.
"""

from __future__ import annotations

import re
from struct import Struct

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.container_layout import CONTAINER_BYTES_MAX
from nearkin_shared.formats.reed_solomon import SHARDS_MAX, parity_of, rebuild_shards
from nearkin_shared.types import U8, Bools
from nearkin_shared.utils.frozen import frozen

VERSION = 1
HEAD = Struct("<4sHHQBBHI32s16s8s")
assert HEAD.size == 80  # docs/internals/formats/parity-object.md
SECTOR_BYTES = 4096
"""Unit of loss of a disk."""
SHARD_BYTES_MIN = 64
"""An object of less than k times this has fewer shards: checks of 8 bytes a shard would exceed it."""
_SCHEME = re.compile(r"rs-([0-9]{1,2})-([0-9]{1,2})", re.ASCII)


@frozen
class Scheme:
    """Numbers of data shards and of parity shards."""

    data: int
    parity: int


def scheme_of(text: str) -> Scheme | None:
    """Parse `none` or `rs-K-M`. Raises BadInput."""
    if text == "none":
        return None
    matched = _SCHEME.fullmatch(text)
    if matched is not None:
        scheme = Scheme(int(matched[1]), int(matched[2]))
        if scheme.data >= 1 and scheme.parity >= 1 and scheme.data + scheme.parity <= SHARDS_MAX:
            return scheme
    raise BadInput(f"parity {text!r}: want none, or rs-K-M with K + M up to {SHARDS_MAX}, such as rs-28-4")


@frozen
class ParityHead:
    """The head of a parity object, which describes its object."""

    object_bytes: int
    data: int
    parity: int
    shard_bytes: int
    blake3: bytes
    name_digest: bytes

    @property
    def sectors(self) -> int:
        """Number of sectors of each shard."""
        return -(-self.shard_bytes // SECTOR_BYTES)

    @property
    def parity_bytes(self) -> int:
        """Bytes of the parity object."""
        shards = self.data + self.parity
        return 2 * HEAD.size + CHECK_BYTES * shards * self.sectors + self.parity * self.shard_bytes

    def pack(self) -> bytes:
        """Return the head's bytes."""
        fields = (b"NKP1", VERSION, 0, self.object_bytes, self.data, self.parity, 0, self.shard_bytes)
        bare = HEAD.pack(*fields, self.blake3, self.name_digest, b"")[:-CHECK_BYTES]
        return bare + check_bytes(bare)


def encode_parity(name: str, data: bytes | memoryview, scheme: Scheme) -> bytes:
    """Return the parity object of an object. Raises BadInput above a container's bound."""
    if len(data) > CONTAINER_BYTES_MAX:
        raise BadInput(f"{name}: {len(data)} bytes; parity covers at most {CONTAINER_BYTES_MAX}")
    head = _head_for(len(data), scheme, blake3(data).digest(), _digest_of(name))
    rows = _shards(data, head)
    rows[head.data :] = parity_of(rows[: head.data], scheme.parity)
    packed = head.pack()
    return b"".join([packed, *_checks(rows, head), rows[head.data :].tobytes(), packed])


def bytes_of_parity(object_bytes: int, scheme: Scheme) -> int:
    """Return the size of the parity object of an object."""
    return _head_for(object_bytes, scheme, b"", b"").parity_bytes


def _head_for(object_bytes: int, scheme: Scheme, digest: bytes, name_digest: bytes) -> ParityHead:
    shards = max(1, min(scheme.data, object_bytes // SHARD_BYTES_MIN))
    shard_bytes = max(1, -(-object_bytes // shards))
    return ParityHead(object_bytes, shards, scheme.parity, shard_bytes, digest, name_digest)


def head_of(parity: bytes, name: str) -> ParityHead:
    """Return the first or last head, whichever is undamaged. Raises Corrupt, FormatTooNew."""
    for packed in (parity[: HEAD.size], parity[-HEAD.size :]):
        if len(packed) == HEAD.size and check_bytes(packed[:-CHECK_BYTES]) == packed[-CHECK_BYTES:]:
            return _parse_head(packed, name, len(parity))
    raise Corrupt(f"parity of {name}: both of its heads are damaged")


def _parse_head(packed: bytes, name: str, parity_bytes: int) -> ParityHead:
    magic, version, flags, object_bytes, data, parity, reserved, shard_bytes, digest, of_name, _ = HEAD.unpack(packed)
    if magic != b"NKP1":
        raise Corrupt(f"parity of {name}: starts with {magic!r}")
    if version > VERSION or flags or reserved:
        raise FormatTooNew(f"parity of {name}: format {version}, flags {flags}; this Nearkin reads {VERSION}: upgrade")
    head = ParityHead(object_bytes, data, parity, shard_bytes, digest, of_name)
    is_plausible = data >= 1 and parity >= 1 and data + parity <= SHARDS_MAX and 1 <= shard_bytes <= CONTAINER_BYTES_MAX
    # Memory is allocated for the announced sizes: at most the bound of an object, and twice the parity that exists.
    is_plausible &= object_bytes <= CONTAINER_BYTES_MAX and parity * shard_bytes <= 2 * parity_bytes
    if (
        not is_plausible
        or version < VERSION
        or not (data - 1) * shard_bytes < max(1, object_bytes) <= data * shard_bytes
    ):
        raise Corrupt(f"parity of {name}: {data} shards of {shard_bytes} bytes for {object_bytes}")
    if of_name != _digest_of(name):
        raise Corrupt(f"parity of {name}: belongs to another object")
    return head


def reconstruct(name: str, data: bytes | memoryview, parity: bytes) -> bytes | None:
    """Return the object as it was written; None if too much of it is lost.

    `data` may be truncated or empty. Raises Corrupt or FormatTooNew if the parity is unusable.
    """
    head = head_of(parity, name)
    if len(data) == head.object_bytes and blake3(data).digest() == head.blake3:
        return bytes(data)
    rows, checks = _shards(data[: head.object_bytes], head), _stored_checks(parity, head)
    body = parity[HEAD.size + checks.size : HEAD.size + checks.size + head.parity * head.shard_bytes]
    flat = rows[head.data :].reshape(-1)
    flat[: len(body)] = np.frombuffer(body, np.uint8)
    try:
        found = _rebuild_columns(rows, _find_damaged(rows, checks, head), head)
    except BadInput:
        return None
    whole = found[: head.data].reshape(-1)[: head.object_bytes].tobytes()
    return whole if blake3(whole).digest() == head.blake3 else None


def _rebuild_columns(rows: U8, is_damaged: Bools, head: ParityHead) -> U8:
    """Compute the damaged sectors; columns with the same damaged shards are computed together."""
    found = rows.copy()
    patterns: dict[bytes, list[int]] = {}
    for column in np.flatnonzero(is_damaged.any(axis=0)).tolist():
        patterns.setdefault(is_damaged[:, column].tobytes(), []).append(column)
    for pattern, columns in patterns.items():
        lost = np.flatnonzero(np.frombuffer(pattern, np.bool_)).tolist()
        positions = np.concatenate(
            [np.arange(c * SECTOR_BYTES, min((c + 1) * SECTOR_BYTES, head.shard_bytes)) for c in columns]
        )
        found[:, positions] = rebuild_shards(np.ascontiguousarray(rows[:, positions]), head.data, lost)
    return found


def _find_damaged(rows: U8, checks: U8, head: ParityHead) -> Bools:
    """Return bool[k + m, sectors]: the sectors whose check fails."""
    found = np.frombuffer(b"".join(_checks(rows, head)), np.uint8).reshape(-1, CHECK_BYTES)
    is_damaged: Bools = np.any(found != checks.reshape(-1, CHECK_BYTES), axis=1)
    return is_damaged.reshape(head.data + head.parity, head.sectors)


def _shards(data: bytes | memoryview, head: ParityHead) -> U8:
    """Return uint8[k + m, n]: the object's bytes row by row, then zeros."""
    rows = np.zeros((head.data + head.parity, head.shard_bytes), np.uint8)
    rows.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    return rows


def _checks(rows: U8, head: ParityHead) -> list[bytes]:
    starts = [sector * SECTOR_BYTES for sector in range(head.sectors)]
    return [check_bytes(row[start : start + SECTOR_BYTES]) for row in rows for start in starts]


def _stored_checks(parity: bytes, head: ParityHead) -> U8:
    """Return the stored checks, zero-padded if the parity object is truncated."""
    size = CHECK_BYTES * (head.data + head.parity) * head.sectors
    found = np.zeros(size, np.uint8)
    stored = parity[HEAD.size : HEAD.size + size]
    found[: len(stored)] = np.frombuffer(stored, np.uint8)
    return found


def _digest_of(name: str) -> bytes:
    return blake3(name.encode()).digest(length=16)
