"""Check round trips of formats.

Lists, tables, containers and manifests are decoded as they were encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns, location_runs
from nearkin_shared.formats.block import EncodedBlock, decode_block, encode_block
from nearkin_shared.formats.container import encode_container
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.directory import ChunkTable, SegmentTable, positions_in_blocks
from nearkin_shared.formats.manifest import Manifest, decode_manifest, encode_manifest
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.results import Ledger
from nearkin_shared.types import ZERO, ContainerId, Locations
from tests.support.data import samples

HOLDER = ContainerId(7_000_000)
CONTAINERS = [2, 3, 6_999_999, int(HOLDER), 7_000_001, (1 << 64) - 1]
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def stretches(
    draw: st.DrawFn, pool: list[int], own_chunks: int = 0, ordinal_max: int = ROWS_MAX - 1
) -> list[tuple[int, int]]:
    """Draw (container, ordinal) rows, mostly in runs as stored data has them."""
    rows: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 8))):
        container, count = draw(st.sampled_from(pool)), draw(st.integers(1, 9))
        if container == ZERO:
            rows += [(ZERO, draw(st.integers(0, SEGMENT_BYTES_MAX)))] * count
            continue
        highest = own_chunks - 1 if container == HOLDER else ordinal_max
        if highest < 0:
            continue
        start = draw(st.one_of(st.integers(0, min(30, highest)), st.integers(max(0, highest - 30), highest)))
        rows += [(container, min(start + i, highest)) for i in range(count)]
    return rows


def located(rows: list[tuple[int, int]]) -> Locations:
    return Locations(np.array([c for c, _ in rows], np.uint64), np.array([o for _, o in rows], np.uint32))


def equal(left: Locations, right: Locations) -> bool:
    return np.array_equal(left.containers, right.containers) and np.array_equal(left.ordinals, right.ordinals)


@given(st.data())
def test_location_runs_of_any_parts_round_trip(data: st.DataObject) -> None:
    rows = data.draw(stretches([*CONTAINERS, ZERO], 1000, location_runs.ORDINAL_MAX))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    bounds = np.array([0, *cuts, len(rows)], np.uint32)
    made = located(rows)
    table, refs = location_runs.container_table(made.containers, HOLDER)
    run_refs, steps, counts, parts = location_runs.compress(refs, made.ordinals, bounds)
    assert int(counts.sum()) == len(rows)
    assert int(parts.sum()) == len(counts)
    ends = np.cumsum(counts, dtype=np.int64)
    assert set(np.cumsum(np.diff(bounds.astype(np.int64)))) <= {0, *ends.tolist()}
    found_refs, ordinals = location_runs.expand(run_refs, steps, counts, len(rows), "r")
    assert equal(location_runs.to_locations(found_refs, ordinals, table, HOLDER, "r"), made)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_signed_steps_round_trip(steps: list[int]) -> None:
    assert location_runs.unzigzag(location_runs.zigzag(np.array(steps, np.int64))).tolist() == steps


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 5))))
def test_group_totals_are_sums_of_earlier_rows(rows: list[tuple[int, int]]) -> None:
    found = location_runs.group_totals(
        np.array([g for g, _ in rows], np.uint8), np.array([v for _, v in rows], np.int64)
    )
    assert found.tolist() == [sum(v for h, v in rows[:i] if h == g) for i, (g, _) in enumerate(rows)]


@given(st.lists(st.sampled_from(["u1", "<u2", "<u4", "<u8"]), min_size=1, max_size=5), st.integers(0, 200), st.data())
def test_columns_round_trip(dtypes: list[str], rows: int, data: st.DataObject) -> None:
    kinds = [np.dtype(d) for d in dtypes]
    made = [
        np.frombuffer(data.draw(st.binary(min_size=rows * k.itemsize, max_size=rows * k.itemsize)), k) for k in kinds
    ]
    packed = columns.pack(made)
    found, used = columns.unpack(memoryview(packed), kinds, rows, "c")
    assert used == len(packed)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, made, strict=True))


def chunk_tables(draw: st.DrawFn) -> tuple[list[EncodedBlock], ChunkTable, int]:
    """Draw chunks in blocks of one depth each.

    A base is at a lower depth here, or anywhere in another container.
    """
    depth_max = draw(st.integers(0, 4))
    block_depths = draw(st.lists(st.integers(0, depth_max), max_size=5))
    count = draw(st.integers(1, 25)) if block_depths else 0
    blocks = [draw(st.integers(0, len(block_depths) - 1)) for _ in range(count)]
    lengths = [draw(st.one_of(st.integers(1, 60), st.just(SEGMENT_BYTES_MAX))) for _ in range(count)]
    depths = [block_depths[b] for b in blocks]
    encoded = [draw(st.integers(1, 30)) if d else n for d, n in zip(depths, lengths, strict=True)]
    bases = [(0, 0)] * count
    for row in range(count):
        if depths[row]:
            here = [i for i in range(count) if depths[i] < depths[row]]
            foreign = st.tuples(st.sampled_from([2, 3, 7_000_001]), st.integers(0, ROWS_MAX - 1))
            own = st.tuples(st.just(int(HOLDER)), st.sampled_from(here)) if here else foreign
            bases[row] = draw(st.one_of(foreign, own))
    ranks = [draw(st.integers(0, 15)) if d else 0 for d in depths]
    raw = [sum(e for e, b in zip(encoded, blocks, strict=True) if b == number) for number in range(len(block_depths))]
    sealed = [
        encode_block(np.full(n, number, np.uint8), int(d > 0), d, samples.compressor())
        for number, (n, d) in enumerate(zip(raw, block_depths, strict=True))
    ]
    where, sizes = np.array(blocks, np.uint32), np.array(encoded, np.uint32)
    table = ChunkTable(
        samples.names_of(lengths),
        np.array(lengths, np.uint32),
        where,
        positions_in_blocks(where, sizes),
        sizes,
        np.array(depths, np.uint8),
        located(bases),
        np.array(ranks, np.uint8),
    )
    return sealed, table, depth_max


@st.composite
def containers(draw: st.DrawFn) -> tuple[list[EncodedBlock], ChunkTable, int, list[str], SegmentTable]:
    blocks, chunks, depth_max = chunk_tables(draw)
    names = draw(st.lists(TEXT, max_size=3, unique=True))
    rows = draw(stretches([2, 3, int(HOLDER), ZERO, (1 << 64) - 1], own_chunks=len(chunks)))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4))) if names else []
    rows = rows if names else []
    bounds = [0, *cuts, len(rows)] if names else [0]
    sketches = [draw(st.integers(0, len(names) - 1)) for _ in bounds[1:]]
    segments = SegmentTable(np.array(bounds, np.uint32), np.array(sketches, np.uint8), located(rows))
    return blocks, chunks, depth_max, names, segments


@settings(max_examples=80, deadline=None)
@given(containers())
def test_containers_round_trip(made: Any) -> None:
    blocks, chunks, depth_max, names, segments = made
    made = encode_container(HOLDER, samples.DOMAIN, depth_max, names, blocks, chunks, segments)
    found, decoded = samples.read_all(made.data)
    assert (found.container, found.domain, found.depth_max) == (HOLDER, samples.DOMAIN, depth_max)
    assert found.sketch_names == tuple(names)
    assert (found.container_bytes, found.directory_bytes, found.recipe_bytes) == (
        len(made.data),
        made.directory_bytes,
        made.recipe_bytes,
    )
    assert [len(b) for b in decoded] == [b.raw_bytes for b in blocks if b.raw_bytes]
    assert [set(b) for b in decoded] == [{number} for number, b in enumerate(blocks) if b.raw_bytes]
    for name in ("names", "lengths", "blocks", "positions", "encoded", "depths", "ranks"):
        assert np.array_equal(getattr(found.chunks, name), getattr(chunks, name)), name
    assert equal(found.chunks.bases, chunks.bases)
    assert found.segments.bounds.tolist() == segments.bounds.tolist()
    assert found.segments.sketches.tolist() == segments.sketches.tolist()
    assert equal(found.segments.chunks, segments.chunks)


@given(st.data())
def test_manifests_round_trip(data: st.DataObject) -> None:
    rows = data.draw(stretches([2, 3, 7_000_001, (1 << 64) - 1]))
    lengths = np.array([data.draw(st.integers(1, (1 << 32) - 1)) for _ in rows], np.uint32)
    with_lengths = data.draw(st.booleans())
    numbers = st.integers(0, (1 << 64) - 1)
    made = Manifest(
        tenant=data.draw(TEXT),
        key=data.draw(TEXT),
        version=data.draw(numbers),
        created_us=data.draw(st.integers(0, 253_402_300_799_999_999)),
        size_bytes=int(lengths.sum(dtype=np.uint64)) if with_lengths else data.draw(numbers),
        blake3=data.draw(st.binary(min_size=32, max_size=32)),
        sha256=data.draw(st.none() | st.binary(min_size=32, max_size=32)),
        seconds=data.draw(st.integers(0, 0xFFFFFFFF)) / 1000,
        ledger=Ledger(chunks=data.draw(numbers), delta_bytes=data.draw(numbers)),
        segments=located(rows),
        known=np.array([data.draw(st.booleans()) for _ in rows], np.bool_),
        metadata=data.draw(st.dictionaries(TEXT, TEXT, max_size=4)),
        lengths=lengths if with_lengths else None,
    )
    found = decode_manifest(encode_manifest(made), "m")
    assert equal(found.segments, made.segments)
    if with_lengths or len(rows) > 1:
        assert (found.lengths is not None) == with_lengths
        assert found.lengths is None or found.lengths.tolist() == lengths.tolist()
    assert found.known.tolist() == made.known.tolist()
    plain = ("tenant", "key", "version", "created_us", "size_bytes", "blake3", "sha256", "seconds", "metadata")
    assert [getattr(found, name) for name in plain] == [getattr(made, name) for name in plain]
    assert (found.ledger.chunks, found.ledger.delta_bytes) == (made.ledger.chunks, made.ledger.delta_bytes)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_by_name(data: bytes) -> None:
    for parse in (samples.read_all, lambda d: decode_manifest(d, "m"), lambda d: decode_block(d, "b")):
        try:
            parse(data)
        except (Corrupt, FormatTooNew):
            continue
        raise AssertionError("random bytes were accepted as stored ones")
