"""Encode and decode heads: the highest version of each key at a moment.

    0      4     6       8          16        20
    | NKH1 | ver | flags | sequence | entries | digests 16 each, ascending | versions u64 each | MAC 16 | check 8 |

The digest is the one in the object names of a key's manifests. In an unencrypted store the record has a MAC; in an
encrypted store encryption authenticates it (docs/internals/formats/heads.md).

Invariant: a head is never lower than the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from struct import Struct

import numpy as np

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.record_authentication import MAC_BYTES, mac_of, split_mac

VERSION = 1
MAGIC = b"NKH1"
FIXED = Struct("<4sHHQI")
assert FIXED.size == 20  # docs/internals/formats/heads.md
DIGEST_BYTES = 16
ENTRIES_MAX = 1 << 22
"""96 MiB; further keys are not covered."""
_HAS_MAC = 1


def encode_heads(sequence: int, heads: Mapping[bytes, int], key: bytes | None = None) -> bytes:
    """Encode a record of heads, authenticated by `key` if there is one."""
    digests = sorted(heads)
    assert len(digests) <= ENTRIES_MAX
    body = FIXED.pack(MAGIC, VERSION, 0 if key is None else _HAS_MAC, sequence, len(digests))
    body += b"".join(digests) + np.array([heads[digest] for digest in digests], "<u8").tobytes()
    body += b"" if key is None else mac_of(body, key)
    return body + columns.check_bytes(body)


def decode_heads(data: bytes, what: str, key: bytes | None = None) -> tuple[int, dict[bytes, int]]:
    """Return (sequence, heads).

    Raises FormatTooNew, Corrupt (also if `key` is given and does not authenticate the record).
    """
    whole = memoryview(data)
    if len(whole) < FIXED.size + columns.CHECK_BYTES or bytes(whole[:4]) != MAGIC:
        raise Corrupt(f"{what}: not a record of heads ({len(whole)} bytes)")
    view = whole[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != bytes(whole[-columns.CHECK_BYTES :]):
        raise Corrupt(f"{what}: checksum does not agree")
    _, version, flags, sequence, entries = FIXED.unpack_from(view)
    if version > VERSION or flags & ~_HAS_MAC:
        raise FormatTooNew(f"{what}: format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade")
    if version < VERSION or entries > ENTRIES_MAX:
        raise Corrupt(f"{what}: format {version} with {entries} entries, which no release of Nearkin wrote")
    if key is not None and not flags & _HAS_MAC:
        raise Corrupt(f"{what}: not authenticated by this store's key")
    if flags & _HAS_MAC:
        view = split_mac(view, key, what)
    start = FIXED.size + DIGEST_BYTES * entries
    if len(view) != start + 8 * entries:
        raise Corrupt(f"{what}: {len(view)} bytes for {entries} entries (MAC: {MAC_BYTES if flags else 0})")
    digests = [bytes(view[at : at + DIGEST_BYTES]) for at in range(FIXED.size, start, DIGEST_BYTES)]
    if any(first >= second for first, second in pairwise(digests)):
        raise Corrupt(f"{what}: its entries are not in order")
    return sequence, dict(zip(digests, np.frombuffer(view[start:], "<u8").tolist(), strict=True))
