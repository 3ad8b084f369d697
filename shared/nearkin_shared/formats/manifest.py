"""Encode and decode manifests.

    0      4     6       8    12
    | NKM1 | ver | flags | id ... fixed fields | chain | tenant | key | metadata | segment runs | lengths | check 8 |

Segments are runs of (container, ordinal), like chunks in a recipe (docs/internals/formats/manifest.md).

Invariant: a manifest names every segment of one committed version; it is written once and never changed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from datetime import UTC, datetime, timedelta
from struct import Struct

import numpy as np

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns, location_runs
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.limits import KEY_BYTES_MAX, METADATA_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.results import Ledger, VersionInfo
from nearkin_shared.types import CONTAINER_ID_MIN, U32, ZERO, Bools, Locations
from nearkin_shared.utils.frozen import frozen

VERSION = 4
"""4 has the chain fields. 3 has segment lengths and no chain fields, 2 has neither: both are read, and written for a
version without chain fields, 2 if the lengths follow from the size (at most one segment) or are unknown. 1 named
containers by u16; no release wrote it.
"""
VERSION_MIN = 2
_LENGTHS_VERSION = 3
NO_DIGEST = bytes(32)
"""Previous digest of a first version, and of one whose previous manifest was unreadable at its commit."""
NO_ORIGIN = bytes(16)
"""Origin of a version whose caller waited for the result."""
LOCAL_ORIGIN = b"embedded"
"""First bytes of an origin in a store with one writing process. GC of such a store refuses versions of services."""
HOLDER = 0
"""Container id of the manifest in location runs; a manifest contains no segment, so (0, _) and (1, _) never occur."""

FIXED = Struct("<4sHHQqQ32s32s16sIHHI" + "Q" * 8)
assert FIXED.size == 188  # docs/internals/formats/manifest.md
CHAIN = Struct("<Q32sq")
"""Version and digest of the previous manifest, `retain_until_us`."""
assert CHAIN.size == 48  # docs/internals/formats/manifest.md
SEGMENTS_MAX = 1 << 24
"""2 TiB of segments of 128 KiB, the usual size; 0.2 GiB in memory."""
CREATED_US_MAX = 253_402_300_799_999_999
"""The last microsecond of the year 9999, the limit of Python's datetime."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HAS_SHA256 = 1
_HAS_LENGTHS = 2
"""Used in format 4; in older formats the version implies it."""
_SOURCE_CHANGED = 4
_TREE = 8
_FLAGS = {2: _HAS_SHA256, 3: _HAS_SHA256, 4: _HAS_SHA256 | _HAS_LENGTHS | _SOURCE_CHANGED | _TREE}
"""Flags that each format version has."""
_U32_MAX = 0xFFFFFFFF
_TENANT_BYTES_AT = 116
assert Struct("<4sHHQqQ32s32s16sI").size == _TENANT_BYTES_AT  # docs/internals/formats/manifest.md
_RUN_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4", "u1")]
_REF_COLUMNS = [np.dtype("<u8")]
_LENGTH_COLUMNS = [np.dtype("<u4")]
_ONE_RUN = Struct("<IIIB")
"""The columns of one run of segments, as `_RUN_COLUMNS`."""
_FIRST_OF_TABLE = 2
_METADATA_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
"""Kept: `json.dumps` makes a new one for each blob, which takes as long as to encode its metadata."""
_ESCAPED_BYTES_MAX = 6
"""Of a byte of text in JSON: a control character is written as an escape."""
_PAIR_BYTES = 8
"""Quotes, colon and comma of a name and its value."""

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
"""Fields that are known for one version; the compressed size of shared blocks is not."""


@frozen
class Previous:
    """The newest manifest of a key when the next version was committed."""

    version: int = 0
    """0 if there was none, or in formats before 4."""
    digest: bytes = NO_DIGEST
    """BLAKE3 of the decrypted manifest; NO_DIGEST if it was unreadable."""


NO_PREVIOUS = Previous()


@frozen
class Manifest:
    """A committed version. `segments` in order; `known` bool[s]: stored before this version."""

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
    origin: bytes = NO_ORIGIN
    """16 bytes that all attempts to store the same upload share, so that it is committed once; see LOCAL_ORIGIN."""
    lengths: U32 | None = None
    """uint32[s], bytes of each segment, which give its offset in the blob. None in manifests of older releases."""
    previous: Previous = NO_PREVIOUS
    retain_until_us: int = 0
    """End of retention, microseconds since 1970; 0: none."""
    source_changed: bool = False
    """Whether the source changed while it was read: the content may mix two states of it."""
    is_tree: bool = False
    """Whether `blake3` is the digest of a tree (docs/internals/formats/tree.md), not of all bytes in order."""

    @property
    def is_by_services(self) -> bool:
        """Whether services committed the version: only they and embedded stores give origins."""
        return self.origin != NO_ORIGIN and not self.origin.startswith(LOCAL_ORIGIN)

    @property
    def info(self) -> VersionInfo:
        """The version as callers see it."""
        return VersionInfo(
            key=self.key,
            version=self.version,
            size_bytes=self.size_bytes,
            created=moment_of(self.created_us),
            digest=f"blake3:{self.blake3.hex()}",
            sha256=self.sha256.hex() if self.sha256 else None,
            segments=len(self.segments),
            chunks=self.ledger.chunks,
            metadata=self.metadata,
            retain_until=moment_of(self.retain_until_us) if self.retain_until_us else None,
            source_changed=self.source_changed,
        )

    @property
    def has_chain(self) -> bool:
        """Whether the manifest needs the fields of format 4."""
        return self.previous != NO_PREVIOUS or self.retain_until_us != 0 or self.source_changed or self.is_tree


def moment_of(us: int) -> datetime:
    """Convert microseconds since 1970 to a UTC time, exactly.

    As a float the last microseconds of 9999 would become the next year's.
    """
    return _EPOCH + timedelta(microseconds=us)


def us_of(moment: datetime) -> int:
    """Return microseconds since 1970; a time without a zone is UTC.

    Raises BadInput for a time before 1970.
    """
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    found = (aware - _EPOCH) // timedelta(microseconds=1)
    if found < 0:
        raise BadInput(f"created {moment.isoformat()}: want a time from 1970 to 9999")
    return found


def tenant_of_manifest(data: bytes | memoryview) -> str:
    """Return the tenant of an encoded manifest."""
    view = memoryview(data)
    (tenant_bytes,) = Struct("<H").unpack_from(view, _TENANT_BYTES_AT)
    start = FIXED.size + (CHAIN.size if int.from_bytes(view[4:6], "little") > _LENGTHS_VERSION else 0)
    return bytes(view[start : start + tenant_bytes]).decode()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest. Raises BadInput if `decode_manifest` would refuse it."""
    try:
        tenant, key = manifest.tenant.encode(), manifest.key.encode()
    except UnicodeEncodeError as err:
        raise BadInput(f"tenant or key {manifest.key!r}: not valid UTF-8 (position {err.start})") from err
    metadata = encode_metadata(manifest.metadata)
    problem = _problem(len(tenant), len(key), len(metadata), manifest.created_us, len(manifest.segments))
    ordinals = manifest.segments.ordinals
    if problem is None and len(ordinals):
        problem = _locations_problem(manifest.segments)
    if problem is None and manifest.lengths is not None:
        problem = _lengths_problem(manifest.lengths, len(ordinals), manifest.size_bytes)
    if problem is None:
        problem = _chain_problem(manifest.version, manifest.previous, manifest.retain_until_us)
    if problem is not None:
        raise BadInput(f"{manifest.key!r}: {problem}")
    lengths = manifest.lengths if len(ordinals) > 1 else None
    version, flags = _version_and_flags(manifest, has_lengths=lengths is not None)
    fixed = FIXED.pack(
        b"NKM1",
        version,
        flags,
        manifest.version,
        manifest.created_us,
        manifest.size_bytes,
        manifest.blake3,
        manifest.sha256 or b"",
        manifest.origin,
        min(round(manifest.seconds * 1000), _U32_MAX),
        len(tenant),
        len(key),
        len(metadata),
        *(getattr(manifest.ledger, name) for name in _LEDGER_FIELDS),
    )
    if version == VERSION:
        fixed += CHAIN.pack(manifest.previous.version, manifest.previous.digest, manifest.retain_until_us)
    locations = _encode_one(manifest) if len(ordinals) == 1 else _encode_locations(manifest)
    body = fixed + tenant + key + metadata + locations
    if lengths is not None:
        body += columns.pack([lengths.astype("<u4", copy=False)])
    return body + columns.check_bytes(body)


def _encode_locations(manifest: Manifest) -> bytes:
    """Return the table of containers and the runs of segments."""
    table, refs = location_runs.container_table(manifest.segments.containers, HOLDER)
    changes = np.flatnonzero(manifest.known[1:] != manifest.known[:-1]) + 1
    bounds = np.r_[0, changes, len(refs)].astype(np.uint32)
    run_refs, steps, counts, _ = location_runs.compress(refs, manifest.segments.ordinals, bounds)
    run_starts = np.cumsum(counts, dtype=np.int64) - counts
    known = manifest.known[run_starts].astype(np.uint8)
    return columns.pack([table.astype("<u8")]) + columns.pack([run_refs, steps, counts, known])


def _encode_one(manifest: Manifest) -> bytes:
    """Return what `_encode_locations` does for one segment, in a fifth of the time."""
    table = int(manifest.segments.containers[0]).to_bytes(8, "little")
    run = _ONE_RUN.pack(_FIRST_OF_TABLE, int(manifest.segments.ordinals[0]) << 1, 1, bool(manifest.known[0]))
    return columns.pack_row(table) + columns.pack_row(run)


def _version_and_flags(manifest: Manifest, *, has_lengths: bool) -> tuple[int, int]:
    """Return the oldest format version that can represent the manifest, and its flags."""
    flags = _HAS_SHA256 if manifest.sha256 else 0
    if not manifest.has_chain:
        return (_LENGTHS_VERSION if has_lengths else VERSION_MIN), flags
    flags |= _HAS_LENGTHS if has_lengths else 0
    flags |= _SOURCE_CHANGED if manifest.source_changed else 0
    return VERSION, flags | (_TREE if manifest.is_tree else 0)


def encode_metadata(metadata: Mapping[str, str]) -> bytes:
    """Encode metadata. Raises BadInput for metadata that are not text, or too large."""
    if not all(isinstance(part, str) for part in (*metadata, *metadata.values())):
        raise BadInput(f"metadata {dict(metadata)!r:.100}: want names and values of text")
    try:
        encoded = _METADATA_ENCODER.encode(dict(metadata)).encode() if metadata else b""
    except UnicodeEncodeError as err:
        raise BadInput(f"metadata {dict(metadata)!r:.100}: not valid UTF-8") from err
    if len(encoded) > METADATA_BYTES_MAX:
        raise BadInput(f"metadata of {len(encoded)} bytes as JSON: want at most {METADATA_BYTES_MAX}")
    return encoded


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise BadInput as `encode_metadata` does; small metadata are not encoded for that."""
    with suppress(TypeError, UnicodeEncodeError):
        text = "".join((*metadata, *metadata.values()))
        if len(text.encode()) * _ESCAPED_BYTES_MAX + len(metadata) * _PAIR_BYTES < METADATA_BYTES_MAX:
            return
    encode_metadata(metadata)


def _problem(tenant_bytes: int, key_bytes: int, metadata_bytes: int, created_us: int, segments: int) -> str | None:
    """Return which value is out of bounds, if any; used before writing and after reading."""
    for name, found, most in (
        ("tenant", tenant_bytes, TENANT_BYTES_MAX),
        ("key", key_bytes, KEY_BYTES_MAX),
        ("metadata as JSON", metadata_bytes, METADATA_BYTES_MAX),
    ):
        if found > most:
            return f"{name} of {found} bytes: want at most {most}"
    if not 0 <= created_us <= CREATED_US_MAX:
        return f"created {created_us} us after 1970: want a time from 1970 to 9999"
    if segments > SEGMENTS_MAX:
        return f"{segments} segments: want at most {SEGMENTS_MAX}; raise chunker.target_bytes"
    return None


def _locations_problem(segments: Locations) -> str | None:
    """Return what is wrong with the locations of segments, at least one, or None."""
    ordinals, containers = segments.ordinals, segments.containers
    if len(segments) == 1:
        ordinal, container = int(ordinals[0]), int(containers[0])
    else:
        ordinal, container = int(ordinals.max()), int(containers.min())
    if ordinal >= ROWS_MAX:
        return f"segment {ordinal} of a container: it has {ROWS_MAX} at most"
    if container < CONTAINER_ID_MIN:
        return f"a segment of container {container}; want a container id"
    return None


def check_manifest_bytes(data: bytes | memoryview, what: str) -> memoryview:
    """Return the manifest's bytes without the checksum after verifying it. Raises Corrupt."""
    whole = memoryview(data)
    if len(whole) < FIXED.size + columns.CHECK_BYTES:
        raise Corrupt(f"{what}: {len(whole)} bytes are too few for a manifest")
    magic = bytes(whole[:4])
    if magic != b"NKM1":
        raise Corrupt(f"{what}: not a manifest (starts with {magic!r})")
    view = whole[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != bytes(whole[-columns.CHECK_BYTES :]):
        raise Corrupt(f"{what}: checksum does not agree")
    return view


def decode_manifest(data: bytes | memoryview, what: str) -> Manifest:
    """Decode a manifest. Raises Corrupt, or FormatTooNew with both versions."""
    view = check_manifest_bytes(data, what)
    version, flags = int.from_bytes(view[4:6], "little"), int.from_bytes(view[6:8], "little")
    if version > VERSION or flags & ~_FLAGS.get(version, _HAS_SHA256):
        raise FormatTooNew(
            f"{what}: manifest format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade"
        )
    if version < VERSION_MIN:
        raise Corrupt(f"{what}: manifest format {version}, which no release of Nearkin wrote")
    try:
        return _decode(view, what)
    except (struct.error, ValueError, IndexError) as err:
        raise Corrupt(f"{what}: does not parse: {err}") from err


def _decode(view: memoryview, what: str) -> Manifest:
    fields = FIXED.unpack_from(view)
    _, version, flags, number, created_us, size_bytes, blake3, sha256, origin, millis = fields[:10]
    tenant_bytes, key_bytes, metadata_bytes = fields[10:13]
    problem = _problem(tenant_bytes, key_bytes, metadata_bytes, created_us, 0)
    if problem is not None:
        raise Corrupt(f"{what}: {problem}")
    position = FIXED.size
    previous, retain_until_us = NO_PREVIOUS, 0
    if version == VERSION:
        previous_version, previous_digest, retain_until_us = CHAIN.unpack_from(view, position)
        previous = Previous(previous_version, previous_digest)
        position += CHAIN.size
        if (problem := _chain_problem(number, previous, retain_until_us)) is not None:
            raise Corrupt(f"{what}: {problem}")
    tenant = str(view[position : position + tenant_bytes], "utf-8")
    position += tenant_bytes
    key = str(view[position : position + key_bytes], "utf-8")
    position += key_bytes
    metadata = _metadata(str(view[position : position + metadata_bytes], "utf-8"), what)
    position += metadata_bytes
    (table,), used = columns.unpack(view[position:], _REF_COLUMNS, location_runs.TABLE_MAX, what)
    position += used
    (run_refs, steps, counts, known), used = columns.unpack(view[position:], _RUN_COLUMNS, SEGMENTS_MAX, what)
    position += used
    lengths: U32 | None = None
    if version == _LENGTHS_VERSION or flags & _HAS_LENGTHS:
        (lengths,), used = columns.unpack(view[position:], _LENGTH_COLUMNS, SEGMENTS_MAX, what)
        position += used
    if position != len(view):
        raise Corrupt(f"{what}: {len(view) - position} bytes left over")
    if len(run_refs) and (int(run_refs.min()) <= ZERO or int(known.max()) > 1):
        raise Corrupt(f"{what}: a segment without a container")
    refs, ordinals = location_runs.expand(run_refs, steps, counts, SEGMENTS_MAX, what)
    if len(ordinals) and int(ordinals.max()) >= ROWS_MAX:  # marking allocates a bit or more for each ordinal below it
        raise Corrupt(f"{what}: segment {int(ordinals.max())} of a container: it has {ROWS_MAX} at most")
    if lengths is not None and (problem := _lengths_problem(lengths, len(ordinals), size_bytes)) is not None:
        raise Corrupt(f"{what}: {problem}")
    if lengths is None and len(ordinals) <= 1 and size_bytes <= _U32_MAX:
        lengths = np.full(len(ordinals), size_bytes, np.uint32)
    ledger = Ledger(logical_bytes=size_bytes, **dict(zip(_LEDGER_FIELDS, fields[13:21], strict=True)))
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
        segments=location_runs.to_locations(refs, ordinals, table, HOLDER, what),
        known=np.repeat(known.astype(np.bool_), counts),
        metadata=metadata,
        origin=origin,
        lengths=lengths,
        previous=previous,
        retain_until_us=retain_until_us,
        source_changed=bool(flags & _SOURCE_CHANGED),
        is_tree=bool(flags & _TREE),
    )


def _chain_problem(version: int, previous: Previous, retain_until_us: int) -> str | None:
    """Return which chain field is out of bounds, or None."""
    if previous.version >= version and previous.version:
        return f"previous version {previous.version} of version {version}: want a lower one"
    if len(previous.digest) != len(NO_DIGEST) or (not previous.version and previous.digest != NO_DIGEST):
        return f"digest {previous.digest.hex()} of previous version {previous.version}: want 32 bytes, zeros for none"
    if not 0 <= retain_until_us <= CREATED_US_MAX:
        return f"retained until {retain_until_us} us after 1970: want a time from 1970 to 9999"
    return None


def _lengths_problem(lengths: U32, segments: int, size_bytes: int) -> str | None:
    """Return what is wrong with the lengths of segments, or None."""
    total = int(lengths[0]) if len(lengths) == 1 else int(lengths.sum(dtype=np.uint64))
    if len(lengths) != segments or total != size_bytes or not lengths.all():
        return f"{len(lengths)} lengths of {segments} segments, {total} bytes of {size_bytes}"
    return None


def _metadata(text: str, what: str) -> dict[str, str]:
    """Parse metadata, one JSON object of strings."""
    try:
        found = json.loads(text) if text else {}
    except RecursionError as err:
        raise Corrupt(f"{what}: metadata nested beyond the limit of the parser") from err
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise Corrupt(f"{what}: metadata is not one object of strings")
    for part in (*found, *found.values()):
        part.encode()  # a lone surrogate, which JSON can express and UTF-8 cannot: ValueError
    return found
