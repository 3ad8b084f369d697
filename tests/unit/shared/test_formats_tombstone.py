"""Test tombstones.

Each byte is verified, and a tombstone that a reader would refuse is not written.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct

import pytest

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.tombstone import FIXED, SEQUENCE_MAX, MarkKind, decode_mark, encode_mark
from tests.support.data import samples

MARK = samples.small_mark()
DATA = encode_mark(MARK)


def resealed(body: bytes) -> bytes:
    return body + columns.check_bytes(body)


def test_tombstone_round_trips() -> None:
    for mark in (
        MARK,
        replace(MARK, sequence=2, kind=MarkKind.UNDELETED, until_us=0, who="", reason=""),
        replace(MARK, sequence=SEQUENCE_MAX, kind=MarkKind.COLLECTED, until_us=0),
    ):
        assert decode_mark(encode_mark(mark), "mark") == mark


def test_fixed_part_is_laid_out_as_the_page_says() -> None:
    layout = Struct("<4s2H Q I 4H q q 16s")
    assert FIXED.size == 60
    assert layout.unpack_from(DATA)[:5] == (b"NKT1", 1, 1, 3, 1)
    assert int.from_bytes(DATA[28:36], "little") == MARK.at_us
    assert int.from_bytes(DATA[36:44], "little") == MARK.until_us
    assert DATA[44:60] == MARK.request
    assert DATA[60:-8].decode() == "defaultbackups/täglich.tarkim@db-1wrong höst"


def test_any_flipped_bit_is_detected() -> None:
    for bit in range(len(DATA) * 8):
        wrong = bytearray(DATA)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match="mark 7"):
            decode_mark(bytes(wrong), "mark 7")


def test_any_missing_or_added_byte_is_detected() -> None:
    for stop in range(len(DATA)):
        with pytest.raises(Corrupt):
            decode_mark(DATA[:stop], "mark")
    for wrong in (DATA + b"\0", resealed(DATA[:-8] + b"\0"), resealed(DATA[:-9])):
        with pytest.raises(Corrupt):
            decode_mark(wrong, "mark")


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (4, b"\3\0", FormatTooNew),
        (4, b"\0\0", Corrupt),
        (6, b"\4\0", FormatTooNew),
        (6, b"\0\0", Corrupt),
        (6, b"\2\0", Corrupt),
        (16, b"\0\0\0\0", Corrupt),
        (16, b"\2\0\0\0", Corrupt),
        (16, b"\xff\xff\0\0", Corrupt),
        (20, b"\xff\0", Corrupt),
        (28, b"\xff" * 8, Corrupt),
        (36, b"\xff" * 8, Corrupt),
        (60, b"\xff", Corrupt),
    ],
)
def test_invalid_tombstone_with_valid_checksum_is_refused(at: int, value: bytes, error: type[Exception]) -> None:
    body = bytearray(DATA[:-8])
    body[at : at + len(value)] = value
    with pytest.raises(error):
        decode_mark(resealed(bytes(body)), "mark")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence": 0},
        {"sequence": SEQUENCE_MAX + 1},
        {"sequence": 2},
        {"kind": MarkKind.UNDELETED},
        {"sequence": 2, "kind": MarkKind.UNDELETED},  # a deletion alone has an end
        {"at_us": -1},
        {"until_us": 1 << 62},
        {"tenant": "t" * 129},
        {"key": "k" * 1025},
        {"who": "ä" * 129},
        {"reason": "r" * 1025},
        {"reason": "\ud800"},
    ],
)
def test_tombstone_that_a_reader_would_refuse_is_not_written(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        encode_mark(replace(MARK, **wrong))  # type: ignore[arg-type]
