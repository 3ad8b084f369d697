"""Test the container builder.

Locations stay valid, blocks have one depth, and the file holds what was added.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nearkin_delta import container_builder as module
from nearkin_delta.block_encoder import LAST_CHUNK_BYTES, MERGED_SPAN_BYTES_MAX, SPAN_BYTES_MAX, BlockCloser
from nearkin_delta.container_builder import ContainerBuilder, Encodings, Prefixes, new_container_id
from nearkin_shared.config.reduction import BlockSettings, DeltaSettings
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.index.container_entries import PublishableContainer
from nearkin_shared.limits import MIB
from nearkin_shared.types import SEGMENT_ID_BYTES, ZERO, ContainerId, Locations, Pieces
from tests.support.data import samples

CONTAINER = ContainerId(99 << 20)
SMALL = BlockSettings(raw_bytes=64 * 1024, delta_bytes=4 * 1024, level=3)
SKETCH = "finesse/12/3/48"


def fresh(lengths: list[int], depths: list[int] | None = None, label: str = "c") -> Encodings:
    """Return chunks of noise.

    Those above depth 0 are kept as 10 bytes, on base 0 of another container.
    """
    depths = depths or [0] * len(lengths)
    encoded = [10 if depth else length for length, depth in zip(lengths, depths, strict=True)]
    payload = samples.noise(sum(lengths), label)
    deltas = samples.noise(10 * len(lengths), label + "deltas")
    starts = np.cumsum([0, *lengths])[:-1]
    return Encodings(
        samples.names_of(lengths, label),
        np.array(lengths, np.uint32),
        np.array(depths, np.uint8),
        (payload, deltas),
        np.array([int(depth > 0) for depth in depths], np.int32),
        np.array([10 * i if d else starts[i] for i, d in enumerate(depths)], np.uint64),
        np.array(encoded, np.uint32),
        Locations(np.array([2 if d else 0 for d in depths], np.uint64), np.zeros(len(lengths), np.uint32)),
        np.zeros(len(lengths), np.uint8),
    )


def builder(settings: BlockSettings = SMALL, depth_max: int = 3) -> ContainerBuilder:
    return ContainerBuilder(
        CONTAINER, samples.DOMAIN, settings, DeltaSettings(max_depth=depth_max), container_layout.XDELTA3
    )


def encodings_of(made: PublishableContainer) -> list[bytes]:
    """Return each chunk's encoding, read from the file."""
    directory, blocks = samples.read_all(made.data)
    positions = zip(directory.chunks.blocks, directory.chunks.positions, directory.chunks.encoded, strict=True)
    return [blocks[block][at : at + size] for block, at, size in positions]


def block_of(made: ContainerBuilder, number: int) -> np.ndarray:
    """Return a block's bytes, of an open or a closed block."""
    still_open = made.open_block(number)
    return decode_block(made.record(number), "closed") if still_open is None else still_open


def wanted(added: Encodings) -> list[bytes]:
    positions = zip(added.which, added.offsets, added.encoded, strict=True)
    return [added.sources[which][int(at) : int(at) + int(size)].tobytes() for which, at, size in positions]


def test_ids_grow_when_the_clock_stops_or_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_764_000_000_000_000_000)
    first = new_container_id(0)
    assert first >> 20 == 1_764_000_000_000
    last = first
    for _ in range(50):
        found = new_container_id(last)
        assert found > last
        last = found
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    steps = {new_container_id(last) - last for _ in range(50)}
    assert min(steps) >= 1
    assert max(steps) <= 1 << 20
    assert len(steps) > 40  # an id above `last` may have been deleted: it is not used again


def test_ids_of_two_tenants_of_a_process_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_764_000_000_001_000_000)
    monkeypatch.setattr(secrets, "randbits", lambda _: 7)
    first, second = new_container_id(0), new_container_id(0)
    assert second == first + 1


def test_file_holds_what_was_added() -> None:
    made = builder()
    batches = [fresh([100, 5000, 3], label="a"), fresh([70, 80, 90, 60], [1, 0, 2, 1], "b"), fresh([], label="n")]
    placed = [made.add(batch) for batch in batches]
    assert [p.ordinals.tolist() for p in placed] == [[0, 1, 2], [3, 4, 5, 6], []]
    sealed = made.finish().seal()
    assert encodings_of(sealed) == wanted(batches[0]) + wanted(batches[1])
    directory = sealed.claims.directory
    assert directory.chunks.depths.tolist() == [0, 0, 0, 1, 0, 2, 1]
    assert np.array_equal(directory.chunks.names, np.concatenate([b.names for b in batches]))
    assert directory.blocks.depths[directory.chunks.blocks].tolist() == directory.chunks.depths.tolist()


def test_chunks_of_open_container_are_readable() -> None:
    made = builder()
    batch = fresh([30_000, 50_000, 40, 20_000], [0, 0, 1, 0])  # the first two close a block
    made.add(batch)
    chunks = made.directory(CONTAINER).chunks
    found = [
        block_of(made, int(block))[at : at + size].tobytes()
        for block, at, size in zip(chunks.blocks, chunks.positions, chunks.encoded, strict=True)
    ]
    assert found == wanted(batch)
    sealed = made.finish().seal()
    assert encodings_of(sealed) == found


def test_block_closes_with_the_chunk_that_fills_it() -> None:
    made = builder()
    made.add(fresh([900 * 1024, 65_535, 1, 1, 65_536, 65_537]))
    raw = made.finish().seal().claims.directory.blocks.raw.tolist()
    assert raw == [900 * 1024, 65_536, 65_537, 65_537]


def test_each_depth_has_its_own_limit() -> None:
    made = builder()
    made.add(fresh([100] * 1000, [1] * 1000))  # 10 bytes each, 4 KiB a block
    blocks = made.finish().seal().claims.directory.blocks
    assert blocks.depths.tolist() == [1, 1, 1]
    assert blocks.raw.tolist() == [4100, 4100, 1800]


def test_recipes_name_the_added_chunks() -> None:
    made = builder()
    assert made.empty
    own = made.add(fresh([10, 20, 30]))
    other = Locations(np.array([ZERO, 5], np.uint64), np.array([4096, 7], np.uint32))
    ids = samples.noise(2 * SEGMENT_ID_BYTES, "ids").reshape(2, SEGMENT_ID_BYTES)
    rows = Locations.join([own, other])
    located = made.add_segments(ids, np.array([2, 3], np.uint32), SKETCH, rows)
    assert (located.containers.tolist(), located.ordinals.tolist()) == ([CONTAINER, CONTAINER], [0, 1])
    later = made.add_segments(ids[:1], np.array([1], np.uint32), "none", own.take(slice(0, 1)))
    assert later.ordinals.tolist() == [2]
    made.add_super_features(SKETCH, np.array([1], np.uint32), np.array([[5, 6, 7]], np.uint64))
    claims = made.finish().seal().claims
    segments = claims.directory.segments
    assert segments.bounds.tolist() == [0, 2, 5, 6]
    assert [claims.directory.sketch_names[number] for number in segments.sketches] == [SKETCH, SKETCH, "none"]
    assert segments.chunks.containers.tolist() == [CONTAINER, CONTAINER, CONTAINER, ZERO, 5, CONTAINER]
    assert segments.chunks.ordinals.tolist() == [0, 1, 2, 4096, 7, 0]
    assert np.array_equal(claims.segment_ids, np.concatenate([ids, ids[:1]]))
    assert claims.super_features[SKETCH][1].tolist() == [[5, 6, 7]]


def test_container_of_recipes_alone_is_finished() -> None:
    made = builder()
    ids = samples.noise(SEGMENT_ID_BYTES, "ids").reshape(1, SEGMENT_ID_BYTES)
    made.add_segments(
        ids, np.array([1], np.uint32), SKETCH, Locations(np.array([7], np.uint64), np.zeros(1, np.uint32))
    )
    assert not made.empty
    sealed = made.finish().seal()
    assert (len(sealed.claims.directory.blocks), len(sealed.claims.directory.segments)) == (0, 1)


@pytest.mark.parametrize(
    ("bound", "most"), [("CHUNKS_MAX", 50), ("BLOCKS_MAX", 3), ("RECIPE_CHUNKS_MAX", 50), ("NAMED_MAX", 50)]
)
def test_builder_is_full_before_a_directory_is(monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    made = builder()
    assert not made.full
    monkeypatch.setattr(module, bound, most)
    ids = samples.noise(SEGMENT_ID_BYTES, "ids").reshape(1, SEGMENT_ID_BYTES)
    for number in range(60):
        made.add(fresh([8_000], label=str(number)))
        rows = Locations(np.array([2 + number], np.uint64), np.zeros(1, np.uint32))
        made.add_segments(ids, np.array([1], np.uint32), SKETCH, rows)
        if made.full:
            break
    assert made.full
    made.finish().seal()


def test_size_estimate_follows_closed_blocks() -> None:
    made = builder()
    assert made.stored_bytes_estimate == 0
    made.add(fresh([70_000, 60_000]))
    sealed_bytes = len(made.finish().seal().data)
    again = builder()
    again.add(fresh([70_000, 60_000]))
    again.next_batch()
    again.next_batch()
    assert 0.9 * sealed_bytes < again.stored_bytes_estimate < 1.1 * sealed_bytes


def test_size_estimate_of_open_blocks_follows_their_kind() -> None:
    """Growing patches count as their chunks are estimated, other blocks as half."""
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, DeltaSettings(), container_layout.PATCH)
    batch = fresh([1000, 2000], [1, 1])
    batch = replace(batch, which=np.zeros(2, np.int32), offsets=np.array([0, 1000], np.uint64), encoded=batch.lengths)
    pieces = Pieces.of(samples.noise(5000, "base"), np.array([0, 0], np.uint64), np.array([5000, 5000], np.uint32))
    prefixes = Prefixes(np.array([0, 1, 2], np.uint32), batch.bases, pieces)
    made.add(replace(batch, prefixes=prefixes, rest=np.array([70, 30], np.uint32)))
    assert made.stored_bytes_estimate == 100 + 2 * 30
    made.add(fresh([10_000], label="raw"))
    assert made.stored_bytes_estimate == 100 + 10_000 // 2 + 3 * 30, "without a closed block the estimate must be half"


def test_sparse_patch_block_ends_after_a_gap_in_one_batch() -> None:
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, DeltaSettings(), container_layout.PATCH)
    between = [60_000] * (SPAN_BYTES_MAX // 60_000 + 1)
    near, far = fresh([1000, 60_000, 1000], [1, 0, 1]), fresh([1000, *between, 1000], [1, *(0 for _ in between), 1])
    made.add(near)
    numbers = made._block_numbers[0]
    assert numbers[0] == numbers[2]
    made.add(far)
    numbers = made._block_numbers[1]
    assert numbers[0] != numbers[-1]


@pytest.mark.parametrize("base_bytes", [LAST_CHUNK_BYTES, LAST_CHUNK_BYTES + 1])
def test_patch_block_on_joined_bases_spans_less(base_bytes: int) -> None:
    """A base longer than any chunk is in a merged block, of which a patch block needs few."""
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, DeltaSettings(), container_layout.PATCH)
    between = [60_000] * (MERGED_SPAN_BYTES_MAX // 60_000 + 1)
    batch = fresh([1000, *between, 1000], [1, *(0 for _ in between), 1])
    count = len(batch)
    pieces = Pieces.of(samples.noise(base_bytes, "base"), np.zeros(2, np.uint64), np.full(2, base_bytes, np.uint32))
    bounds = np.array([0, *(1 for _ in range(count - 1)), 2], np.uint32)
    prefixes = Prefixes(bounds, batch.bases.take(np.array([0, count - 1])), pieces)
    offsets = np.cumsum(batch.lengths, dtype=np.uint64) - batch.lengths
    batch = replace(batch, which=np.zeros(count, np.int32), offsets=offsets, encoded=batch.lengths)
    made.add(replace(batch, prefixes=prefixes, rest=np.full(count, 50, np.uint32)))
    numbers = made._block_numbers[0]
    assert (numbers[0] == numbers[-1]) == (base_bytes == LAST_CHUNK_BYTES)


class Waiting(Executor):
    """A thread that runs nothing until a test releases it."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, function: Any, /, *args: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.tasks.append((done, function, args))
        return done

    def work(self) -> None:
        for done, function, args in self.tasks:
            done.set_result(function(*args))
        self.tasks.clear()


def test_block_in_encoding_counts_as_open_for_two_batches() -> None:
    thread = Waiting()
    delta = DeltaSettings()
    closer = BlockCloser(SMALL, thread)
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, delta, container_layout.PATCH, closer=closer)
    chunks = fresh([70_000, 60_000])
    made.add(chunks)
    assert len(thread.tasks) == 1
    before = made.stored_bytes_estimate
    seen = made.open_block(0)
    assert seen is not None
    assert np.array_equal(seen, chunks.sources[0][:70_000])
    thread.work()
    assert made.stored_bytes_estimate == before, "the time at which a thread ends must not change what is stored"
    assert made.open_block(0) is not None
    made.next_batch()
    assert made.open_block(0) is not None, "the next batch must be added meanwhile"
    made.next_batch()
    assert made.open_block(0) is None
    assert np.array_equal(decode_block(made.record(0), "closed"), chunks.sources[0][:70_000])


def test_blocks_without_a_thread_count_as_open_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller encodes each block as it fills."""
    encoded: list[int] = []
    close = BlockCloser.close

    def noted(closer: BlockCloser, blocks: Any) -> Any:
        encoded.extend(block.number for block in blocks)
        return close(closer, blocks)

    monkeypatch.setattr(BlockCloser, "close", noted)
    delta = DeltaSettings()
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, delta, container_layout.PATCH)
    begun: list[list[int]] = []
    begin = BlockCloser.begin

    def beginning(closer: BlockCloser, number: int, *args: Any) -> Any:
        begun.append(list(encoded))
        return begin(closer, number, *args)

    monkeypatch.setattr(BlockCloser, "begin", beginning)
    chunks = fresh([70_000, 70_000, 60_000])
    made.add(chunks)
    assert begun == [[], [0], [0, 1]], "a block must be encoded before the next begins"
    estimate = made.stored_bytes_estimate
    made.next_batch()
    assert made.open_block(0) is not None
    assert made.stored_bytes_estimate == estimate
    made.next_batch()
    assert made.open_block(0) is None
    assert encodings_of(made.finish().seal()) == wanted(chunks)
    assert encoded == [0, 1, 2]


def test_closing_more_than_the_encoding_bound_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_BYTES_MAX", 150_000)
    delta = DeltaSettings()
    with ThreadPoolExecutor(1) as thread:
        closer = BlockCloser(SMALL, thread)
        made = ContainerBuilder(CONTAINER, samples.DOMAIN, SMALL, delta, container_layout.PATCH, closer=closer)
        chunks = [fresh([70_000], label=str(row)) for row in range(5)]
        still_open = []
        for row in range(5):
            made.add(chunks[row])
            made.advance_stream(70_000)
            still_open.append([made.open_block(number) is not None for number in range(row + 1)])
        assert still_open[1] == [True, True], "140 kB may be encoded at once"
        assert still_open[2] == [False, False, True]
        assert still_open[4] == [False, False, False, False, True]
        assert encodings_of(made.finish().seal()) == [content for one in chunks for content in wanted(one)]


class Kept:
    """Records the blocks that it is asked to cache."""

    def __init__(self) -> None:
        self.rooms: list[np.ndarray] = []
        self.blocks: dict[int, np.ndarray] = {}

    def room(self, size_bytes: int) -> np.ndarray:
        self.rooms.append(np.empty(size_bytes, np.uint8))
        return self.rooms[-1]

    def cache_written(self, container: ContainerId, block: int, decoded: np.ndarray) -> None:
        self.blocks[block] = decoded


def test_full_raw_block_is_cached_in_place_others_as_copies() -> None:
    settings = BlockSettings(raw_bytes=4 * MIB, delta_bytes=4 * 1024, level=3)
    kept, delta = Kept(), DeltaSettings()
    closer = BlockCloser(settings, None, kept)
    made = ContainerBuilder(CONTAINER, samples.DOMAIN, settings, delta, container_layout.PATCH, closer=closer)
    chunks = fresh([60_000] * 80)  # 4.2 MB in the first block, 0.6 in the second
    made.add(chunks)
    sealed = made.finish().seal()
    contents = wanted(chunks)
    assert [kept.blocks[number].tobytes() for number in (0, 1)] == [b"".join(contents[:70]), b"".join(contents[70:])]
    assert np.shares_memory(kept.blocks[0], kept.rooms[0])
    second_room, copy = kept.rooms[1], kept.blocks[1]
    assert not np.shares_memory(copy, second_room)
    assert encodings_of(sealed) == wanted(chunks)
