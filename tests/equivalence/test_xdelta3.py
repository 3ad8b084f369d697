"""Compare both xdelta3 implementations.

Each decodes the other's deltas, and both refuse the same with one message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.kernels.native import _xdelta3
from nearkin_shared.kernels.reference import xdelta3_reference
from nearkin_shared.kernels.reference.xdelta3_reference import number


def pack(pieces: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(piece) for piece in pieces], dtype=np.uint32)
    return b"".join(pieces), np.cumsum(lengths, dtype=np.uint64) - lengths, lengths


def outcome(kernel: Any, delta: bytes, base: bytes, target_bytes: int) -> bytes | str:
    """Return the bytes that one delta decodes to, or the message of the refusal."""
    try:
        decoded = kernel.decode_many(*pack([delta]), *pack([base]), np.array([target_bytes], np.uint32))
    except Corrupt as err:
        return str(err)
    return bytes(decoded.tobytes())


@st.composite
def pair(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a target made of pieces of the base, pieces of itself, runs and new bytes."""
    base = draw(st.binary(max_size=80)) * draw(st.integers(1, 40)) + draw(st.binary(max_size=80))
    target = b""
    for _ in range(draw(st.integers(0, 8))):
        source = draw(st.sampled_from(["base", "target", "new", "run"]))
        if source == "new":
            target += draw(st.binary(max_size=40))
        elif source == "run":
            target += draw(st.binary(min_size=1, max_size=1)) * draw(st.integers(0, 200))
        else:
            whole = base if source == "base" else target
            start = draw(st.integers(0, len(whole)))
            target += whole[start : start + draw(st.integers(0, 2000))]
    return target, base


@settings(deadline=None)
@given(pairs=st.lists(pair(), max_size=4), level=st.integers(1, 9), crude=st.booleans())
def test_each_kernel_decodes_the_other_s_deltas(pairs: list[tuple[bytes, bytes]], level: int, crude: bool) -> None:
    targets, bases = [target for target, _ in pairs], [base for _, base in pairs]
    encoder = xdelta3_reference if crude else _xdelta3
    limits = np.full(len(pairs), 1 << 20, np.uint32)
    deltas, lengths = encoder.encode_many(*pack(targets), *pack(bases), level=level, limit_bytes=limits)
    offsets = np.cumsum(lengths, dtype=np.uint64) - lengths
    target_lengths = np.array([len(target) for target in targets], np.uint32)
    for decoder in (_xdelta3, xdelta3_reference):
        decoded = decoder.decode_many(deltas, offsets, lengths, *pack(bases), target_lengths)
        assert decoded.tobytes() == b"".join(targets)


@settings(deadline=None)
@given(
    pairs=st.lists(pair(), min_size=1, max_size=3),
    limits=st.lists(st.integers(0, 400), min_size=3, max_size=3),
)
def test_delta_is_kept_exactly_within_its_limit(pairs: list[tuple[bytes, bytes]], limits: list[int]) -> None:
    """No delta is longer than its limit, and none that fits is refused."""
    packed = (*pack([target for target, _ in pairs]), *pack([base for _, base in pairs]))
    limit_bytes = np.array(limits[: len(pairs)], np.uint32)
    for kernel in (_xdelta3, xdelta3_reference):
        _, free = kernel.encode_many(*packed, limit_bytes=np.full(len(pairs), 1 << 20, np.uint32))
        _, bounded = kernel.encode_many(*packed, limit_bytes=limit_bytes)
        assert bounded.tolist() == np.where(free <= limit_bytes, free, 0).tolist()


@settings(deadline=None)
@given(data=st.data(), source=pair(), crude=st.booleans())
def test_both_kernels_decode_damaged_deltas_alike(
    data: st.DataObject, source: tuple[bytes, bytes], crude: bool
) -> None:
    target, base = source
    encoder = xdelta3_reference if crude else _xdelta3
    delta, _ = encoder.encode_many(*pack([target]), *pack([base]), limit_bytes=np.array([1 << 20], np.uint32))
    damaged = bytearray(delta.tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "insert", "delete"]))
        # Headers are a few bytes of many; half of all damage is put there.
        at = data.draw(st.integers(0, min(30, len(damaged))) | st.integers(0, len(damaged)))
        if kind == "cut":
            del damaged[at:]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(max_size=10) | st.integers(0, 2**70).map(number))
        elif at < len(damaged):
            if kind == "flip":
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "set":
                damaged[at] = data.draw(st.integers(0, 255))
            else:
                del damaged[at]
    target_bytes = data.draw(st.just(len(target)) | st.integers(0, len(target) + 5))
    assert outcome(_xdelta3, bytes(damaged), base, target_bytes) == outcome(
        xdelta3_reference, bytes(damaged), base, target_bytes
    )


HOSTILE_NUMBER = st.sampled_from([0, 1, 127, 128, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])


@st.composite
def windows(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Draw a delta of any instructions, most of which fit."""

    def nearly(value: int) -> bytes:
        return number(draw(HOSTILE_NUMBER) if draw(st.integers(0, 40)) == 0 else value)

    base = draw(st.binary(max_size=40))
    delta = bytearray(b"\xd6\xc3\xc4\x00\x00")
    target_bytes = 0
    for _ in range(draw(st.integers(0, 3))):
        bits = draw(st.sampled_from([0, 1, 2]))
        whole_bytes = [0, len(base), target_bytes][bits]
        segment_bytes = draw(st.integers(0, whole_bytes))
        offset = draw(st.integers(0, whole_bytes - segment_bytes))
        data, codes, addresses = bytearray(), bytearray(), bytearray()
        length = 0
        for _ in range(draw(st.integers(0, 8))):
            code = draw(st.integers(0, 255))
            codes.append(code)
            for half in xdelta3_reference.CODE_TABLE_DEFAULT[code]:
                half_bytes = half.length
                if half_bytes == 0:
                    half_bytes = draw(st.integers(0, 40))
                    codes += nearly(half_bytes)
                if half.kind == "copy":
                    here = segment_bytes + length
                    if half.mode >= 6:
                        addresses.append(draw(st.integers(0, 255)))
                    else:
                        addresses += nearly(draw(st.integers(0, max(here, 1))))
                else:
                    data += draw(st.binary(min_size=1, max_size=1)) * (half_bytes if half.kind == "add" else 1)
                length += half_bytes
        body = nearly(length) + b"\x00" + nearly(len(data)) + nearly(len(codes)) + nearly(len(addresses))
        body += data + codes + addresses
        source_range = nearly(segment_bytes) + nearly(offset) if bits else b""
        delta += bytes([bits]) + source_range + nearly(len(body)) + body
        target_bytes += length
    return bytes(delta), base, target_bytes


@settings(deadline=None)
@given(hostile=windows())
def test_both_kernels_decode_any_instructions_alike(hostile: tuple[bytes, bytes, int]) -> None:
    assert outcome(_xdelta3, *hostile) == outcome(xdelta3_reference, *hostile)


@settings(deadline=None)
@given(delta=st.binary(max_size=60), prefix=st.booleans(), base=st.binary(max_size=20), target_bytes=st.integers(0, 50))
def test_both_kernels_decode_any_bytes_alike(delta: bytes, prefix: bool, base: bytes, target_bytes: int) -> None:
    delta = b"\xd6\xc3\xc4\x00" + delta if prefix else delta
    assert outcome(_xdelta3, delta, base, target_bytes) == outcome(xdelta3_reference, delta, base, target_bytes)


ranges = st.lists(
    st.tuples(st.integers(0, 30) | st.just(2**64 - 1), st.integers(0, 30) | st.just(2**32 - 1)), max_size=3
)


@settings(deadline=None)
@given(target_ranges=ranges, base_ranges=ranges, limits=st.none() | st.lists(st.integers(0, 9), max_size=3))
def test_both_kernels_refuse_equal_ranges_with_one_message(
    target_ranges: list[tuple[int, int]], base_ranges: list[tuple[int, int]], limits: list[int] | None
) -> None:
    def refusal(kernel: Any) -> str | None:
        try:
            kernel.encode_many(
                bytes(32),
                np.array([offset for offset, _ in target_ranges], np.uint64),
                np.array([length for _, length in target_ranges], np.uint32),
                bytes(16),
                np.array([offset for offset, _ in base_ranges], np.uint64),
                np.array([length for _, length in base_ranges], np.uint32),
                limit_bytes=None if limits is None else np.array(limits, np.uint32),
            )
        except BadInput as err:
            return str(err)
        return None

    assert refusal(_xdelta3) == refusal(xdelta3_reference)
