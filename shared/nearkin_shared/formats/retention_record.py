"""Encode and decode retention records: a later end of a version's retention.

    0      4     6       8         16         20        28   36      44
    | NKR1 | ver | flags | version | sequence | lengths | at | until | tenant | key | who | reason | MAC | check |

In an unencrypted store the record has a MAC; in an encrypted store encryption authenticates it
(docs/internals/formats/retention.md).

Invariant: a later record never names an earlier time.
"""

from __future__ import annotations

from struct import Struct

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.record_authentication import mac_of, not_authentic, split_mac
from nearkin_shared.formats.tombstone import REASON_BYTES_MAX, WHO_BYTES_MAX
from nearkin_shared.formats.trailing_texts import decode_texts, encode_texts
from nearkin_shared.limits import KEY_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.utils.frozen import frozen

VERSION = 1
MAGIC = b"NKR1"
FIXED = Struct("<4sHHQIHHHHqq")
assert FIXED.size == 44  # docs/internals/formats/retention.md
SEQUENCE_MAX = 1000
"""Extensions of one version: the names that a reader lists at most."""
_HAS_MAC = 1


@frozen
class RetentionRecord:
    """One extension of a version's retention."""

    tenant: str
    key: str
    version: int
    sequence: int
    """1 for the first extension of the version, incremented by each."""
    at_us: int
    """Microseconds since 1970, UTC, by the writer's clock."""
    retain_until_us: int
    """End of retention, microseconds since 1970."""
    who: str = ""
    reason: str = ""


def tenant_of_retention(data: bytes | memoryview) -> str:
    """Return the tenant of an encoded record."""
    tenant_bytes = FIXED.unpack_from(data)[5]
    return bytes(memoryview(data)[FIXED.size : FIXED.size + tenant_bytes]).decode()


def encode_retention(record: RetentionRecord, key: bytes | None = None) -> bytes:
    """Encode the record, authenticated by `key` if there is one.

    Raises BadInput if `decode_retention` would refuse it.
    """
    texts = encode_texts(record.tenant, record.key, record.who, record.reason)
    lengths = [len(text) for text in texts]
    problem = _find_problem(record.sequence, record.at_us, record.retain_until_us, lengths)
    if problem is not None:
        raise BadInput(f"{record.key!r} version {record.version}: {problem}")
    flags = 0 if key is None else _HAS_MAC
    body = FIXED.pack(
        MAGIC, VERSION, flags, record.version, record.sequence, *lengths, record.at_us, record.retain_until_us
    )
    body += b"".join(texts)
    body += b"" if key is None else mac_of(body, key)
    return body + columns.check_bytes(body)


def decode_retention(data: bytes | memoryview, what: str, key: bytes | None = None) -> RetentionRecord:
    """Decode the record.

    Raises FormatTooNew, Corrupt (also if `key` is given and does not authenticate it).
    """
    whole = memoryview(data)
    if len(whole) < FIXED.size + columns.CHECK_BYTES or bytes(whole[:4]) != MAGIC:
        raise Corrupt(f"{what}: not a retention record ({len(whole)} bytes)")
    view = whole[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != bytes(whole[-columns.CHECK_BYTES :]):
        raise Corrupt(f"{what}: checksum does not agree")
    _, layout, flags, version, sequence, *lengths = FIXED.unpack_from(view)[:9]
    at_us, retain_until_us = FIXED.unpack_from(view)[9:]
    if layout > VERSION or flags & ~_HAS_MAC:
        raise FormatTooNew(f"{what}: format {layout}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade")
    if layout < VERSION:
        raise Corrupt(f"{what}: format {layout}, which no release of Nearkin wrote")
    if key is not None and not flags & _HAS_MAC:
        raise not_authentic(what)
    if flags & _HAS_MAC:
        view = split_mac(view, key, what)
    problem = _find_problem(sequence, at_us, retain_until_us, lengths)
    if problem is not None:
        raise Corrupt(f"{what}: {problem}")
    tenant, name, who, reason = decode_texts(view[FIXED.size :], lengths, what)
    return RetentionRecord(tenant, name, version, sequence, at_us, retain_until_us, who, reason)


def _find_problem(sequence: int, at_us: int, retain_until_us: int, lengths: list[int]) -> str | None:
    """Return the first field out of its bound, if any; used before writing and after reading."""
    if not 1 <= sequence <= SEQUENCE_MAX:
        return f"extension {sequence} of its retention: want 1 to {SEQUENCE_MAX}; extend it by longer times"
    if not 0 <= at_us <= CREATED_US_MAX or not 0 < retain_until_us <= CREATED_US_MAX:
        return f"extended {at_us} us after 1970, until {retain_until_us}: want times from 1970 to 9999"
    bounds = (TENANT_BYTES_MAX, KEY_BYTES_MAX, WHO_BYTES_MAX, REASON_BYTES_MAX)
    for name, found, most in zip(("tenant", "key", "who", "reason"), lengths, bounds, strict=True):
        if found > most:
            return f"{name} of {found} bytes: want at most {most}"
    return None
