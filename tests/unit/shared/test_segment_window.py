"""Reads of many ranges of one version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.reading.segment_window import SegmentWindow

DATA = np.random.default_rng(1).bytes(10_000)


def window_of(lengths: list[int] | None, reads: list[tuple[int, int]], data: bytes = DATA) -> SegmentWindow:
    """Return a window, and note in `reads` what it reads."""
    columns: Any = SimpleNamespace(
        lengths=None if lengths is None else np.array(lengths, np.uint32), size_bytes=len(data)
    )

    def read(start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(data)
        reads.append((start, stop))
        return data[start:stop]

    return SegmentWindow(cast("Manifest", columns), read)


@pytest.mark.parametrize("lengths", [[1_000] * 10, [10_000], [1, 9_998, 1], None])
def test_window_returns_the_bytes_of_any_ranges(lengths: list[int] | None) -> None:
    """Ascending ranges, within segments or over their ends, are those of the version; each segment is read twice."""
    random = np.random.default_rng(2)
    for most in (1, 10, 500, 3_000):
        reads: list[tuple[int, int]] = []
        window, start = window_of(lengths, reads), 0
        while (start := start + int(random.integers(0, most))) < len(DATA):
            stop = min(len(DATA), start + int(random.integers(1, most + 1)))
            assert window.read(start, stop) == DATA[start:stop]
            start = stop
        if most <= 10:
            assert len(reads) <= 3 * len(lengths or [0])  # a range over an end is read apart


def test_single_range_reads_no_more() -> None:
    """Nothing behind the only range of a segment is read."""
    reads: list[tuple[int, int]] = []
    window = window_of([5_000, 5_000], reads)
    assert window.read(10, 20) == DATA[10:20]
    assert window.read(6_000, 6_001) == DATA[6_000:6_001]
    assert reads == [(10, 20), (6_000, 6_001)]
    assert window.read(7_000, 7_001) == DATA[7_000:7_001]
    assert reads[2:] == [(7_000, 10_000)]


def test_window_of_unknown_segments_is_bounded() -> None:
    """At most a segment is held, whatever the size of the version."""
    reads: list[tuple[int, int]] = []
    window = window_of(None, reads, bytes(3 * SEGMENT_BYTES_MAX))
    for start in (0, 10, 20, SEGMENT_BYTES_MAX + 30):
        assert len(window.read(start, start + 1)) == 1
    assert max(stop - start for start, stop in reads) == SEGMENT_BYTES_MAX
