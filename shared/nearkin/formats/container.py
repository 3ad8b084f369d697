"""Container. Invariant: every byte belongs to exactly one checksummed record; a reader needs nothing but the file.

    0        4     6      8              16        32
    | NKC1 | ver | flags | container id | domain  | block ... | directory | footer |

Chunks are numbered in stream order, across blocks; a delta names its base by (container, ordinal), and a segment recipe
names its chunks the same way, so that a fingerprint is written once in the life of a chunk. docs/formats/container.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
from backports.zstd import ZstdCompressor
from numpy.typing import NDArray

from nearkin.errors import BadInput, Corrupt, FormatTooNew
from nearkin.formats import columns, runs
from nearkin.limits import DEPTH_MAX, SEGMENT_BYTES_MAX
from nearkin.records import CONTAINER_ID_MIN, NAME_BYTES, SELF, U8, U32, U64, ZERO, ContainerId, Locations

VERSION = 2
"""1 named containers by u16; no release ever wrote it."""
DOMAIN_BYTES = 16
CONTAINER_BYTES_MAX = 1 << 30
BLOCK_RAW_BYTES_MAX = 32 * 1024 * 1024
SKETCHES_MAX = 256
BLOCKS_MAX = 1 << 16
ROWS_MAX = 1 << 23
"""Chunks, segments, and chunks named by recipes: bounds what a directory decodes to. Builders seal far below."""

HEADER = Struct("<4sHHQ16s")
assert HEADER.size == 32  # docs/formats/container.md
BLOCK = Struct("<4sBBBBII8s")
assert BLOCK.size == 24  # docs/formats/container.md
DIRECTORY = Struct("<4sIIIHH")
assert DIRECTORY.size == 20  # docs/formats/container.md
FOOTER = Struct("<QI8s8s4s")
assert FOOTER.size == 32  # docs/formats/container.md

STORED, ZSTD = 0, 1
"""How a block's bytes are compressed."""
RAW, XDELTA3 = 0, 1
"""What a block's bytes are: chunks as they came, or VCDIFF deltas, one after another."""
KINDS = ("raw", "xdelta3")

_BLOCK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "u1", "u1", "u1")]
_CHUNK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u2")]
_DELTA_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4", "u1")]
_REF_COLUMNS = [np.dtype("<u8")]
_SEGMENT_COLUMNS = [np.dtype(t) for t in ("<u4", "u1")]
_RUN_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4")]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """How the chunks of one container are kept; all arrays have one row a chunk, in stream order.

    `blocks` says in which block the encoding lies, `positions` and `encoded` where in the decoded block (bytes).
    `bases` is (0, 0) for a chunk at depth 0; `ranks` says which super-feature found the base.
    """

    names: U8
    lengths: U32
    blocks: U32
    positions: U32
    encoded: U32
    depths: U8
    bases: Locations
    ranks: U8

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one container: `offsets` uint64 and `stored` uint32 bytes of the payload, `raw` bytes decoded."""

    offsets: U64
    stored: U32
    raw: U32
    codecs: U8
    kinds: U8
    depths: U8

    def __len__(self) -> int:
        return len(self.stored)


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Segment recipes: segment j is rows bounds[j] .. bounds[j + 1] of `chunks`; `sketches` how each was sketched."""

    bounds: U32
    sketches: U8
    chunks: Locations

    def __len__(self) -> int:
        return len(self.sketches)


@dataclass(frozen=True, slots=True)
class Directory:
    """What a container says of itself, decoded."""

    container: ContainerId
    domain: bytes
    depth_max: int
    sketch_names: tuple[str, ...]
    blocks: BlockTable
    chunks: ChunkTable
    segments: SegmentTable
    container_bytes: int
    directory_bytes: int
    recipe_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Return about how much memory the decoded tables take."""
        return len(self.chunks) * (NAME_BYTES + 30) + len(self.segments.chunks) * 12 + len(self.blocks) * 24 + 512


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A sealed block: its header and payload, ready to write, and what the directory says of it."""

    header: bytes
    payload: bytes | memoryview
    raw_bytes: int
    codec: int
    kind: int
    depth: int

    @property
    def stored_bytes(self) -> int:
        """Return the payload's bytes, header not counted."""
        return len(self.payload)


def encode_block(raw: U8, kind: int, depth: int, compressor: ZstdCompressor) -> EncodedBlock:
    """Return `raw` compressed, or as it is where that is not smaller. Decoded and compared before it is kept (I7).

    Raises Corrupt when the decoded bytes differ: memory or the library failed.
    """
    frame = compressor.compress(raw, ZstdCompressor.FLUSH_FRAME)
    payload: bytes | memoryview
    if len(frame) < len(raw):
        if not np.array_equal(np.frombuffer(columns.inflate(frame, len(raw), "block"), np.uint8), raw):
            raise Corrupt("a block just compressed does not decompress to what it was: check this machine's memory")
        codec, payload = ZSTD, frame
    else:
        codec, payload = STORED, raw.tobytes()
    fields = (b"NKB1", codec, kind, depth, 0, len(raw), len(payload))
    check = columns.check_bytes(BLOCK.pack(*fields, b"")[:-8], payload)
    return EncodedBlock(BLOCK.pack(*fields, check), payload, len(raw), codec, kind, depth)


def decode_block(record: bytes | memoryview, what: str) -> U8:
    """Return the decoded bytes of one block record (header and payload). Raises Corrupt, naming `what`."""
    view = memoryview(record)
    try:
        magic, codec, kind, _depth, reserved, raw_bytes, stored_bytes, check = BLOCK.unpack_from(view)
    except struct.error as err:
        raise Corrupt(f"{what}: cut short") from err
    payload = view[BLOCK.size :]
    if magic != b"NKB1" or len(payload) != stored_bytes or raw_bytes > BLOCK_RAW_BYTES_MAX:
        raise Corrupt(f"{what}: not a block of {stored_bytes} bytes")
    if columns.check_bytes(view[: BLOCK.size - 8], payload) != check:
        raise Corrupt(f"{what}: checksum does not agree")
    if reserved or kind >= len(KINDS) or codec > ZSTD:
        raise FormatTooNew(
            f"{what}: compression {codec}, kind {kind}, flags {reserved}: unknown to this Nearkin; upgrade"
        )
    if codec == STORED:
        if raw_bytes != stored_bytes:
            raise Corrupt(f"{what}: stored as {stored_bytes} bytes, announced as {raw_bytes}")
        return np.frombuffer(payload, np.uint8)
    return np.frombuffer(columns.inflate(payload, raw_bytes, what), np.uint8)


def positions_in_blocks(blocks: U32, encoded: U32) -> U32:
    """Return where in its decoded block each chunk's encoding starts, bytes: chunks of a block lie in stream order."""
    return runs.group_totals(blocks, encoded.astype(np.int64)).astype(np.uint32)


def encode_container(
    container: ContainerId,
    domain: bytes,
    depth_max: int,
    sketch_names: Sequence[str],
    blocks: Sequence[EncodedBlock],
    chunks: ChunkTable,
    segments: SegmentTable,
) -> tuple[bytes, int, int]:
    """Return (the container, its directory's bytes, of these the recipes' bytes)."""
    parts: list[bytes | memoryview] = [HEADER.pack(b"NKC1", VERSION, 0, container, domain)]
    for block in blocks:
        parts += [block.header, block.payload]
    directory, recipe_bytes = _encode_directory(container, depth_max, sketch_names, blocks, chunks, segments)
    offset = sum(len(part) for part in parts)
    lead = FOOTER.pack(offset, len(directory), columns.check_bytes(directory), b"", b"")[:20]
    frame_check = columns.check_bytes(parts[0], lead)
    data = b"".join([*parts, directory, lead, frame_check, b"NKCF"])
    return data, len(directory), recipe_bytes


def _encode_directory(
    container: ContainerId,
    depth_max: int,
    sketch_names: Sequence[str],
    blocks: Sequence[EncodedBlock],
    chunks: ChunkTable,
    segments: SegmentTable,
) -> tuple[bytes, int]:
    deltas = np.flatnonzero(chunks.depths)
    bases = chunks.bases.take(deltas)
    table, refs = runs.container_table(np.concatenate([bases.containers, segments.chunks.containers]), container)
    base_refs, chunk_refs = refs[: len(deltas)], refs[len(deltas) :]
    # One run a base: each written as the step from the base before it in the same container.
    singles = np.arange(len(deltas) + 1, dtype=np.uint32)
    _, base_steps, _, _ = runs.compress(base_refs, bases.ordinals, singles)
    run_refs, steps, counts, _ = runs.compress(chunk_refs, segments.chunks.ordinals, segments.bounds)
    names = b"".join([len(name.encode()).to_bytes(2, "little") + name.encode() for name in sketch_names])
    recipes = columns.pack([np.diff(segments.bounds).astype("<u4"), segments.sketches]) + columns.pack(
        [run_refs, steps, counts]
    )
    head = DIRECTORY.pack(b"NKD1", len(blocks), len(chunks), len(segments), depth_max, len(sketch_names))
    rest = columns.pack(
        [
            np.array([b.stored_bytes for b in blocks], "<u4"),
            np.array([b.raw_bytes for b in blocks], "<u4"),
            np.array([b.codec for b in blocks], "u1"),
            np.array([b.kind for b in blocks], "u1"),
            np.array([b.depth for b in blocks], "u1"),
        ]
    )
    rest += columns.pack([chunks.lengths.astype("<u4"), chunks.blocks.astype("<u2")])
    rest += columns.pack([chunks.encoded[deltas], base_refs, base_steps, chunks.ranks[deltas]])
    rest += columns.pack([table.astype("<u8")])
    return head + names + chunks.names[:, :28].tobytes() + rest + recipes, len(recipes)


def container_id_of(header: bytes | memoryview, what: str) -> tuple[ContainerId, bytes]:
    """Return (id, domain) of a container's header. Raises Corrupt, or FormatTooNew naming both versions."""
    try:
        magic, version, flags, container, domain = HEADER.unpack_from(header)
    except struct.error as err:
        raise Corrupt(f"{what}: shorter than a header") from err
    if magic != b"NKC1":
        raise Corrupt(f"{what}: not a container (starts with {magic!r})")
    if version > VERSION or flags:
        raise FormatTooNew(
            f"{what}: container format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade"
        )
    if version < VERSION or container < CONTAINER_ID_MIN:
        raise Corrupt(f"{what}: container format {version}, id {container}: no release of Nearkin wrote such")
    return ContainerId(container), domain


def footer_of(
    header: bytes | memoryview, footer: bytes | memoryview, container_bytes: int, what: str
) -> tuple[int, int, bytes]:
    """Return (directory offset, directory bytes, its check). Raises Corrupt."""
    try:
        offset, size, check, frame_check, magic = FOOTER.unpack(footer)
    except struct.error as err:
        raise Corrupt(f"{what}: shorter than a footer") from err
    if (
        magic != b"NKCF"
        or columns.check_bytes(memoryview(header)[: HEADER.size], memoryview(footer)[:20]) != frame_check
    ):
        raise Corrupt(f"{what}: footer's checksum does not agree")
    if offset + size + FOOTER.size != container_bytes or offset < HEADER.size:
        raise Corrupt(f"{what}: {container_bytes} bytes where its footer says {offset + size + FOOTER.size}")
    return offset, size, check


def decode_directory(
    data: bytes | memoryview, container: ContainerId, domain: bytes, container_bytes: int, check: bytes, what: str
) -> Directory:
    """Return the directory. Raises Corrupt, naming `what` and the part, for anything that does not add up."""
    view = memoryview(data)
    if columns.check_bytes(view) != check:
        raise Corrupt(f"{what}: directory's checksum does not agree")
    try:
        return _decode_directory(view, container, domain, container_bytes, what)
    except (struct.error, ValueError, IndexError) as err:
        raise Corrupt(f"{what}: directory does not parse: {err}") from err


def _decode_directory(
    view: memoryview, container: ContainerId, domain: bytes, container_bytes: int, what: str
) -> Directory:
    magic, block_count, chunk_count, segment_count, depth_max, sketch_count = DIRECTORY.unpack_from(view)
    if magic != b"NKD1" or sketch_count > SKETCHES_MAX or depth_max > DEPTH_MAX or chunk_count > ROWS_MAX:
        raise Corrupt(f"{what}: not a directory")
    position = DIRECTORY.size
    sketch_names: list[str] = []
    for _ in range(sketch_count):
        length = int.from_bytes(view[position : position + 2], "little")
        sketch_names.append(str(view[position + 2 : position + 2 + length], "utf-8"))
        position += 2 + length
    names28 = np.frombuffer(view, np.uint8, chunk_count * 28, position).reshape(chunk_count, 28)
    position += chunk_count * 28

    def take(dtypes: list[np.dtype[Any]], rows_max: int) -> list[NDArray[Any]]:
        nonlocal position
        found, used = columns.unpack(view[position:], dtypes, rows_max, what)
        position += used
        return found

    block_columns = take(_BLOCK_COLUMNS, BLOCKS_MAX)
    chunk_columns = take(_CHUNK_COLUMNS, ROWS_MAX)
    delta_columns = take(_DELTA_COLUMNS, ROWS_MAX)
    (table,) = take(_REF_COLUMNS, runs.TABLE_MAX)
    recipe_start = position
    segment_columns = take(_SEGMENT_COLUMNS, ROWS_MAX)
    run_columns = take(_RUN_COLUMNS, ROWS_MAX)
    _expect(position == len(view), what, "bytes left over")
    found = len(block_columns[0]), len(chunk_columns[0]), len(segment_columns[0])
    _expect(found == (block_count, chunk_count, segment_count), what, "its tables have other rows than its head says")
    blocks = _blocks(block_columns, depth_max, container_bytes - len(view), what)
    scope = _Scope(container, table, what)
    chunks = _chunks(names28, chunk_columns, delta_columns, blocks, scope)
    segments = _segments(segment_columns, run_columns, chunk_count, scope)
    _expect(_below(segments.sketches, sketch_count), what, "a segment names an unknown sketch")
    directory_bytes, recipe_bytes = len(view), len(view) - recipe_start
    return Directory(
        container,
        domain,
        depth_max,
        tuple(sketch_names),
        blocks,
        chunks,
        segments,
        container_bytes,
        directory_bytes,
        recipe_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Scope:
    """What locations in a directory are relative to, and how errors name it."""

    container: ContainerId
    table: U64
    what: str


def _blocks(found: list[NDArray[Any]], depth_max: int, other_bytes: int, what: str) -> BlockTable:
    """Return the block table; `other_bytes` of the container are not its directory: header, blocks and footer."""
    stored, raw, codecs, kinds, depths = found
    _expect(_below(raw, BLOCK_RAW_BYTES_MAX + 1), what, "a block is too large")
    _expect(_below(codecs, ZSTD + 1) and _below(kinds, len(KINDS)), what, "a block of unknown kind")
    _expect(_below(depths, depth_max + 1), what, "a block deeper than its container allows")
    records = stored.astype(np.int64) + BLOCK.size
    _expect(HEADER.size + int(records.sum()) + FOOTER.size == other_bytes, what, "its blocks do not fill the container")
    offsets = HEADER.size + BLOCK.size + np.cumsum(records) - records
    return BlockTable(offsets.astype(np.uint64), stored, raw, codecs, kinds, depths)


def _chunks(
    names28: U8, found: list[NDArray[Any]], deltas_found: list[NDArray[Any]], blocks: BlockTable, scope: _Scope
) -> ChunkTable:
    what, count = scope.what, len(names28)
    lengths, block_numbers = found[0], found[1].astype(np.uint32)
    delta_encoded, base_refs, base_steps, delta_ranks = deltas_found
    _expect(_below(block_numbers, len(blocks)), what, "a chunk names a block that is not there")
    _expect(_below(lengths - np.uint32(1), SEGMENT_BYTES_MAX), what, "a chunk is empty, or longer than a segment")
    depths = blocks.depths[block_numbers]
    deltas = np.flatnonzero(depths)
    _expect(len(deltas) == len(delta_encoded), what, "delta counts differ")
    encoded = lengths.copy()
    encoded[deltas] = delta_encoded
    filled = np.bincount(block_numbers, weights=encoded, minlength=len(blocks)) if count else np.zeros(len(blocks))
    _expect(bool(np.array_equal(filled, blocks.raw)), what, "chunks do not fill their blocks")
    refs, ordinals = runs.expand(base_refs, base_steps, np.ones(len(base_refs), np.uint32), ROWS_MAX, what)
    _expect(not np.any(refs == ZERO), what, "a delta against the zero chunk")
    own = refs == SELF
    _expect(_below(ordinals[own], count), what, "a base that is not there")
    _expect(not np.any(depths[ordinals[own]] >= depths[deltas[own]]), what, "a base is not shallower than its delta")
    bases, ranks = Locations.empty(count), np.zeros(count, np.uint8)
    bases.containers[deltas] = runs.from_table(refs, scope.table, scope.container, what)
    bases.ordinals[deltas] = ordinals
    ranks[deltas] = delta_ranks
    names = np.empty((count, NAME_BYTES), np.uint8)
    names[:, :28] = names28
    names[:, 28:] = lengths.astype("<u4").view(np.uint8).reshape(count, 4)
    positions = positions_in_blocks(block_numbers, encoded)
    return ChunkTable(names, lengths, block_numbers, positions, encoded, depths, bases, ranks)


def _segments(
    found: list[NDArray[Any]], run_columns: list[NDArray[Any]], chunk_count: int, scope: _Scope
) -> SegmentTable:
    what = scope.what
    counts, sketches = found
    run_refs, steps, run_counts = run_columns
    refs, ordinals = runs.expand(run_refs, steps, run_counts, ROWS_MAX, what)
    _expect(int(counts.sum(dtype=np.uint64)) == len(ordinals), what, "recipes do not add up")
    _expect(_below(ordinals[refs == SELF], chunk_count), what, "a recipe names a chunk that is not there")
    _expect(_below(ordinals[refs == ZERO], SEGMENT_BYTES_MAX + 1), what, "a hole longer than a segment")
    bounds = np.zeros(len(counts) + 1, np.uint32)
    np.cumsum(counts, out=bounds[1:])
    return SegmentTable(bounds, sketches, runs.located(refs, ordinals, scope.table, scope.container, what))


def _below(values: NDArray[Any], limit: int) -> bool:
    """Return whether all of the values are below the limit."""
    return not len(values) or int(values.max()) < limit


def _expect(holds: bool, what: str, problem: str) -> None:
    if not holds:
        raise Corrupt(f"{what}: directory: {problem}")


def decode_container(data: bytes | memoryview, what: str) -> Directory:
    """Return the directory of a whole container held in memory, after checking header and footer."""
    view = memoryview(data)
    if len(view) < HEADER.size + FOOTER.size:
        raise Corrupt(f"{what}: {len(view)} bytes are too few for a container")
    if len(view) > CONTAINER_BYTES_MAX:
        raise BadInput(f"{what}: {len(view)} bytes; a container has at most {CONTAINER_BYTES_MAX}")
    # The footer first: its check covers the header, so that a flipped bit is not taken for a newer format.
    offset, size, check = footer_of(view, view[-FOOTER.size :], len(view), what)
    container, domain = container_id_of(view, what)
    return decode_directory(view[offset : offset + size], container, domain, len(view), check, what)
