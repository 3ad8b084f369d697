"""Container. Invariant: every byte belongs to exactly one checksummed record; a reader needs nothing but the file.

    0        4     6      8              16        32
    | NKC1 | ver | flags | container id | domain  | block ... | directory | footer |

Chunks are numbered in stream order, across blocks; deltas and patch blocks name bases by (container, ordinal), and
segment recipes name their chunks the same way, so that a fingerprint is written once in the life of a chunk.
docs/formats/container.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import BadInput, Corrupt, FormatTooNew
from nearkin.formats import columns, runs
from nearkin.kernels.frames import FrameEncoder, decode_frame
from nearkin.limits import DEPTH_MAX, SEGMENT_BYTES_MAX
from nearkin.records import (
    CONTAINER_ID_MIN,
    NAME_BYTES,
    SELF,
    U8,
    U32,
    U64,
    ZERO,
    Bools,
    ContainerId,
    Locations,
    distinct,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 4
"""4 is rewritten: of what it had some is gone. 3 has patch blocks. 2, which had none, is still read."""
VERSION_WHOLE = 3
"""What a container is written as whose chunks are all there, so that an older Nearkin reads it."""
VERSION_MIN = 2
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
RAW, XDELTA3, PATCH = 0, 1, 2
"""What a block's bytes are: chunks as they came; VCDIFF deltas, one after another; chunks as they came, in a frame that
refers to the bytes of bases, which are its prefix."""
KINDS = ("raw", "xdelta3", "patch")
PREFIX_BYTES_MAX = 32 * 1024 * 1024
"""Bases of one patch block, together."""
LOST = b"NKBL"
"""Begins a block whose bytes are lost."""
LOCALITY_RANK = 255
"""Of a delta whose base no super-feature found: it lay beside the chunks around it when those were stored."""
_MAGIC_2, _MAGIC, _MAGIC_REST = b"NKD1", b"NKD2", b"NKD3"
_NAMES = Struct("<I")

_BLOCK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "u1", "u1", "u1")]
_CHUNK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u2")]
_DELTA_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4", "u1")]
_REF_COLUMNS = [np.dtype("<u8")]
_PATCHED_COLUMNS = [np.dtype(t) for t in ("<u4", "u1")]
_PREFIX_COLUMNS = [np.dtype("<u4")]
_SEGMENT_COLUMNS = [np.dtype(t) for t in ("<u4", "u1")]
_RUN_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4")]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """How the chunks of one container are kept; all arrays have one row a chunk, in stream order.

    `blocks` says in which block the encoding lies, `positions` and `encoded` where in the decoded block (bytes).
    `bases` is (0, 0) for a chunk at depth 0; of a chunk in a patch block it is the one that gives most of its bytes.
    `ranks` says which super-feature found that base, or LOCALITY_RANK. A chunk of length 0 is gone: all of it is zero.
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

    @property
    def there(self) -> Bools:
        """Return which chunks are not gone."""
        there: Bools = self.lengths > 0
        return there


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one container: `offsets` uint64 and `stored` uint32 bytes of the payload, `raw` bytes decoded.

    A block of no bytes is gone; its number is never given to another.
    """

    offsets: U64
    stored: U32
    raw: U32
    codecs: U8
    kinds: U8
    depths: U8

    def __len__(self) -> int:
        return len(self.stored)


@dataclass(frozen=True, slots=True)
class PrefixTable:
    """The bases of patch blocks, in the order in which their bytes are the prefix: block b has rows bounds[b] to
    bounds[b + 1] of `bases`, none if it is of another kind.
    """

    bounds: U32
    bases: Locations

    @staticmethod
    def empty(blocks: int) -> PrefixTable:
        """Return the table of `blocks` blocks that lean on nothing."""
        return PrefixTable(np.zeros(blocks + 1, np.uint32), Locations.empty())

    def of(self, block: int) -> Locations:
        """Return the bases of one block."""
        return self.bases.take(slice(int(self.bounds[block]), int(self.bounds[block + 1])))


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Segment recipes: segment j is rows bounds[j] .. bounds[j + 1] of `chunks`; `sketches` how each was sketched."""

    bounds: U32
    sketches: U8
    chunks: Locations

    def __len__(self) -> int:
        return len(self.sketches)


CHUNK_ROW = np.dtype(
    [
        ("names", "u1", NAME_BYTES),
        ("base_containers", "<u8"),
        ("base_ordinals", "<u4"),
        ("lengths", "<u4"),
        ("encoded", "<u4"),
        ("blocks", "<u4"),
        ("positions", "<u4"),
        ("depths", "u1"),
        ("ranks", "u1"),
        ("kinds", "u1"),
    ]
)
"""How one chunk is kept, all of it side by side: a reader takes rows at random, and each costs one cache line."""


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
    prefixes: PrefixTable
    container_bytes: int
    directory_bytes: int
    recipe_bytes: int
    _rows: list[NDArray[np.void]] = field(default_factory=list, repr=False, compare=False)

    @property
    def memory_bytes(self) -> int:
        """Return about how much memory the decoded tables take."""
        rows = len(self.segments.chunks) + len(self.prefixes.bases)
        chunk_bytes = NAME_BYTES + 30 + CHUNK_ROW.itemsize
        return len(self.chunks) * chunk_bytes + rows * 12 + len(self.blocks) * 28 + 512

    @property
    def rows(self) -> NDArray[np.void]:
        """Return CHUNK_ROW[chunks]: the chunk table, and the kind of each chunk's block."""
        if not self._rows:
            chunks, rows = self.chunks, np.empty(len(self.chunks), CHUNK_ROW)
            rows["names"] = chunks.names
            rows["base_containers"], rows["base_ordinals"] = chunks.bases.containers, chunks.bases.ordinals
            for name in ("lengths", "encoded", "blocks", "positions", "depths", "ranks"):
                rows[name] = getattr(chunks, name)
            rows["kinds"] = self.blocks.kinds[chunks.blocks]
            self._rows.append(rows)
        return self._rows[0]

    def leans_on(self) -> list[int]:
        """Return the other containers in which bases of this one lie, ascending."""
        bases = np.concatenate([self.chunks.bases.containers, self.prefixes.bases.containers])
        return [int(base) for base in distinct(bases) if base not in (0, self.container)]


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


def encode_block(
    raw: U8, kind: int, depth: int, encoder: FrameEncoder, options: Mapping[int, int] | None = None
) -> EncodedBlock:
    """Return `raw` compressed, or as it is where that is not smaller. Decoded and compared before it is kept (I7).

    `options` are those of zstd for this block, None: the encoder's. Raises Corrupt when the decoded bytes differ:
    memory or the library failed.
    """
    frame = encoder.encode(raw, None, options)
    if len(frame) < len(raw):
        return _framed(raw, ZSTD, kind, depth, frame)
    return _framed(raw, STORED, kind, depth, raw.tobytes())


def encode_patch(
    raw: U8, prefix: Buffer, depth: int, encoder: FrameEncoder, options: Mapping[int, int]
) -> EncodedBlock:
    """Return `raw` as one frame that refers to `prefix`, 8 bytes at least; else as `encode_block`.

    `options` are those of zstd for this block.
    """
    return _framed(raw, ZSTD, PATCH, depth, encoder.encode(raw, prefix, options))


def _framed(raw: U8, codec: int, kind: int, depth: int, payload: bytes | memoryview) -> EncodedBlock:
    fields = (b"NKB1", codec, kind, depth, 0, len(raw), len(payload))
    check = columns.check_bytes(BLOCK.pack(*fields, b"")[:-8], payload)
    return EncodedBlock(BLOCK.pack(*fields, check), payload, len(raw), codec, kind, depth)


def lost_block(raw_bytes: int, was: bytes) -> EncodedBlock:
    """Return what stands for chunks whose bytes are lost, `raw_bytes` together: every reader refuses it.

    `was` is the broken record that they lay in, kept as it was found; of a block that was lost before, what that kept.
    """
    kept = was[BLOCK.size :] if was[:4] == LOST else was
    return EncodedBlock(BLOCK.pack(LOST, STORED, RAW, 0, 0, raw_bytes, len(kept), b""), kept, raw_bytes, STORED, RAW, 0)


def _new(size_bytes: int) -> U8:
    return np.empty(size_bytes, np.uint8)


def kind_of(record: bytes | memoryview) -> int:
    """Return the kind that a block's header gives, unchecked."""
    return memoryview(record)[5] if len(record) > 5 else RAW


def decode_block(
    record: bytes | memoryview, what: str, prefix: Buffer | None = None, take: Callable[[int], U8] = _new
) -> U8:
    """Return the decoded bytes of one block record (header and payload). Raises Corrupt, naming `what`.

    `prefix`: the bytes of a patch block's bases; None checks the block and returns no bytes of it. `take` returns room
    for so many bytes.
    """
    view = memoryview(record)
    try:
        magic, codec, kind, _depth, reserved, raw_bytes, stored_bytes, check = BLOCK.unpack_from(view)
    except struct.error as err:
        raise Corrupt(f"{what}: cut short") from err
    payload = view[BLOCK.size :]
    if magic == LOST:
        raise Corrupt(f"{what}: its bytes are lost: put the same content again, or run `nearkin repair` with a copy")
    if magic != b"NKB1" or len(payload) != stored_bytes or raw_bytes > BLOCK_RAW_BYTES_MAX:
        raise Corrupt(f"{what}: not a block of {stored_bytes} bytes")
    if columns.check_bytes(view[: BLOCK.size - 8], payload) != check:
        raise Corrupt(f"{what}: checksum does not agree")
    if reserved or kind >= len(KINDS) or codec > ZSTD:
        raise FormatTooNew(
            f"{what}: compression {codec}, kind {kind}, flags {reserved}: unknown to this Nearkin; upgrade"
        )
    if kind == PATCH:
        if codec != ZSTD:
            raise Corrupt(f"{what}: a patch block that is not compressed")
        if prefix is None:
            return np.zeros(0, np.uint8)
        decoded = take(raw_bytes)
        decode_frame(payload, decoded, what, prefix)
        return decoded
    if codec == STORED:
        if raw_bytes != stored_bytes:
            raise Corrupt(f"{what}: stored as {stored_bytes} bytes, announced as {raw_bytes}")
        return np.frombuffer(payload, np.uint8)
    decoded = take(raw_bytes)
    decode_frame(payload, decoded, what)
    return decoded


def positions_in_blocks(blocks: U32, encoded: U32) -> U32:
    """Return where in its decoded block each chunk's encoding starts, bytes: chunks of a block lie in stream order."""
    return runs.group_totals(blocks, encoded.astype(np.int64)).astype(np.uint32)


def encode_container(
    container: ContainerId,
    domain: bytes,
    depth_max: int,
    sketch_names: Sequence[str],
    blocks: Sequence[EncodedBlock | None],
    chunks: ChunkTable,
    segments: SegmentTable,
    prefixes: PrefixTable | None = None,
) -> tuple[bytes, int, int]:
    """Return (the container, its directory's bytes, of these the recipes' bytes). A block that is None is gone."""
    whole = bool(chunks.there.all()) and None not in blocks
    version = VERSION_WHOLE if whole else VERSION
    parts: list[bytes | memoryview] = [HEADER.pack(b"NKC1", version, 0, container, domain)]
    for block in blocks:
        if block is not None:
            parts += [block.header, block.payload]
    prefixes = prefixes or PrefixTable.empty(len(blocks))
    directory, recipe_bytes = _encode_directory(
        container, depth_max, sketch_names, blocks, chunks, segments, prefixes, whole=whole
    )
    offset = sum(len(part) for part in parts)
    lead = FOOTER.pack(offset, len(directory), columns.check_bytes(directory), b"", b"")[:20]
    frame_check = columns.check_bytes(parts[0], lead)
    data = b"".join([*parts, directory, lead, frame_check, b"NKCF"])
    return data, len(directory), recipe_bytes


def _encode_directory(
    container: ContainerId,
    depth_max: int,
    sketch_names: Sequence[str],
    blocks: Sequence[EncodedBlock | None],
    chunks: ChunkTable,
    segments: SegmentTable,
    prefixes: PrefixTable,
    *,
    whole: bool,
) -> tuple[bytes, int]:
    kinds = np.array([b.kind if b else RAW for b in blocks], np.uint8)
    of_chunks, there = kinds[chunks.blocks], chunks.there
    deltas, patched = np.flatnonzero(there & (of_chunks == XDELTA3)), np.flatnonzero(there & (of_chunks == PATCH))
    bases = chunks.bases.take(deltas)
    table, refs = runs.container_table(
        np.concatenate([bases.containers, prefixes.bases.containers, segments.chunks.containers]), container
    )
    base_refs, prefix_refs, chunk_refs = np.split(refs, [len(deltas), len(deltas) + len(prefixes.bases)])
    # One run a base: each written as the step from the base before it in the same container.
    base_steps = runs.compress(base_refs, bases.ordinals, _singles(deltas))[1]
    prefix_runs = runs.compress(prefix_refs, prefixes.bases.ordinals, prefixes.bounds)
    # In the same way each chunk's base by its place in the prefix, from that of the chunk before it in its block.
    places = _places_in_prefix(chunks, patched, prefixes)
    place_steps = runs.compress(chunks.blocks[patched] + np.uint32(2), places, _singles(patched))[1]
    run_refs, steps, counts, _ = runs.compress(chunk_refs, segments.chunks.ordinals, segments.bounds)
    names = b"".join([len(name.encode()).to_bytes(2, "little") + name.encode() for name in sketch_names])
    recipes = columns.pack([np.diff(segments.bounds).astype("<u4"), segments.sketches]) + columns.pack(
        [run_refs, steps, counts]
    )
    magic = _MAGIC if whole else _MAGIC_REST
    head = DIRECTORY.pack(magic, len(blocks), len(chunks), len(segments), depth_max, len(sketch_names))
    if not whole:
        head += _NAMES.pack(int(np.count_nonzero(there)))
    rest = columns.pack(
        [
            np.array([b.stored_bytes if b else 0 for b in blocks], "<u4"),
            np.array([b.raw_bytes if b else 0 for b in blocks], "<u4"),
            np.array([b.codec if b else 0 for b in blocks], "u1"),
            kinds,
            np.array([b.depth if b else 0 for b in blocks], "u1"),
        ]
    )
    rest += columns.pack([chunks.lengths.astype("<u4"), chunks.blocks.astype("<u2")])
    rest += columns.pack([chunks.encoded[deltas], base_refs, base_steps, chunks.ranks[deltas]])
    rest += columns.pack([place_steps, chunks.ranks[patched]])
    rest += columns.pack([np.diff(prefixes.bounds)[kinds == PATCH].astype("<u4")])
    rest += columns.pack(list(prefix_runs[:3]))
    rest += columns.pack([table.astype("<u8")])
    return head + names + chunks.names[there, :28].tobytes() + rest + recipes, len(recipes)


def _singles(rows: NDArray[np.intp]) -> U32:
    return np.arange(len(rows) + 1, dtype=np.uint32)


_PLACE = np.dtype([("block", "<u4"), ("container", "<u8"), ("ordinal", "<u4")])


def _places_in_prefix(chunks: ChunkTable, patched: NDArray[np.intp], prefixes: PrefixTable) -> U32:
    """Return where in its block's prefix the base of each patched chunk stands. Raises BadInput where it does not."""
    counts = np.diff(prefixes.bounds)
    rows = np.empty(len(prefixes.bases), _PLACE)
    rows["block"] = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    rows["container"], rows["ordinal"] = prefixes.bases.containers, prefixes.bases.ordinals
    wanted = np.empty(len(patched), _PLACE)
    wanted["block"] = chunks.blocks[patched]
    wanted["container"], wanted["ordinal"] = chunks.bases.containers[patched], chunks.bases.ordinals[patched]
    order = np.argsort(rows, order=("block", "container", "ordinal"))
    at = np.searchsorted(rows[order], wanted)
    if len(wanted) and (not len(rows) or np.any(rows[order[np.minimum(at, len(rows) - 1)]] != wanted)):
        raise BadInput("a chunk's base is not in the prefix of its block")
    found = order[np.minimum(at, max(0, len(rows) - 1))] if len(wanted) else np.zeros(0, np.intp)
    places: U32 = (found - prefixes.bounds[wanted["block"]]).astype(np.uint32)
    return places


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
    if version < VERSION_MIN or container < CONTAINER_ID_MIN:
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
    if (
        magic not in (_MAGIC, _MAGIC_2, _MAGIC_REST)
        or sketch_count > SKETCHES_MAX
        or depth_max > DEPTH_MAX
        or chunk_count > ROWS_MAX
    ):
        raise Corrupt(f"{what}: not a directory")
    position, name_count = DIRECTORY.size, chunk_count
    if magic == _MAGIC_REST:
        (name_count,) = _NAMES.unpack_from(view, position)
        position += _NAMES.size
        _expect(name_count <= chunk_count, what, "more names than chunks")
    sketch_names: list[str] = []
    for _ in range(sketch_count):
        length = int.from_bytes(view[position : position + 2], "little")
        sketch_names.append(str(view[position + 2 : position + 2 + length], "utf-8"))
        position += 2 + length
    names28 = np.frombuffer(view, np.uint8, name_count * 28, position).reshape(name_count, 28)
    position += name_count * 28

    def take(dtypes: list[np.dtype[Any]], rows_max: int) -> list[NDArray[Any]]:
        nonlocal position
        found, used = columns.unpack(view[position:], dtypes, rows_max, what)
        position += used
        return found

    block_columns = take(_BLOCK_COLUMNS, BLOCKS_MAX)
    chunk_columns = take(_CHUNK_COLUMNS, ROWS_MAX)
    delta_columns = take(_DELTA_COLUMNS, ROWS_MAX)
    patched_columns = [np.zeros(0, dtype) for dtype in _PATCHED_COLUMNS]
    prefix_counts, prefix_runs = np.zeros(0, np.uint32), [np.zeros(0, dtype) for dtype in _RUN_COLUMNS]
    if magic != _MAGIC_2:
        patched_columns = take(_PATCHED_COLUMNS, ROWS_MAX)
        (prefix_counts,) = take(_PREFIX_COLUMNS, BLOCKS_MAX)
        prefix_runs = take(_RUN_COLUMNS, ROWS_MAX)
    (table,) = take(_REF_COLUMNS, runs.TABLE_MAX)
    recipe_start = position
    segment_columns = take(_SEGMENT_COLUMNS, ROWS_MAX)
    run_columns = take(_RUN_COLUMNS, ROWS_MAX)
    _expect(position == len(view), what, "bytes left over")
    found = len(block_columns[0]), len(chunk_columns[0]), len(segment_columns[0])
    _expect(found == (block_count, chunk_count, segment_count), what, "its tables have other rows than its head says")
    blocks = _blocks(block_columns, depth_max, container_bytes - len(view), what, whole=magic != _MAGIC_REST)
    _expect(magic != _MAGIC_2 or _below(blocks.kinds, PATCH), what, "a patch block in a directory of an older format")
    scope = _Scope(container, table, what)
    prefixes = _prefixes(prefix_counts, prefix_runs, chunk_count, blocks, scope)
    chunks = _chunks(names28, chunk_columns, delta_columns, patched_columns, blocks, prefixes, scope)
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
        prefixes,
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


def _blocks(found: list[NDArray[Any]], depth_max: int, other_bytes: int, what: str, *, whole: bool) -> BlockTable:
    """Return the block table; `other_bytes` of the container are not its directory: header, blocks and footer."""
    stored, raw, codecs, kinds, depths = found
    _expect(_below(raw, BLOCK_RAW_BYTES_MAX + 1), what, "a block is too large")
    _expect(_below(codecs, ZSTD + 1) and _below(kinds, len(KINDS)), what, "a block of unknown kind")
    _expect(_below(depths, depth_max + 1), what, "a block deeper than its container allows")
    _expect(bool(np.array_equal(kinds == RAW, depths == 0)), what, "a block whose depth its kind does not have")
    gone = np.zeros(len(raw), np.bool_) if whole else raw == 0
    _expect(not np.any(stored[gone]) and not np.any(kinds[gone] | codecs[gone]), what, "a block that is half gone")
    records = np.where(gone, 0, stored.astype(np.int64) + BLOCK.size)
    _expect(HEADER.size + int(records.sum()) + FOOTER.size == other_bytes, what, "its blocks do not fill the container")
    offsets = HEADER.size + BLOCK.size + np.cumsum(records) - records
    return BlockTable(offsets.astype(np.uint64), stored, raw, codecs, kinds, depths)


def _prefixes(
    counts: U32, found: list[NDArray[Any]], chunk_count: int, blocks: BlockTable, scope: _Scope
) -> PrefixTable:
    what = scope.what
    patch = blocks.kinds == PATCH
    _expect(len(counts) == np.count_nonzero(patch), what, "prefix counts differ from its patch blocks")
    _expect(not len(counts) or int(counts.min()) > 0, what, "a patch block without bases")
    run_refs, steps, run_counts = found
    refs, ordinals = runs.expand(run_refs, steps, run_counts, ROWS_MAX, what)
    _expect(int(counts.sum(dtype=np.uint64)) == len(ordinals), what, "prefixes do not add up")
    _expect(not np.any(refs == ZERO), what, "the zero chunk as a base")
    _expect(_below(ordinals[refs == SELF], chunk_count), what, "a base that is not there")
    bounds = np.zeros(len(blocks) + 1, np.uint32)
    bounds[1:][patch] = counts
    np.cumsum(bounds, out=bounds)
    return PrefixTable(bounds, runs.located(refs, ordinals, scope.table, scope.container, what))


def _chunks(
    names28: U8,
    found: list[NDArray[Any]],
    deltas_found: list[NDArray[Any]],
    patched_found: list[NDArray[Any]],
    blocks: BlockTable,
    prefixes: PrefixTable,
    scope: _Scope,
) -> ChunkTable:
    what, count = scope.what, len(found[0])
    lengths, block_numbers = found[0], found[1].astype(np.uint32)
    there = lengths > 0
    delta_encoded, base_refs, base_steps, delta_ranks = deltas_found
    _expect(_below(block_numbers, len(blocks)), what, "a chunk names a block that is not there")
    fine = len(names28) == np.count_nonzero(there) and _below(lengths, SEGMENT_BYTES_MAX + 1)
    _expect(fine, what, "a chunk is empty, or longer than a segment")
    _expect(not np.any(block_numbers[~there]), what, "a chunk that is gone, in a block")
    depths: U8 = np.where(there, blocks.depths[block_numbers], np.uint8(0))
    kinds = blocks.kinds[block_numbers]
    deltas, patched = np.flatnonzero(there & (kinds == XDELTA3)), np.flatnonzero(there & (kinds == PATCH))
    _expect(len(deltas) == len(delta_encoded), what, "delta counts differ")
    _expect(len(patched) == len(patched_found[0]), what, "counts of patched chunks differ")
    encoded = lengths.copy()
    encoded[deltas] = delta_encoded
    filled = np.bincount(block_numbers, weights=encoded, minlength=len(blocks)) if count else np.zeros(len(blocks))
    _expect(bool(np.array_equal(filled, blocks.raw)), what, "chunks do not fill their blocks")
    refs, ordinals = runs.expand(base_refs, base_steps, np.ones(len(base_refs), np.uint32), ROWS_MAX, what)
    _expect(not np.any(refs == ZERO), what, "a delta against the zero chunk")
    _expect(_below(ordinals[refs == SELF], count), what, "a base that is not there")
    bases, ranks = Locations.empty(count), np.zeros(count, np.uint8)
    bases.containers[deltas] = runs.from_table(refs, scope.table, scope.container, what)
    bases.ordinals[deltas] = ordinals
    ranks[deltas], ranks[patched] = delta_ranks, patched_found[1]
    rows = _rows_of_prefix(block_numbers[patched], patched_found[0], prefixes, what)
    bases.containers[patched], bases.ordinals[patched] = prefixes.bases.containers[rows], prefixes.bases.ordinals[rows]
    own = np.concatenate([bases.take(deltas).ordinals, prefixes.bases.ordinals])
    own = own[np.concatenate([bases.containers[deltas], prefixes.bases.containers]) == np.uint64(scope.container)]
    _expect(bool(there[own].all()), what, "a base that is gone")
    _shallower(bases, depths[deltas], deltas, depths, scope)
    of_row = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
    _shallower(prefixes.bases, blocks.depths[of_row], np.arange(len(of_row)), depths, scope)
    names = np.zeros((count, NAME_BYTES), np.uint8)
    names[there, :28] = names28
    names[:, 28:] = lengths.astype("<u4").view(np.uint8).reshape(count, 4)
    positions = positions_in_blocks(block_numbers, encoded)
    return ChunkTable(names, lengths, block_numbers, positions, encoded, depths, bases, ranks)


def _rows_of_prefix(blocks: U32, steps: U32, prefixes: PrefixTable, what: str) -> NDArray[np.int64]:
    """Return which row of the prefixes each patched chunk's base is."""
    _, places = runs.expand(blocks + np.uint32(2), steps, np.ones(len(steps), np.uint32), ROWS_MAX, what)
    rows = prefixes.bounds[blocks].astype(np.int64) + places
    _expect(not np.any(rows >= prefixes.bounds[blocks + 1]), what, "a base beyond its block's prefix")
    return rows


def _shallower(bases: Locations, depths: U8, rows: NDArray[np.intp], chunk_depths: U8, scope: _Scope) -> None:
    """Refuse bases of the container's own, in `rows`, that are no shallower than what leans on them."""
    own = bases.containers[rows] == np.uint64(scope.container)
    below = chunk_depths[bases.ordinals[rows[own]]]
    _expect(not np.any(below >= depths[own]), scope.what, "a base is not shallower than its delta")


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
