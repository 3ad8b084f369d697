"""Compare the compiled chunkers with their definition and PRUNE's formula."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.kernels.native import _chunking as compiled
from nearkin_shared.kernels.native import _leastcdc as compiled_least
from nearkin_shared.kernels.reference import chunking_reference as reference
from nearkin_shared.kernels.reference import leastcdc_reference as reference_least

PAIRS: dict[str, tuple[Any, Any]] = {
    "fastcdc": (compiled.fastcdc_cut, reference.fastcdc_cut),
    "leastcdc": (compiled_least.leastcdc_cut, reference_least.leastcdc_cut),
    "rabin": (compiled.rabin_cut, reference.rabin_cut),
    "inck": (compiled.inck_cut, reference.inck_cut),
}
WORDS = [b"the ", b"chunk ", b"of ", b"a ", b"blob ", b"is ", b"kept ", b"as ", b"its ", b"nearest ", b"kin.\n", b"\t"]


def make(kind: str, seed: int, total_bytes: int) -> bytes:
    rng = np.random.Generator(np.random.PCG64(seed))
    if kind == "random":
        return rng.bytes(total_bytes)
    if kind == "constant":
        return bytes([seed % 256]) * total_bytes
    if kind == "high":
        return rng.integers(254, 256, total_bytes, dtype=np.uint8).tobytes()
    if kind == "periodic":
        period = rng.bytes(1 + seed % 300)
        return (period * (total_bytes // len(period) + 1))[:total_bytes]
    if kind == "sparse":
        values = np.zeros(total_bytes, dtype=np.uint8)
        values[rng.integers(0, max(total_bytes, 1), total_bytes // 100)] = 255
        return values.tobytes()
    text = b"".join(WORDS[word] for word in rng.integers(0, len(WORDS), total_bytes // 3 + 1))
    return (text * (total_bytes // max(len(text), 1) + 1))[:total_bytes]


contents = st.builds(
    make,
    st.sampled_from(["random", "constant", "high", "periodic", "sparse", "text"]),
    st.integers(0, 2**32),
    st.one_of(st.integers(0, 300), st.integers(0, 20_000)),
)


@st.composite
def bounds(draw: st.DrawFn) -> tuple[int, int, int]:
    target_bytes = 1 << draw(st.integers(6, 13))
    min_bytes = draw(st.one_of(st.sampled_from([64, target_bytes]), st.integers(64, target_bytes)))
    max_bytes = draw(st.one_of(st.just(target_bytes), st.integers(target_bytes, 8 * target_bytes)))
    return min_bytes, target_bytes, max_bytes


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(PAIRS)), data=contents, limits=bounds(), final=st.booleans())
@example(name="fastcdc", data=b"", limits=(64, 64, 64), final=True)
@example(name="rabin", data=bytes(64), limits=(64, 64, 64), final=False)
def test_kernel_cuts_as_reference(name: str, data: bytes, limits: tuple[int, int, int], final: bool) -> None:
    kernel_cut, reference_cut = PAIRS[name]
    assert kernel_cut(data, *limits, final).tolist() == reference_cut(data, *limits, final).tolist()


@settings(max_examples=100, deadline=None)
@given(data=contents, limits=bounds(), final=st.booleans(), skip=st.integers(0, 70))
def test_leastcdc_paths_cut_as_reference(data: bytes, limits: tuple[int, int, int], final: bool, skip: int) -> None:
    expected = reference_least.leastcdc_cut(data[skip:], *limits, final).tolist()
    for path in compiled_least.cpu_paths():
        inside = memoryview(data)[skip:]  # any alignment
        assert compiled_least.leastcdc_cut(inside, *limits, final, path=path).tolist() == expected


def test_missing_cpu_path_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'path "neon": choose .*base'):
        compiled_least.leastcdc_cut(b"", 64, 64, 64, True, path="neon")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["rabin", "inck"]),
    data=contents,
    limits=bounds(),
    window=st.one_of(st.sampled_from([16, 31, 47, 62, 64]), st.integers(16, 256)),
)
def test_kernel_with_any_window_cuts_as_reference(
    name: str, data: bytes, limits: tuple[int, int, int], window: int
) -> None:
    kernel_cut, reference_cut = PAIRS[name]
    window = min(window, limits[0])
    assert kernel_cut(data, *limits, True, window).tolist() == reference_cut(data, *limits, True, window).tolist()


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["fastcdc", "leastcdc"]),
    data=contents,
    least=st.integers(64, 2000),
    above=st.integers(0, 2000),
    most=st.integers(0, 20_000),
)
def test_kernel_with_any_target_cuts_as_reference(name: str, data: bytes, least: int, above: int, most: int) -> None:
    kernel_cut, reference_cut = PAIRS[name]
    limits = (least, least + above, least + above + most)
    assert kernel_cut(data, *limits, True).tolist() == reference_cut(data, *limits, True).tolist()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PAIRS)),
    data=contents,
    pieces=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
)
def test_piecewise_input_gives_equal_chunks(name: str, data: bytes, pieces: list[int]) -> None:
    kernel_cut = PAIRS[name][0]
    lengths: list[int] = []
    tail, taken, step = b"", 0, 0
    while taken < len(data):
        piece_bytes = pieces[step % len(pieces)]
        tail += data[taken : taken + piece_bytes]
        taken, step = taken + piece_bytes, step + 1
        certain = kernel_cut(tail, 128, 512, 2048, False)
        lengths += certain.tolist()
        tail = tail[int(certain.sum()) :]
    lengths += kernel_cut(tail, 128, 512, 2048, True).tolist()
    assert lengths == kernel_cut(data, 128, 512, 2048, True).tolist()


@pytest.mark.parametrize("name", sorted(PAIRS))
@pytest.mark.parametrize("kind", ["random", "text", "high"])
def test_kernel_over_many_lanes_cuts_as_reference(name: str, kind: str) -> None:
    kernel_cut, reference_cut = PAIRS[name]
    data = make(kind, 11, 150_000)
    for limits in ((2048, 8192, 65536), (64, 64, 1000), (512, 32768, 900 * 1024)):
        assert kernel_cut(data, *limits, True).tolist() == reference_cut(data, *limits, True).tolist()


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_cut_reads_nothing_beyond_its_payload(name: str) -> None:
    kernel_cut = PAIRS[name][0]
    data = make("random", 12, 30_000)
    for total_bytes in (65, 127, 4097, 9_999):
        alone = kernel_cut(data[:total_bytes], 64, 4096, 30_000, True).tolist()
        inside = kernel_cut(memoryview(data)[:total_bytes], 64, 4096, 30_000, True).tolist()
        assert alone == inside
        assert sum(alone) == total_bytes


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_kernel_and_reference_refuse_equal_arguments(name: str) -> None:
    for arguments in (
        (b"", 1, 1024, 4096, True),
        ("text", 256, 1024, 4096, True),
        (b"", 256, 1024, 2**40, True),
        (b"", 256, 60, 4096, True),
        (b"", 256, 8192, 4096, True),
    ):
        messages = []
        for cut in PAIRS[name]:
            with pytest.raises(BadInput) as caught:
                cut(*arguments)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.fixture(scope="module")
def random_data() -> bytes:
    return np.random.Generator(np.random.PCG64(20110601)).bytes(128 << 20)


@pytest.mark.parametrize("mask_bits", range(10, 16))
@pytest.mark.parametrize("name", ["rabin", "inck"])
def test_random_data_has_mean_length_of_prune(name: str, mask_bits: int, random_data: bytes) -> None:
    # the mean of 4,500 chunks (15 bits) has a standard error of 1 %; fewer bits make more chunks
    min_bytes, max_bytes = 2048, 65536
    lengths = PAIRS[name][0](random_data, min_bytes, 1 << mask_bits, max_bytes, True)
    expected_bytes = reference.expected_chunk_bytes(min_bytes, max_bytes, mask_bits)
    assert lengths[:-1].mean() == pytest.approx(expected_bytes, rel=0.02)
