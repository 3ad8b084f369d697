"""Test the splitter: batches give the segments of the whole blob."""

from __future__ import annotations

import numpy as np
import pytest

from nearkin.lab.corpus_cache import random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.splitter import CARRY_BYTES_MAX, Arenas, Cutter, FilledArena
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import U8, SegmentBatch
from tests.support.data import content_samples as samples
from tests.support.data.stores import settings

FINGERPRINTER = Fingerprinter(bytes(range(32)), "tenant")
BATCH_BYTES = 2 * 1024 * 1024


def fed(cutter: Cutter, arenas: Arenas, blobs: list[bytes], piece_bytes: int = BATCH_BYTES) -> None:
    """Feed blobs as the embedded writer does.

    In sequence, in pieces of an arena, and once an arena is full.
    """
    arena, used, runs = arenas.take(), CARRY_BYTES_MAX, list[BlobRun]()
    for number, blob in enumerate(blobs):
        rest = np.frombuffer(blob, np.uint8)
        runs.append(BlobRun(number, used, used, False))
        while len(rest):
            if used == len(arena):
                cutter.cut(FilledArena(arena, tuple(runs)))
                arena, used = arenas.take(), CARRY_BYTES_MAX
                runs = [BlobRun(number, used, used, False)]
            count = min(len(rest), len(arena) - used, piece_bytes)
            arena[used : used + count], rest = rest[:count], rest[count:]
            used += count
            runs[-1] = BlobRun(number, runs[-1].start, used, False)
            if piece_bytes < BATCH_BYTES:
                cutter.cut(FilledArena(arena, tuple(runs), full=False))
        runs[-1] = BlobRun(number, runs[-1].start, used, True)
    cutter.cut(FilledArena(arena, tuple(runs)))


def listed(batch: SegmentBatch) -> list[tuple[int, bytes, bytes]]:
    """Return (blob, segment id, the bytes of all its chunks) of each segment."""
    found = []
    for i in range(batch.segments):
        rows = range(int(batch.chunk_bounds[i]), int(batch.chunk_bounds[i + 1]))
        slices = [(int(batch.offsets[row]), int(batch.lengths[row])) for row in rows]
        content = b"".join(batch.payload[start : start + length].tobytes() for start, length in slices)
        found.append((int(batch.blobs[i]), batch.segment_ids[i].tobytes(), content))
    return found


@pytest.mark.parametrize("piece_bytes", [BATCH_BYTES, 700_001, 100_000])
@pytest.mark.parametrize("algorithm", ["leastcdc", "fastcdc", "rabin", "inck", "fixed", "whole"])
def test_batches_give_segments_of_the_whole_blob(algorithm: str, piece_bytes: int) -> None:
    chosen = settings({"chunker": {"algorithm": algorithm}, "runner": {"batch_bytes": BATCH_BYTES}})
    blobs = [random_bytes(5_000_000, 1), b"", text_like(1000, 2), bytes(3_000_000), text_like(2_100_000, 3), b"x"]
    arenas, found = Arenas(BATCH_BYTES), list[tuple[int, bytes, bytes]]()
    fed(Cutter(chosen, FINGERPRINTER, arenas, lambda batch: found.extend(listed(batch))), arenas, blobs, piece_bytes)
    expected = []
    for number, blob in enumerate(blobs):
        runs = FrameRuns(np.frombuffer(blob, np.uint8), (BlobRun(number, 0, len(blob), True),))
        expected += listed(ChunkerStage(chosen, FINGERPRINTER).decide(runs, LookupResults()).segments)
    assert found == expected
    assert {number: sum(len(c) for n, _, c in found if n == number) for number in range(6)} == {
        number: len(blob) for number, blob in enumerate(blobs)
    }


@pytest.mark.parametrize("piece_bytes", [BATCH_BYTES, 700_001, 100_000])
def test_batches_with_rules_give_segments_of_the_whole_blob(piece_bytes: int) -> None:
    """Kinds that are found in one batch are known in the next."""
    chosen = settings({"chunker": {"rules": "all"}, "runner": {"batch_bytes": BATCH_BYTES}})
    members = {"a": samples.jpeg(1_900_001), "b": text_like(70_000, 4), "c": b"c", "d": random_bytes(3_000_000, 5)}
    weights = samples.safetensors_file({f"layer.{number}": random_bytes(700_000, number) for number in range(6)})
    blobs = [samples.jpeg(5_000_000), b"", samples.tar_file(members), weights, samples.postgres_file(400), b"x"]
    arenas, found = Arenas(BATCH_BYTES), list[tuple[int, bytes, bytes]]()
    fed(Cutter(chosen, FINGERPRINTER, arenas, lambda batch: found.extend(listed(batch))), arenas, blobs, piece_bytes)
    expected, stage = [], ChunkerStage(chosen, FINGERPRINTER)
    for number, blob in enumerate(blobs):
        runs = FrameRuns(np.frombuffer(blob, np.uint8), (BlobRun(number, 0, len(blob), True),))
        expected += listed(stage.decide(runs, LookupResults()).segments)
    assert found == expected


@pytest.mark.parametrize("batch_bytes", [BATCH_BYTES, 3_333_333])
@pytest.mark.parametrize("piece_bytes", [BATCH_BYTES, 100_000])
@pytest.mark.parametrize("algorithm", ["leastcdc", "fastcdc", "fixed", "whole"])
def test_borders_end_chunks_in_any_batches(algorithm: str, piece_bytes: int, batch_bytes: int) -> None:
    """Chunk and segment borders inside a blob give the segments of one batch with the same borders."""
    chosen = settings({"chunker": {"algorithm": algorithm}, "runner": {"batch_bytes": batch_bytes}})
    sizes = [5_000, 0, 3_000, 1_500_000, 100, 70, *([4_000] * 700), 900_000, 2_500_000, 1]
    parts = [random_bytes(size, number) for number, size in enumerate(sizes)]
    segment_ends = {3, 4, 706}
    arenas, found = Arenas(batch_bytes), list[tuple[int, bytes, bytes]]()
    cutter = Cutter(chosen, FINGERPRINTER, arenas, lambda batch: found.extend(listed(batch)))
    arena, used, runs = arenas.take(), CARRY_BYTES_MAX, [BlobRun(0, CARRY_BYTES_MAX, CARRY_BYTES_MAX, False)]
    for number, part in enumerate(parts):
        rest = np.frombuffer(part, np.uint8)
        while len(rest):
            if used == len(arena):
                cutter.cut(FilledArena(arena, tuple(runs)))
                arena, used = arenas.take(), CARRY_BYTES_MAX
                runs = [BlobRun(0, used, used, False)]
            count = min(len(rest), len(arena) - used, piece_bytes)
            arena[used : used + count], rest = rest[:count], rest[count:]
            used += count
            runs[-1] = BlobRun(0, runs[-1].start, used, False)
            if piece_bytes < BATCH_BYTES:
                cutter.cut(FilledArena(arena, tuple(runs), full=False))
        runs[-1] = BlobRun(0, runs[-1].start, used, True, number in segment_ends)
        runs.append(BlobRun(0, used, used, False))
    runs[-1] = BlobRun(0, used, used, True)
    cutter.cut(FilledArena(arena, tuple(runs)))

    whole = np.frombuffer(b"".join(parts), np.uint8)
    ends = np.cumsum(sizes).tolist()
    one = [
        BlobRun(0, end - size, end, True, number in segment_ends or end == ends[-1])
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    expected = listed(
        ChunkerStage(chosen, FINGERPRINTER).decide(FrameRuns(whole, tuple(one)), LookupResults()).segments
    )
    assert found == expected
    assert b"".join(content for _, _, content in found) == whole.tobytes()
    borders = np.cumsum([len(content) for _, _, content in found]).tolist()
    assert {ends[number] for number in segment_ends} <= set(borders)


def test_tail_is_carried_if_each_chunk_is_a_segment() -> None:
    chosen = settings({"chunker": {"algorithm": "whole"}, "runner": {"batch_bytes": BATCH_BYTES}})
    arenas, batches = Arenas(BATCH_BYTES), list[int]()
    cutter = Cutter(chosen, FINGERPRINTER, arenas, lambda batch: batches.append(int(batch.lengths.sum())))
    fed(cutter, arenas, [bytes(BATCH_BYTES + 1)])
    # two chunks of the first batch are complete, but the second may not end its segment yet
    assert batches == [900 * 1024, BATCH_BYTES + 1 - 900 * 1024]


def test_used_arena_is_reused_and_a_foreign_one_is_not() -> None:
    arenas = Arenas(BATCH_BYTES)
    one: U8 = arenas.take()
    arenas.give_back(one[5:10])
    assert arenas.take() is one
    arenas.give_back(np.zeros(100, np.uint8)[:50])
    assert len(arenas.take()) == BATCH_BYTES + CARRY_BYTES_MAX


def test_arena_without_complete_segment_is_reused_at_once() -> None:
    chosen = settings({"runner": {"batch_bytes": BATCH_BYTES}})
    arenas, batches = Arenas(BATCH_BYTES), list[SegmentBatch]()
    cutter = Cutter(chosen, FINGERPRINTER, arenas, batches.append)
    arena = arenas.take()
    start = CARRY_BYTES_MAX
    arena[start : start + 100] = 7
    cutter.cut(FilledArena(arena, (BlobRun(0, start, start + 100, False),)))
    assert not batches
    assert arenas.take() is arena
    cutter.cut(FilledArena(arena, (BlobRun(0, start, start, True),)))
    assert [listed(batch)[0][2] for batch in batches] == [bytes([7]) * 100]
