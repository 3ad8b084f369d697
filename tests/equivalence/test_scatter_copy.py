"""Compare both implementations of the scatter copy.

Equal bytes, equal refusals, and no byte moved by a refusal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _scatter_copy
from nearkin_shared.kernels.reference import scatter_copy_reference

Slices = list[tuple[int, int, int, int]]


@pytest.fixture(params=[_scatter_copy, scatter_copy_reference], ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def arrays(slices: Slices) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    which, offsets, lengths, targets = zip(*slices, strict=True) if slices else ((), (), (), ())
    return (
        np.array(which, np.int32),
        np.array(offsets, np.uint64),
        np.array(lengths, np.uint32),
        np.array(targets, np.uint64),
    )


@st.composite
def legal(draw: st.DrawFn) -> tuple[list[bytes], Slices, int]:
    buffers = draw(st.lists(st.binary(max_size=60), min_size=1, max_size=5))
    out_bytes = draw(st.integers(60, 200))
    slices = []
    for _ in range(draw(st.integers(0, 12))):
        which = draw(st.integers(0, len(buffers) - 1))
        offset = draw(st.integers(0, len(buffers[which])))
        length = draw(st.integers(0, len(buffers[which]) - offset))
        slices.append((which, offset, length, draw(st.integers(0, out_bytes - length))))
    return buffers, slices, out_bytes


@given(case=legal())
def test_both_kernels_copy_equal_bytes(case: tuple[list[bytes], Slices, int]) -> None:
    buffers, slices, out_bytes = case
    which, offsets, lengths, targets = arrays(slices)
    expected = bytearray(b"." * out_bytes)
    for buffer, offset, length, target in slices:
        expected[target : target + length] = buffers[buffer][offset : offset + length]
    joined = b"".join(buffers[buffer][offset : offset + length] for buffer, offset, length, _ in slices)
    for module in (_scatter_copy, scatter_copy_reference):
        out = bytearray(b"." * out_bytes)
        module.gather(buffers, which, offsets, lengths, out, targets)
        assert out == expected
        made = module.gather_new(buffers, which, offsets, lengths)
        assert made.dtype == np.uint8
        assert made.tobytes() == joined


near = st.integers(0, 12)
far = st.sampled_from([2**32 - 1, 2**31, 13])
farther = st.sampled_from([2**64 - 1, 2**63, 2**64 - 5])


@given(
    slices=st.lists(st.tuples(st.integers(-1, 2), near | farther, near | far, near | farther), max_size=4),
    extra=st.integers(0, 3),
)
def test_refused_slices_copy_nothing(slices: Slices, extra: int) -> None:
    """Both kernels refuse the same slices with the same message."""
    which, offsets, lengths, targets = arrays(slices)
    counts = [which, offsets, lengths, targets]
    if extra < 3:
        counts[extra + 1] = np.append(counts[extra + 1], counts[extra + 1].dtype.type(0))

    def outcome(module: Any) -> tuple[str | None, bytes, str | None]:
        out = bytearray(b"." * 16)
        words: list[str | None] = []
        for call in (
            lambda: module.gather([b"0123456789", b"abc"], counts[0], counts[1], counts[2], out, counts[3]),
            lambda: module.gather_new([b"0123456789", b"abc"], *counts[:3]),
        ):
            try:
                call()
                words.append(None)
            except BadInput as err:
                words.append(str(err))
        if words[0] is not None:
            assert out == b"." * 16
        return words[0], bytes(out), words[1]

    assert outcome(_scatter_copy) == outcome(scatter_copy_reference)


def test_no_slices_and_no_buffers_copy_nothing(kernel: Any) -> None:
    which, offsets, lengths, targets = arrays([])
    kernel.gather([], which, offsets, lengths, bytearray(), targets)
    assert kernel.gather_new([], which, offsets, lengths).shape == (0,)
    assert kernel.gather_new([b"", b"x"], *arrays([(0, 0, 0, 0), (1, 1, 0, 0)])[:3]).shape == (0,)


def test_overlapping_targets_keep_the_later_slice(kernel: Any) -> None:
    out = bytearray(6)
    which, offsets, lengths, targets = arrays([(0, 0, 4, 0), (1, 0, 4, 2)])
    kernel.gather([b"aaaa", b"bbbb"], which, offsets, lengths, out, targets)
    assert out == b"aabbbb"


def test_buffer_may_be_its_own_destination(kernel: Any) -> None:
    out = bytearray(b"0123456789")
    which, offsets, lengths, targets = arrays([(0, 0, 8, 2)])
    kernel.gather([out], which, offsets, lengths, out, targets)
    assert out == b"0101234567"


def test_arguments_in_the_target_memory_are_read_first(kernel: Any) -> None:
    """The copy overwrites its own argument arrays; the checked values still hold."""
    memory = np.zeros(64, np.uint8)
    lengths = memory[:16].view(np.uint32)
    lengths[:] = 8, 4, 0, 0
    which, offsets, _, targets = arrays([(0, 0, 0, 4), (0, 0, 0, 20), (0, 0, 0, 0), (0, 0, 0, 0)])
    kernel.gather([np.full(1000, 0x7F, np.uint8)], which, offsets, lengths, memory, targets)
    assert np.flatnonzero(memory == 0x7F).tolist() == [*range(4, 12), *range(20, 24)]


def test_any_contiguous_buffer_is_read_or_written(kernel: Any) -> None:
    wide = np.arange(4, dtype=np.uint16).reshape(2, 2)
    out = np.zeros((2, 4), np.uint16)
    which, offsets, lengths, targets = arrays([(0, 2, 4, 0), (1, 0, 3, 5), (2, 1, 2, 8), (3, 0, 1, 15)])
    kernel.gather([wide, b"abc", memoryview(b"wxyz"), bytearray(b"!")], which, offsets, lengths, out, targets)
    assert out.tobytes() == wide.tobytes()[2:6] + b"\0abcxy\0\0\0\0\0!"


@pytest.mark.parametrize(
    ("buffers", "out", "words"),
    [
        (["text"], bytearray(4), r"buffers\[0\] str: pass C-contiguous bytes"),
        ([b"abcd", np.zeros((4, 4), np.uint8)[:, 1]], bytearray(4), r"buffers\[1\] ndarray: pass C-contiguous bytes"),
        ([b"abcd"], bytes(4), "out bytes: pass writable C-contiguous bytes"),
        ([b"abcd"], np.zeros((4, 4), np.uint8)[:, 1], "out ndarray: pass writable C-contiguous bytes"),
    ],
)
def test_other_buffers_are_refused_by_name(kernel: Any, buffers: list[Any], out: Any, words: str) -> None:
    which, offsets, lengths, targets = arrays([(0, 0, 4, 0)])
    with pytest.raises(BadInput, match=words):
        kernel.gather(buffers, which, offsets, lengths, out, targets)


@pytest.mark.parametrize("wrong", range(4))
def test_other_dtypes_are_refused_by_name(kernel: Any, wrong: int) -> None:
    every = list(arrays([(0, 0, 4, 0)]))
    every[wrong] = every[wrong].astype(np.int16)
    name = ("which", "offsets", "lengths", "out_offsets")[wrong]
    with pytest.raises(BadInput, match=rf"{name} int16\[1\]: pass a one-dimensional numpy array of"):
        kernel.gather([b"abcd"], *every[:3], bytearray(4), every[3])


def test_lengths_beyond_their_buffers_allocate_nothing(kernel: Any) -> None:
    """Four entries of 4 GiB are refused before the array is allocated."""
    which, offsets, lengths, _ = arrays([(0, 0, 2**32 - 1, 0)] * 4)
    with pytest.raises(BadInput, match="slice 0 at offset 0, 4294967295 bytes: leaves buffer 0 of 1 bytes"):
        kernel.gather_new([b"x"], which, offsets, lengths)
