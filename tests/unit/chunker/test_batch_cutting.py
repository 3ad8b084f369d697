"""Test the cuts of a batch: each blob has the segments that it has by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.batch_cutting import cut_blobs
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import Batch, Envelope
from nearkin_shared.pipeline.stage import LookupResults

NAMER = Fingerprinter(b"s" * 32, "t")
VALUES = (
    random_bytes(1024, 1),
    b"",
    text_like(200_000, 2),
    bytes(30_000),
    random_bytes(1024, 1),
    b"x",
    text_like(90_000, 3),
)


def batch_of(values: tuple[bytes, ...]) -> Batch:
    blobs = tuple(
        BatchedBlob(f"k{number}", len(value), blake3(value).digest(), bytes(16), 1)
        for number, value in enumerate(values)
    )
    envelope = Envelope(bytes(16), "t", "k0", blobs=len(blobs))
    return Batch(envelope, blobs, np.frombuffer(b"".join(values), np.uint8))


@pytest.mark.parametrize("rules", ["none", "all"])
def test_blob_in_a_batch_has_its_own_segments(rules: str) -> None:
    settings = Settings() if rules == "none" else with_changes(Settings(), {"chunker": {"rules": rules}})
    stage = ChunkerStage(settings, NAMER)
    segments, end = cut_blobs(stage, batch_of(VALUES))
    assert sum(blob.segments or 0 for blob in end.blobs) == segments.segments == end.envelope.sequence
    assert [replace(blob, segments=None) for blob in end.blobs] == list(batch_of(VALUES).blobs)
    start = 0
    for value, blob in zip(VALUES, end.blobs, strict=True):
        alone = stage.decide(
            FrameRuns(np.frombuffer(value, np.uint8), (BlobRun(0, 0, len(value), True),)), LookupResults()
        ).segments
        assert blob.segments == alone.segments
        ids = segments.segment_ids[start : start + alone.segments]
        np.testing.assert_array_equal(ids, alone.segment_ids)
        np.testing.assert_array_equal(segments.segment_lengths[start : start + alone.segments], alone.segment_lengths)
        start += alone.segments
    assert int(segments.lengths.sum()) == sum(map(len, VALUES))
