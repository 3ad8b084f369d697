"""Bodies of parts decode to what was encoded, and all others are refused."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.formats import upload_parts
from nearkin_shared.formats.upload_parts import (
    CopiedRange,
    PartsDecoder,
    PartsEncoder,
    format_versions,
    parse_versions,
)

BASE_BYTES = 1000
DIGEST = bytes(range(32))
DATA = st.binary(min_size=1, max_size=40)
IDLE = st.integers(1, 50)


@st.composite
def part_lists(draw: st.DrawFn) -> list[bytes | CopiedRange | int]:
    """Draw new bytes, ascending ranges and lengths of idle records."""
    bounds = sorted(draw(st.lists(st.integers(0, BASE_BYTES), max_size=12, unique=True)))
    ranges = [CopiedRange(*bound) for bound in list(pairwise(bounds))[::2]]
    parts: list[bytes | CopiedRange | int] = []
    for copied in ranges:
        parts += draw(st.lists(st.one_of(DATA, IDLE), max_size=3))
        parts.append(copied)
    return parts + draw(st.lists(st.one_of(DATA, IDLE), max_size=3))


def encode(parts: list[bytes | CopiedRange | int]) -> bytes:
    body = bytearray()
    encoder = PartsEncoder(body.extend)
    for part in parts:
        if isinstance(part, CopiedRange):
            encoder.add_copy(*part)
        elif isinstance(part, int):
            encoder.add_idle(part)
        else:
            encoder.add_data(part)
    encoder.end(len(expand(parts)), DIGEST)
    return bytes(body)


def base() -> bytes:
    return b"".join(number.to_bytes(2, "little") for number in range(BASE_BYTES // 2))


def expand(parts: list[bytes | CopiedRange | int]) -> bytes:
    pieces = [base()[part.start : part.stop] if isinstance(part, CopiedRange) else part for part in parts]
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


def decode(body: bytes, step: int, size_bytes_max: int = 1 << 30) -> tuple[bytes, PartsDecoder]:
    decoder, result = PartsDecoder([BASE_BYTES], size_bytes_max), bytearray()
    for start in range(0, len(body), step):
        for part in decoder.feed(body[start : start + step]):
            result += base()[part.start : part.stop] if isinstance(part, CopiedRange) else part
    decoder.finish()
    return bytes(result), decoder


@given(part_lists(), st.integers(1, 100))
def test_body_decodes_to_its_parts(parts: list[bytes | CopiedRange | int], step: int) -> None:
    """Whatever the pieces are in which it arrives."""
    result, decoder = decode(encode(parts), step)
    assert (result, decoder.digest, decoder.size_bytes) == (expand(parts), DIGEST, len(result))
    assert decoder.records == len(parts)


@given(part_lists(), st.data())
def test_damaged_body_is_refused(parts: list[bytes | CopiedRange | int], data: st.DataObject) -> None:
    """A flipped bit, a cut and bytes behind the end are each refused."""
    body = encode(parts)
    position = data.draw(st.integers(0, len(body) - 1))
    flipped = bytearray(body)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadInput, match="body of parts"):
        decode(bytes(flipped), 7)
    with pytest.raises(BadInput, match="ends within record"):
        decode(body[:position], 7)
    with pytest.raises(BadInput, match="behind its end"):
        decode(body + b"\0", 7)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_or_bounded(noise: bytes, has_head: bool) -> None:
    """No body makes the decoder fail in another way, or yield more than it may."""
    body = encode([])[:12] + noise if has_head else noise
    with pytest.raises(BadInput):
        decode(body, 11)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\x07", "record 1 has kind 7; want one of [0, 1, 2, 3]"),
        (b"\x01\0\0\0\0", "record 1 has length 0; want 1 to 16777216"),
        (b"\x01\xff\xff\xff\xff", "record 1 has length 4294967295"),
        (b"\x03\x01\0\x01\0", "record 1 has length 65537; want 1 to 65536"),
        (b"\x02" + (5).to_bytes(8, "little") * 2, "record 1 copies bytes 5 to 5"),
        (b"\x02" + (5).to_bytes(8, "little") + (1001).to_bytes(8, "little"), "copies bytes 5 to 1001"),
        (b"\x02" + (1 << 63).to_bytes(8, "little") * 2, "within 0 to 1000"),
        (b"\0" + (3).to_bytes(8, "little") + bytes(64), "size 3 at its end, its records make 0"),
        (b"\0" + bytes(72), "BLAKE3 00000000"),
    ],
)
def test_wrong_record_is_named(record: bytes, message: str) -> None:
    """The refusal names the record, its value and what is accepted."""
    with pytest.raises(BadInput, match=re.escape(message)):
        decode(encode([])[:12] + record, 3)


def test_ranges_must_ascend() -> None:
    """No byte of the base is copied twice: a small body would stand for terabytes."""
    with pytest.raises(BadInput, match=r"record 2 copies bytes 9 to 20; want .* within 10 to 1000"):
        decode(encode([CopiedRange(0, 10), CopiedRange(9, 20)]), 5)


def test_ranges_of_each_source_ascend_within_it() -> None:
    """Ranges of several sources alternate; none crosses a border, and each begins behind the one before."""

    def decoded(*ranges: tuple[int, int]) -> list[CopiedRange]:
        decoder = PartsDecoder([10, 20, 5], 1000)
        return [part for part in decoder.feed(encode([CopiedRange(*one) for one in ranges])) if len(part)]  # type: ignore[misc]

    alternating = [(10, 12), (0, 4), (30, 31), (12, 30), (4, 10), (31, 35)]
    assert decoded(*alternating) == alternating
    for refused, message in (
        ([(5, 11)], "within 0 to 10"),
        ([(10, 31)], "within 10 to 30"),
        ([(10, 12), (0, 4), (11, 13)], "within 12 to 30"),
        ([(30, 36)], "within 30 to 35"),
        ([(35, 36)], "within 30 to 35"),
    ):
        with pytest.raises(BadInput, match=message):
            decoded(*refused)
    with pytest.raises(BadInput, match="within 0 to 0"):
        list(PartsDecoder([], 1000).feed(encode([CopiedRange(0, 1)])))


@given(st.sets(st.integers(1, 60), min_size=1))
def test_version_numbers_are_read_as_written(versions: set[int]) -> None:
    """Runs are joined, and the text is as short as they allow."""
    text = format_versions(sorted(versions))
    assert parse_versions(text) == sorted(versions)
    assert parse_versions(text.replace(",", ", ")) == sorted(versions)
    assert text.count(",") + 1 == sum(version - 1 not in versions for version in versions)


@pytest.mark.parametrize(
    "text",
    ["", "0", "1,", "2,1", "1,1", "3-2", "1-3,3", "1-1001", "1-999,2000-2001", "-1", "1-", "a", "1 2", "1" * 20, "١"],
)
def test_wrong_version_numbers_are_refused(text: str) -> None:
    """Not ascending, too many, or no numbers: the refusal has the text."""
    with pytest.raises(BadInput, match=re.escape(f"Nearkin-Checkpoints {text}: want at most 1000")):
        parse_versions(text)


def test_other_version_is_refused() -> None:
    """A body of a later format names the version that is read."""
    body = bytearray(encode([]))
    body[8] = 2
    with pytest.raises(BadInput, match="version 2, flags 0; want 1 and 0"):
        decode(bytes(body), 5)
    with pytest.raises(BadInput, match=r"begins with b'%PDF-1\.7'"):
        decode(b"%PDF-1.7 and more", 5)


def test_number_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more record than may be is refused."""
    monkeypatch.setattr(upload_parts, "RECORDS_MAX", 3)
    decode(encode([1, b"a", CopiedRange(0, 1)]), 5)
    with pytest.raises(BadInput, match="more than 3 records"):
        decode(encode([1, b"a", CopiedRange(0, 1), b"b"]), 5)


def test_size_of_the_result_is_bounded() -> None:
    """Copies count as bytes of the result."""
    decode(encode([CopiedRange(0, 90), b"0123456789"]), 5, 100)
    with pytest.raises(BadInput, match="record 2 makes 101 bytes, the result may have 100"):
        decode(encode([CopiedRange(0, 91), b"0123456789"]), 5, 100)
