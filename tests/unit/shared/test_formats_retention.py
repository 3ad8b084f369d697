"""Test retention records.

Each byte is verified, and a record that a reader would refuse is not written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.retention_record import FIXED, SEQUENCE_MAX, decode_retention, encode_retention
from tests.support.data import samples

KEY = bytes(range(32))
RECORD = samples.small_retention()
DATA = encode_retention(RECORD, KEY)


def test_retention_record_is_read_as_written() -> None:
    """F.29: a record is decoded as encoded, with a MAC and, in an encrypted store, without."""
    assert decode_retention(DATA, "record", KEY) == RECORD
    assert decode_retention(encode_retention(RECORD), "record") == RECORD
    assert FIXED.size == 44
    assert int.from_bytes(DATA[36:44], "little") == RECORD.retain_until_us


def test_each_flipped_bit_of_retention_record_is_detected() -> None:
    """F.29: no bit of a record changes unnoticed, and none is missing."""
    for bit in range(len(DATA) * 8):
        wrong = bytearray(DATA)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match="record 7"):
            decode_retention(bytes(wrong), "record 7", KEY)
    for stop in range(len(DATA)):
        with pytest.raises(Corrupt):
            decode_retention(DATA[:stop], "record", KEY)


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["no-mac", "wrong-mac"])
def test_unauthenticated_retention_record_is_corrupt(key: bytes | None) -> None:
    """F.29: a store that authenticates its records refuses a record without the store's MAC."""
    with pytest.raises(Corrupt, match="not authenticated"):
        decode_retention(encode_retention(RECORD, key), "record", KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": 0},
        {"sequence": SEQUENCE_MAX + 1},
        {"retain_until_us": 0},
        {"retain_until_us": 1 << 62},
        {"at_us": -1},
        {"tenant": "t" * 129},
        {"key": "k" * 1025},
        {"who": "w" * 257},
        {"reason": "r" * 1025},
    ],
)
def test_retention_record_out_of_bounds_is_not_written(change: dict[str, object]) -> None:
    """F.29: a writer refuses a record that a reader would refuse."""
    with pytest.raises(BadInput):
        encode_retention(replace(RECORD, **change), KEY)  # type: ignore[arg-type]


def test_newer_retention_record_names_the_remedy() -> None:
    """F.29: a record of a later format or with an unknown flag is not reported as damaged."""
    for at, value in ((4, 2), (6, 3)):
        body = DATA[:at] + value.to_bytes(2, "little") + DATA[at + 2 : -8]
        with pytest.raises(FormatTooNew, match="upgrade"):
            decode_retention(body + columns.check_bytes(body), "record", KEY)
