"""Test hostile directories with valid checksums, as only a writer could make them.

Refused within bounds.
"""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns, container_layout, directory_codec
from nearkin_shared.formats.block import decode_block
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.directory import Directory
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.types import SELF, ZERO
from tests.support.data import samples

REFUSALS = (Corrupt, FormatTooNew)


@dataclass
class Parts:
    """A directory taken apart.

    `tables` are lists of columns as docs/internals/formats/container.md has them.
    """

    head: list[Any]
    names: list[bytes]
    chunk_names: bytes
    tables: list[list[Any]]

    def joined(self) -> bytes:
        named = b"".join(len(n).to_bytes(2, "little") + n for n in self.names)
        return (
            container_layout.DIRECTORY.pack(*self.head)
            + named
            + self.chunk_names
            + b"".join(map(columns.pack, self.tables))
        )


TABLES = [
    directory_codec._BLOCK_COLUMNS,
    directory_codec._CHUNK_COLUMNS,
    directory_codec._DELTA_COLUMNS,
    directory_codec._PATCHED_COLUMNS,
    directory_codec._PREFIX_COLUMNS,
    directory_codec._RUN_COLUMNS,
    directory_codec._REF_COLUMNS,
    directory_codec._SEGMENT_COLUMNS,
    directory_codec._RUN_COLUMNS,
]
BLOCKS, CHUNKS, DELTAS, PATCHED, PREFIXES, PREFIX_RUNS, REFS, SEGMENTS, RUNS = range(9)


def parts(make: Callable[[], bytes] = samples.small_container) -> Parts:
    data = samples.directory_of(make())
    position, names, tables = container_layout.DIRECTORY.size, [], []
    head = container_layout.DIRECTORY.unpack_from(data)
    for _ in range(head[5]):
        length = int.from_bytes(data[position : position + 2], "little")
        names.append(data[position + 2 : position + 2 + length])
        position += 2 + length
    chunk_names = data[position : position + head[2] * 28]
    position += head[2] * 28
    for dtypes in TABLES:
        found, used = columns.unpack(memoryview(data)[position:], dtypes, 1000, "t")
        tables.append([column.copy() for column in found])
        position += used
    return Parts(list(head), names, chunk_names, tables)


def read_with(changed: Parts, make: Callable[[], bytes] = samples.small_container) -> Directory:
    return samples.read_all(samples.with_directory(make(), changed.joined()))[0]


@pytest.mark.parametrize("make", [samples.small_container, samples.patch_container, samples.empty_container])
def test_parts_joined_again_are_the_same_container(make: Callable[[], bytes]) -> None:
    assert samples.with_directory(make(), parts(make).joined()) == make()


def changed(table: int, column: int, row: int, value: int) -> Callable[[Parts], None]:
    def change(p: Parts) -> None:
        p.tables[table][column][row] = value

    return change


def shortened(table: int) -> Callable[[Parts], None]:
    def change(p: Parts) -> None:
        p.tables[table] = [c[:-1] for c in p.tables[table]]

    return change


def counted(index: int, value: int | bytes) -> Callable[[Parts], None]:
    def change(p: Parts) -> None:
        p.head[index] = value

    return change


def many_of_one_recipe(p: Parts) -> None:
    p.tables[SEGMENTS][0][-1] += SEGMENT_BYTES_MAX
    more = (ZERO, 0, SEGMENT_BYTES_MAX)  # holes as long as the last one
    p.tables[RUNS] = [np.append(c, np.uint32(value)) for c, value in zip(p.tables[RUNS], more, strict=True)]


def many_bases(p: Parts) -> None:
    p.tables[PREFIXES][0][0] = 1 + container_layout.PREFIX_BASES_MAX
    p.tables[PREFIX_RUNS][2][1] = container_layout.PREFIX_BASES_MAX


def beyond(table: int) -> Callable[[Parts], None]:
    def change(p: Parts) -> None:
        refs, steps = p.tables[table][table == DELTAS :][:2]
        steps[int(np.flatnonzero(refs > ZERO)[0])] = 2 * container_layout.ROWS_MAX

    return change


WRONG = {
    "magic": counted(0, b"NKD3"),
    "magic of the format before, which had fewer tables": counted(0, b"NKD1"),
    "blocks": counted(1, 4),
    "chunks": counted(2, 7),
    "chunks, more than a file holds": counted(2, 0xFFFFFFFF),
    "segments": counted(3, 0xFFFFFFFF),
    "depth bound": counted(4, 65),
    "depth bound below a block's": counted(4, 0),
    "sketches, more than there are": counted(5, 3),
    "sketches, too many": counted(5, 257),
    "a sketch that is not UTF-8": lambda p: p.names.__setitem__(0, b"\xff\xfe"),
    "a sketch too long": lambda p: p.names.append(b"x" * 60000),
    "a block too short": changed(BLOCKS, 0, 0, 37),
    "a block too long": changed(BLOCKS, 0, 0, 0xFFFFFFFF),
    "a block's raw bytes": changed(BLOCKS, 1, 0, 401),
    "a block's raw bytes, far too many": changed(BLOCKS, 1, 0, 0xFFFFFFFF),
    "a block's codec": changed(BLOCKS, 2, 0, 2),
    "a block's kind": changed(BLOCKS, 3, 0, 2),
    "a block's depth": changed(BLOCKS, 4, 0, 3),
    "a raw block marked as deltas": changed(BLOCKS, 4, 0, 1),
    "a chunk longer than its block": changed(CHUNKS, 0, 0, 101),
    "a chunk longer than a segment": changed(CHUNKS, 0, 0, SEGMENT_BYTES_MAX + 1),
    "a chunk of nothing": changed(CHUNKS, 0, 0, 0),
    "a chunk in no block": changed(CHUNKS, 1, 0, 3),
    "a chunk in another block": changed(CHUNKS, 1, 0, 2),
    "a delta too long": changed(DELTAS, 0, 0, 13),
    "a delta in no container": changed(DELTAS, 1, 1, 4),
    "a delta against a hole": changed(DELTAS, 1, 1, ZERO),
    "a delta against itself": changed(DELTAS, 2, 0, 4),
    "a delta against what is not there": changed(DELTAS, 2, 0, 60),
    "a delta against ordinal -1": changed(DELTAS, 2, 0, 1),
    "a table of containers out of order": changed(REFS, 0, 0, (1 << 64) - 1),
    "a table that names the holder": changed(REFS, 0, 1, samples.CONTAINER),
    "recipes that do not add up": changed(SEGMENTS, 0, 0, 6),
    "recipes whose sum wraps": changed(SEGMENTS, 0, 0, 0xFFFFFFFF),
    "an unknown sketch": changed(SEGMENTS, 1, 0, 2),
    "a recipe of a chunk that is not there": changed(RUNS, 1, 0, 10),
    "a recipe of a chunk that no container has": beyond(RUNS),
    "a recipe of more chunks than a segment has bytes": many_of_one_recipe,
    "a delta against what no container has": beyond(DELTAS),
    "a hole too long": changed(RUNS, 1, 2, 2 * SEGMENT_BYTES_MAX + 2),
    "runs of 4 billion chunks": changed(RUNS, 2, 0, 0xFFFFFFFF),
    "an empty run": changed(RUNS, 2, 0, 0),
    "a run in no container": changed(RUNS, 0, 1, 9),
    "a block row missing": shortened(BLOCKS),
    "a chunk row missing": shortened(CHUNKS),
    "a delta row missing": shortened(DELTAS),
    "a container missing from the table": shortened(REFS),
    "a segment row missing": shortened(SEGMENTS),
    "a run missing": shortened(RUNS),
    "a patched chunk that is none": lambda p: p.tables.__setitem__(PATCHED, [np.zeros(1, "<u4"), np.zeros(1, "u1")]),
    "a prefix of no patch block": lambda p: p.tables.__setitem__(PREFIXES, [np.ones(1, "<u4")]),
    "a table missing": lambda p: p.tables.pop(),
    "a table too many": lambda p: p.tables.append([np.zeros(0, np.uint8)]),
    "chunk names truncated": lambda p: setattr(p, "chunk_names", p.chunk_names[:-1]),
}


WRONG_PATCHED = {
    "magic of the format before": counted(0, b"NKD1"),
    "depth bound below the patch block's": counted(4, 1),
    "a patch block at depth 0": changed(BLOCKS, 4, 1, 0),
    "a patch block marked as raw": changed(BLOCKS, 3, 1, container_layout.RAW),
    "a patch block marked as deltas": changed(BLOCKS, 3, 1, container_layout.XDELTA3),
    "a raw block marked as a patch": changed(BLOCKS, 3, 0, container_layout.PATCH),
    "a base beyond the prefix": changed(PATCHED, 0, 1, 4),
    "a base before the prefix": changed(PATCHED, 0, 0, 1),
    "a prefix of no bases": changed(PREFIXES, 0, 0, 0),
    "a prefix of more bases than are named": changed(PREFIXES, 0, 0, 3),
    "a prefix of four billion": changed(PREFIXES, 0, 0, 0xFFFFFFFF),
    "a prefix in no container": changed(PREFIX_RUNS, 0, 0, 7),
    "a prefix of a hole": changed(PREFIX_RUNS, 0, 0, ZERO),
    "a base of its own that is not there": changed(PREFIX_RUNS, 1, 0, 8),
    "a base of its own that is no shallower": changed(PREFIX_RUNS, 1, 0, 2),
    "a base that no container has": beyond(PREFIX_RUNS),
    "a prefix of too many bases": many_bases,
    "a run of bases too many": changed(PREFIX_RUNS, 2, 1, 2),
    "a patched row missing": shortened(PATCHED),
    "a prefix count missing": shortened(PREFIXES),
    "a prefix run missing": shortened(PREFIX_RUNS),
}


@pytest.mark.parametrize("change", WRONG_PATCHED.values(), ids=WRONG_PATCHED)
def test_inconsistent_patch_block_is_corrupt(
    change: Callable[[Parts], None],
) -> None:
    """A valid checksum does not hide fields that contradict one another."""
    wrong = parts(samples.patch_container)
    change(wrong)
    with pytest.raises(Corrupt):
        read_with(wrong, samples.patch_container)


def test_container_of_patches_round_trips() -> None:
    directory, _ = samples.read_all(samples.patch_container())
    assert directory.blocks.kinds.tolist() == [container_layout.RAW, container_layout.PATCH]
    assert directory.chunks.depths.tolist() == [0, 2, 2, 2]
    assert directory.chunks.bases.containers.tolist() == [0, samples.CONTAINER, samples.OLDER, samples.OLDER]
    assert directory.chunks.ranks.tolist() == [0, container_layout.LOCALITY_RANK, 1, container_layout.LOCALITY_RANK]
    bases = directory.prefixes.of(1)
    assert (bases.containers.tolist(), bases.ordinals.tolist()) == ([samples.CONTAINER, samples.OLDER], [0, 77])
    assert len(directory.prefixes.of(0)) == 0
    assert directory.base_containers() == [samples.OLDER]


def test_patch_block_needs_exactly_its_prefix() -> None:
    data = samples.patch_container()
    directory, _ = samples.read_all(data)
    start = int(directory.blocks.offsets[1]) - container_layout.BLOCK.size
    record = data[start : start + container_layout.BLOCK.size + int(directory.blocks.stored[1])]
    first, second = samples.PATCHED_BASES
    decoded = decode_block(record, "b", first + second)
    assert decoded[:500].tobytes() == first[100:600]
    for wrong in (b"", second + first, first + second[:-1], first):
        with contextlib.suppress(Corrupt):
            assert not np.array_equal(decode_block(record, "b", wrong), decoded)


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_inconsistent_directory_is_corrupt(
    change: Callable[[Parts], None],
) -> None:
    """A valid checksum does not hide fields that contradict one another."""
    wrong = parts()
    change(wrong)
    with pytest.raises(Corrupt):
        read_with(wrong)


def test_random_values_are_refused_or_keep_all_bounds() -> None:
    chance = random.Random(2)
    accepted = 0
    for _ in range(1500):
        wrong = parts()
        for _ in range(chance.randint(1, 2)):
            column = chance.choice(chance.choice([table for table in wrong.tables if len(table[0])]))
            highest = int(np.iinfo(column.dtype).max)
            column[chance.randrange(len(column))] = chance.choice(
                (0, 1, 2, chance.randint(0, 12), highest, highest >> 1, chance.randint(0, highest))
            )
        try:
            directory = read_with(wrong)
        except Corrupt:
            continue
        accepted += 1
        own = directory.segments.chunks.containers == directory.container
        assert int(directory.segments.chunks.ordinals[own].max(initial=0)) < len(directory.chunks)
        assert int(directory.segments.bounds[-1]) == len(directory.segments.chunks)
        assert (np.diff(directory.segments.bounds.astype(np.int64)) >= 0).all()
        ends = directory.chunks.positions.astype(np.int64) + directory.chunks.encoded
        assert (ends <= directory.blocks.raw[directory.chunks.blocks]).all()
        assert (directory.chunks.depths <= directory.depth_max).all()
    assert accepted > 20  # ranks, sketches, foreign bases: a reader cannot check them


def test_random_directory_bytes_are_refused_or_parse() -> None:
    chance = random.Random(3)
    data = samples.small_container()
    directory = samples.directory_of(data)
    for _ in range(1500):
        wrong = bytearray(directory)
        for _ in range(chance.randint(1, 3)):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        try:
            samples.read_all(samples.with_directory(data, bytes(wrong)))
        except REFUSALS:
            continue
    for length in range(len(directory)):
        with pytest.raises(REFUSALS):
            samples.read_all(samples.with_directory(data, directory[:length]))


def test_small_file_that_claims_many_rows_allocates_nothing() -> None:
    greedy = parts()
    greedy.tables[RUNS] = [np.full(1000, 2, "<u4"), np.zeros(1000, "<u4"), np.full(1000, 0xFFFFFFFF, "<u4")]
    many = parts()
    many.tables[SEGMENTS] = [
        np.zeros(container_layout.ROWS_MAX + 1, "<u4"),
        np.zeros(container_layout.ROWS_MAX + 1, "u1"),
    ]
    files = [samples.with_directory(samples.small_container(), p.joined()) for p in (greedy, many)]
    for data in files:
        assert len(data) < 20_000
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt):
                samples.read_all(data)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def many_recipes_of_nothing(p: Parts) -> None:
    p.tables[SEGMENTS] = [np.append(c, np.zeros(1 << 18, c.dtype)) for c in p.tables[SEGMENTS]]
    p.head[3] += 1 << 18


def many_rows_of_recipes(p: Parts) -> None:
    p.tables[SEGMENTS][0][-1] += 1 << 18
    p.tables[RUNS] = [
        np.append(c, np.uint32(value)) for c, value in zip(p.tables[RUNS], (ZERO, 0, 1 << 18), strict=True)
    ]


def long_names(p: Parts) -> None:
    p.names = [*p.names, *[b"x" * 65_535] * 100]
    p.head[5] = len(p.names)


@pytest.mark.parametrize("change", [many_recipes_of_nothing, many_rows_of_recipes, long_names, lambda _: None])
def test_directory_memory_bytes_are_exact(change: Callable[[Parts], None]) -> None:
    taken = parts()
    change(taken)
    data = samples.with_directory(samples.small_container(), taken.joined())
    decode_container(data, "once, for what is made the first time")
    tracemalloc.start()
    try:
        directory = decode_container(data, "sample")
        _ = directory.rows, directory.block_rows
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes <= directory.memory_bytes + 8192, "other objects made meanwhile take some KiB"
    assert directory.memory_bytes <= held_bytes * 1.1 + 8192


def test_container_that_names_only_itself_has_empty_table() -> None:
    """The base of a raw chunk, (0, 0), is no container and takes no row."""
    made = parts()
    assert made.tables[REFS][0].tolist() == sorted([samples.OLDEST, samples.OLDER])
    assert int(made.tables[DELTAS][1][0]) == SELF
