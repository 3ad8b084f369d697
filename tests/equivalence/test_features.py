"""Compare the compiled features with their definition on every CPU path."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _features as compiled
from nearkin_shared.kernels.reference import features_reference as reference

SHARED = Path(__file__).parents[2] / "shared"
PATHS = ("base", "avx2", "avx512")
ALGORITHMS = ("ntransform", "ntransform_scalar", "finesse", "finesse_scalar", "odess")


def content(seed: int, length: int, symbols: int) -> bytes:
    """Return `length` bytes of `symbols` values.

    Few values cause equal fingerprints and runs of zeros.
    """
    return np.random.default_rng(seed).integers(0, symbols, length, dtype=np.uint8).tobytes()


@st.composite
def plans(draw: st.DrawFn) -> dict[str, int]:
    super_features = draw(st.integers(1, 6))
    features = super_features * draw(st.integers(1, 64 // super_features))
    return {"features": features, "super_features": super_features}


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[bytes, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    payload_bytes = draw(st.integers(0, 20_000))
    payload = content(draw(st.integers(0, 2**32)), payload_bytes, draw(st.sampled_from([1, 2, 4, 256])))
    pairs = draw(st.lists(st.tuples(st.integers(0, payload_bytes), st.integers(0, payload_bytes)), max_size=5))
    offsets = np.array([min(pair) for pair in pairs], np.uint64)
    lengths = np.array([max(pair) - min(pair) for pair in pairs], np.uint32)
    return payload, offsets, lengths


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=60, deadline=None)
@given(chunks=chunk_lists(), plan=plans(), window=st.sampled_from([48, 48, 48, 39, 64]))
def test_compiled_features_equal_definition(
    algorithm: str, chunks: tuple[Any, Any, Any], plan: dict[str, int], window: int
) -> None:
    expected = getattr(reference, algorithm)(*chunks, **plan, window_bytes=window)
    found = getattr(compiled, algorithm)(*chunks, **plan, window_bytes=window)
    assert found.dtype == np.uint64
    assert found.shape == (len(chunks[1]), plan["super_features"])
    assert found.tolist() == expected.tolist()


@settings(max_examples=60, deadline=None)
@given(chunks=chunk_lists(), sampling=st.integers(0, 16), data=st.data())
def test_odess_with_any_sampling_and_window_agrees(
    chunks: tuple[Any, Any, Any], sampling: int, data: st.DataObject
) -> None:
    window = data.draw(st.integers(32 + sampling, 64))
    expected = reference.odess(*chunks, window_bytes=window, sampling_bits=sampling)
    assert compiled.odess(*chunks, window_bytes=window, sampling_bits=sampling).tolist() == expected.tolist()


@pytest.mark.parametrize("window", [4, 5, 31, 47, 49, 128, 256])
def test_rabin_with_any_window_agrees(window: int) -> None:
    payload = content(7, 30_000, 256)
    chunks = payload, np.array([1, 100], np.uint64), np.array([29_000, 12 * window], np.uint32)
    for algorithm in ("ntransform", "finesse"):
        expected = getattr(reference, algorithm)(*chunks, window_bytes=window)
        assert getattr(compiled, algorithm)(*chunks, window_bytes=window).tolist() == expected.tolist(), algorithm


def edge_lengths() -> list[int]:
    """Return lengths around each boundary of the vector code.

    Windows, lanes, 16 rows, buffers of 4096 positions.
    """
    positions = {64 * k + d for k in (1, 2, 16, 17) for d in (-1, 0, 1)} | {1024 + 63, 4097, 8200}
    whole = {p + 47 for p in positions}
    many = set(range(578, 2700, 67))  # lanes of unequal lengths
    subs = {12 * (p + 47) + p % 12 for p in positions if p < 1100}
    return sorted(whole | subs | {0, 1, 47, 48, 575, 576, 577} | many)


# (features, super-features, window): more sub-chunks than lanes, fewer; runs shorter than 16 rows; wide windows
EDGE_PLANS = ((64, 4, 48), (33, 3, 16), (12, 3, 4), (5, 1, 15), (2, 1, 256), (1, 1, 48))


def guarded(payload: bytes) -> memoryview:
    """Return a copy between two guard pages, which end the process when read.

    The length is a multiple of a page.
    """
    assert len(payload) % mmap.PAGESIZE == 0
    region = mmap.mmap(-1, len(payload) + 2 * mmap.PAGESIZE)
    region[mmap.PAGESIZE : -mmap.PAGESIZE] = payload
    first = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (first, first + mmap.PAGESIZE + len(payload)):
        assert protect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return memoryview(region)[mmap.PAGESIZE : -mmap.PAGESIZE]


def edge_payload() -> bytes:
    pages = (max(edge_lengths()) + 70_000) // mmap.PAGESIZE
    return content(11, pages * mmap.PAGESIZE - 70_000, 256) + content(12, 70_000, 3)


def answers_here(kernel: Any, payload: bytes | memoryview) -> list[list[int]]:
    lengths = edge_lengths()
    rows: list[list[int]] = []
    at_the_end = [len(payload) - length for length in lengths]
    for starts in ([3] * len(lengths), at_the_end):
        chunks = payload, np.array(starts, np.uint64), np.array(lengths, np.uint32)
        for algorithm in ALGORITHMS:
            rows += getattr(kernel, algorithm)(*chunks).tolist()
        for features, super_features, window in EDGE_PLANS:
            plan = {"features": features, "super_features": super_features, "window_bytes": window}
            for algorithm in ("ntransform", "finesse"):
                rows += getattr(kernel, algorithm)(*chunks, **plan).tolist()
    return rows


SCRIPT = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("tests_features", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["tests_features"] = module
spec.loader.exec_module(module)
import hashlib
rows = module.answers_here(module.compiled, module.guarded(module.edge_payload()))
print(module.compiled.cpu_path(), hashlib.sha256(repr(rows).encode()).hexdigest())
"""


def run_with(cpu: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NEARKIN_CPU": cpu, "PYTHONPATH": str(SHARED)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def reachable() -> tuple[str, ...]:
    """Return the CPU paths of this machine, as a separate process reports them.

    NEARKIN_CPU may hide some of them here.
    """
    environment = {name: value for name, value in os.environ.items() if name != "NEARKIN_CPU"}
    script = "from nearkin_shared.kernels.native import _features; print(_features.cpu_path())"
    best = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PYTHONPATH": str(SHARED)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    return PATHS[: PATHS.index(best) + 1]


def test_each_cpu_path_equals_definition_within_bounds() -> None:
    """Guard pages around each buffer end the process if a kernel reads outside."""
    expected = hashlib.sha256(repr(answers_here(reference, edge_payload())).encode()).hexdigest()
    for path in reachable():
        result = run_with(path, SCRIPT, __file__)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == [path, expected], path


def test_unknown_cpu_path_is_refused_at_import() -> None:
    for demand in ("", "sse9", *PATHS[len(reachable()) :]):
        result = run_with(demand, "import nearkin_shared.kernels.native._features")
        assert result.returncode
        assert f'NEARKIN_CPU "{demand}": choose' in result.stderr
        assert "base" in result.stderr


@pytest.mark.parametrize("kernel", [compiled, reference], ids=["compiled", "reference"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestOutOfBoundsArguments:
    def refuses(self, kernel: Any, algorithm: str, named: str, *chunks: Any, **parameters: Any) -> None:
        with pytest.raises(BadInput, match=named):
            getattr(kernel, algorithm)(*chunks, **parameters)

    def test_chunk_past_the_end_is_refused(self, kernel: Any, algorithm: str) -> None:
        one = np.array([1], np.uint64)
        self.refuses(kernel, algorithm, "offset 1 with length 1000", bytes(1000), one, np.array([1000], np.uint32))
        huge = np.array([2**64 - 1], np.uint64)
        self.refuses(kernel, algorithm, "18446744073709551615", bytes(1000), huge, np.array([1], np.uint32))
        self.refuses(kernel, algorithm, "payload's 0 bytes", b"", np.zeros(1, np.uint64), np.array([1], np.uint32))

    def test_array_of_another_type_is_refused(self, kernel: Any, algorithm: str) -> None:
        offsets, lengths = np.zeros(2, np.uint64), np.zeros(2, np.uint32)
        self.refuses(kernel, algorithm, "offsets is int64", b"x", offsets.astype(np.int64), lengths)
        self.refuses(kernel, algorithm, "lengths is uint64", b"x", offsets, lengths.astype(np.uint64))
        self.refuses(kernel, algorithm, "offsets is list", b"x", [0, 0], lengths)
        self.refuses(kernel, algorithm, "lengths is uint32", b"x", offsets, np.zeros((2, 1), np.uint32))
        self.refuses(kernel, algorithm, "offsets is uint64", b"x", np.zeros(4, np.uint64)[::2], lengths)
        self.refuses(kernel, algorithm, "2 entries and lengths 1", b"x", offsets, lengths[:1])

    def test_payload_that_is_no_plain_buffer_is_refused(self, kernel: Any, algorithm: str) -> None:
        arrays = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
        self.refuses(kernel, algorithm, "payload is a str", "text", *arrays)
        self.refuses(kernel, algorithm, "not C-contiguous", memoryview(bytes(10))[::2], *arrays)

    def test_parameters_out_of_range_are_refused(self, kernel: Any, algorithm: str) -> None:
        chunks = b"", np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        self.refuses(kernel, algorithm, "features 0 is out of range", *chunks, features=0)
        self.refuses(kernel, algorithm, "features 65 is out of range", *chunks, features=65)
        self.refuses(kernel, algorithm, "features 12 is not a multiple of super_features 5", *chunks, super_features=5)
        self.refuses(kernel, algorithm, "super_features 13", *chunks, super_features=13)
        self.refuses(kernel, algorithm, "window_bytes 3", *chunks, window_bytes=3)
        self.refuses(kernel, algorithm, "window_bytes 257", *chunks, window_bytes=257)
        self.refuses(kernel, algorithm, "features 12.0 is not a whole number", *chunks, features=12.0)

    def test_features_of_each_kind_of_buffer_are_equal(self, kernel: Any, algorithm: str) -> None:
        payload = content(3, 4096, 256)
        arrays = np.zeros(1, np.uint64), np.array([4096], np.uint32)
        expected = getattr(kernel, algorithm)(payload, *arrays).tolist()
        read_only = np.frombuffer(payload, np.uint8)
        for buffer in (bytearray(payload), memoryview(payload), read_only, read_only.view("<u4").reshape(32, 32)):
            assert getattr(kernel, algorithm)(buffer, *arrays).tolist() == expected

    def test_features_of_nothing_are_empty(self, kernel: Any, algorithm: str) -> None:
        function = getattr(kernel, algorithm)
        assert function(b"", np.zeros(0, np.uint64), np.zeros(0, np.uint32)).shape == (0, 3)
        assert function(b"", np.zeros(2, np.uint64), np.zeros(2, np.uint32)).tolist() == [[0] * 3] * 2
        assert function(np.empty(0, np.uint8), np.zeros(1, np.uint64), np.zeros(1, np.uint32)).tolist() == [[0] * 3]
