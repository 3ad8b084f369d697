"""Compare both implementations of lookups in sorted runs.

Equal keys found in any runs, equal refusals.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _sorted_runs
from nearkin_shared.kernels.reference import sorted_runs_reference

BOTH = [_sorted_runs, sorted_runs_reference]
TAIL_BYTES, VALUE_BYTES = 3, 5
Entry = tuple[int, bytes, bytes]
TOP = 64 - 3

heads = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 7).map(lambda head: head << TOP), st.integers(0, 4))
keys = st.tuples(heads, st.sampled_from([b"aaa", b"aab", b"\0\0\0"]))


@pytest.fixture(params=BOTH, ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(entries: list[Entry], children: int = 0) -> bytes:
    entries = sorted(entries)
    packed = b"".join(struct.pack("=Q", head) for head, _, _ in entries)
    return struct.pack("<Q", children) + packed + b"".join(tail + value for _, tail, value in entries)


def name(depth: int, bits: int) -> bytes:
    return struct.pack(">BQ", depth, bits)


def look_up(kernel: Any, runs: Mapping[bytes, bytes], searched: list[tuple[int, bytes]], marked: int = -1) -> list[Any]:
    """Return the values found, None for keys without one.

    Row `marked` is marked as found before the call.
    """
    searched = sorted(searched)
    found, values = np.zeros(len(searched), np.bool_), np.zeros((len(searched), VALUE_BYTES), np.uint8)
    if marked >= 0:
        found[marked] = True
    tails = np.frombuffer(b"".join(tail for _, tail in searched), np.uint8).reshape(-1, TAIL_BYTES)

    def get(expected: bytes) -> memoryview | None:
        return memoryview(runs[expected]) if expected in runs else None

    kernel.find_in_runs(get, np.array([head for head, _ in searched], np.uint64), tails, values, found)
    return [value.tobytes() if is_found else None for value, is_found in zip(values, found.tolist(), strict=True)]


@given(
    st.dictionaries(keys, st.binary(min_size=VALUE_BYTES, max_size=VALUE_BYTES), max_size=80), st.lists(keys), st.data()
)
def test_look_up_finds_keys_of_each_run(
    held: dict[tuple[int, bytes], bytes], others: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    placed: dict[bytes, list[Entry]] = {name(0, 0): []}
    children: dict[bytes, int] = {}
    for (head, tail), value in held.items():
        depth = data.draw(st.integers(0, 3))
        for above in range(depth):
            bits = (head >> (64 - 3 * (above + 1))) & 7
            parent = name(above, head >> (64 - 3 * above) if above else 0)
            placed.setdefault(parent, [])
            children[parent] = children.get(parent, 0) | 1 << bits
        placed.setdefault(name(depth, head >> (64 - 3 * depth) if depth else 0), []).append((head, tail, value))
    runs = {which: run(entries, children.get(which, 0)) for which, entries in placed.items()}
    searched = sorted([*held, *others])
    expected = [held.get(key) for key in searched]
    for kernel in BOTH:
        assert look_up(kernel, runs, searched) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 18, 33, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("spread", ["even", "low", "high", "clumps", "one"])
def test_look_up_with_any_spread_of_heads_finds_keys(kernel: Any, count: int, spread: str) -> None:
    random = np.random.default_rng(count)
    drawn = {
        "even": random.integers(0, 2**64, count, np.uint64),
        "low": random.integers(0, 4 * count + 1, count).astype(np.uint64),
        "high": np.uint64(2**64 - 1) - random.integers(0, 4 * count + 1, count).astype(np.uint64),
        "clumps": random.integers(0, 3, count).astype(np.uint64) << np.uint64(62),
        "one": np.full(count, 7, np.uint64),
    }[spread].tolist()
    held = {(head, number.to_bytes(3, "big")): number.to_bytes(5, "big") for number, head in enumerate(drawn)}
    runs = {name(0, 0): run([(*key, value) for key, value in held.items()])}
    absent = [(head ^ 1, tail) for head, tail in held] + [(head, b"zzz") for head, _ in held]
    searched = sorted([*held, *absent])
    assert look_up(kernel, runs, searched) == [held.get(key) for key in searched]


def test_look_up_key_in_several_runs_takes_the_shallowest(kernel: Any) -> None:
    one, other = 5 << TOP, 6 << TOP
    runs = {
        name(0, 0): run([(one, b"aaa", b"first")], 0xFF),
        name(1, 5): run([(one, b"aaa", b"below"), (one, b"aab", b"other")]),
        name(1, 6): run([(other, b"aaa", b"above")], 0xFF),
        name(2, 0o60): run([(other, b"aaa", b"under")]),
    }
    expected = [b"first", b"other", b"above"]
    assert look_up(kernel, runs, [(one, b"aaa"), (one, b"aab"), (other, b"aaa")]) == expected


def test_look_up_reads_runs_to_the_depth_limit_only(kernel: Any) -> None:
    head = 0o7777777_7777777_7777777  # its first bit is 0
    runs = {name(depth, head >> (64 - 3 * depth) if depth else 0): run([], 0xFF) for depth in range(20)}
    runs[name(20, head >> 4)] = run([(head, b"aaa", b"value")], 0xFF)
    runs[name(21, head >> 1)] = run([(head, b"aab", b"below")])
    assert look_up(kernel, runs, [(head, b"aaa"), (head, b"aab")]) == [b"value", None]


def test_look_up_leaves_marked_row_unchanged(kernel: Any) -> None:
    runs = {name(0, 0): run([(5, b"aaa", b"value")])}
    assert look_up(kernel, runs, [(5, b"aaa")], marked=0) == [bytes(VALUE_BYTES)]


def test_look_up_unsorted_heads_stays_within_the_run(kernel: Any) -> None:
    random = np.random.default_rng(3)
    for count in (1, 17, 40, 300):
        shuffled = random.integers(0, 2**64, count, np.uint64).tobytes() + bytes(count * (TAIL_BYTES + VALUE_BYTES))
        searched = [(int(head), b"\0\0\0") for head in random.integers(0, 2**64, 200, np.uint64)]
        assert set(look_up(kernel, {name(0, 0): bytes(8) + shuffled}, searched)) <= {None, bytes(VALUE_BYTES)}


def test_look_up_propagates_errors_of_the_callable(kernel: Any) -> None:
    def get(expected: bytes) -> memoryview | None:
        if expected == name(0, 0):
            return memoryview(run([], 0xFF))
        raise KeyError(expected)

    one = np.zeros(1, np.uint64)
    with pytest.raises(KeyError):
        kernel.find_in_runs(get, one, np.zeros((1, 3), np.uint8), np.zeros((1, 5), np.uint8), np.zeros(1, np.bool_))


@pytest.mark.parametrize("run_bytes", [1, 7, 9, 8 + 15, 8 + 17])
def test_look_up_refuses_run_of_another_size(kernel: Any, run_bytes: int) -> None:
    with pytest.raises(BadInput, match=f"a run of {run_bytes} bytes: want 8, and entries of 16"):
        look_up(kernel, {name(0, 0): bytes(run_bytes)}, [(1, b"aaa")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": np.zeros(2, np.int64)}, "heads int64"),
        ({"heads": np.array([2, 1], np.uint64)}, "heads fall after row 0"),
        ({"heads": np.zeros(3, np.uint64)}, "3 heads, 2 tails, 2 values, 2 found"),
        ({"tails": np.zeros(2, np.uint8)}, "tails uint8"),
        ({"tails": np.zeros((2, 6), np.uint8)[:, ::2]}, "tails uint8.*contiguous"),
        ({"values": np.zeros((2, 5), np.int8)}, "values int8"),
        ({"found": np.zeros(2, np.uint8)}, "found uint8"),
        ({"found": np.zeros(4, np.bool_)[::2]}, "found: want a contiguous"),
    ],
)
def test_look_up_refuses_arrays_that_do_not_agree(kernel: Any, change: dict[str, Any], message: str) -> None:
    given = {
        "heads": np.zeros(2, np.uint64),
        "tails": np.zeros((2, 3), np.uint8),
        "values": np.zeros((2, 5), np.uint8),
        "found": np.zeros(2, np.bool_),
    }
    kernel.find_in_runs(lambda expected: None, **given)
    with pytest.raises(BadInput, match=message):
        kernel.find_in_runs(lambda expected: None, **(given | change))
