"""Test messages about batches of small blobs: they round trip, and hostile ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats.blob_table import BatchedBlob, blob_id
from nearkin_shared.formats.message import (
    Batch,
    BatchEnd,
    End,
    Envelope,
    Frame,
    Segments,
    decode,
    encode,
    is_batch,
    is_end,
)
from nearkin_shared.formats.message_layout import BLOBS_MAX, HEADER, TABLE_BYTES
from tests.support.data.messages import segment

VALUES = (b"one record", b"", b"another record of another key")
BLOBS = tuple(
    BatchedBlob(f"k{number}", len(value), blake3(value).digest(), bytes([number] * 16), 1000 + number, {"n": "\x01ü"})
    for number, value in enumerate(VALUES)
)
ENVELOPE = Envelope(bytes(range(16)), "t", "k0", blobs=len(BLOBS))
BATCH = Batch(ENVELOPE, BLOBS, np.frombuffer(b"".join(VALUES), np.uint8))
END = BatchEnd(ENVELOPE, tuple(replace(blob, segments=1, traceparent=b"00-ab") for blob in BLOBS))


def test_batch_and_its_end_round_trip() -> None:
    data = encode(BATCH)
    found = decode(data, "test")
    assert isinstance(found, Batch)
    assert (found.envelope, found.blobs, found.payload.tobytes()) == (ENVELOPE, BLOBS, b"".join(VALUES))
    assert is_batch(data)
    assert not is_end(data)
    last = encode(END)
    assert decode(last, "test") == END
    assert is_end(last)
    assert END.segments == 3


def test_messages_about_a_batch_keep_its_size_in_format_5() -> None:
    """An older worker must not take the segments of a batch for those of one blob."""
    for message in (Segments(ENVELOPE, segment(b"x" * 5000)), End(ENVELOPE, 1, bytes(16), failure="no")):
        data = encode(message)
        assert data[4] == 5
        assert decode(data, "test").envelope == ENVELOPE
    assert encode(Frame(replace(ENVELOPE, blobs=0), BATCH.payload))[4] == 1


def test_ids_of_the_blobs_are_counted_from_the_batch() -> None:
    assert blob_id(bytes(15) + b"\x05", 0) == bytes(15) + b"\x05"
    assert blob_id(bytes(14) + b"\x00\xff", 1) == bytes(14) + b"\x01\x00"
    assert blob_id(b"\xff" * 16, 2) == bytes(15) + b"\x01"


def test_batch_out_of_bounds_is_not_sent() -> None:
    with pytest.raises(BadInput, match="whose blobs have"):
        encode(replace(BATCH, payload=BATCH.payload[1:]))
    with pytest.raises(BadInput, match="of no blobs"):
        encode(replace(BATCH, envelope=replace(ENVELOPE, blobs=0)))
    with pytest.raises(BadInput, match="frame of a batch"):
        encode(Frame(ENVELOPE, BATCH.payload))
    many = (replace(BLOBS[1], key="k"),) * (BLOBS_MAX + 1)
    with pytest.raises(BadInput, match=f"1 to {BLOBS_MAX}"):
        encode(Batch(replace(ENVELOPE, blobs=len(many)), many, BATCH.payload[:0]))
    long = tuple(replace(BLOBS[1], metadata={"m": "x" * 60_000}) for _ in range(4))
    with pytest.raises(BadInput, match="table of a batch"):
        encode(Batch(replace(ENVELOPE, blobs=4), long, BATCH.payload[:0]))


def with_rows(change: Callable[[list[Any]], object]) -> bytes:
    """Return an encoded end of a batch with a changed table."""
    data = encode(END)
    start = HEADER.size + len("tk0")
    rows = json.loads(data[start:])
    change(rows)
    table = json.dumps(rows).encode()
    fields = list(HEADER.unpack_from(data))
    fields[7] = len(table)
    return HEADER.pack(*fields) + data[HEADER.size : start] + table


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda rows: rows.pop(), "not a list of 3 blobs"),
        (lambda rows: rows[0].pop(), "not a list of 8"),
        (lambda rows: rows[0].__setitem__(0, 7), "key 7"),
        (lambda rows: rows[0].__setitem__(0, "k" * 2000), "key"),
        (lambda rows: rows[0].__setitem__(1, -1), "size_bytes -1"),
        (lambda rows: rows[0].__setitem__(1, True), "size_bytes True"),
        (lambda rows: rows[0].__setitem__(2, "ab"), "digest"),
        (lambda rows: rows[0].__setitem__(3, "xy"), "does not parse"),
        (lambda rows: rows[0].__setitem__(4, 1 << 62), "began_us"),
        (lambda rows: rows[0].__setitem__(5, {"a": 1}), "metadata"),
        (lambda rows: rows[0].__setitem__(5, [1]), "metadata"),
        (lambda rows: rows[0].__setitem__(6, 1), "traceparent"),
        (lambda rows: rows[0].__setitem__(7, None), "number of segments"),
        (lambda rows: rows[0].__setitem__(7, 1.5), "segments 1.5"),
    ],
)
def test_hostile_table_is_refused_by_value(change: Callable[[list[Any]], object], problem: str) -> None:
    with pytest.raises(Corrupt, match=problem):
        decode(with_rows(change), "test")


def test_hostile_batch_is_refused() -> None:
    data = bytearray(encode(BATCH))
    at = HEADER.size + len("tk0")
    longer = data.copy()
    longer[at : at + TABLE_BYTES.size] = TABLE_BYTES.pack(1 << 30)
    with pytest.raises(Corrupt, match="a table of"):
        decode(bytes(longer), "test")
    for version, blobs in ((5, 0), (1, 3), (5, BLOBS_MAX + 1)):
        changed = data.copy()
        changed[4] = version
        changed[54:56] = blobs.to_bytes(2, "little")
        with pytest.raises(Corrupt, match=f"{blobs} blobs in a batch"):
            decode(bytes(changed), "test")
