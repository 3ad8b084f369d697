"""Encode and decode marks: deletion, undeletion and collection of a version.

    0      4     6      8         16         20        28   36      44        60
    | NKT1 | ver | kind | version | sequence | lengths | at | until | request | tenant, key, who, reason | check 8 |

In an unencrypted store a mark has a MAC of 16 bytes before the check. Sequence 1 deletes, 2 undeletes, 3 deletes again:
odd numbers are deletions, even numbers end them (docs/internals/formats/tombstone.md).

Invariant: the highest mark of a version decides whether it exists; marks are written once and never changed.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from struct import Struct

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.record_authentication import mac_of, split_mac
from nearkin_shared.formats.trailing_texts import decode_texts, encode_texts
from nearkin_shared.limits import KEY_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.utils.frozen import frozen

VERSION = 2
"""2 has a MAC before the check; 1, which is encrypted or from an older release, has none."""
FIXED = Struct("<4sHHQIHHHHqq16s")
assert FIXED.size == 60  # docs/internals/formats/tombstone.md
SEQUENCE_MAX = 1000
"""500 deletions and undeletions: a listing reads at most this many names for each version."""
WHO_BYTES_MAX = 256
REASON_BYTES_MAX = 1024
NO_REQUEST = bytes(16)


class MarkKind(IntEnum):
    """The effect of a mark."""

    DELETED = 1
    UNDELETED = 2
    COLLECTED = 3
    """The version's data are being freed: it cannot be undeleted. Its number is not reused."""


@frozen
class Mark:
    """A change of a version's state after its commit."""

    tenant: str
    key: str
    version: int
    sequence: int
    kind: MarkKind
    at_us: int
    """Microseconds since 1970, UTC, by the writer's clock."""
    until_us: int
    """End of the undelete window: nothing of the version is freed before. 0 for other kinds."""
    request: bytes = NO_REQUEST
    """16 bytes that all marks of one call share, its repetitions included."""
    who: str = ""
    reason: str = ""
    authenticated: bool = field(default=False, compare=False)
    """Whether a MAC was verified when it was read. Marks of encrypted stores have none; encryption authenticates them.
    """


def tenant_of_mark(data: bytes | memoryview) -> str:
    """Return the tenant of an encoded mark."""
    tenant_bytes = FIXED.unpack_from(data)[5]
    return bytes(memoryview(data)[FIXED.size : FIXED.size + tenant_bytes]).decode()


def encode_mark(mark: Mark, key: bytes | None = None) -> bytes:
    """Encode the mark, authenticated by `key` if there is one.

    Raises BadInput if `decode_mark` would refuse it.
    """
    texts = encode_texts(mark.tenant, mark.key, mark.who, mark.reason)
    problem = _problem(mark.sequence, mark.kind, mark.at_us, mark.until_us, [len(text) for text in texts])
    if problem is not None:
        raise BadInput(f"{mark.key!r} version {mark.version}: {problem}")
    fixed = FIXED.pack(
        b"NKT1",
        1 if key is None else VERSION,
        mark.kind,
        mark.version,
        mark.sequence,
        *map(len, texts),
        mark.at_us,
        mark.until_us,
        mark.request,
    )
    body = fixed + b"".join(texts)
    body += b"" if key is None else mac_of(body, key)
    return body + columns.check_bytes(body)


def decode_mark(data: bytes | memoryview, what: str, key: bytes | None = None) -> Mark:
    """Decode a mark; verify its MAC if it has one and `key` is given.

    Raises Corrupt (also for a MAC that does not verify), or FormatTooNew with both versions.
    """
    whole = memoryview(data)
    if len(whole) < FIXED.size + columns.CHECK_BYTES:
        raise Corrupt(f"{what}: {len(whole)} bytes are too few for a mark")
    magic = bytes(whole[:4])
    if magic != b"NKT1":
        raise Corrupt(f"{what}: not a mark (starts with {magic!r})")
    view = whole[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != bytes(whole[-columns.CHECK_BYTES :]):
        raise Corrupt(f"{what}: checksum does not agree")
    fields = FIXED.unpack_from(view)
    _, layout, kind, version, sequence, *lengths = fields[:9]
    at_us, until_us, request = fields[9:]
    if layout > VERSION or (layout >= 1 and kind > max(MarkKind)):
        raise FormatTooNew(f"{what}: mark format {layout}, kind {kind}; this Nearkin reads up to {VERSION}: upgrade")
    if layout < 1:
        raise Corrupt(f"{what}: mark format {layout}, which no release of Nearkin wrote")
    has_mac = layout == VERSION
    if has_mac:
        view = split_mac(view, key, what)
    problem = _problem(sequence, kind, at_us, until_us, lengths)
    if problem is not None:
        raise Corrupt(f"{what}: {problem}")
    tenant, name, who, reason = decode_texts(view[FIXED.size :], lengths, what)
    authenticated = has_mac and key is not None
    return Mark(tenant, name, version, sequence, MarkKind(kind), at_us, until_us, request, who, reason, authenticated)


def _problem(sequence: int, kind: int, at_us: int, until_us: int, lengths: list[int]) -> str | None:
    """Return which value is out of bounds, if any; used before writing and after reading."""
    if not 1 <= sequence <= SEQUENCE_MAX:
        return f"mark {sequence}: want 1 to {SEQUENCE_MAX}; put the content as a new version instead"
    if (kind == MarkKind.DELETED) != (sequence % 2 == 1) or kind < min(MarkKind):
        return f"mark {sequence} of kind {kind}: odd ones delete, even ones undelete or collect"
    if not 0 <= at_us <= CREATED_US_MAX or not 0 <= until_us <= CREATED_US_MAX:
        return f"marked {at_us} us after 1970, until {until_us}: want times from 1970 to 9999"
    if kind != MarkKind.DELETED and until_us:
        return f"mark {sequence} of kind {kind} until {until_us}: only a deletion has an end"
    bounds = (TENANT_BYTES_MAX, KEY_BYTES_MAX, WHO_BYTES_MAX, REASON_BYTES_MAX)
    for name, found, most in zip(("tenant", "key", "who", "reason"), lengths, bounds, strict=True):
        if found > most:
            return f"{name} of {found} bytes: want at most {most}"
    return None
