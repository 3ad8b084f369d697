"""Compare the fast fingerprint kernel with its definition.

Invariant: equal on every code path of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.fingerprint import TagKey
from nearkin_shared.kernels.native import _fingerprint as fast
from nearkin_shared.kernels.reference import fingerprint_reference as plain

KEY = TagKey(bytes(range(32)), b"tenant-a")
PATHS = ("base", "avx2", "avx512")

# Sizes around a SHA-1 block and its padding (55, 56, 63, 64), an NH row (64) and an NH block (2048).
EDGES = [0, 1, 7, 8, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 2047, 2048, 2049, 4096, 6143, 6145, 65536]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[bytes, NDArray[np.uint64], NDArray[np.uint32]]:
    """Return a payload and chunks anywhere within it: overlapping, repeated, empty, unaligned."""
    seed, total = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 20_000))
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, draw(st.sampled_from([1, 2, 256])), total, dtype=np.uint8).tobytes()
    n = draw(st.integers(0, 40))
    lengths = np.minimum(rng.integers(0, draw(st.sampled_from([1, 70, 300, 20_001])), n), total).astype(np.uint32)
    offsets = rng.integers(0, total - lengths.astype(np.int64) + 1).astype(np.uint64)
    return payload, offsets, lengths


@given(pieces())
def test_fast_and_plain_kernel_agree_on_any_pieces(
    given_pieces: tuple[bytes, NDArray[np.uint64], NDArray[np.uint32]],
) -> None:
    payload, offsets, lengths = given_pieces
    fingerprints = fast.sha1_many(payload, offsets, lengths)
    tags = fast.check_tags(payload, offsets, lengths, KEY)
    np.testing.assert_array_equal(fingerprints, plain.sha1_many(payload, offsets, lengths))
    np.testing.assert_array_equal(tags, plain.check_tags(payload, offsets, lengths, KEY))
    np.testing.assert_array_equal(fast.zero_mask(payload, offsets, lengths), plain.zero_mask(payload, offsets, lengths))
    np.testing.assert_array_equal(fast.names(fingerprints, tags, lengths), plain.names(fingerprints, tags, lengths))


@given(st.lists(st.integers(0, 3), min_size=32, max_size=32), st.sampled_from([0, 255]), st.integers(1, 5000))
def test_tags_with_each_carry_agree(key_bytes: list[int], fill: int, length: int) -> None:
    key = TagKey(bytes(key_bytes), b"")
    payload, offsets, lengths = bytes([fill]) * length, np.zeros(1, np.uint64), np.array([length], np.uint32)
    np.testing.assert_array_equal(
        fast.check_tags(payload, offsets, lengths, key), plain.check_tags(payload, offsets, lengths, key)
    )


def test_both_kernels_refuse_equal_arguments() -> None:
    zero64, zero32 = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    wrong = [
        (None, zero64, zero32),
        ("text", zero64, zero32),
        (np.zeros(4, np.uint32), zero64, zero32),
        (np.zeros((2, 2), np.uint8), zero64, zero32),
        (np.zeros(9, [("a", "u1"), ("b", "<u4")]), zero64, zero32),
        (np.zeros(9, [("a", "u1")]), zero64, zero32),
        (np.zeros(9, np.bool_), zero64, zero32),
        (memoryview(b"abcdef")[::2], zero64, zero32),
        (b"abc", zero64.astype(np.int64), zero32),
        (b"abc", zero64.astype(">u8"), zero32),
        (b"abc", zero64, zero32.astype(np.uint64)),
        (b"abc", [0], zero32),
        (b"abc", zero64.reshape(1, 1), zero32),
        (b"abc", np.zeros(2, np.uint64), zero32),
        (b"abc", np.array([4], np.uint64), zero32),
        (b"abc", zero64, np.array([4], np.uint32)),
        (b"abc", np.array([2**64 - 1], np.uint64), np.array([2], np.uint32)),  # the sum wraps to 1
        (b"", np.array([2**64 - 2**32 + 1], np.uint64), np.array([2**32 - 1], np.uint32)),  # the sum wraps to 0
    ]
    kernel: Any
    for kernel in (fast, plain):
        for payload, offsets, lengths in wrong:
            with pytest.raises(BadInput):
                kernel.sha1_many(payload, offsets, lengths)
            with pytest.raises(BadInput):
                kernel.check_tags(payload, offsets, lengths, KEY)
            with pytest.raises(BadInput):
                kernel.zero_mask(payload, offsets, lengths)
        with pytest.raises(BadInput, match="TagKey"):
            kernel.check_tags(b"abc", zero64, zero32, b"key")
        with pytest.raises(BadInput, match=r"\(n, 20\)"):
            kernel.names(np.zeros((1, 19), np.uint8), zero64, zero32)
        with pytest.raises(BadInput, match="as many"):
            kernel.names(np.zeros((2, 20), np.uint8), zero64, zero32)


def test_reference_tag_matches_siphash_paper() -> None:
    assert plain.siphash(bytes(range(16)), bytes(range(15)), 2, 4) == 0xA129CA6149BE45E5


PROBE = """
import hashlib, json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from nearkin_shared.kernels.native import _fingerprint as fast
from nearkin_shared.kernels.fingerprint import TagKey
rng = np.random.default_rng(3)
payload = rng.bytes(400_000)
edges = json.loads(sys.argv[2])
lengths = np.array(edges + rng.integers(0, 30_000, 60).tolist() + [64] * 40, np.uint32)
offsets = np.array([rng.integers(0, 400_001 - n) for n in lengths.tolist()], np.uint64)
offsets[:20] %= np.uint64(300_000)
good = [hashlib.sha1(payload[o : o + n]).digest() for o, n in zip(offsets.tolist(), lengths.tolist())]
for engine in (None, *fast.sha1_engines()):
    for few in (*range(1, 20), len(lengths)):  # every way the lanes fill and drain
        found = fast.sha1_many(payload, offsets[:few], lengths[:few], engine=engine).tobytes()
        assert found == b"".join(good[:few]), (engine, few)
    for length in range(0, 200):  # every lane another length, around one, two and three blocks
        near = np.arange(length, length + 20, dtype=np.uint32)
        found = fast.sha1_many(payload, offsets[:20], near, engine=engine).tobytes()
        spans = zip(offsets.tolist(), near.tolist())
        assert found == b"".join(hashlib.sha1(payload[o : o + n]).digest() for o, n in spans), (engine, length)
tags = fast.check_tags(payload, offsets, lengths, TagKey(bytes(32), b"d"))
long = np.zeros(9000, np.uint64), np.full(9000, 100, np.uint32)
assert fast.sha1_many(payload, *long).tobytes() == hashlib.sha1(payload[:100]).digest() * 9000
segment = rng.bytes(900 * 1024)
whole = np.array([0, 1, 899 * 1024, 7, 64], np.uint64), np.array([900 * 1024, 55, 1024, 64, 900 * 1024 - 64], np.uint32)
for engine in (None, *fast.sha1_engines()):
    hashed = fast.sha1_many(segment, *whole, engine=engine).tobytes()
    assert hashed == b"".join(hashlib.sha1(segment[o : o + n]).digest() for o, n in zip(*map(np.ndarray.tolist, whole)))
print(json.dumps([fast.cpu_path(), hashlib.sha256(tags.tobytes()).hexdigest(), list(fast.sha1_engines())]))
"""


def probe(path: str) -> subprocess.CompletedProcess[str]:
    source = os.path.abspath(os.path.join(os.path.dirname(fast.__file__), "../../.."))
    return subprocess.run(
        [sys.executable, "-c", PROBE, source, json.dumps(EDGES)],
        env={**os.environ, "NEARKIN_CPU": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_cpu_path_gives_equal_fingerprints_and_tags() -> None:
    machine = fast.cpu_path() if "NEARKIN_CPU" not in os.environ else "base"
    answers = {}
    for path in PATHS[: PATHS.index(machine) + 1]:
        done = probe(path)
        assert done.returncode == 0, done.stderr
        used, digest, engines = json.loads(done.stdout)
        assert used == path
        assert engines[0] == "portable"
        assert ("avx2" in engines, "avx512" in engines) == (path != "base", path == "avx512")
        answers[path] = digest
    rng = np.random.default_rng(3)
    payload = rng.bytes(400_000)
    lengths = np.array(EDGES + rng.integers(0, 30_000, 60).tolist() + [64] * 40, np.uint32)
    offsets = np.array([rng.integers(0, 400_001 - n) for n in lengths.tolist()], np.uint64)
    offsets[:20] %= np.uint64(300_000)
    tags = plain.check_tags(payload, offsets, lengths, TagKey(bytes(32), b"d"))
    assert set(answers.values()) == {hashlib.sha256(tags.tobytes()).hexdigest()}


def test_measured_choice_names_available_engines() -> None:
    engines = fast.sha1_engines()
    assert all(0 < block_nanoseconds < 100_000 for block_nanoseconds in engines.values()), engines
    few, many, few_max = fast.sha1_choice()
    assert few in {"portable", "sha-ni"} & set(engines)
    if many is None:
        assert few_max == 0
    else:
        assert engines[many] < engines[few]
        assert 0 <= few_max < {"avx2": 8, "avx512": 16}[many]


def test_unavailable_engine_is_refused_with_choices() -> None:
    with pytest.raises(BadInput, match=r"'avx1024'.*portable"):
        fast.sha1_many(b"", np.zeros(0, np.uint64), np.zeros(0, np.uint32), engine="avx1024")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import numpy as n; from nearkin_shared.kernels.native._fingerprint import sha1_many as s\n"
            "s(b'', n.zeros(0, n.uint64), n.zeros(0, n.uint32), engine='avx2')",
        ],
        env={**os.environ, "NEARKIN_CPU": "base"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "BadInput" in done.stderr
    assert "leave portable" in done.stderr


def test_unknown_cpu_path_is_refused_with_choices() -> None:
    done = probe("avx1024")
    assert done.returncode != 0
    assert 'NEARKIN_CPU "avx1024": choose' in done.stderr
    assert "base" in done.stderr
