"""Encoding of the fields that a listing shows of a version.

    layout 1 | flags 1 | size 8 | created 8 | retained until 8 | segments 4 | BLAKE3 32 | SHA-256 32 or 0 | metadata

Metadata is JSON.

Invariant: the entry follows from the manifest alone. It is empty if the metadata are longer than METADATA_KEPT_MAX; a
listing then reads the manifest.
"""

from __future__ import annotations

import json
from struct import Struct
from struct import error as StructError  # noqa: N812

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest, moment_of
from nearkin_shared.results import Ledger, VersionInfo

LAYOUT = 1
METADATA_KEPT_MAX = 4096
_FIXED = Struct("<BBQqqI32s")
assert _FIXED.size == 62
_HAS_SHA256, _SOURCE_CHANGED = 1, 2
_SHA256_BYTES = 32


def pack_listed(manifest: Manifest) -> bytes:
    """Encode the listing entry of a version; empty if the metadata are too long."""
    metadata = (
        json.dumps(dict(manifest.metadata), ensure_ascii=False, sort_keys=True).encode() if manifest.metadata else b""
    )
    if len(metadata) > METADATA_KEPT_MAX:
        return b""
    flags = _HAS_SHA256 * (manifest.sha256 is not None) | _SOURCE_CHANGED * manifest.source_changed
    fixed = _FIXED.pack(
        LAYOUT,
        flags,
        manifest.size_bytes,
        manifest.created_us,
        manifest.retain_until_us,
        len(manifest.segments),
        manifest.blake3,
    )
    return fixed + (manifest.sha256 or b"") + metadata


def unpack_listed(key: str, version: int, ledger: Ledger, packed: bytes) -> VersionInfo | None:
    """Decode a listing entry; return None if the manifest must be read.

    Raises: Corrupt.
    """
    if not packed or packed[0] != LAYOUT:
        return None
    try:
        _, flags, size_bytes, created_us, retain_until_us, segments, blake3 = _FIXED.unpack_from(packed)
        at = _FIXED.size + _SHA256_BYTES * bool(flags & _HAS_SHA256)
        metadata = json.loads(packed[at:]) if len(packed) > at else {}
    except (StructError, ValueError) as err:
        raise Corrupt(f"index: listing entry of {key!r} version {version} does not parse; run rebuild-index") from err
    return VersionInfo(
        key=key,
        version=version,
        size_bytes=size_bytes,
        created=moment_of(created_us),
        digest=f"blake3:{blake3.hex()}",
        sha256=packed[_FIXED.size : at].hex() if flags & _HAS_SHA256 else None,
        segments=segments,
        chunks=ledger.chunks,
        metadata=metadata,
        retain_until=moment_of(retain_until_us) if retain_until_us else None,
        source_changed=bool(flags & _SOURCE_CHANGED),
    )
