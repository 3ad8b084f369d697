"""Test both implementations of xdelta3.

Decoded deltas, refused ones, and the messages of refusals.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.kernels.native import _xdelta3
from nearkin_shared.kernels.reference import xdelta3_reference
from nearkin_shared.kernels.xdelta3 import DELTA_BYTES_MAX, PAIR_BYTES_MAX

COMMAND = shutil.which("xdelta3")
needs_command = pytest.mark.skipif(COMMAND is None, reason="the xdelta3 command is not installed")

MAGIC = b"\xd6\xc3\xc4\x00"
ADD_3, COPY_SELF, COPY_HERE, RUN = 4, 19, 35, 0


@pytest.fixture(params=[_xdelta3, xdelta3_reference], ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def pack(pieces: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(piece) for piece in pieces], dtype=np.uint32)
    return b"".join(pieces), np.cumsum(lengths, dtype=np.uint64) - lengths, lengths


def encode(kernel: Any, targets: list[bytes], bases: list[bytes], **options: Any) -> list[bytes]:
    deltas, lengths = kernel.encode_many(*pack(targets), *pack(bases), **options)
    assert deltas.dtype == np.uint8
    assert lengths.dtype == np.uint32
    assert len(deltas) == lengths.sum()
    ends = np.cumsum(lengths)
    return [deltas[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


def decode(kernel: Any, deltas: list[bytes], bases: list[bytes], lengths: list[int]) -> bytes:
    targets = kernel.decode_many(*pack(deltas), *pack(bases), np.array(lengths, dtype=np.uint32))
    assert targets.dtype == np.uint8
    return bytes(targets.tobytes())


def edited(base: bytes, seed: int, edits: int = 6) -> bytes:
    rng = random.Random(seed)
    target = bytearray(base)
    for _ in range(edits):
        at, length = rng.randrange(len(target) + 1), rng.randrange(1, 40)
        target[at : at + rng.choice([0, length])] = rng.randbytes(rng.choice([0, length]))
    return bytes(target)


def number(value: int) -> bytes:
    return bytes([value >> shift & 127 | 128 for shift in range(63, 0, -7) if value >> shift] + [value & 127])


def window(
    length: int,
    *,
    data: bytes = b"",
    codes: bytes = b"",
    addresses: bytes = b"",
    segment: tuple[int, int, int] = (0, 0, 0),
    checksum: int | None = None,
) -> bytes:
    """Return one window; `segment` is (indicator bits, length, offset)."""
    body = number(length) + b"\x00" + number(len(data)) + number(len(codes)) + number(len(addresses))
    body += b"" if checksum is None else checksum.to_bytes(4)
    body += data + codes + addresses
    bits, segment_bytes, offset = segment
    source_range = number(segment_bytes) + number(offset) if bits & 3 else b""
    return bytes([bits | (0 if checksum is None else 4)]) + source_range + number(len(body)) + body


def vcdiff(*windows: bytes) -> bytes:
    return MAGIC + b"\x00" + b"".join(windows)


BASE_8K = random.Random(1).randbytes(8192)
TARGET_8K = edited(BASE_8K, 2)


# ---- encoding


def test_no_pairs_give_empty_arrays(kernel: Any) -> None:
    assert encode(kernel, [], []) == []
    assert decode(kernel, [], [], []) == b""


@pytest.mark.parametrize("level", range(1, 10))
def test_each_level_decodes(kernel: Any, level: int) -> None:
    targets = [edited(BASE_8K, seed) for seed in range(4)]
    deltas = encode(kernel, targets, [BASE_8K] * 4, level=level)
    assert all(deltas)
    assert decode(kernel, deltas, [BASE_8K] * 4, [len(target) for target in targets]) == b"".join(targets)


def test_few_edits_cost_few_bytes() -> None:
    (delta,) = encode(_xdelta3, [TARGET_8K], [BASE_8K])
    assert len(delta) < 300


def test_identical_target_costs_under_32_bytes(kernel: Any) -> None:
    (delta,) = encode(kernel, [BASE_8K], [BASE_8K])
    assert 0 < len(delta) < 32


def test_empty_base_decodes(kernel: Any) -> None:
    (delta,) = encode(kernel, [b"abcd" * 100], [b""], limit_bytes=np.array([10_000], np.uint32))
    assert decode(kernel, [delta], [b""], [400]) == b"abcd" * 100


def test_empty_target_needs_a_limit_above_its_length(kernel: Any) -> None:
    assert encode(kernel, [b""], [BASE_8K]) == [b""]
    (delta,) = encode(kernel, [b""], [BASE_8K], limit_bytes=np.array([64], np.uint32))
    assert delta
    assert decode(kernel, [delta], [BASE_8K], [0]) == b""


@pytest.mark.parametrize("base_bytes", [1, 8, 9, 255, 256, 257, 4095, 4096, 4097, 16384, 65536])
def test_bases_around_powers_of_two_decode(kernel: Any, base_bytes: int) -> None:
    base = random.Random(base_bytes).randbytes(base_bytes)
    targets = [base, base + b"tail", b"head" + base, base[1:], base[: base_bytes // 2] * 2]
    limits = np.full(len(targets), 1 << 20, np.uint32)
    deltas = encode(kernel, targets, [base] * len(targets), limit_bytes=limits)
    lengths = [len(target) for target in targets]
    assert decode(kernel, deltas, [base] * len(targets), lengths) == b"".join(targets)


def test_delta_over_its_limit_alone_is_left_out(kernel: Any) -> None:
    noise = random.Random(3).randbytes(8192)
    deltas = encode(kernel, [TARGET_8K, noise, TARGET_8K], [BASE_8K] * 3)
    assert deltas[1] == b""
    assert deltas[0] == deltas[2] != b""


def test_limit_is_the_last_length_kept(kernel: Any) -> None:
    (delta,) = encode(kernel, [TARGET_8K], [BASE_8K], limit_bytes=np.array([1 << 20], np.uint32))
    at, below = np.array([len(delta)], np.uint32), np.array([len(delta) - 1], np.uint32)
    assert encode(kernel, [TARGET_8K], [BASE_8K], limit_bytes=at) == [delta]
    assert encode(kernel, [TARGET_8K], [BASE_8K], limit_bytes=below) == [b""]


def test_pair_encodes_equally_alone_and_after_others() -> None:
    targets = [edited(BASE_8K, seed, edits=seed) for seed in range(1, 30)] + [b"", BASE_8K * 9, TARGET_8K]
    together = encode(_xdelta3, targets, [BASE_8K] * len(targets))
    assert together == [encode(_xdelta3, [target], [BASE_8K])[0] for target in targets]


def test_threads_encode_and_decode_as_one_thread() -> None:
    targets = [edited(BASE_8K, seed) for seed in range(60)]
    bases = [BASE_8K] * len(targets)
    alone = encode(_xdelta3, targets, bases)
    lengths = [len(target) for target in targets]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: encode(_xdelta3, targets, bases), range(12))) == [alone] * 12
        decoded = list(pool.map(lambda _: decode(_xdelta3, alone, bases, lengths), range(12)))
    assert decoded == [b"".join(targets)] * 12


@pytest.mark.parametrize("level", [1, 3, 9])
def test_two_mebibytes_with_many_short_matches_decode(level: int) -> None:
    """Above 1 MiB the instruction queue is bounded: this target fills it several times over."""
    rng = random.Random(4)
    base = rng.randbytes(1 << 20)
    target = b"".join(base[(at := rng.randrange(1 << 20)) : at + 20] + rng.randbytes(2) for _ in range(100_000))
    assert len(target) > 2 << 20
    (delta,) = encode(_xdelta3, [target], [base], level=level)
    assert delta
    assert decode(_xdelta3, [delta], [base], [len(target)]) == target


def test_read_only_writable_and_wide_buffers_are_read(kernel: Any) -> None:
    (expected,) = encode(kernel, [TARGET_8K], [BASE_8K])
    at, target_length = np.zeros(1, np.uint64), np.array([len(TARGET_8K)], np.uint32)
    base_length = np.array([8192], np.uint32)
    wide = np.frombuffer(BASE_8K, dtype=np.uint64).reshape(32, 32)
    for target, base in [(bytearray(TARGET_8K), memoryview(BASE_8K)), (np.frombuffer(TARGET_8K, np.uint8), wide)]:
        deltas, _ = kernel.encode_many(target, at, target_length, base, at, base_length)
        assert deltas.tobytes() == expected


# ---- invalid arguments


U64, U32 = np.uint64, np.uint32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": "text"}, "targets str: pass C-contiguous bytes"),
        ({"targets": np.zeros((8, 8), np.uint8)[:, ::2]}, "targets ndarray: pass C-contiguous bytes"),
        ({"target_offsets": np.zeros(1, np.int64)}, r"target_offsets int64\[1\]: pass a one-dimensional"),
        ({"target_offsets": [0]}, "target_offsets list: pass a one-dimensional"),
        ({"base_lengths": np.zeros((1, 1), U32)}, r"base_lengths uint32\[1, 1\]"),
        ({"target_offsets": np.array([61], U64)}, "target 0 at offset 61, 4 bytes: leaves its payload of 64 bytes"),
        ({"base_offsets": np.array([2**64 - 1], U64)}, "base 0 at offset 18446744073709551615, 4 bytes"),
        ({"base_lengths": np.array([65], U32)}, "base 0 at offset 0, 65 bytes: leaves its payload of 64"),
        ({"target_lengths": np.zeros(2, U32)}, "target_lengths has 2 entries: target_offsets has 1"),
        ({"base_offsets": np.zeros(2, U64), "base_lengths": np.zeros(2, U32)}, "base_offsets has 2 entries"),
        ({"limit_bytes": np.zeros(2, U32)}, "limit_bytes has 2 entries: there are 1 pairs"),
        ({"limit_bytes": np.zeros(1, U64)}, r"limit_bytes uint64\[1\]"),
        ({"level": 0}, "level 0: choose 1 to 9"),
        ({"level": 10}, "level 10: choose 1 to 9"),
    ],
)
def test_bad_encode_input_is_named(kernel: Any, change: dict[str, Any], words: str) -> None:
    arguments = {
        "targets": bytes(64),
        "target_offsets": np.zeros(1, U64),
        "target_lengths": np.array([4], U32),
        "bases": bytes(64),
        "base_offsets": np.zeros(1, U64),
        "base_lengths": np.array([4], U32),
        **change,
    }
    options = {name: arguments.pop(name) for name in ("level", "limit_bytes") if name in arguments}
    with pytest.raises(BadInput, match=words):
        kernel.encode_many(*arguments.values(), **options)


def test_pairs_above_their_bound_are_refused(kernel: Any) -> None:
    zero = np.zeros(1, U64)
    large, above, empty = bytes(PAIR_BYTES_MAX + 1), np.array([PAIR_BYTES_MAX + 1], U32), np.zeros(1, U32)
    with pytest.raises(BadInput, match=f"target 0 of {PAIR_BYTES_MAX + 1} bytes: at most {PAIR_BYTES_MAX}"):
        kernel.encode_many(large, zero, above, b"", zero, empty)
    with pytest.raises(BadInput, match=f"base 0 of {PAIR_BYTES_MAX + 1} bytes: at most {PAIR_BYTES_MAX}"):
        kernel.decode_many(b"", zero, empty, large, zero, above, empty)
    with pytest.raises(BadInput, match=f"target 0 of {PAIR_BYTES_MAX + 1} bytes: at most {PAIR_BYTES_MAX}"):
        kernel.decode_many(b"", zero, empty, b"", zero, empty, above)
    huge = np.zeros(DELTA_BYTES_MAX + 1, np.uint8)
    with pytest.raises(BadInput, match=f"delta 0 of {DELTA_BYTES_MAX + 1} bytes: at most {DELTA_BYTES_MAX}"):
        kernel.decode_many(huge, zero, np.array([len(huge)], U32), b"", zero, empty, empty)


def test_target_lengths_of_other_pairs_are_refused(kernel: Any) -> None:
    with pytest.raises(BadInput, match="target_lengths has 2 entries: there are 1 pairs"):
        decode(kernel, [b""], [b""], [0, 0])


# ---- legal VCDIFF that xdelta3 itself does not write


def test_header_without_windows_is_an_empty_target(kernel: Any) -> None:
    assert decode(kernel, [vcdiff()], [b""], [0]) == b""


def test_windows_are_concatenated(kernel: Any) -> None:
    delta = vcdiff(
        window(3, data=b"abc", codes=bytes([ADD_3])),
        window(0),
        window(4, codes=bytes([COPY_SELF, 4]), addresses=b"\x02", segment=(1, 8, 1)),
    )
    assert decode(kernel, [delta], [b"0123456789"], [7]) == b"abc3456"


def test_window_copies_from_the_target_so_far(kernel: Any) -> None:
    delta = vcdiff(
        window(3, data=b"abc", codes=bytes([ADD_3])),
        window(2, codes=bytes([COPY_SELF, 2]), addresses=b"\x00", segment=(2, 2, 1)),
    )
    assert decode(kernel, [delta], [b""], [5]) == b"abcbc"


def test_copy_reads_the_bytes_it_has_just_written(kernel: Any) -> None:
    delta = vcdiff(window(11, data=b"abc", codes=bytes([ADD_3, COPY_HERE, 8]), addresses=b"\x03"))
    assert decode(kernel, [delta], [b""], [11]) == b"abcabcabcab"


def test_copy_continues_from_the_segment_into_the_window(kernel: Any) -> None:
    delta = vcdiff(
        window(8, data=b"abc", codes=bytes([ADD_3, COPY_SELF, 5]), addresses=b"\x02", segment=(1, 4, 0)),
        window(5, codes=bytes([COPY_SELF, 5]), addresses=b"\x02", segment=(1, 4, 0)),
    )
    assert decode(kernel, [delta], [b"0123"], [13]) == b"abc23abc23232"


def test_run_repeats_one_byte(kernel: Any) -> None:
    assert decode(kernel, [vcdiff(window(5, data=b"x", codes=bytes([RUN, 5])))], [b""], [5]) == b"xxxxx"


def test_application_header_is_skipped(kernel: Any) -> None:
    delta = MAGIC + b"\x04" + b"\x05hello" + window(3, data=b"abc", codes=bytes([ADD_3]))
    assert decode(kernel, [delta], [b""], [3]) == b"abc"


# ---- hostile deltas


SECTIONS = b"\x00\x00\x00"
HUGE = b"\x8f\xff\xff\xff\x7f"
BIG = b"\xff" * 9 + b"\x7f"
ABC = window(3, data=b"abc", codes=bytes([ADD_3]))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header is cut short"),
    "no indicator": (MAGIC, "header is cut short"),
    "another magic": (b"\xd6\xc3\xc4S\x00" + ABC, "not VCDIFF version 0"),
    "header bits": (MAGIC + b"\x08", "unknown header bits"),
    "secondary compressor": (MAGIC + b"\x01\x02" + ABC, "secondary compression is not supported"),
    "secondary section": (vcdiff(b"\x00\x05\x03\x01" + SECTIONS), "secondary compression is not supported"),
    "code table": (MAGIC + b"\x02\x00" + ABC, "an own code table is not supported"),
    "long application header": (MAGIC + b"\x04" + HUGE, "application header is cut short"),
    "window bits": (vcdiff(b"\x08" + ABC[1:]), "unknown window bits"),
    "both segments": (vcdiff(b"\x03" + ABC[1:]), "a window names two source segments"),
    "segment too long": (vcdiff(b"\x01\x05\x00" + ABC[1:]), "source segment is outside its source"),
    "segment too far": (vcdiff(b"\x01\x01\x04" + ABC[1:]), "source segment is outside its source"),
    "segment of 4 GiB at 4 GiB": (vcdiff(b"\x01" + HUGE + HUGE + ABC[1:]), "source segment is outside"),
    "segment before any target": (vcdiff(b"\x02\x01\x00" + ABC[1:]), "source segment is outside"),
    "window cut": (vcdiff(ABC[:-1]), "window is cut short"),
    "no checksum": (vcdiff(b"\x04\x05\x03\x00" + SECTIONS), "window is cut short"),
    "window of 4 GiB": (vcdiff(b"\x00\x09" + HUGE + b"\x00" + SECTIONS), "decodes to more than the target's length"),
    "one byte more": (vcdiff(ABC, window(1, data=b"d", codes=b"\x02")), "decodes to more than the target's length"),
    "sections short": (vcdiff(b"\x00\x06\x03\x00" + SECTIONS + b"x"), "section lengths do not add up"),
    "sections of 12 GiB": (vcdiff(b"\x00\x11\x03\x00" + HUGE * 3), "section lengths do not add up"),
    "number cut": (vcdiff(b"\x00\x80"), "number is cut short"),
    "number of 70 bits": (vcdiff(b"\x00" + BIG), "number exceeds 32 bits"),
    "endless zeros": (vcdiff(b"\x00" + b"\x80" * 1000), "number is cut short"),
    "length cut": (vcdiff(window(3, codes=b"\x01")), "number is cut short"),
    "addition past the window": (vcdiff(window(2, data=b"abc", codes=b"\x04")), "instruction writes past its window"),
    "run of 4 GiB": (vcdiff(window(3, data=b"x", codes=b"\x00" + HUGE)), "instruction writes past its window"),
    "data short": (vcdiff(window(3, data=b"ab", codes=b"\x04")), "data section is too short"),
    "run without a byte": (vcdiff(window(3, codes=b"\x00\x03")), "data section is too short"),
    "no address": (vcdiff(window(3, codes=b"\x13\x03")), "address section is too short"),
    "address not yet written": (
        vcdiff(window(3, codes=b"\x13\x03", addresses=b"\x00")),
        "copy address is at or after",
    ),
    "address before the start": (
        vcdiff(window(3, data=b"a", codes=b"\x02\x23\x02", addresses=b"\x02")),
        "copy address is at or after its own position",
    ),
    "address of 32 bits": (vcdiff(window(3, codes=b"\x13\x03", addresses=HUGE)), "copy address is at or after"),
    "half a window": (vcdiff(window(3, data=b"a", codes=b"\x02")), "instructions end before the window is full"),
    "data left over": (vcdiff(window(3, data=b"abcd", codes=b"\x04")), "a section has bytes left over"),
    "addresses left over": (vcdiff(window(3, data=b"abc", codes=b"\x04", addresses=b"\x00")), "bytes left over"),
    "wrong checksum": (
        vcdiff(window(3, data=b"abc", codes=b"\x04", checksum=zlib.adler32(b"abd"))),
        r"checksum does not agree \(wrong base, or damaged\)",
    ),
    "target short": (vcdiff(window(2, data=b"ab", codes=b"\x03")), "decodes to less than the target's length"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_deltas_are_corrupt_and_named(kernel: Any, name: str) -> None:
    delta, words = HOSTILE[name]
    good = vcdiff(ABC)
    with pytest.raises(Corrupt, match=f"^delta of pair 1: .*{words}"):
        decode(kernel, [good, delta, good], [b"0123"] * 3, [3, 3, 3])


def test_wrong_base_is_corrupt(kernel: Any) -> None:
    (delta,) = encode(_xdelta3, [TARGET_8K], [BASE_8K])
    wrong = bytearray(BASE_8K)
    wrong[4000] ^= 1
    with pytest.raises(Corrupt, match="delta of pair 0: checksum does not agree"):
        decode(kernel, [delta], [bytes(wrong)], [len(TARGET_8K)])


def test_each_truncation_is_corrupt(kernel: Any) -> None:
    (delta,) = encode(kernel, [TARGET_8K], [BASE_8K])
    for length in range(len(delta)):
        with pytest.raises(Corrupt):
            decode(kernel, [delta[:length]], [BASE_8K], [len(TARGET_8K)])


def test_flipped_bit_of_checksummed_delta_is_detected() -> None:
    (delta,) = encode(_xdelta3, [TARGET_8K], [BASE_8K])
    refused = 0
    for bit in range(8 * len(delta)):
        flipped = bytearray(delta)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decoded = decode(_xdelta3, [bytes(flipped)], [BASE_8K], [len(TARGET_8K)])
        except Corrupt:
            refused += 1
        else:  # a shorter source segment, for example, may leave every copy as it was
            assert decoded == TARGET_8K
    assert refused > 7 * len(delta)


def test_delta_that_claims_gibibytes_allocates_nothing() -> None:
    promises = [HOSTILE[name][0] for name in HOSTILE if "GiB" in name or "long" in name]
    assert len(promises) >= 5
    tracemalloc.start()
    try:
        for delta in promises:
            with pytest.raises(Corrupt):
                decode(_xdelta3, [delta], [b"0123"], [3])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_random_bytes_never_decode() -> None:
    rng = random.Random(6)
    for _ in range(3000):
        noise = rng.choice([b"", MAGIC, MAGIC + b"\x00", vcdiff(b"\x01\x04\x00")]) + rng.randbytes(rng.randrange(60))
        with pytest.raises(Corrupt):
            decode(_xdelta3, [noise], [b"0123"], [4096])


# ---- the command

FROZEN_BASE = b"".join(b"line %d of a file that changes little\n" % i for i in range(30))
FROZEN_TARGET = (
    FROZEN_BASE[:300]
    + b"ZZ" * 9
    + FROZEN_BASE[330:900]
    + b"inserted text here"
    + FROZEN_BASE[900:]
    + FROZEN_BASE[10:60]
)
FROZEN_BODY = (
    "5a6c650a6c696e652039313031313233343536373832323232696e7365727465642074657874206865726532323232323213822c00120a23"
    "24031325024324032325022325022325022325022325022325022325232502632502332502332502331e0112270243250243250243250243"
    "250233250233201321a100826b8253004c262626262626827c26264c72844b72264c72264c8323f5"
)
FROZEN = {
    "-A": "d6c3c4000005861900812289220031491e10d99561" + FROZEN_BODY,
    "-A -n": "d6c3c4000001861900811e89220031491e" + FROZEN_BODY,
    "with an application header": "d6c3c4000405742f2f622f05861900812289220031491e10d99561" + FROZEN_BODY,
}


@pytest.mark.parametrize("options", FROZEN)
def test_output_of_xdelta3_3_0_11_decodes(kernel: Any, options: str) -> None:
    delta = bytes.fromhex(FROZEN[options])
    assert decode(kernel, [delta], [FROZEN_BASE], [len(FROZEN_TARGET)]) == FROZEN_TARGET


def run(*arguments: str | Path) -> None:
    assert COMMAND is not None
    subprocess.run([COMMAND, *map(str, arguments)], check=True, capture_output=True, timeout=30)


PAIRS = {
    "edited": (TARGET_8K, BASE_8K),
    "text": (FROZEN_TARGET, FROZEN_BASE),
    "one byte": (b"a", b"b"),
    "empty target": (b"", BASE_8K),
    "64 KiB": (edited(BASE_8K * 8, 9, 50), BASE_8K * 8),
    "900 KiB": (edited(random.Random(8).randbytes(900 << 10), 9, 90), random.Random(8).randbytes(900 << 10)),
}


@needs_command
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", ["-1 -S none -A", "-9 -S none -A", "-3 -S none -n", "-6 -S none -W 16384"])
def test_output_of_the_command_decodes(tmp_path: Path, options: str, name: str) -> None:
    target, base = PAIRS[name]
    (tmp_path / "target").write_bytes(target)
    (tmp_path / "base").write_bytes(base)
    run("-e", *options.split(), "-s", tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    delta = (tmp_path / "delta").read_bytes()
    assert decode(_xdelta3, [delta], [base], [len(target)]) == target
    if len(target) < 100_000:
        assert decode(xdelta3_reference, [delta], [base], [len(target)]) == target


@needs_command
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("level", [1, 9])
def test_command_decodes_own_output(kernel: Any, tmp_path: Path, level: int, name: str) -> None:
    target, base = PAIRS[name]
    (delta,) = encode(kernel, [target], [base], level=level, limit_bytes=np.array([1 << 22], np.uint32))
    (tmp_path / "base").write_bytes(base)
    (tmp_path / "delta").write_bytes(delta)
    run("-d", "-s", tmp_path / "base", tmp_path / "delta", tmp_path / "decoded")
    assert (tmp_path / "decoded").read_bytes() == target
