"""Encode and decode heads: the highest version of each key at a moment.

    0      4     6       8          16        20
    | NKH1 | ver | flags | sequence | entries | digests 16 each, ascending | versions u64 each | rows | MAC | check 8 |

    rows, from version 2 on: count u32 | entry u32 each | version u64 each | mark u32 each | retention u32 each

The digest is the one in the object names of a key's manifests. In an unencrypted store the record has a MAC; in an
encrypted store encryption authenticates it (docs/internals/formats/heads.md).

Invariant: a head is never lower than the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import pairwise
from struct import Struct

import numpy as np

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.record_authentication import MAC_BYTES, mac_of, split_mac
from nearkin_shared.utils.frozen import frozen

VERSION = 2
"""2 has rows of marks and retention records; a record without any is written as version 1."""
MAGIC = b"NKH1"
FIXED = Struct("<4sHHQI")
assert FIXED.size == 20  # docs/internals/formats/heads.md
DIGEST_BYTES = 16
ENTRIES_MAX = 1 << 22
"""96 MiB; further keys are not covered, nor tombstones of their versions."""
_HAS_MAC = 1
_COUNT = Struct("<I")
_ROW_TYPES = ("<u4", "<u8", "<u4", "<u4")
_ROW_BYTES = 20


@frozen
class Sequences:
    """The highest sequences of a version's marks and retention records, 0 for none."""

    mark: int = 0
    retention: int = 0


@frozen
class Heads:
    """The contents of a record, by digest of the key."""

    versions: Mapping[bytes, int] = field(default_factory=dict)
    """Highest version."""
    sequences: Mapping[bytes, Mapping[int, Sequences]] = field(default_factory=dict)
    """By version: those that have marks or retention records."""


def encode_heads(sequence: int, heads: Heads, key: bytes | None = None) -> bytes:
    """Return the record of heads, authenticated by `key` if there is one."""
    digests = sorted(heads.versions)
    assert len(digests) <= ENTRIES_MAX
    rows = [
        (entry, version, of.mark, of.retention)
        for entry, digest in enumerate(digests)
        for version, of in sorted(heads.sequences.get(digest, {}).items())
    ]
    body = FIXED.pack(MAGIC, VERSION if rows else 1, 0 if key is None else _HAS_MAC, sequence, len(digests))
    body += b"".join(digests) + np.array([heads.versions[digest] for digest in digests], "<u8").tobytes()
    if rows:
        columns_of_rows = zip(zip(*rows, strict=True), _ROW_TYPES, strict=True)
        body += _COUNT.pack(len(rows)) + b"".join(np.array(values, of).tobytes() for values, of in columns_of_rows)
    body += b"" if key is None else mac_of(body, key)
    return body + columns.check_bytes(body)


def decode_heads(data: bytes, what: str, key: bytes | None = None) -> tuple[int, Heads]:
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
    if version < 1 or entries > ENTRIES_MAX:
        raise Corrupt(f"{what}: format {version} with {entries} entries, which no release of Nearkin wrote")
    if key is not None and not flags & _HAS_MAC:
        raise Corrupt(f"{what}: not authenticated by this store's key")
    if flags & _HAS_MAC:
        view = split_mac(view, key, what)
    start = FIXED.size + DIGEST_BYTES * entries
    end = start + 8 * entries
    if len(view) < end or (version == 1 and len(view) != end):
        raise Corrupt(f"{what}: {len(view)} bytes for {entries} entries (MAC: {MAC_BYTES if flags else 0})")
    digests = [bytes(view[at : at + DIGEST_BYTES]) for at in range(FIXED.size, start, DIGEST_BYTES)]
    if any(first >= second for first, second in pairwise(digests)):
        raise Corrupt(f"{what}: its entries are not in order")
    versions = dict(zip(digests, np.frombuffer(view[start:end], "<u8").tolist(), strict=True))
    return sequence, Heads(versions, {} if version == 1 else _decode_rows(view[end:], digests, what))


def _decode_rows(view: memoryview, digests: list[bytes], what: str) -> dict[bytes, dict[int, Sequences]]:
    count = _COUNT.unpack_from(view)[0] if len(view) >= _COUNT.size else 0
    if not count or len(view) != _COUNT.size + _ROW_BYTES * count:
        raise Corrupt(f"{what}: {len(view)} bytes for {count} rows of marks")
    at, values = _COUNT.size, []
    for of in _ROW_TYPES:
        size = np.dtype(of).itemsize * count
        values.append(np.frombuffer(view[at : at + size], of).tolist())
        at += size
    found: dict[bytes, dict[int, Sequences]] = {}
    for entry, version, mark, retention in zip(*values, strict=True):
        if entry >= len(digests):
            raise Corrupt(f"{what}: a row of entry {entry}, and there are {len(digests)}")
        found.setdefault(digests[entry], {})[version] = Sequences(mark, retention)
    return found
