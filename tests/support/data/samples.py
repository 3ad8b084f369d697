"""Make small containers and manifests.

Invariant: the same call gives the same content, on every machine and in every release.

They cover each feature of the formats: raw and delta blocks, stored and compressed, bases in the same and in another
container, recipes that name their own chunks, other containers' chunks and holes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from backports.zstd import CompressionParameter

from nearkin_shared.formats import columns, container_layout
from nearkin_shared.formats.block import EncodedBlock, decode_block, encode_block, encode_patch
from nearkin_shared.formats.container import decode_container, encode_container
from nearkin_shared.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.formats.manifest import Manifest, Previous
from nearkin_shared.formats.parity_object import Scheme, encode_parity
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.formats.retention_record import RetentionRecord
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.results import Ledger
from nearkin_shared.types import NAME_BYTES, U8, ZERO, ContainerId, Locations

CONTAINER = ContainerId(0x0000_0193_5D4C_0001)
OLDER = ContainerId(0x0000_0193_5D4B_0007)
OLDEST = ContainerId(0x0000_0193_5D4A_0003)
DOMAIN = bytes(range(16))
SKETCHES = ("finesse/12/3/48", "none")


def noise(byte_count: int, label: str) -> U8:
    """Return `byte_count` incompressible bytes, determined by `label`."""
    return np.frombuffer(hashlib.shake_256(label.encode()).digest(byte_count), np.uint8)


def names_of(lengths: list[int], label: str = "names") -> U8:
    """Return uint8[n, 32] names with these lengths and otherwise arbitrary bytes."""
    names = noise(len(lengths) * NAME_BYTES, label).reshape(len(lengths), NAME_BYTES).copy()
    names[:, 28:] = np.array(lengths, "<u4").view(np.uint8).reshape(len(lengths), 4)
    return names


def compressor() -> FrameEncoder:
    """Return an encoder as used by builders."""
    return FrameEncoder({CompressionParameter.compression_level: 3, CompressionParameter.content_size_flag: 1})


def small_container() -> bytes:
    """Return a container of 6 chunks in 3 blocks (raw text, raw noise, deltas) and 3 segments: about 700 bytes."""
    text = np.frombuffer(b"The quick brown fox. " * 20, np.uint8)[:400]
    packer = compressor()
    blocks = [
        encode_block(text, container_layout.RAW, 0, packer),
        encode_block(noise(20, "deltas"), container_layout.XDELTA3, 1, packer),
        encode_block(noise(80, "raw"), container_layout.RAW, 0, packer),
    ]
    lengths = [100, 300, 90, 120, 30, 50]
    chunks = ChunkTable(
        names=names_of(lengths),
        lengths=np.array(lengths, np.uint32),
        blocks=np.array([0, 0, 1, 1, 2, 2], np.uint32),
        positions=np.array([0, 100, 0, 12, 0, 30], np.uint32),
        encoded=np.array([100, 300, 12, 8, 30, 50], np.uint32),
        depths=np.array([0, 0, 1, 1, 0, 0], np.uint8),
        bases=Locations(np.array([0, 0, CONTAINER, OLDER, 0, 0], np.uint64), np.array([0, 0, 1, 77, 0, 0], np.uint32)),
        ranks=np.array([0, 0, 0, 2, 0, 0], np.uint8),
    )
    holders = [
        CONTAINER,
        CONTAINER,
        OLDER,
        OLDER,
        OLDER,
        ZERO,
        ZERO,
        CONTAINER,
        CONTAINER,
        OLDEST,
        CONTAINER,
        CONTAINER,
    ]
    ordinals = [0, 1, 5, 6, 7, 65536, 65536, 2, 3, 9, 4, 5]
    segments = SegmentTable(
        bounds=np.array([0, 5, 10, 12], np.uint32),
        sketches=np.array([0, 0, 1], np.uint8),
        chunks=Locations(np.array(holders, np.uint64), np.array(ordinals, np.uint32)),
    )
    return encode_container(CONTAINER, DOMAIN, 2, SKETCHES, blocks, chunks, segments).data


def rest_container() -> bytes:
    """Return `small_container` rewritten without chunks 1, 2, 4 and 5 and its last segment."""
    whole = decode_container(small_container(), "whole")
    text = np.frombuffer(b"The quick brown fox. " * 20, np.uint8)[:100]
    packer = compressor()
    kept, lengths = [0, 3], np.zeros(6, np.uint32)
    blocks = [None, None, None, encode_block(text, container_layout.RAW, 0, packer)]
    blocks.append(encode_block(noise(8, "delta"), container_layout.XDELTA3, 1, packer))
    lengths[kept] = whole.chunks.lengths[kept]
    has_content = lengths > 0
    chunks = ChunkTable(
        names=np.where(has_content[:, None], whole.chunks.names, np.uint8(0)),
        lengths=lengths,
        blocks=np.array([3, 0, 0, 4, 0, 0], np.uint32),
        positions=np.zeros(6, np.uint32),
        encoded=np.array([100, 0, 0, 8, 0, 0], np.uint32),
        depths=np.array([0, 0, 0, 1, 0, 0], np.uint8),
        bases=Locations(np.array([0, 0, 0, OLDER, 0, 0], np.uint64), np.array([0, 0, 0, 77, 0, 0], np.uint32)),
        ranks=np.array([0, 0, 0, 2, 0, 0], np.uint8),
    )
    segments = SegmentTable(
        np.array([0, 5, 10, 10], np.uint32), np.array([0, 0, 0], np.uint8), whole.segments.chunks.take(slice(0, 10))
    )
    return encode_container(CONTAINER, DOMAIN, 2, SKETCHES, blocks, chunks, segments).data


PATCHED_BASES = (b"".join(b"row %04d of the first base; " % i for i in range(40)), bytes(noise(500, "second base")))
"""Bytes of chunk 0 of `patch_container` and of chunk 77 of OLDER."""


def patch_container() -> bytes:
    """Return a container of 4 chunks: a base, and a patch block with this base and one in another container."""
    first, second = PATCHED_BASES
    raw = np.frombuffer(first, np.uint8)
    targets = [first[100:600] + b"!" + first[600:900], second[:300] + first[:50], second[200:] + b"?"]
    patched = np.frombuffer(b"".join(targets), np.uint8)
    options: dict[int, int] = {CompressionParameter.compression_level: 3, CompressionParameter.content_size_flag: 1}
    blocks = [
        encode_block(raw, container_layout.RAW, 0, compressor()),
        encode_patch(patched, first + second, 2, compressor(), options),
    ]
    lengths = [len(first), *map(len, targets)]
    bases = Locations(np.array([CONTAINER, OLDER], np.uint64), np.array([0, 77], np.uint32))
    chunks = ChunkTable(
        names=names_of(lengths),
        lengths=np.array(lengths, np.uint32),
        blocks=np.array([0, 1, 1, 1], np.uint32),
        positions=np.array([0, 0, lengths[1], lengths[1] + lengths[2]], np.uint32),
        encoded=np.array(lengths, np.uint32),
        depths=np.array([0, 2, 2, 2], np.uint8),
        bases=Locations(np.array([0, CONTAINER, OLDER, OLDER], np.uint64), np.array([0, 0, 77, 77], np.uint32)),
        ranks=np.array([0, container_layout.LOCALITY_RANK, 1, container_layout.LOCALITY_RANK], np.uint8),
    )
    segments = SegmentTable(
        bounds=np.array([0, 4], np.uint32),
        sketches=np.array([0], np.uint8),
        chunks=Locations(np.full(4, CONTAINER, np.uint64), np.arange(4, dtype=np.uint32)),
    )
    prefixes = PrefixTable(np.array([0, 0, 2], np.uint32), bases)
    return encode_container(CONTAINER, DOMAIN, 3, SKETCHES[:1], blocks, chunks, segments, prefixes).data


def merged_container() -> bytes:
    """Return a container of 3 chunks as a GC run merges them.

    Chunks 0 and 2, which was appended, are in merged block 1; chunk 1 is a slice of chunk 2, in reference block 2;
    block 0 was removed.
    """
    own, appended = b"row %04d of the own chunk; " * 20, PATCHED_BASES[0]
    content = np.frombuffer(own + appended, np.uint8)
    options: dict[int, int] = {CompressionParameter.compression_level: 3, CompressionParameter.content_size_flag: 1}
    reference = encode_patch(np.frombuffer(appended[100:400], np.uint8), appended, 1, compressor(), options)
    blocks = [
        None,
        replace(encode_block(content, container_layout.RAW, 0, compressor()), role=container_layout.MERGED),
        replace(reference, role=container_layout.REFERENCE),
    ]
    lengths = [len(own), 300, len(appended)]
    base = Locations(np.array([CONTAINER], np.uint64), np.array([2], np.uint32))
    chunks = ChunkTable(
        names=names_of(lengths),
        lengths=np.array(lengths, np.uint32),
        blocks=np.array([1, 2, 1], np.uint32),
        positions=np.array([0, 0, len(own)], np.uint32),
        encoded=np.array(lengths, np.uint32),
        depths=np.array([0, 1, 0], np.uint8),
        bases=Locations(np.array([0, CONTAINER, 0], np.uint64), np.array([0, 2, 0], np.uint32)),
        ranks=np.array([0, container_layout.REFERENCE_RANK, 0], np.uint8),
    )
    segments = SegmentTable(
        bounds=np.array([0, 2], np.uint32),
        sketches=np.array([0], np.uint8),
        chunks=Locations(np.full(2, CONTAINER, np.uint64), np.arange(2, dtype=np.uint32)),
    )
    prefixes = PrefixTable(np.array([0, 0, 0, 1], np.uint32), base)
    return encode_container(CONTAINER, DOMAIN, 1, SKETCHES[:1], blocks, chunks, segments, prefixes).data


def empty_container() -> bytes:
    """Return a container without content: header, empty directory, footer."""
    none8, none32 = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
    chunks = ChunkTable(
        np.zeros((0, NAME_BYTES), np.uint8), none32, none32, none32, none32, none8, Locations.empty(), none8
    )
    segments = SegmentTable(np.zeros(1, np.uint32), none8, Locations.empty())
    blocks: list[EncodedBlock] = []
    return encode_container(CONTAINER, DOMAIN, 1, (), blocks, chunks, segments).data


def small_mark() -> Mark:
    """Return a deletion."""
    return Mark(
        tenant="default",
        key="backups/täglich.tar",
        version=3,
        sequence=1,
        kind=MarkKind.DELETED,
        at_us=1_764_000_000_123_456,
        until_us=1_764_604_800_123_456,
        request=bytes(range(16)),
        who="kim@db-1",
        reason="wrong höst",
    )


def small_retention() -> RetentionRecord:
    """Return an extension of a retention."""
    return RetentionRecord(
        tenant="default",
        key="backups/täglich.tar",
        version=3,
        sequence=2,
        at_us=1_764_000_000_123_456,
        retain_until_us=1_795_536_000_000_000,
        who="kim@db-1",
        reason="Prüfung",
    )


def small_manifest() -> Manifest:
    """Return a manifest of 7 segments, some of them in other versions too."""
    return Manifest(
        tenant="default",
        key="backups/täglich.tar",
        version=3,
        created_us=1_764_000_000_123_456,
        size_bytes=1_234_567,
        blake3=bytes(noise(32, "blake3")),
        sha256=bytes(noise(32, "sha256")),
        seconds=1.25,
        ledger=Ledger(1_234_567, 150, 90, 40, 20, 5, 600_000, 400_000, 20_000),
        segments=Locations(
            np.array([OLDEST, OLDEST, OLDER, CONTAINER, CONTAINER, CONTAINER, OLDER], np.uint64),
            np.array([4, 5, 0, 0, 1, 2, 1], np.uint32),
        ),
        known=np.array([True, True, True, False, False, True, True]),
        origin=bytes(range(16)),
        metadata={"host": "db-1", "note": 'ein "Zitat"'},
    )


def measured_manifest() -> Manifest:
    """Return the same manifest with the lengths of its segments."""
    lengths = np.array([131_072, 98_765, 400_000, 1, 204_800, 300_000, 99_929], np.uint32)
    return replace(small_manifest(), lengths=lengths)


def manifest_with_chain() -> Manifest:
    """Return the same manifest with all fields of format 4."""
    return replace(
        measured_manifest(),
        previous=Previous(2, bytes(noise(32, "previous"))),
        retain_until_us=1_767_225_600_000_000,
        source_changed=True,
    )


def read_all(data: bytes | memoryview) -> tuple[Directory, list[bytes]]:
    """Return the directory and all decoded blocks of a container.

    Raises Corrupt or FormatTooNew.
    """
    directory = decode_container(data, "sample")
    view = memoryview(data)
    blocks = []
    for number in np.flatnonzero(directory.blocks.raw).tolist():
        start = int(directory.blocks.offsets[number])
        record = view[start - container_layout.BLOCK.size : start + int(directory.blocks.stored[number])]
        blocks.append(decode_block(record, f"sample block {number}").tobytes())
    return directory, blocks


def with_directory(data: bytes, directory: bytes) -> bytes:
    """Return a container with another directory and matching checksums, as only a writer could make it."""
    offset, _, _, _, _ = container_layout.FOOTER.unpack(data[-container_layout.FOOTER.size :])
    lead = container_layout.FOOTER.pack(offset, len(directory), columns.check_bytes(directory), b"", b"")[:20]
    return data[:offset] + directory + lead + columns.check_bytes(data[: container_layout.HEADER.size], lead) + b"NKCF"


def directory_of(data: bytes) -> bytes:
    """Return the directory's bytes of a container."""
    offset, size, _, _, _ = container_layout.FOOTER.unpack(data[-container_layout.FOOTER.size :])
    return data[offset : offset + size]


PARITY_OF = "manifests/ab/abcdef0123456789abcdef0123456789/0000000000000003.nkm"
PARITY_SCHEME = Scheme(4, 2)


def small_parity() -> tuple[bytes, bytes]:
    """Return (an object of 10,000 bytes, its parity)."""
    data = b"".join(number.to_bytes(4, "little") for number in range(2500))
    return data, encode_parity(PARITY_OF, data, PARITY_SCHEME)


def small_quarantine() -> dict[int, PendingDelete]:
    """Return a quarantine record of two containers."""
    none = np.zeros(0, np.uint32)
    return {
        CONTAINER: PendingDelete(1_764_000_000_123_456, np.array([1, 2, 3, 9], np.uint32), np.array([0], np.uint32)),
        OLDER: PendingDelete(1_764_000_000_000_001, none, none, whole=True),
    }
