"""Test blocks: each base once in a prefix, bounds hold, and the smallest encoding is kept."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_delta import block_encoder as module
from nearkin_delta.block_encoder import (
    SLACK_SHARE,
    BlockCloser,
    BlockEncoder,
    ClosedBlock,
    OpenBlock,
    SparePrefixes,
    encoders_max,
)
from nearkin_delta.container_builder import Prefixes
from nearkin_shared.config.reduction import BlockSettings
from nearkin_shared.config.settings import PROFILES
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import decode_block
from nearkin_shared.kernels import xdelta3
from nearkin_shared.kernels.base_prefix import BasePrefix
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.types import Locations, Pieces
from tests.support.data.stores import settings

ENCODER = BlockEncoder(BlockSettings())


def prefixes(bases: list[list[tuple[int, bytes]]]) -> Prefixes:
    """Return the bases of chunks, each by its ordinal in container 5."""
    flat = [one for some in bases for one in some]
    lengths = np.array([len(content) for _, content in flat], np.uint64)
    return Prefixes(
        np.cumsum([0, *map(len, bases)]).astype(np.uint32),
        Locations(np.full(len(flat), 5, np.uint64), np.array([ordinal for ordinal, _ in flat], np.uint32)),
        Pieces.of(
            np.frombuffer(b"".join(content for _, content in flat), np.uint8),
            (np.cumsum(lengths) - lengths).astype(np.uint64),
            lengths.astype(np.uint32),
        ),
    )


def filled(
    chunks: list[bytes], bases: list[list[tuple[int, bytes]]], limit_bytes: int = 1 << 20
) -> tuple[OpenBlock, int]:
    """Return a patch block that took as many of the chunks as fit, and how many."""
    block = OpenBlock(0, container_layout.PATCH, 2, limit_bytes)
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    base_prefixes = prefixes(bases)
    part = block.add_bases(base_prefixes.validate(), np.arange(len(chunks)), lengths)
    offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
    payload = np.frombuffer(b"".join(chunks), np.uint8)
    none = np.zeros(0, np.uint8)
    block.append((payload, none), np.zeros(len(part), np.int32), offsets[part], lengths[part])
    block.record_bases(base_prefixes.bases.take(base_prefixes.bounds[part].astype(np.intp)))
    return block, len(part)


def read(closed: ClosedBlock, prefix: bytes) -> np.ndarray:
    record = closed.block.header + bytes(closed.block.payload)
    return decode_block(record, "b", prefix)


def test_prefix_holds_each_base_once_by_first_use() -> None:
    one, two = text_like(4000, 1), text_like(4000, 2)
    chunks = [mutate(one, 1), mutate(two, 2), mutate(one, 3)]
    block, taken = filled(chunks, [[(7, one)], [(3, two), (7, one)], [(7, one), (3, two)]])
    assert taken == 3
    assert bytes(block.prefix) == one + two
    assert block.prefix_bases.ordinals.tolist() == [7, 3]
    closed = ENCODER.close(block)
    assert closed.block.kind == container_layout.PATCH
    assert closed.block.depth == 2
    assert read(closed, one + two).tobytes() == b"".join(chunks)
    assert closed.prefix.ordinals.tolist() == [7, 3]


def test_block_takes_chunks_whose_bases_fit_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    base = [random_bytes(5000, n) for n in range(4)]
    monkeypatch.setattr(module, "PREFIX_BYTES_MAX", 10_000)
    assert filled(base, [[(n, content)] for n, content in enumerate(base)])[1] == 2
    assert filled(base, [[(0, base[0])]] * 4)[1] == 4
    assert filled(base[:1], [[(n, content) for n, content in enumerate(base)]])[1] == 1
    monkeypatch.setattr(module, "PREFIX_BASES_MAX", 1)
    assert filled(base, [[(n, content)] for n, content in enumerate(base)])[1] == 1


def test_block_ends_with_the_chunk_that_fills_it() -> None:
    block, taken = filled([random_bytes(3000, n) for n in range(5)], [[(1, bytes(9))]] * 5, limit_bytes=6500)
    assert (taken, block.used, block.full) == (3, 9000, True)


def test_bases_that_save_little_are_dropped_with_depth() -> None:
    chunks = [text_like(8000, n) for n in range(4)]
    closed = ENCODER.close(filled(chunks, [[(1, random_bytes(8000, 9))]] * 4)[0])
    assert (closed.block.kind, closed.block.depth, len(closed.prefix)) == (container_layout.RAW, 0, 0)
    assert read(closed, b"").tobytes() == b"".join(chunks)


def test_noise_based_on_noise_is_stored_raw() -> None:
    closed = ENCODER.close(filled([random_bytes(8000, 1)], [[(1, random_bytes(8000, 9))]])[0])
    assert (closed.block.kind, closed.block.codec) == (container_layout.RAW, container_layout.STORED)


def raw_block(content: bytes) -> OpenBlock:
    """Return a block of one chunk that has no base."""
    block, sizes = OpenBlock(0, container_layout.RAW, 0, len(content)), np.array([len(content)], np.uint32)
    payload = (np.frombuffer(content, np.uint8), np.zeros(0, np.uint8))
    block.append(payload, np.zeros(1, np.int32), np.zeros(1, np.uint64), sizes)
    return block


@pytest.mark.parametrize("before", [text_like(200_000), random_bytes(200_000)], ids=["behind text", "behind noise"])
@pytest.mark.parametrize("profile", ["default", "archive"])
def test_raw_block_is_written_with_a_window_of_its_size(profile: str, before: bytes) -> None:
    """A repeat at the far end of a block is found, whichever search the previous block used."""
    chosen = settings(PROFILES[profile])
    encoder = BlockEncoder(chosen.block)
    noise = random_bytes(60_000, 1)
    content = noise + bytes(int(chosen.block.raw_bytes) - 2 * len(noise)) + noise
    encoder.close(raw_block(before))
    closed = encoder.close(raw_block(content))
    assert closed.block.stored_bytes < 70_000
    assert read(closed, b"").tobytes() == content


def test_bases_below_zstd_minimum_are_left_out() -> None:
    closed = ENCODER.close(filled([b"abcdefg" * 30], [[(1, b"abcdefg")]])[0])
    assert (closed.block.kind, closed.block.depth) == (container_layout.RAW, 0)


@pytest.mark.parametrize(("shared", "edits", "tried"), [(3, 200, True), (1, 200, False), (3, 1, False)])
def test_deltas_are_tried_for_bad_patches_of_shared_bases(
    monkeypatch: pytest.MonkeyPatch, shared: int, edits: int, tried: bool
) -> None:
    """`shared` chunks have one base.

    A good patch, and one with many bases, is kept without trying deltas.
    """
    bases = [random_bytes(8000, n) for n in range(6 // shared)]
    chunks = [mutate(bases[n // shared], n, edits=edits) for n in range(6)]
    block, _ = filled(chunks, [[(n // shared, bases[n // shared])] for n in range(6)])
    calls = list[int]()
    encoder = BlockEncoder(BlockSettings())

    def as_deltas(open_block: OpenBlock, raw: np.ndarray, patch: ClosedBlock) -> ClosedBlock:
        calls.append(patch.block.stored_bytes)
        return patch

    monkeypatch.setattr(encoder, "_as_deltas", as_deltas)
    closed = encoder.close(block)
    assert closed.block.kind == container_layout.PATCH
    assert (closed.block.stored_bytes * module.VCDIFF_TRIED > closed.chunk_bytes) == (edits > 1)
    assert bool(calls) == tried


def test_deltas_smaller_than_a_patch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    base = random_bytes(8000, 1)
    chunks = [mutate(base, n, edits=2) for n in range(3)]
    block, _ = filled(chunks, [[(4, base)]] * 3)
    patch = ENCODER.close(block)
    assert patch.block.kind == container_layout.PATCH
    wide = ClosedBlock(patch.block, patch.chunk_bytes, patch.prefix)
    object.__setattr__(wide.block, "payload", bytes(patch.block.payload) + bytes(10_000))  # a patch of poor ratio
    closed = ENCODER._as_deltas(block, block.bytes_so_far, wide)
    assert (closed.block.kind, closed.block.depth, len(closed.prefix)) == (container_layout.XDELTA3, 2, 0)
    sizes = closed.encoded
    assert sizes is not None
    found = xdelta3.decode_many(
        read(closed, b""),
        (np.cumsum(sizes, dtype=np.uint64) - sizes).astype(np.uint64),
        sizes,
        np.frombuffer(base, np.uint8),
        np.zeros(3, np.uint64),
        np.full(3, len(base), np.uint32),
        np.array([len(chunk) for chunk in chunks], np.uint32),
    )
    assert found.tobytes() == b"".join(chunks)


class BrokenEncoder(FrameEncoder):
    """Writes a valid frame of other bytes, as failing memory would."""

    def unchecked(self, raw: Any, prefix: Any = None, options: Any = None) -> bytes | memoryview:
        other = np.frombuffer(raw, np.uint8).copy()
        other[-1] ^= 1
        return super().unchecked(other, prefix, options)


@pytest.mark.parametrize("bases", [[(4, b"abcdefg")], [(4, text_like(8000, 1))]])
def test_block_that_does_not_decode_is_not_kept(bases: list[tuple[int, bytes]]) -> None:
    encoder = BlockEncoder(BlockSettings())
    encoder._encoder = BrokenEncoder({})
    block, _ = filled([mutate(text_like(8000, 1), 1)], [bases])
    with pytest.raises(Corrupt, match="check this machine's memory"):
        encoder.close(block)


def test_block_takes_last_chunk_of_any_size() -> None:
    block = OpenBlock(0, container_layout.RAW, 0, 4096)
    chunks = [random_bytes(size, size) for size in (4000, 900_000)]
    lengths = np.array([4000, 900_000], np.uint32)
    assert block.fitting(np.arange(2), lengths).tolist() == [0, 1]
    payload, offsets = np.frombuffer(b"".join(chunks), np.uint8), np.array([0, 4000], np.uint64)
    for row in range(2):
        one = slice(row, row + 1)
        block.append((payload, payload), np.zeros(1, np.int32), offsets[one], lengths[one])
    assert block.bytes_so_far.tobytes() == b"".join(chunks)


def test_memory_of_a_growing_block_is_from_one_allocator() -> None:
    requested: list[int] = []

    def take(size_bytes: int) -> np.ndarray:
        requested.append(size_bytes)
        return np.zeros(size_bytes, np.uint8)

    block = OpenBlock(0, container_layout.RAW, 0, 4096, take)
    content = np.frombuffer(random_bytes(4096 + 4096 // SLACK_SHARE + 1, 1), np.uint8)
    sizes = np.array([4000, len(content) - 4000], np.uint32)
    block.append((content, content), np.zeros(2, np.int32), np.array([0, 4000], np.uint64), sizes)
    assert requested == [4096 + 4096 // SLACK_SHARE, len(content)]
    assert block.bytes_so_far.tobytes() == content.tobytes()


@pytest.mark.parametrize("profile", ["default", "archive"])
def test_block_of_some_mib_reserves_room_for_largest_chunk(profile: str) -> None:
    requested: list[int] = []

    def take(size_bytes: int) -> np.ndarray:
        requested.append(size_bytes)
        return np.zeros(size_bytes, np.uint8)

    chosen = settings(PROFILES[profile])
    limit_bytes, largest_bytes = int(chosen.block.raw_bytes), int(chosen.chunker.max_bytes)
    block = OpenBlock(0, container_layout.RAW, 0, limit_bytes, take, last_chunk_bytes=largest_bytes)
    payload = np.zeros(limit_bytes + largest_bytes - 1, np.uint8)
    sizes = np.array([limit_bytes - 1, largest_bytes], np.uint32)
    block.append((payload, payload), np.zeros(2, np.int32), np.array([0, limit_bytes - 1], np.uint64), sizes)
    assert requested == [limit_bytes + largest_bytes], "large blocks must not be copied"


def test_spare_prefixes_are_empty_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    spares, given = SparePrefixes(), [spares_prefix(1000) for _ in range(4)]
    room_bytes = given[0].room_bytes
    monkeypatch.setattr("nearkin_delta.block_encoder.SPARE_BYTES_MAX", room_bytes * 5 // 2)
    for prefix in given:
        spares.give_back(prefix)
    taken = [spares.take() for _ in range(3)]
    assert [any(one is prefix for prefix in given) for one in taken] == [True, True, False]
    assert [len(one) for one in taken] == [0, 0, 0]
    for _ in range(3):  # prefixes in use are not counted
        spares.give_back(spares_prefix(2000))
        assert len(spares.take()) == 0
    grown = spares_prefix(400_000)
    assert grown.room_bytes >= 400_000 > room_bytes * 5 // 2
    grown.clear()
    rows = prefixes([[(1, bytes(10))]]).validate()
    assert grown.add(np.zeros(1, np.intp), rows) == 1
    spares.give_back(grown)
    assert spares.take() is not grown, "a prefix must count with its capacity, not with its last content"


@pytest.mark.parametrize("threads", [0, 1])
def test_prefix_of_an_encoded_block_is_reused(threads: int) -> None:
    base, spares = random_bytes(9000, 1), SparePrefixes()
    base_prefixes = prefixes([[(1, base)]]).validate()
    payload, nothing = np.frombuffer(mutate(base, 2), np.uint8), np.zeros(0, np.uint8)
    lengths = np.array([len(payload)], np.uint32)
    with ThreadPoolExecutor(1) if threads else nullcontext() as thread:
        closer = BlockCloser(BlockSettings(), thread, prefixes=spares)
        assert closer.is_synchronous == (not threads)
        seen, results = set[int](), list[ClosedBlock]()
        for number in range(3):
            block = closer.begin(number, container_layout.PATCH, 1, 1 << 16)
            seen.add(id(block.bases_so_far))
            assert not len(block.bases_so_far)
            block.add_bases(base_prefixes, np.arange(1), lengths)
            block.append((payload, nothing), np.zeros(1, np.int32), np.zeros(1, np.uint64), lengths)
            block.record_bases(Locations(np.full(1, 5, np.uint64), np.ones(1, np.uint32)))
            (encoding,) = closer.close([block])
            results.append(encoding.result())
            with pytest.raises(AttributeError):
                block.prefix  # noqa: B018 - it is another's now
    assert len(seen) == 1
    assert [read(closed, base).tobytes() for closed in results] == [payload.tobytes()] * 3


def spares_prefix(size_bytes: int) -> BasePrefix:
    prefix = BasePrefix(1 << 20, 10)
    prefix.add(np.arange(1), prefixes([[(1, bytes(size_bytes))]]).validate())
    return prefix


def test_blocks_encoded_concurrently_equal_serial_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are also finished in order."""
    contents = [mutate(text_like(1 << 18, 5), seed, edits=50) for seed in range(24)]
    in_use: list[BlockEncoder] = []
    most = 0
    close = BlockEncoder.close

    def watched(encoder: BlockEncoder, block: OpenBlock) -> ClosedBlock:
        nonlocal most
        assert encoder not in in_use, "an encoder was used by two threads at a time"
        in_use.append(encoder)
        most = max(most, len(in_use))
        time.sleep(0.002 * (block.number % 5))  # so that blocks end in another order
        closed = close(encoder, block)
        in_use.remove(encoder)
        return closed

    monkeypatch.setattr(BlockEncoder, "close", watched)
    with ThreadPoolExecutor(3) as threads:
        closer = BlockCloser(BlockSettings(), threads)
        blocks = [
            closer.begin(number, container_layout.RAW, 0, len(content)) for number, content in enumerate(contents)
        ]
        for block, content in zip(blocks, contents, strict=True):
            append_alone(block, content)
        encodings = [encoding for at in range(0, 24, 4) for encoding in closer.close(blocks[at : at + 4])]
        found = [bytes(encoding.result().block.record) for encoding in encodings]
    monkeypatch.undo()
    assert most > 1
    assert found == [bytes(ENCODER.close(block).block.record) for block in blocks]


def append_alone(block: OpenBlock, content: bytes) -> None:
    """Append one chunk."""
    payload, length = np.frombuffer(content, np.uint8), np.array([len(content)], np.uint32)
    block.append((payload, payload), np.zeros(1, np.int32), np.zeros(1, np.uint64), length)


def test_blocks_that_adapt_to_the_last_are_encoded_serially() -> None:
    assert encoders_max(BlockSettings()) > 1
    assert encoders_max(BlockSettings(thorough=True)) == 1
    assert encoders_max(BlockSettings(level=15)) == 1, "each encoder would take 50 MB and more"
    assert encoders_max(BlockSettings(raw_bytes=30 << 20)) == 1
