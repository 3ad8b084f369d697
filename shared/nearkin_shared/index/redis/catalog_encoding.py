"""Encoding of catalog entries and container summaries in Redis.

Invariant: members order as (key, version) do, and decode in one way only.

    member of a tenant's versions   key, each NUL followed by 255; NUL NUL; version 8 big-endian; rest
    rest                            layout 1, manifest's bytes 8, seconds as a double 8, ledger 12 x 8; then the listing
                                    entry (`nearkin_shared.index.listing_entry`), empty if an earlier release wrote it
    field of a tenant's marks       the member's start -> "highest mark, bytes of all" in decimal
    summary of a container          12 numbers; depths: count 1, then 4 each; counts: (length 1, name, count 4) each of
                                    segments by sketch, and of chunks by base finder, the name after a `?`
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from hashlib import blake2b
from operator import attrgetter
from struct import Struct
from struct import error as StructError  # noqa: N812

from nearkin_shared.errors import Corrupt
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.results import LEDGER_FIELDS, Ledger
from nearkin_shared.types import ContainerId

_REST = Struct("<BQd12Q")
assert _REST.size == 113
_LEDGER_VALUES = attrgetter(*LEDGER_FIELDS)
"""Takes a twentieth of the time of `dataclasses.astuple`, which copies each value."""
_SUMMARY = Struct("<9I3Q")
assert _SUMMARY.size == 60
_SUMMARY_FIELDS = tuple(field.name for field in fields(ContainerSummary))[1:13]
assert (_SUMMARY_FIELDS[0], _SUMMARY_FIELDS[-1]) == ("container_bytes", "delta_bytes")
_COUNT = Struct("<I")
NAME_BYTES_MAX = 255


def tenant_tag(tenant: str) -> str:
    """Return the tag of a tenant in keys: 24 hex digits."""
    return blake2b(tenant.encode(), digest_size=12, person=b"nearkin-tenant").hexdigest()


def escape_key(key: str) -> bytes:
    """Escape a key so that NUL NUL never occurs; the order of keys is kept."""
    return key.encode().replace(b"\0", b"\0\xff")


def member_start(key: str, version: int) -> bytes:
    """Return the start of a version's member."""
    return escape_key(key) + b"\0\0" + version.to_bytes(8, "big")


def member_end(key: str) -> bytes:
    """Return a bound above every member of a key, and below those of the next key."""
    return escape_key(key) + b"\0\1"


def member_rest(entry: CatalogEntry) -> bytes:
    """Return the rest of a version's member."""
    return _REST.pack(1, entry.manifest_bytes, entry.seconds, *_LEDGER_VALUES(entry.ledger)) + entry.listed


def parse_member(member: bytes) -> CatalogEntry:
    """Decode a member. Raises Corrupt."""
    end = member.find(b"\0\0")
    try:
        layout, manifest_bytes, seconds, *ledger = _REST.unpack_from(member, end + 10)
        if end < 0 or layout != 1:
            raise Corrupt(f"index: version entry has an unknown layout ({member[:40]!r}); run rebuild-index")
        key = member[:end].replace(b"\0\xff", b"\0").decode()
    except (StructError, UnicodeDecodeError) as err:
        raise Corrupt(f"index: version entry does not parse ({member[:40]!r}); run rebuild-index") from err
    version, listed = int.from_bytes(member[end + 2 : end + 10], "big"), member[end + 10 + _REST.size :]
    return CatalogEntry(key, version, manifest_bytes, seconds, Ledger(*ledger), listed=listed)


def with_marks(entry: CatalogEntry, recorded: bytes | None) -> CatalogEntry:
    """Return the entry with its recorded marks, "HIGHEST BYTES". Raises Corrupt."""
    if recorded is None:
        return entry
    try:
        sequence, marks_bytes = map(int, recorded.split())
    except ValueError as err:
        raise Corrupt(f"index: the marks of {entry.key!r} do not parse ({recorded[:40]!r}); run rebuild-index") from err
    return replace(entry, sequence=sequence, marks_bytes=marks_bytes)


def pack_summary(summary: ContainerSummary) -> bytes:
    """Encode a container's summary, without its id."""
    numbers = [getattr(summary, name) for name in _SUMMARY_FIELDS]
    depths = bytes([len(summary.depths)]) + b"".join(map(_COUNT.pack, summary.depths))
    counts = Counter[bytes]()
    for name, count in (*summary.sketches.items(), *((f"?{name}", count) for name, count in summary.found_by.items())):
        counts[_truncate_name(name)] += count
    packed_counts = b"".join(bytes([len(name)]) + name + _COUNT.pack(count) for name, count in counts.items())
    return _SUMMARY.pack(*numbers) + depths + packed_counts


def _truncate_name(name: str) -> bytes:
    """Truncate a name to the bytes that fit a summary."""
    return name.encode()[:NAME_BYTES_MAX].decode(errors="ignore").encode()


def parse_summary(container: ContainerId, packed: bytes) -> ContainerSummary:
    """Decode a container's summary. Raises Corrupt."""
    try:
        numbers = _SUMMARY.unpack_from(packed)
        at = _SUMMARY.size + 1
        depths = tuple(_COUNT.unpack_from(packed, at + 4 * i)[0] for i in range(packed[at - 1]))
        at += 4 * len(depths)
        sketches: dict[str, int] = {}
        while at < len(packed):
            end = at + 1 + packed[at]
            sketches[packed[at + 1 : end].decode()] = _COUNT.unpack_from(packed, end)[0]
            at = end + _COUNT.size
    except (StructError, UnicodeDecodeError, IndexError) as err:
        raise Corrupt(f"index: the summary of container {container:016x} does not parse; run rebuild-index") from err
    numbers_by_field = dict(zip(_SUMMARY_FIELDS, numbers, strict=True))
    found_by = {name[1:]: count for name, count in sketches.items() if name.startswith("?")}
    sketches = {name: count for name, count in sketches.items() if not name.startswith("?")}
    return ContainerSummary(
        container=container, depths=depths, sketches=sketches, found_by=found_by, **numbers_by_field
    )
