"""Chunks that are taken over without their bytes have the segments that their bytes would have."""

from __future__ import annotations

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns, arena_filler
from nearkin_chunker.arena_filler import ArenaFiller
from nearkin_chunker.splitter import Arenas, Cutter
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import U8, Locations, SegmentBatch, StoredChunks
from tests.support.data.stores import settings

FINGERPRINTER = Fingerprinter(bytes(range(32)), "tenant")
BATCH_BYTES = 2 * 1024 * 1024
PIECE_BYTES = 100_000


def chunks_of(batch: SegmentBatch) -> StoredChunks:
    """Return the chunks of a batch, at locations that count them."""
    count = len(batch.lengths)
    return StoredChunks(
        batch.names, batch.lengths, Locations(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint32))
    )


def fed(rules: str, parts: list[bytes | StoredChunks]) -> tuple[list[SegmentBatch], list[bytes]]:
    """Feed parts of one blob as the embedded writer does; return the batches and their fresh chunks."""
    chosen = settings({"chunker": {"rules": rules}, "runner": {"batch_bytes": BATCH_BYTES}})
    arenas, batches, fresh = Arenas(BATCH_BYTES), list[SegmentBatch](), list[bytes]()

    def keep(batch: SegmentBatch) -> None:
        batches.append(batch)
        claimed = set() if batch.claimed is None else set(batch.claimed.rows.tolist())
        for row in sorted({*range(len(batch.lengths))} - claimed):
            start = int(batch.offsets[row])
            fresh.append(batch.payload[start : start + int(batch.lengths[row])].tobytes())

    cutter = Cutter(chosen, FINGERPRINTER, arenas, keep)
    filler = ArenaFiller(arenas, cutter.cut, cutter.cut)
    filler.begin(0)
    for part in parts:
        if isinstance(part, StoredChunks):
            filler.take_over(part)
            continue
        position = 0
        while position < len(part):
            window = filler.window()
            window[:] = b"\xee" * len(window)
            count = min(len(window), len(part) - position, PIECE_BYTES)
            window[:count] = part[position : position + count]
            filler.advance(count)
            position += count
        filler.end_chunk()
    filler.end()
    filler.flush()
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
@pytest.mark.parametrize("step_bytes", [BATCH_BYTES, 300_000])
@pytest.mark.parametrize("kept_bytes", [9_000, 300_000, 5_000_000])
def test_stored_chunks_have_the_segments_of_their_bytes(
    kept_bytes: int, step_bytes: int, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between new bytes, alone, over the end of a batch, and as the tail that the next batch goes on with."""
    monkeypatch.setattr(arena_filler, "STEP_BYTES", step_bytes)
    kept = text_like(kept_bytes, 1)
    stored = chunks_of(decided(rules, kept, []))
    new = [random_bytes(50_000, 2), text_like(3_000, 3), random_bytes(1_900_000, 4)]
    parts: list[bytes | StoredChunks] = [new[0], stored, new[1], stored, new[2], stored]
    batches, fresh = fed(rules, parts)
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
    kept = chunks_of(decided("none", text_like(200_000, 2), []))
    batch = fed("none", [random_bytes(20_000, 1), kept])[0][0]
    assert batch.claimed is not None
    middle = slice(int(batch.claimed.rows[3]), int(batch.claimed.rows[6]))
    payload: U8 = batch.payload
    part = batch.cut(slice(0, 0), middle, payload).claimed
    assert part is not None
    assert (part.rows.tolist(), part.locations.ordinals.tolist()) == ([0, 1, 2], [3, 4, 5])
