"""Manifest. Invariant: it names every segment of one committed version; it is written once and never changed.

    0      4     6       8    12
    | NKM1 | ver | flags | id ... fixed fields | tenant | key | metadata | segment runs | check 8 |

Segments are named as runs of (container, ordinal), like chunks in a recipe. docs/formats/manifest.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from collections.abc import Mapping
from struct import Struct, error as StructError

import numpy as np

from nearkin.config import KEY_BYTES_MAX, METADATA_BYTES_MAX, TENANT_BYTES_MAX
from nearkin.errors import Corrupt, FormatTooNew
from nearkin.formats import columns, runs
from nearkin.records import Bools, Ledger, Locations

VERSION = 1
HOLDER = 0
"""A manifest holds no segments itself; location (0, _) never occurs in it."""

FIXED = Struct("<4sHHQqQ32s32sIHHI" + "Q" * 8)
assert FIXED.size == 172  # docs/formats/manifest.md
_HAS_SHA256 = 1
_RUN_COLUMNS = [np.dtype(t) for t in ("<u2", "<u4", "<u4", "u1")]
_REF_COLUMNS = [np.dtype("<u8")]

_LEDGER_FIELDS = (
    "chunks",
    "duplicate_chunks",
    "delta_chunks",
    "raw_chunks",
    "zero_chunks",
    "unique_bytes",
    "delta_chunk_bytes",
    "delta_bytes",
)
"""What can be said of one version alone; how a shared block compressed can not."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed version. `segments` in order; `known` bool[s]: this version did not introduce that segment."""

    tenant: str
    key: str
    version: int
    created_us: int
    """Microseconds since 1970, UTC, by the writer's clock."""
    size_bytes: int
    blake3: bytes
    sha256: bytes | None
    seconds: float
    ledger: Ledger
    segments: Locations
    known: Bools
    metadata: Mapping[str, str] = field(default_factory=dict)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes."""
    tenant, key = manifest.tenant.encode(), manifest.key.encode()
    metadata = json.dumps(dict(manifest.metadata), sort_keys=True, ensure_ascii=False).encode() if manifest.metadata else b""
    table, refs = runs.container_table(manifest.segments.containers, HOLDER)
    changes = np.flatnonzero(manifest.known[1:] != manifest.known[:-1]) + 1
    bounds = np.r_[0, changes, len(refs)].astype(np.uint32)
    run_refs, steps, counts, _ = runs.compress(refs, manifest.segments.ordinals, bounds)
    run_starts = np.cumsum(counts, dtype=np.int64) - counts
    known = manifest.known[run_starts].astype(np.uint8)
    fixed = FIXED.pack(
        b"NKM1",
        VERSION,
        _HAS_SHA256 if manifest.sha256 else 0,
        manifest.version,
        manifest.created_us,
        manifest.size_bytes,
        manifest.blake3,
        manifest.sha256 or b"",
        min(round(manifest.seconds * 1000), 0xFFFFFFFF),
        len(tenant),
        len(key),
        len(metadata),
        *(getattr(manifest.ledger, name) for name in _LEDGER_FIELDS),
    )
    body = fixed + tenant + key + metadata + columns.pack([table.astype("<u8")]) + columns.pack([run_refs, steps, counts, known])
    return body + columns.check_bytes(body)


def decode_manifest(data: bytes, what: str) -> Manifest:
    """Return the manifest. Raises Corrupt, or FormatTooNew naming both versions."""
    if len(data) < FIXED.size + columns.CHECK_BYTES:
        raise Corrupt(f"{what}: {len(data)} bytes are too few for a manifest")
    if data[:4] != b"NKM1":
        raise Corrupt(f"{what}: not a manifest (starts with {data[:4]!r})")
    version = int.from_bytes(data[4:6], "little")
    view = memoryview(data)[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != data[-columns.CHECK_BYTES :]:
        raise Corrupt(f"{what}: checksum does not agree")
    if version > VERSION:
        raise FormatTooNew(f"{what}: manifest format {version}; this Nearkin reads up to {VERSION}: upgrade")
    try:
        return _decode(view, what)
    except (StructError, ValueError, IndexError, AttributeError) as err:
        raise Corrupt(f"{what}: does not parse: {err}") from err


def _decode(view: memoryview, what: str) -> Manifest:
    fields = FIXED.unpack_from(view)
    _, _, flags, number, created_us, size_bytes, blake3, sha256, millis, tenant_bytes, key_bytes, metadata_bytes = fields[:12]
    if tenant_bytes > TENANT_BYTES_MAX or key_bytes > KEY_BYTES_MAX or metadata_bytes > METADATA_BYTES_MAX:
        raise Corrupt(f"{what}: a field is longer than its bound")
    position = FIXED.size
    tenant = str(view[position : position + tenant_bytes], "utf-8")
    position += tenant_bytes
    key = str(view[position : position + key_bytes], "utf-8")
    position += key_bytes
    metadata = json.loads(bytes(view[position : position + metadata_bytes])) if metadata_bytes else {}
    position += metadata_bytes
    (table,), used = columns.unpack(view[position:], _REF_COLUMNS, what)
    position += used
    (run_refs, steps, counts, known), used = columns.unpack(view[position:], _RUN_COLUMNS, what)
    if position + used != len(view):
        raise Corrupt(f"{what}: {len(view) - position - used} bytes left over")
    refs, ordinals = runs.expand(run_refs, steps, counts, what)
    ledger = Ledger(logical_bytes=size_bytes, **dict(zip(_LEDGER_FIELDS, fields[12:20], strict=True)))
    return Manifest(
        tenant=tenant,
        key=key,
        version=number,
        created_us=created_us,
        size_bytes=size_bytes,
        blake3=blake3,
        sha256=sha256 if flags & _HAS_SHA256 else None,
        seconds=millis / 1000,
        ledger=ledger,
        segments=runs.located(refs, ordinals, table, HOLDER, what),
        known=np.repeat(known.astype(np.bool_), counts),
        metadata=metadata,
    )
