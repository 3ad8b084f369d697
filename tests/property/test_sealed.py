"""Compare ranges of an encrypted object with those of the plain bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.formats.encrypted_object import PAGE_BYTES
from nearkin_shared.objectstore.encrypting import EncryptingObjectStore, ObjectEncryption
from tests.support.data.test_keys import memory_keyring

KEYRING = memory_keyring()
LARGE = random_bytes(4 * PAGE_BYTES + 77, 1)
EDGES = [edge + shift for edge in range(0, len(LARGE), PAGE_BYTES) for shift in (-1, 0, 1)]
POSITIONS = st.integers(0, len(LARGE) + 10) | st.sampled_from(EDGES).map(lambda at: max(0, at))
RANGES = st.lists(st.tuples(POSITIONS, POSITIONS).map(sorted), max_size=5)


@settings(max_examples=150, deadline=None)
@given(size_bytes=POSITIONS, first=RANGES, second=RANGES)
def test_ranges_of_encrypted_object_equal_plain_ranges(
    size_bytes: int, first: list[list[int]], second: list[list[int]]
) -> None:
    objects = EncryptingObjectStore(KEYRING.objects(), ObjectEncryption(KEYRING.keyring))
    data = LARGE[:size_bytes]
    objects.put_new("a/x", data)
    assert objects.size_bytes("a/x") == len(data)
    assert list(objects.names("a")) == [("a/x", len(data))]
    for ranges in (first, second):
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        assert objects.get_ranges("a/x", starts, ends) == [data[start:end] for start, end in ranges]
    assert objects.get("a/x") == data
