"""Run the kernels on emulated older processors.

An instruction that the processor lacks ends the process.
"""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
import numpy as np
from nearkin_shared.kernels import chunking
from nearkin_shared.kernels import size_estimate
from nearkin_shared.kernels import features
from nearkin_shared.kernels import fingerprint
from nearkin_shared.kernels import xdelta3

data = np.random.Generator(np.random.PCG64(7)).integers(0, 200, 300_000, np.uint8)
lengths = chunking.fastcdc_cut(data, 2048, 8192, 65536, True)
blob = data.tobytes() + bytes(70_000) + data.tobytes()[:1000] * 99
least = [
    chunking.leastcdc_cut(blob[first:last], *bounds, final)
    for first, last in ((0, None), (1, None), (7, 5000), (300_001, -3), (13, 77))
    for bounds in ((2048, 8192, 65536), (64, 200, 4000), (64, 64, 921600))
    for final in (True, False)
]
offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
key = fingerprint.TagKey(b"k" * 32, b"tenant")
edited = data.copy()
edited[::997] ^= 1
deltas, delta_lengths = xdelta3.encode_many(edited, offsets, lengths, data, offsets, lengths)
starts = (np.cumsum(delta_lengths, dtype=np.uint64) - delta_lengths).astype(np.uint64)
whole = xdelta3.decode_many(deltas, starts, delta_lengths, data, offsets, lengths, lengths)
assert np.array_equal(whole, edited)
parts = [
    lengths,
    *least,
    fingerprint.sha1_many(data, offsets, lengths),
    fingerprint.check_tags(data, offsets, lengths, key),
    features.finesse(data, offsets, lengths),
    features.ntransform(data, offsets, lengths),
    features.odess(data, offsets, lengths),
    size_estimate.compressed_bytes_estimate(data, offsets, lengths),
]
digest = hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest()
print(features.cpu_path(), fingerprint.cpu_path(), chunking.cpu_path(), digest)
"""


NAMES_A_PROCESSOR = {"NEARKIN_CPU", "OPENBLAS_CORETYPE"}
"""Ours, and that of numpy's OpenBLAS: some machines set it to their own, which the emulated one is not."""


def _run(*before: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [*before, sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**{k: v for k, v in os.environ.items() if k not in NAMES_A_PROCESSOR}, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.fixture(scope="module")
def widest() -> list[str]:
    return _run()


@pytest.mark.parametrize("path", ["base", "avx2", "avx512"])
def test_each_cpu_path_gives_equal_bytes(widest: list[str], path: str) -> None:
    if {"base": 0, "avx2": 1, "avx512": 2}[path] > {"base": 0, "avx2": 1, "avx512": 2}.get(widest[0], 0):
        pytest.skip(f"this processor stops at {widest[0]}")
    *paths, digest = _run(NEARKIN_CPU=path)
    assert (paths, digest) == ([path] * 3, widest[-1])


@pytest.mark.parametrize("processor", ["Nehalem", "Haswell"])
def test_older_processor_gives_equal_bytes(widest: list[str], processor: str) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed (Debian package qemu-user)")
    *paths, digest = _run(emulator, "-cpu", processor)
    assert "avx512" not in paths
    assert digest == widest[-1]
