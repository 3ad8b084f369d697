"""Test the choice between delta and raw.

A delta is kept if it is estimated to store fewer bytes.
"""

from __future__ import annotations

import numpy as np

from nearkin_delta.codecs import CLEAR_GAIN, keep_delta
from tests.support.data.samples import noise


def decided(chunks: list[bytes], delta_lengths: list[int]) -> list[bool]:
    payload = np.frombuffer(b"".join(chunks) or b"\0", np.uint8)
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
    return [bool(kept) for kept in keep_delta(payload, offsets, lengths, np.array(delta_lengths, np.uint32))]


NOISE = noise(8192, "chunk").tobytes()
ZEROS = bytes(8192)


def test_no_delta_is_never_kept() -> None:
    assert decided([NOISE, ZEROS], [0, 0]) == [False, False]
    assert decided([], []) == []


def test_incompressible_chunk_takes_any_real_delta() -> None:
    assert decided([NOISE] * 4, [1, 100, 2000, 7000]) == [True] * 4


def test_delta_as_long_as_a_compressible_chunk_is_dropped() -> None:
    assert decided([ZEROS, b"abcd" * 2048], [8192, 8192]) == [False, False]
    assert decided([ZEROS], [1000]) == [False]


def test_clear_gain_is_kept_whatever_the_estimate() -> None:
    clear = 8192 // CLEAR_GAIN - 1
    assert decided([ZEROS], [clear]) == [True]


def test_rows_are_decided_independently() -> None:
    chunks, deltas = [ZEROS, NOISE, ZEROS, NOISE], [8000, 500, 100, 0]
    together = decided(chunks, deltas)
    assert together == [decided([chunk], [delta])[0] for chunk, delta in zip(chunks, deltas, strict=True)]
    assert together == [False, True, True, False]


def test_delta_longer_than_a_dropped_one_is_dropped() -> None:
    text = b"".join(b"line %d of the same text\n" % i for i in range(330))[:8192]
    kept = decided([text] * 40, [200 * i + 1 for i in range(40)])
    assert kept == sorted(kept, reverse=True)
    assert kept[0]
    assert not kept[-1]
