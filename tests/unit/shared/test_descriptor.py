"""Test the descriptor.

It is created once, never overwritten, and each damage to the secret is detected.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew, NotFound
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.storage import descriptor


def written(data: bytes) -> ObstoreObjectStore:
    objects = memory_objects()
    objects.put_new(descriptor.NAME, data)
    return objects


def made() -> tuple[descriptor.Descriptor, bytes]:
    objects = memory_objects()
    return descriptor.create(objects), objects.get(descriptor.NAME)


def test_descriptor_round_trips() -> None:
    found, data = made()
    assert descriptor.read(written(data)) == found
    assert (len(bytes.fromhex(found.secret)), found.fingerprint_bits) == (32, 160)


def test_two_stores_have_different_secrets() -> None:
    assert len({made()[0].secret for _ in range(5)}) == 5


def test_descriptor_is_never_overwritten() -> None:
    objects = memory_objects()
    first = descriptor.create(objects)
    with pytest.raises(AlreadyExists):
        descriptor.create(objects)
    assert descriptor.read(objects) == first


def test_store_without_descriptor_is_refused() -> None:
    with pytest.raises(NotFound):
        descriptor.read(memory_objects())


def test_each_flipped_bit_is_detected_or_harmless() -> None:
    found, data = made()
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert descriptor.read(written(bytes(flipped))) == found
        except (Corrupt, FormatTooNew):
            continue


def test_each_truncation_is_detected() -> None:
    _, data = made()
    for length in range(len(data)):
        with pytest.raises(Corrupt, match="restore it from a copy"):
            descriptor.read(written(data[:length]))


def test_order_and_spacing_are_irrelevant() -> None:
    found, data = made()
    turned = dict(reversed(json.loads(data).items()))
    assert descriptor.read(written(json.dumps(turned, separators=(",", ":")).encode())) == found


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"format_version": 0},
        {"format_version": "1"},
        {"format_version": True},
        {"secret": "ab"},
        {"secret": "xy" * 32},
        {"secret": 5},
        {"fingerprint_bits": 500},
        {"fingerprint_bits": 159},
        {"store_id": "other"},
        {"more": 1},
        {"check": None},
        {"check": "0" * 16},
    ],
    ids=str,
)
def test_unknown_fields_are_corrupt(change: dict[str, Any]) -> None:
    fields = json.loads(made()[1]) | change
    with pytest.raises(Corrupt, match="restore it from a copy"):
        descriptor.read(written(json.dumps(fields).encode()))


@pytest.mark.parametrize("data", [b"[]", b"null", b"1", b'"text"', b"[" * 60000, b"{" * 70000, b"\xff", b"{}"])
def test_other_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        descriptor.read(written(data))


def test_store_of_a_later_format_is_named() -> None:
    fields = json.loads(made()[1]) | {"format_version": 2, "news": True}
    with pytest.raises(FormatTooNew, match="store format 2; this Nearkin reads up to 1"):
        descriptor.read(written(json.dumps(fields).encode()))


@pytest.mark.parametrize("bits", [0, 7, 161])
def test_fingerprints_of_other_lengths_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match="8 to 160"):
        descriptor.create(memory_objects(), bits)
