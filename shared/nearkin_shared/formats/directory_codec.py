"""Encode and decode the directory of a container.

A head, the chunks' names, then tables as packed columns (docs/internals/formats/container.md).

Invariant: an inconsistent directory is refused before any value is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats import columns, location_runs
from nearkin_shared.formats.block import EncodedBlock
from nearkin_shared.formats.container_layout import (
    BLOCK,
    BLOCK_RAW_BYTES_MAX,
    BLOCKS_MAX,
    DIRECTORY,
    FOOTER,
    HEADER,
    KINDS,
    MERGED,
    ORDINARY,
    PATCH,
    PREFIX_BASES_MAX,
    RAW,
    REFERENCE,
    ROLES,
    ROWS_MAX,
    SKETCHES_MAX,
    XDELTA3,
    ZSTD,
)
from nearkin_shared.formats.directory import (
    BlockTable,
    ChunkTable,
    Directory,
    PrefixTable,
    SegmentTable,
    positions_in_blocks,
)
from nearkin_shared.limits import DEPTH_MAX, SEGMENT_BYTES_MAX
from nearkin_shared.types import NAME_BYTES, SELF, U8, U32, U64, ZERO, Bools, ContainerId, Locations, bounds_of
from nearkin_shared.utils.frozen import frozen

_MAGIC_2, _MAGIC_WHOLE, _MAGIC_4, _MAGIC = b"NKD1", b"NKD2", b"NKD3", b"NKD4"
_NAMES = Struct("<I")

_BLOCK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "u1", "u1", "u1")]
_ROLE_COLUMNS = [np.dtype("u1")]
_CHUNK_COLUMNS = [np.dtype(t) for t in ("<u4", "<u2")]
_DELTA_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4", "u1")]
_REF_COLUMNS = [np.dtype("<u8")]
_PATCHED_COLUMNS = [np.dtype(t) for t in ("<u4", "u1")]
_PREFIX_COLUMNS = [np.dtype("<u4")]
_SEGMENT_COLUMNS = [np.dtype(t) for t in ("<u4", "u1")]
_RUN_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4", "<u4")]


def encode_directory(
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
    """Encode a directory; return it and the size of its recipes, bytes.

    `whole`: no chunk or block of the container was removed, and all blocks are ordinary.

    Raises: BadInput for a chunk in a patch block whose base is not in that block's prefix.
    """
    kinds = np.array([b.kind if b else RAW for b in blocks], np.uint8)
    of_chunks, present = kinds[chunks.blocks], chunks.there
    deltas, patched = np.flatnonzero(present & (of_chunks == XDELTA3)), np.flatnonzero(present & (of_chunks == PATCH))
    bases = chunks.bases.take(deltas)
    table, refs = location_runs.container_table(
        np.concatenate([bases.containers, prefixes.bases.containers, segments.chunks.containers]), container
    )
    base_refs, prefix_refs, chunk_refs = np.split(refs, [len(deltas), len(deltas) + len(prefixes.bases)])
    # One run a base: each is written as the step from the previous base in the same container.
    base_steps = location_runs.compress(base_refs, bases.ordinals, _single_bounds(deltas))[1]
    prefix_runs = location_runs.compress(prefix_refs, prefixes.bases.ordinals, prefixes.bounds)
    # Likewise the position of each chunk's base in the prefix, as the step from the previous chunk of its block.
    positions = _prefix_positions(chunks, patched, prefixes)
    position_steps = location_runs.compress(chunks.blocks[patched] + np.uint32(2), positions, _single_bounds(patched))[
        1
    ]
    run_refs, steps, counts, _ = location_runs.compress(chunk_refs, segments.chunks.ordinals, segments.bounds)
    names = b"".join([len(name.encode()).to_bytes(2, "little") + name.encode() for name in sketch_names])
    recipes = columns.pack([np.diff(segments.bounds).astype("<u4"), segments.sketches]) + columns.pack(
        [run_refs, steps, counts]
    )
    magic = _MAGIC_WHOLE if whole else _MAGIC
    head = DIRECTORY.pack(magic, len(blocks), len(chunks), len(segments), depth_max, len(sketch_names))
    if not whole:
        head += _NAMES.pack(int(np.count_nonzero(present)))
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
    rest += columns.pack([position_steps, chunks.ranks[patched]])
    rest += columns.pack([np.diff(prefixes.bounds)[kinds == PATCH].astype("<u4")])
    rest += columns.pack(list(prefix_runs[:3]))
    rest += columns.pack([table.astype("<u8")])
    if not whole:
        rest += columns.pack([np.array([b.role if b else ORDINARY for b in blocks], "u1")])
    return head + names + chunks.names[present, :28].tobytes() + rest + recipes, len(recipes)


def _single_bounds(rows: NDArray[np.intp]) -> U32:
    return np.arange(len(rows) + 1, dtype=np.uint32)


def _prefix_positions(chunks: ChunkTable, patched: NDArray[np.intp], prefixes: PrefixTable) -> U32:
    """Return the position of each patched chunk's base in its block's prefix.

    Raises BadInput if it is not in the prefix.
    """
    bounds = prefixes.bounds.astype(np.int64)
    blocks, bases = chunks.blocks[patched], chunks.bases.take(patched)
    counts = np.diff(bounds)
    containers = np.concatenate([prefixes.bases.containers, bases.containers])
    of = np.concatenate([np.repeat(np.arange(len(counts)), counts), blocks]).astype(np.uint64)
    ordinals = np.concatenate([prefixes.bases.ordinals, bases.ordinals]).astype(np.uint64)
    if len(ordinals) and int(ordinals.max()) >= ROWS_MAX:
        raise BadInput(f"a base is chunk {int(ordinals.max())} of its container: want them below {ROWS_MAX}")
    # One number for all three values: comparing rows of a structured array takes ten times as long.
    _, numbers = np.unique(containers, return_inverse=True)
    names = (of << np.uint64(_NUMBER_BITS * 2)) | (numbers.astype(np.uint64) << np.uint64(_NUMBER_BITS)) | ordinals
    rows, base_names = names[: len(prefixes.bases)], names[len(prefixes.bases) :]
    order = np.argsort(rows, kind="stable")
    found_at = np.minimum(np.searchsorted(rows[order], base_names), max(0, len(rows) - 1))
    if len(base_names) and (not len(rows) or np.any(rows[order[found_at]] != base_names)):
        raise BadInput("a chunk's base is not in the prefix of its block")
    found = order[found_at] if len(base_names) else np.zeros(0, np.intp)
    positions: U32 = (found - bounds[blocks]).astype(np.uint32)
    return positions


_NUMBER_BITS = 24
"""Bits of an ordinal, and of the number of a container in the prefixes: there are no more containers than bases."""
assert ROWS_MAX <= 1 << _NUMBER_BITS


def decode_directory(
    data: bytes | memoryview, container: ContainerId, domain: bytes, container_bytes: int, check: bytes, what: str
) -> Directory:
    """Decode a directory. Raises Corrupt, with `what` and the part, if it is inconsistent."""
    view = memoryview(data)
    if columns.check_bytes(view) != check:
        raise Corrupt(f"{what}: directory's checksum does not agree")
    try:
        return _decode_directory(view, container, domain, container_bytes, what)
    except (struct.error, ValueError, IndexError) as err:
        raise Corrupt(f"{what}: directory does not parse: {err}") from err


def _take_sketch_names(view: memoryview, position: int, count: int) -> tuple[tuple[str, ...], int]:
    """Return `count` names from `position` on, and the position after them."""
    names = []
    for _ in range(count):
        length = int.from_bytes(view[position : position + 2], "little")
        names.append(str(view[position + 2 : position + 2 + length], "utf-8"))
        position += 2 + length
    return tuple(names), position


def _decode_directory(
    view: memoryview, container: ContainerId, domain: bytes, container_bytes: int, what: str
) -> Directory:
    magic, block_count, chunk_count, segment_count, depth_max, sketch_count = DIRECTORY.unpack_from(view)
    if (
        magic not in (_MAGIC, _MAGIC_4, _MAGIC_WHOLE, _MAGIC_2)
        or sketch_count > SKETCHES_MAX
        or depth_max > DEPTH_MAX
        or chunk_count > ROWS_MAX
    ):
        raise Corrupt(f"{what}: not a directory")
    position, name_count = DIRECTORY.size, chunk_count
    may_lack_chunks = magic in (_MAGIC, _MAGIC_4)
    if may_lack_chunks:
        (name_count,) = _NAMES.unpack_from(view, position)
        position += _NAMES.size
        _expect(name_count <= chunk_count, what, "more names than chunks")
    sketch_names, position = _take_sketch_names(view, position, sketch_count)
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
    (table,) = take(_REF_COLUMNS, location_runs.TABLE_MAX)
    role_columns = take(_ROLE_COLUMNS, BLOCKS_MAX) if magic == _MAGIC else []
    recipe_start = position
    segment_columns = take(_SEGMENT_COLUMNS, ROWS_MAX)
    run_columns = take(_RUN_COLUMNS, ROWS_MAX)
    _expect(position == len(view), what, "bytes left over")
    found = len(block_columns[0]), len(chunk_columns[0]), len(segment_columns[0])
    _expect(found == (block_count, chunk_count, segment_count), what, "its tables have other rows than its head states")
    other_bytes = container_bytes - len(view)
    blocks = _build_blocks(block_columns, role_columns, depth_max, other_bytes, what, whole=not may_lack_chunks)
    _expect(
        magic != _MAGIC_2 or _all_below(blocks.kinds, PATCH), what, "a patch block in a directory of an older format"
    )
    scope = _Scope(container, table, what)
    prefixes = _build_prefixes(prefix_counts, prefix_runs, chunk_count, blocks, scope)
    chunks = _build_chunks(names28, chunk_columns, delta_columns, patched_columns, blocks, prefixes, scope)
    segments = _build_segments(segment_columns, run_columns, chunk_count, scope)
    _expect(_all_below(segments.sketches, sketch_count), what, "a segment names an unknown sketch")
    directory_bytes, recipe_bytes = len(view), len(view) - recipe_start
    return Directory(
        container,
        domain,
        depth_max,
        sketch_names,
        blocks,
        chunks,
        segments,
        prefixes,
        container_bytes,
        directory_bytes,
        recipe_bytes,
    )


@frozen
class _Scope:
    """The context of locations in a directory, and its name in errors."""

    container: ContainerId
    table: U64
    what: str


def _build_blocks(
    found: list[NDArray[Any]],
    roles_found: list[NDArray[Any]],
    depth_max: int,
    other_bytes: int,
    what: str,
    *,
    whole: bool,
) -> BlockTable:
    """Build the block table.

    `other_bytes` of the container are header, blocks and footer.
    """
    stored, raw, codecs, kinds, depths = found
    _expect(_all_below(raw, BLOCK_RAW_BYTES_MAX + 1), what, "a block is too large")
    _expect(_all_below(codecs, ZSTD + 1) and _all_below(kinds, len(KINDS)), what, "a block of unknown kind")
    _expect(_all_below(depths, depth_max + 1), what, "a block at a depth beyond its container's maximum")
    _expect(bool(np.array_equal(kinds == RAW, depths == 0)), what, "a block whose depth its kind does not have")
    is_removed = np.zeros(len(raw), np.bool_) if whole else raw == 0
    _expect(
        not np.any(stored[is_removed]) and not np.any(kinds[is_removed] | codecs[is_removed]),
        what,
        "a block that is half gone",
    )
    roles = _build_roles(roles_found[0], kinds, is_removed, what) if roles_found else None
    records = np.where(is_removed, 0, stored.astype(np.int64) + BLOCK.size)
    _expect(HEADER.size + int(records.sum()) + FOOTER.size == other_bytes, what, "its blocks do not fill the container")
    offsets = HEADER.size + BLOCK.size + np.cumsum(records) - records
    return BlockTable(offsets.astype(np.uint64), stored, raw, codecs, kinds, depths, roles)


def _build_roles(roles: U8, kinds: U8, is_removed: Bools, what: str) -> U8:
    _expect(len(roles) == len(kinds), what, "its roles are not those of its blocks")
    _expect(_all_below(roles, len(ROLES)), what, "a block of unknown role")
    _expect(not np.any(roles[is_removed]), what, "a removed block with a role")
    _expect(not np.any(kinds[roles == MERGED] == XDELTA3), what, "a merged block of deltas")
    _expect(bool(np.all(kinds[roles == REFERENCE] == PATCH)), what, "a reference block without a prefix")
    return roles.copy()  # a view would keep the bytes of all columns


def _build_prefixes(
    counts: U32, found: list[NDArray[Any]], chunk_count: int, blocks: BlockTable, scope: _Scope
) -> PrefixTable:
    what = scope.what
    patch = blocks.kinds == PATCH
    _expect(len(counts) == np.count_nonzero(patch), what, "prefix counts differ from its patch blocks")
    _expect(not len(counts) or int(counts.min()) > 0, what, "a patch block without bases")
    _expect(_all_below(counts, PREFIX_BASES_MAX + 1), what, "a patch block of too many bases")
    run_refs, steps, run_counts = found
    refs, ordinals = location_runs.expand(run_refs, steps, run_counts, ROWS_MAX, what)
    _expect(int(counts.sum(dtype=np.uint64)) == len(ordinals), what, "prefixes do not add up")
    _expect(not np.any(refs == ZERO), what, "the zero chunk as a base")
    _expect(_all_below(ordinals[refs == SELF], chunk_count), what, "a base that is not there")
    _expect(_all_below(ordinals, ROWS_MAX), what, "a base beyond what a container has")
    bounds = np.zeros(len(blocks) + 1, np.uint32)
    bounds[1:][patch] = counts
    np.cumsum(bounds, out=bounds)
    return PrefixTable(bounds, location_runs.to_locations(refs, ordinals, scope.table, scope.container, what))


def _build_chunks(
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
    present = lengths > 0
    delta_encoded, base_refs, base_steps, delta_ranks = deltas_found
    _expect(_all_below(block_numbers, len(blocks)), what, "a chunk names a block that is not there")
    has_valid_lengths = len(names28) == np.count_nonzero(present) and _all_below(lengths, SEGMENT_BYTES_MAX + 1)
    _expect(has_valid_lengths, what, "a chunk is empty, or longer than a segment")
    _expect(not np.any(block_numbers[~present]), what, "a removed chunk in a block")
    depths: U8 = np.where(present, blocks.depths[block_numbers], np.uint8(0))
    kinds = blocks.kinds[block_numbers]
    deltas, patched = np.flatnonzero(present & (kinds == XDELTA3)), np.flatnonzero(present & (kinds == PATCH))
    _expect(len(deltas) == len(delta_encoded), what, "delta counts differ")
    _expect(len(patched) == len(patched_found[0]), what, "counts of patched chunks differ")
    encoded = lengths.copy()
    encoded[deltas] = delta_encoded
    filled = np.bincount(block_numbers, weights=encoded, minlength=len(blocks)) if count else np.zeros(len(blocks))
    _expect(bool(np.array_equal(filled, blocks.raw)), what, "chunks do not fill their blocks")
    refs, ordinals = location_runs.expand(base_refs, base_steps, np.ones(len(base_refs), np.uint32), ROWS_MAX, what)
    _expect(not np.any(refs == ZERO), what, "a delta against the zero chunk")
    _expect(_all_below(ordinals[refs == SELF], count), what, "a base that is not there")
    _expect(_all_below(ordinals, ROWS_MAX), what, "a base beyond what a container has")
    bases, ranks = Locations.empty(count), np.zeros(count, np.uint8)
    bases.containers[deltas] = location_runs.from_table(refs, scope.table, scope.container, what)
    bases.ordinals[deltas] = ordinals
    ranks[deltas], ranks[patched] = delta_ranks, patched_found[1]
    rows = _rows_of_prefix(block_numbers[patched], patched_found[0], prefixes, what)
    bases.containers[patched], bases.ordinals[patched] = prefixes.bases.containers[rows], prefixes.bases.ordinals[rows]
    own = np.concatenate([bases.take(deltas).ordinals, prefixes.bases.ordinals])
    own = own[np.concatenate([bases.containers[deltas], prefixes.bases.containers]) == np.uint64(scope.container)]
    _expect(bool(present[own].all()), what, "a base that was removed")
    _check_own_base_depths(bases, depths[deltas], deltas, depths, scope)
    of_row = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
    _check_own_base_depths(prefixes.bases, blocks.depths[of_row], np.arange(len(of_row)), depths, scope)
    names = np.zeros((count, NAME_BYTES), np.uint8)
    names[present, :28] = names28
    names[:, 28:] = lengths.astype("<u4").view(np.uint8).reshape(count, 4)
    positions = positions_in_blocks(block_numbers, encoded)
    return ChunkTable(names, lengths, block_numbers, positions, encoded, depths, bases, ranks)


def _rows_of_prefix(blocks: U32, steps: U32, prefixes: PrefixTable, what: str) -> NDArray[np.int64]:
    """Return the row in the prefix table of each patched chunk's base."""
    _, positions = location_runs.expand(blocks + np.uint32(2), steps, np.ones(len(steps), np.uint32), ROWS_MAX, what)
    rows = prefixes.bounds[blocks].astype(np.int64) + positions
    _expect(not np.any(rows >= prefixes.bounds[blocks + 1]), what, "a base beyond its block's prefix")
    return rows


def _check_own_base_depths(
    bases: Locations, depths: U8, rows: NDArray[np.intp], chunk_depths: U8, scope: _Scope
) -> None:
    """Refuse own bases, in `rows`, whose depth is not below that of their chunks."""
    own = bases.containers[rows] == np.uint64(scope.container)
    below = chunk_depths[bases.ordinals[rows[own]]]
    _expect(not np.any(below >= depths[own]), scope.what, "a base whose depth is not below its delta's")


def _build_segments(
    found: list[NDArray[Any]], run_columns: list[NDArray[Any]], chunk_count: int, scope: _Scope
) -> SegmentTable:
    what = scope.what
    counts, sketches = found
    run_refs, steps, run_counts = run_columns
    refs, ordinals = location_runs.expand(run_refs, steps, run_counts, ROWS_MAX, what)
    _expect(int(counts.sum(dtype=np.uint64)) == len(ordinals), what, "recipes do not add up")
    _expect(_all_below(counts, SEGMENT_BYTES_MAX + 1), what, "a recipe of more chunks than a segment has bytes")
    _expect(_all_below(ordinals, ROWS_MAX), what, "a recipe names a chunk beyond what a container has")
    _expect(_all_below(ordinals[refs == SELF], chunk_count), what, "a recipe names a chunk that is not there")
    _expect(_all_below(ordinals[refs == ZERO], SEGMENT_BYTES_MAX + 1), what, "a hole longer than a segment")
    sketches = sketches.copy()  # a view would keep the bytes of all columns: five a row
    return SegmentTable(
        bounds_of(counts), sketches, location_runs.to_locations(refs, ordinals, scope.table, scope.container, what)
    )


def _all_below(values: NDArray[Any], limit: int) -> bool:
    """Return whether all values are below the limit."""
    return not len(values) or int(values.max()) < limit


def _expect(holds: bool, what: str, problem: str) -> None:
    if not holds:
        raise Corrupt(f"{what}: directory: {problem}")
