"""Compare the hasher of contents with its definition and with the library `blake3`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _content_hasher as compiled
from nearkin_shared.kernels.reference import content_hasher_reference as reference

KERNELS = pytest.mark.parametrize("kernel", [compiled, reference], ids=["compiled", "reference"])
STATE_BYTES_MAX = 8 + 54 * 32 + 1024
DATA = np.random.Generator(np.random.PCG64(1)).bytes((2 << 20) + 77)
BORDERS = [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3 * 1024, 16 << 10, (16 << 10) + 1, 31 << 10, 256 << 10]


@pytest.fixture(params=[0, 1, 2])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with each width of vectors that this processor has."""
    if compiled.use_vectors(request.param) < request.param:
        pytest.skip("this processor has no such vectors")
    yield
    compiled.use_vectors(2)


@KERNELS
@pytest.mark.parametrize("size", BORDERS)
def test_digest_at_borders_equals_the_library(kernel: Any, size: int) -> None:
    hasher = kernel.ContentHasher()
    hasher.update(DATA[:size])
    assert hasher.digest() == blake3(DATA[:size]).digest()
    assert hasher.size_bytes == size


@pytest.mark.usefixtures("vectors")
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=6))
@settings(max_examples=60)
def test_pieces_and_states_change_no_digest(pieces: list[int]) -> None:
    """A hasher that is stored and continued between any two pieces has the digest of the library."""
    hasher, position = compiled.ContentHasher(), 0
    for piece in pieces:
        hasher.update(memoryview(DATA)[position : position + piece])
        position = min(len(DATA), position + piece)
        state = hasher.state()
        assert len(state) <= STATE_BYTES_MAX
        assert hasher.digest(16) == blake3(DATA[:position]).digest(length=16)
        hasher = compiled.ContentHasher(state)
    assert hasher.digest() == blake3(DATA[:position]).digest()


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=4))
@settings(max_examples=20)
def test_kernel_and_reference_have_equal_states(pieces: list[int]) -> None:
    hashers: list[Any] = [compiled.ContentHasher(), reference.ContentHasher()]
    position = 0
    for piece in pieces:
        for hasher in hashers:
            hasher.update(DATA[position : position + piece])
        position += piece
    states = [hasher.state() for hasher in hashers]
    assert states[0] == states[1]
    assert compiled.ContentHasher(states[1]).digest() == reference.ContentHasher(states[0]).digest()


@KERNELS
def test_counter_above_4_tib_has_its_high_word(kernel: Any) -> None:
    """A state in the middle of 5 TiB continues alike in both: the number of a chunk has more than 32 bits."""
    size = 5 << 40
    chunks = (size - 1) // 1024
    state = size.to_bytes(8, "little") + bytes(range(32)) * chunks.bit_count() + bytes(1024)
    hasher = kernel.ContentHasher(state)
    hasher.update(DATA[:300_000])
    assert hasher.size_bytes == size + 300_000
    assert hasher.digest(8).hex() == "9b7281d31e37968d"


@KERNELS
@pytest.mark.parametrize("state", [b"", b"1234567", bytes(9), b"\1" + bytes(7), b"\xff" * 8, b"\xff" * 3000])
def test_state_of_another_length_is_refused(kernel: Any, state: bytes) -> None:
    with pytest.raises(BadInput, match="not the state of a hasher"):
        kernel.ContentHasher(state)


@KERNELS
@pytest.mark.parametrize("length", [0, -1, 33])
def test_digest_of_another_length_is_refused(kernel: Any, length: int) -> None:
    with pytest.raises(BadInput, match="choose 1 to 32"):
        kernel.ContentHasher().digest(length)


@KERNELS
def test_data_that_are_no_bytes_are_refused(kernel: Any) -> None:
    for data in ("text", memoryview(DATA)[::2], 7):
        with pytest.raises(BadInput, match="want contiguous bytes"):
            kernel.ContentHasher().update(data)


@KERNELS
def test_digest_is_stored_for_good(kernel: Any) -> None:
    """The digests are in stores: they never change."""
    hasher = kernel.ContentHasher()
    hasher.update(bytes(range(256)) * 40)
    assert hasher.digest(16).hex() == blake3(bytes(range(256)) * 40).hexdigest(length=16)
    assert hasher.state()[:8] == (10240).to_bytes(8, "little")
