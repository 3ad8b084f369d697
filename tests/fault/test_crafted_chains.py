"""Containers that no writer makes: decoded sizes and counts are bounded, whatever their directories state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backports.zstd import CompressionParameter

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import encode_block, encode_patch
from nearkin_shared.formats.container import encode_container
from nearkin_shared.formats.directory import ChunkTable, PrefixTable, SegmentTable
from nearkin_shared.kernels import xdelta3
from nearkin_shared.limits import KIB, MIB, SEGMENT_BYTES_MAX
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading import block_decoder, chunk_reader, decode_budget
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, Locations, bounds_of, offsets_of
from tests.support.data import samples

SEGMENTS = SegmentTable(
    np.array([0, 1], np.uint32),
    np.array([0], np.uint8),
    Locations(np.array([samples.CONTAINER], np.uint64), np.array([0], np.uint32)),
)


def chunk_table(lengths: list[int], blocks: list[int], encoded: list[int], bases: list[int | None]) -> ChunkTable:
    """Return chunks whose bases are chunks of their own container, at depth 1, or that have none."""
    is_delta = np.array([base is not None for base in bases])
    own = Locations(
        np.where(is_delta, np.uint64(samples.CONTAINER), np.uint64(0)),
        np.array([base or 0 for base in bases], np.uint32),
    )
    columns = [np.array(column, np.uint32) for column in (lengths, blocks, encoded)]
    positions, ranks = np.zeros(len(lengths), np.uint32), np.zeros(len(lengths), np.uint8)  # the first is not written
    names, depths = samples.names_of(lengths), is_delta.astype(np.uint8)
    return ChunkTable(names, columns[0], columns[1], positions, columns[2], depths, own, ranks)


def put(root: Path, data: bytes, cache_bytes: int = 64 * MIB) -> ContainerStore:
    store = ContainerStore(LocalObjectStore(root), samples.DOMAIN, cache_bytes)
    store.put(samples.CONTAINER, [data])
    return store


def record_leases(store: ContainerStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of all sizes that a reader allocates."""
    leased, take = list[int](), store.buffers.take

    def record(size_bytes: int) -> U8:
        leased.append(size_bytes)
        return take(size_bytes)

    monkeypatch.setattr(store.buffers, "take", record)
    return leased


def delta_container(bases: list[U8], targets: list[tuple[int, U8]]) -> bytes:
    """Return a container of raw bases, and targets as deltas, each on one of these."""
    whole, aims = np.concatenate(bases), np.concatenate([target for _, target in targets])
    base_lengths = np.array([len(base) for base in bases], np.uint32)
    lengths = np.array([len(target) for _, target in targets], np.uint32)
    of = np.array([base for base, _ in targets])
    at = offsets_of(base_lengths)[of]
    limits = lengths + np.uint32(100)
    deltas, encoded = xdelta3.encode_many(
        aims, offsets_of(lengths), lengths, whole, at, base_lengths[of], limit_bytes=limits
    )
    assert encoded.all()
    packer = samples.compressor()
    blocks = [
        encode_block(whole, container_layout.RAW, 0, packer),
        encode_block(deltas, container_layout.XDELTA3, 1, packer),
    ]
    table = chunk_table(
        [*base_lengths.tolist(), *lengths.tolist()],
        [0] * len(bases) + [1] * len(targets),
        [*base_lengths.tolist(), *encoded.tolist()],
        [None] * len(bases) + of.tolist(),
    )
    return encode_container(samples.CONTAINER, samples.DOMAIN, 2, samples.SKETCHES, blocks, table, SEGMENTS).data


def rows_from(first: int, count: int) -> Locations:
    return Locations(np.full(count, samples.CONTAINER, np.uint64), np.arange(first, first + count, dtype=np.uint32))


def test_base_of_many_deltas_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is read once for all its deltas."""
    base = samples.noise(SEGMENT_BYTES_MAX, "base")
    targets = [base[start : start + 64] for start in range(0, 500 * 64, 64)]
    store = put(tmp_path, delta_container([base], [(0, target) for target in targets]))
    leased, reader = record_leases(store, monkeypatch), ChunkReader(store)
    found = reader.fetch(reader.plan(rows_from(1, len(targets))))
    assert bytes(found) == b"".join(map(bytes, targets))
    assert max(leased) == len(base), "not that for each delta"


@pytest.mark.parametrize("level_bytes_max", [1, 300 * KIB, 1 << 30])
def test_distinct_bases_are_read_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level_bytes_max: int
) -> None:
    """No more bytes of distinct bases are read together than the bound allows."""
    bases = [samples.noise(100 * KIB, f"base {number}") for number in range(9)]
    targets = [(number % 9, bases[number % 9][number * 50 :][:64]) for number in range(100)]
    store = put(tmp_path, delta_container(bases, targets))
    leased, reader = record_leases(store, monkeypatch), ChunkReader(store)
    monkeypatch.setattr(chunk_reader, "LEVEL_BYTES_MAX", level_bytes_max)
    found = reader.fetch(reader.plan(rows_from(0, 109)))
    assert bytes(found) == b"".join(map(bytes, [*bases, *(target for _, target in targets)]))
    leased.clear()
    assert bytes(reader.fetch(reader.plan(rows_from(9, 100)))) == b"".join(bytes(target) for _, target in targets)
    assert max(leased) <= max(100 * KIB, min(level_bytes_max, 900 * KIB))


def test_deltas_read_repeatedly_stay_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas that are requested repeatedly take no more memory than the bound."""
    base, target = samples.noise(64, "base"), samples.noise(50 * KIB, "target")
    long = [(0, base), (0, target)]
    store = put(tmp_path, delta_container([base], long))
    monkeypatch.setattr(chunk_reader, "LEVEL_BYTES_MAX", 200 * KIB)
    joined, plain = list[int](), xdelta3.decode_many

    def decode_many(deltas: U8, *others: Any) -> U8:
        joined.append(len(deltas))
        return plain(deltas, *others)

    monkeypatch.setattr(chunk_reader, "decode_many", decode_many)
    reader, again = ChunkReader(store), rows_from(2, 1).take(np.zeros(100, np.intp))
    assert bytes(reader.fetch(reader.plan(again))) == bytes(target) * 100
    assert max(joined) <= 200 * KIB


@pytest.mark.parametrize("held", [samples.noise(1000, "held"), np.zeros(1000, np.uint8)], ids=["stored", "packed"])
@pytest.mark.parametrize("really_bytes", [600, 999])
def test_block_that_differs_from_its_directory_is_corrupt(tmp_path: Path, held: U8, really_bytes: int) -> None:
    """A block with another number of bytes than its directory states is Corrupt.

    The error is Corrupt, not the kernel's BadInput: the caller made no mistake.
    """
    packer = samples.compressor()
    options: dict[int, int] = {CompressionParameter.compression_level: 1, CompressionParameter.content_size_flag: 1}
    blocks = [
        replace(encode_block(held[:really_bytes], container_layout.RAW, 0, packer), raw_bytes=len(held)),
        encode_patch(held[500:], held[500:], 1, packer, options),
    ]
    table = chunk_table([500, 500, 500], [0, 0, 1], [500, 500, 500], [None, None, 1])
    own = Locations(np.array([samples.CONTAINER], np.uint64), np.array([1], np.uint32))
    prefixes = PrefixTable(np.array([0, 0, 1], np.uint32), own)
    data = encode_container(samples.CONTAINER, samples.DOMAIN, 2, samples.SKETCHES, blocks, table, SEGMENTS, prefixes)
    store = put(tmp_path, data.data)
    reader = ChunkReader(store)
    for rows in ((1, 1), (2, 1), (0, 3), (1, 2)):
        for read in (reader.fetch, reader.lease):
            with pytest.raises(Corrupt, match=f"has {really_bytes} bytes, but 1000 in its directory"):
                read(reader.plan(rows_from(*rows)))


def lattice(width: int, is_delta: int, chunk_bytes: int) -> tuple[bytes, U8]:
    """Return a container of one-chunk patch blocks, `wide` per level, each based on the whole level below; and the top
    chunk.
    """
    content, packer = samples.noise(chunk_bytes, "content"), samples.compressor()
    options: dict[int, int] = {CompressionParameter.compression_level: 1, CompressionParameter.content_size_flag: 1}
    prefix = np.tile(content, width)
    blocks = [encode_block(content, container_layout.RAW, 0, packer)] * width
    for depth in range(1, is_delta + 1):
        blocks += [encode_patch(content, prefix, depth, packer, options)] * width
    count = len(blocks)
    own, none = np.uint64(samples.CONTAINER), np.zeros(count, np.uint32)
    numbers, lengths = np.arange(count, dtype=np.uint32), np.full(count, chunk_bytes, np.uint32)
    below = np.maximum(numbers.astype(np.int64) // width - 1, 0) * width
    table = ChunkTable(
        samples.names_of([chunk_bytes] * count),
        lengths,
        numbers,
        none,
        lengths,
        (numbers // width).astype(np.uint8),
        Locations(np.where(numbers < width, np.uint64(0), own), below.astype(np.uint32)),
        none.astype(np.uint8),
    )
    base_rows = np.concatenate([first + np.arange(width) for first in below[width:]]).astype(np.uint32)
    prefixes = PrefixTable(
        bounds_of(np.where(numbers < width, 0, width)), Locations(np.full(len(base_rows), own), base_rows)
    )
    parts = samples.CONTAINER, samples.DOMAIN, is_delta, samples.SKETCHES, blocks, table, SEGMENTS, prefixes
    return encode_container(*parts).data, content


@pytest.fixture
def walk_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded together."""
    monkeypatch.setattr(block_decoder, "DECODED_BYTES_MAX", 1)


@pytest.mark.usefixtures("walk_chains")
def test_base_chain_is_decoded_once_with_any_cache(tmp_path: Path) -> None:
    """Each block of a base chain is decoded once, whatever the cache holds."""
    data, content = lattice(3, 20, 1000)
    store = put(tmp_path, data, cache_bytes=1)
    reader = ChunkReader(store)
    found = reader.fetch(reader.plan(rows_from(62, 1)))
    assert bytes(found) == bytes(content)
    assert store.costs.blocks_decoded == 61, "three a level, and the one that is wanted"


@pytest.mark.usefixtures("walk_chains")
def test_read_beyond_the_decode_budget_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that exceeds the decode budget is Corrupt."""
    data, _ = lattice(3, 20, 1000)
    store = put(tmp_path, data, cache_bytes=1)
    monkeypatch.setattr(decode_budget, "KEPT_BYTES_MAX", 2000)
    monkeypatch.setattr(decode_budget, "DECODED_BYTES_MAX", 10 * MIB)
    reader = ChunkReader(store)
    with pytest.raises(Corrupt, match=f"{object_name(samples.CONTAINER)} block 62: more than 0 GiB decoded"):
        reader.fetch(reader.plan(rows_from(62, 1)))
    assert store.costs.blocks_decoded < 10 * KIB


def test_batch_beyond_the_decode_budget_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched read that exceeds the decode budget is Corrupt, too."""
    data, _ = lattice(3, 20, 1000)
    store = put(tmp_path, data, cache_bytes=1)
    monkeypatch.setattr(block_decoder, "DECODED_BYTES_MAX", 10_000)
    monkeypatch.setattr(decode_budget, "KEPT_BYTES_MAX", 2000)
    monkeypatch.setattr(decode_budget, "DECODED_BYTES_MAX", 10 * MIB)
    reader = ChunkReader(store)
    with pytest.raises(Corrupt, match="block 62: more than"):
        reader.fetch(reader.plan(rows_from(62, 1)))
    assert store.costs.blocks_decoded < 10 * KIB


@pytest.mark.usefixtures("walk_chains")
def test_memory_for_base_chains_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory held for the blocks of base chains is bounded."""
    data, content = lattice(3, 20, 1000)
    reader = ChunkReader(put(tmp_path, data, cache_bytes=1))
    monkeypatch.setattr(decode_budget, "RETAINED_BYTES_MAX", 20 * 3000)
    assert bytes(reader.fetch(reader.plan(rows_from(62, 1)))) == bytes(content)
    monkeypatch.setattr(decode_budget, "RETAINED_BYTES_MAX", 20 * 3000 - 1)
    with pytest.raises(Corrupt, match="block 62: more than 0 MiB held"):
        reader.fetch(reader.plan(rows_from(62, 1)))


def test_blocks_of_base_chains_are_not_held_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of base chains are not all in memory at the same time."""
    data, content = lattice(12, 1, 128 * KIB)
    store = put(tmp_path, data, cache_bytes=1)
    monkeypatch.setattr(decode_budget, "KEPT_BYTES_MAX", 0)
    held, keep = list[int](), store.cache_blocks

    def record(*kept: Any) -> None:
        held.append(store.buffers.leased_bytes)
        keep(*kept)

    monkeypatch.setattr(store, "cache_blocks", record)
    reader = ChunkReader(store)
    reader._block_decoder._on_deltas.update((samples.CONTAINER, block) for block in range(12, 24))
    assert bytes(reader.fetch(reader.plan(rows_from(12, 12)))) == bytes(content) * 12
    assert store.costs.blocks_decoded == 12 * 13, "each by itself"
    assert max(held) <= max(held[:3]) + 64 * KIB, "for the last of them as for the first"
