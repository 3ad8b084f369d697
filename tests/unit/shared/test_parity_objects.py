"""Test ParityObjectStore.

Parity is computed from the stored bytes, and format numbers are repaired too.
"""

from __future__ import annotations

import pytest

from nearkin_shared.errors import FormatTooNew
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.objectstore.parity import ParityObjectStore, parity_name, read_decoded

NAME = "containers/00/object.nkc"
STORED = bytes(range(256)) * 40


def test_parity_of_existing_object_is_not_replaced() -> None:
    """F.32: a put that finds other bytes under its name leaves the parity of the stored bytes."""
    objects = ParityObjectStore(memory_objects(), Scheme(4, 2))
    objects.put_new(NAME, STORED)
    parity = objects.inner.get(parity_name(NAME))
    with pytest.raises(AlreadyExists):
        objects.put_new(NAME, b"other bytes")
    assert objects.inner.get(parity_name(NAME)) == parity
    assert objects.damage_of(NAME, STORED) is None


def test_flipped_format_number_is_read_by_parity() -> None:
    """F.32: a flipped bit in a format number is repaired in memory."""
    below = memory_objects()
    ParityObjectStore(below, Scheme(4, 2)).put_new(NAME, STORED)
    damaged = bytes([STORED[0] ^ 0x80]) + STORED[1:]
    below.delete(NAME)
    below.put_new(NAME, damaged)

    def decode(data: bytes, name: str) -> bytes:
        if data[0] > 1:
            raise FormatTooNew(f"{name}: format {data[0]}")
        return data

    assert read_decoded(ParityObjectStore(below, None), NAME, decode) == STORED
