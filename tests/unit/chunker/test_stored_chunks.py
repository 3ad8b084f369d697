"""Chunks that are taken over without their bytes have the segments that their bytes would have."""

from __future__ import annotations

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.splitter import CARRY_BYTES_MAX, Arenas, Cutter, FilledArena
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import U8, Locations, SegmentBatch, StoredChunks
from tests.support.data.stores import settings

FINGERPRINTER = Fingerprinter(bytes(range(32)), "tenant")
BATCH_BYTES = 2 * 1024 * 1024


def chunks_of(batch: SegmentBatch) -> StoredChunks:
    """Return the chunks of a batch, at locations that count them."""
    count = len(batch.lengths)
    return StoredChunks(
        batch.names, batch.lengths, Locations(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint32))
    )


def fed(rules: str, parts: list[bytes | StoredChunks], piece_bytes: int) -> tuple[list[SegmentBatch], list[bytes]]:
    """Feed parts of one blob as the embedded writer does; return the batches and the payloads of their fresh rows."""
    chosen = settings({"chunker": {"rules": rules}, "runner": {"batch_bytes": BATCH_BYTES}})
    arenas, batches, fresh = Arenas(BATCH_BYTES), list[SegmentBatch](), list[bytes]()

    def keep(batch: SegmentBatch) -> None:
        batches.append(batch)
        claimed = set() if batch.claimed is None else set(batch.claimed.rows.tolist())
        for row in sorted({*range(len(batch.lengths))} - claimed):
            start = int(batch.offsets[row])
            fresh.append(batch.payload[start : start + int(batch.lengths[row])].tobytes())

    cutter = Cutter(chosen, FINGERPRINTER, arenas, keep)
    arena, used, runs = arenas.take(), CARRY_BYTES_MAX, [BlobRun(0, CARRY_BYTES_MAX, CARRY_BYTES_MAX, False)]

    def fill() -> None:
        nonlocal arena, used, runs
        cutter.cut(FilledArena(arena, tuple(runs)))
        arena, used = arenas.take(), CARRY_BYTES_MAX
        arena[used:] = 0xEE
        runs = [BlobRun(0, used, used, False)]

    for part in parts:
        if isinstance(part, bytes):
            rest = np.frombuffer(part, np.uint8)
            while len(rest):
                if used == len(arena):
                    fill()
                count = min(len(rest), len(arena) - used, piece_bytes)
                arena[used : used + count], rest = rest[:count], rest[count:]
                used += count
                runs[-1] = BlobRun(0, runs[-1].start, used, False)
                if piece_bytes < BATCH_BYTES:
                    cutter.cut(FilledArena(arena, tuple(runs), full=False))
            runs[-1] = BlobRun(0, runs[-1].start, used, True, False)
            runs.append(BlobRun(0, used, used, False))
            continue
        for row in range(len(part)):
            chunk = part.take(slice(row, row + 1))
            if used + int(chunk.lengths[0]) > len(arena):
                fill()
            start, used = used, used + int(chunk.lengths[0])
            runs[-1] = BlobRun(0, start, used, True, False, chunk)
            runs.append(BlobRun(0, used, used, False))
    runs[-1] = BlobRun(0, used, used, True)
    cutter.cut(FilledArena(arena, tuple(runs)))
    return batches, fresh


def decided(rules: str, content: bytes, borders: list[int]) -> SegmentBatch:
    """Return the segments of a blob that has borders of chunks at these offsets."""
    runs = [
        BlobRun(0, start, stop, True, stop == len(content))
        for start, stop in zip([0, *borders], [*borders, len(content)], strict=True)
    ]
    stage = ChunkerStage(settings({"chunker": {"rules": rules}}), FINGERPRINTER)
    return stage.decide(FrameRuns(np.frombuffer(content, np.uint8), tuple(runs)), LookupResults()).segments


def joined_ids(batches: list[SegmentBatch]) -> list[bytes]:
    return [row.tobytes() for batch in batches for row in batch.segment_ids]


@pytest.mark.parametrize("rules", ["none", "all"])
@pytest.mark.parametrize("piece_bytes", [BATCH_BYTES, 100_000])
@pytest.mark.parametrize("kept_bytes", [9_000, 300_000, 5_000_000])
def test_stored_chunks_have_the_segments_of_their_bytes(kept_bytes: int, piece_bytes: int, rules: str) -> None:
    """Between new bytes, alone, over the end of a batch, and as the tail that the next batch goes on with."""
    kept = text_like(kept_bytes, 1)
    stored = chunks_of(decided(rules, kept, []))
    new = [random_bytes(50_000, 2), text_like(3_000, 3), random_bytes(1_900_000, 4)]
    parts: list[bytes | StoredChunks] = [new[0], stored, new[1], stored, new[2], stored]
    batches, fresh = fed(rules, parts, piece_bytes)
    content = b"".join(part if isinstance(part, bytes) else kept for part in parts)
    borders = np.cumsum([len(part) if isinstance(part, bytes) else len(kept) for part in parts]).tolist()
    expected = decided(rules, content, borders[:-1])
    assert joined_ids(batches) == joined_ids([expected])
    assert np.concatenate([batch.lengths for batch in batches]).tolist() == expected.lengths.tolist()
    assert b"".join(fresh) == b"".join(new)
    claimed = [batch.claimed for batch in batches if batch.claimed is not None]
    assert Locations.join([rows.locations for rows in claimed]).ordinals.tolist() == [*range(len(stored))] * 3
    names = np.concatenate([batch.names[batch.claimed.rows] for batch in batches if batch.claimed is not None])
    assert names.tobytes() == stored.names.tobytes() * 3


def test_claimed_rows_of_a_part_are_counted_from_its_start() -> None:
    batch = fed("none", [random_bytes(20_000, 1), chunks_of(decided("none", text_like(200_000, 2), []))], BATCH_BYTES)[
        0
    ][0]
    assert batch.claimed is not None
    middle = slice(int(batch.claimed.rows[3]), int(batch.claimed.rows[6]))
    payload: U8 = batch.payload
    part = batch.cut(slice(0, 0), middle, payload).claimed
    assert part is not None
    assert (part.rows.tolist(), part.locations.ordinals.tolist()) == ([0, 1, 2], [3, 4, 5])
