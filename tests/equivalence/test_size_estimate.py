"""Compare the compiled size estimate with its definition and with zstd."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _size_estimate as compiled
from nearkin_shared.kernels.reference import size_estimate_reference as reference

KERNELS = pytest.mark.parametrize("kernel", [compiled, reference], ids=["compiled", "reference"])


def estimates(kernel: Any, *chunks: bytes) -> list[int]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
    found = kernel.compressed_bytes_estimate(b"".join(chunks), offsets, lengths)
    assert found.dtype == np.uint32
    assert found.shape == (len(chunks),)
    return [int(value) for value in found]


pieces = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=9), st.integers(1, 300)),
)
repetitive = st.builds(
    lambda parts, order: b"".join(parts[i % len(parts)] for i in order),
    st.lists(pieces, min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(repetitive, max_size=4))
def test_compiled_estimates_equal_definition(chunks: list[bytes]) -> None:
    assert estimates(compiled, *chunks) == estimates(reference, *chunks)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 13_000), st.integers(0, 2**32), st.sampled_from([1, 2, 3, 10, 80, 256]))
def test_estimates_of_each_entropy_agree_across_blocks(length: int, seed: int, symbols: int) -> None:
    chunk = np.random.default_rng(seed).integers(0, symbols, length, dtype=np.uint8).tobytes()
    mirrored = chunk + chunk[::-1] + chunk[: length // 2]
    assert estimates(compiled, chunk, mirrored) == estimates(reference, chunk, mirrored)


def test_estimates_at_lengths_around_4096_agree() -> None:
    text = b"".join(b"%d,%x;" % (i * i, i) for i in range(3000))
    noise = hashlib.shake_256(b"estimate").digest(9000)
    for data in (text, noise, noise[:4093] * 3, bytes(9000)):
        chunks = [data[:length] for length in (*range(30), 4095, 4096, 4097, 4105, 4106, 4107, 4170, 8201, 8202, 8203)]
        assert estimates(compiled, *chunks) == estimates(reference, *chunks)


@KERNELS
def test_estimate_depends_on_its_chunk_alone(kernel: Any) -> None:
    chunk = b"the same bytes, whatever came before them; " * 20
    alone = estimates(kernel, chunk)
    assert estimates(kernel, chunk, hashlib.shake_256(b"x").digest(500), chunk)[::2] == alone * 2


@settings(max_examples=60, deadline=None)
@given(st.one_of(repetitive, st.binary(max_size=3000)))
def test_estimate_is_at_most_length_plus_10(chunk: bytes) -> None:
    assert 10 <= estimates(compiled, chunk)[0] <= len(chunk) + 10


@KERNELS
def test_estimate_does_not_grow_with_redundancy(kernel: Any) -> None:
    noise = hashlib.shake_256(b"redundancy").digest(4096)
    mixed = [noise[: 4096 - kept] + noise[:kept] for kept in (0, 512, 1024, 2048, 3072, 4096 - 16)]
    found = estimates(kernel, *mixed)
    assert found[0] == 4096 + 10
    for kept, (less, more) in zip((512, 1024, 2048), itertools.pairwise(found), strict=False):
        assert more < less, kept


def samples() -> dict[str, bytes]:
    here = Path(np.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(here.glob("lib/*.py")))[:160_000]
    binary = next(iter(sorted(here.glob("_core/_multiarray_umath*")))).read_bytes()[:800_000]
    rows = [
        {"id": i, "name": f"user{i * 7919 % 9973}", "score": math.sqrt(i), "active": i % 3 == 0} for i in range(1500)
    ]
    return {"source": sources, "binary": binary, "json": json.dumps(rows).encode()}


@pytest.mark.parametrize("kind", ["source", "binary", "json"])
def test_mean_estimate_is_within_a_tenth_of_zstd_level_3(kind: str) -> None:
    data = samples()[kind]
    chunks = [data[at : at + 8192] for at in range(0, len(data) - 8191, 8192)]
    ratios = [
        est / len(zstd.compress(chunk, 3)) for est, chunk in zip(estimates(compiled, *chunks), chunks, strict=True)
    ]
    assert 0.9 < sum(ratios) / len(ratios) < 1.1


def test_estimates_rank_chunks_as_zstd_does() -> None:
    chunks = [data[at : at + 8192] for data in samples().values() for at in range(0, len(data) - 8191, 8192)]
    chunks += [hashlib.shake_256(bytes([i])).digest(8192) for i in range(5)] + [bytes(8192)]
    actual = np.argsort(np.argsort([len(zstd.compress(chunk, 3)) for chunk in chunks]))
    found = np.argsort(np.argsort(estimates(compiled, *chunks)))
    assert np.corrcoef(actual, found)[0, 1] > 0.97


def test_logarithms_are_exact_to_their_last_bits() -> None:
    for value in (*range(1, 512), 1000, 65_535, 2**31, 2**32 - 1):
        kept = value if value < 512 else value >> (value.bit_length() - 9) << (value.bit_length() - 9)
        assert 0 <= math.log2(kept) * 65536 - reference.log2_of(value) < 1.001, value


@KERNELS
def test_bad_chunks_are_refused_and_no_chunks_are_accepted(kernel: Any) -> None:
    function = kernel.compressed_bytes_estimate
    assert function(b"", np.zeros(0, np.uint64), np.zeros(0, np.uint32)).shape == (0,)
    assert function(b"", np.zeros(1, np.uint64), np.zeros(1, np.uint32)).tolist() == [10]
    assert estimates(kernel, b"", b"abc", b"") == [10, 13, 10]
    with pytest.raises(BadInput, match="offset 5 with length 6"):
        function(bytes(10), np.array([5], np.uint64), np.array([6], np.uint32))
    with pytest.raises(BadInput, match="lengths is int64"):
        function(bytes(10), np.zeros(1, np.uint64), np.zeros(1, np.int64))
    with pytest.raises(BadInput, match="payload is a str"):
        function("text", np.zeros(1, np.uint64), np.zeros(1, np.uint32))
