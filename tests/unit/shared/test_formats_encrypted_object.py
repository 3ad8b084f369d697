"""Test encrypted objects.

Each flipped bit, truncation, and page at another offset, name or key is refused.
"""

from __future__ import annotations

import random

import pytest
from blake3 import blake3

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats.columns import check_bytes
from nearkin_shared.formats.encrypted_object import (
    HEAD,
    PAGE_BYTES,
    STRIDE_BYTES,
    EncryptionHead,
    PageCipher,
    allocate,
    encrypt,
    encrypted_bytes,
    head_of,
    page_runs,
    pages_of,
    plain_bytes,
    stored_range,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
OWNER = bytes(range(16))
SALT = bytes(range(100, 120))


def decrypted(stored: bytes, name: str = "a/b", key: bytes = KEY) -> bytes:
    return PageCipher(head_of(stored, name), name, key).decrypt_object(stored)


def encrypted(data: bytes, name: str = "a/b", key: bytes = KEY) -> bytes:
    return bytes(encrypt(name, data, OWNER, 3, key))


@pytest.mark.parametrize(
    "size_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 7]
)
def test_encrypted_object_round_trips_and_size_is_derived(size_bytes: int) -> None:
    """The plain size follows from the stored size."""
    data = random_bytes(size_bytes, 1)
    stored = encrypted(data)
    assert decrypted(stored) == data
    assert len(stored) == encrypted_bytes(size_bytes)
    assert plain_bytes(len(stored)) == size_bytes
    assert head_of(stored, "a/b") == EncryptionHead(size_bytes, OWNER, 3, stored[20:40])
    if size_bytes > 64:
        assert data[:64] not in stored


def test_sizes_of_no_encrypted_object_are_refused() -> None:
    sizes = {encrypted_bytes(size_bytes): size_bytes for size_bytes in range(2 * PAGE_BYTES + 40)}
    for stored_bytes in range(HEAD.size + 2 * STRIDE_BYTES + 20):
        assert plain_bytes(stored_bytes) == sizes.get(stored_bytes, -1)


def test_each_flipped_bit_of_a_small_object_is_detected() -> None:
    stored = encrypted(b"a few bytes of some object")
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            with pytest.raises(Corrupt, match="a/b"):
                decrypted(bytes(damaged))


def test_flipped_bit_of_a_page_damages_this_page_only() -> None:
    data = random_bytes(3 * PAGE_BYTES + 100, 2)
    stored, lot = encrypted(data), random.Random(3)
    cipher = PageCipher(head_of(stored, "a/b"), "a/b", KEY)
    for _ in range(40):
        at = lot.randrange(HEAD.size, len(stored))
        damaged = bytearray(stored)
        damaged[at] ^= 1 << lot.randrange(8)
        hit = (at - HEAD.size) // STRIDE_BYTES
        for page in range(pages_of(len(data))):
            start, end = stored_range(page, page + 1, len(data))
            if page == hit:
                with pytest.raises(Corrupt, match=f"page {page} "):
                    cipher.open_into(bytes(damaged[start:end]), page, page + 1, allocate(PAGE_BYTES))
            else:
                plain = allocate(PAGE_BYTES)
                size_bytes = cipher.open_into(bytes(damaged[start:end]), page, page + 1, plain)
                assert plain[:size_bytes] == data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        salvaged = cipher.salvage(bytes(damaged))
        around = data[: hit * PAGE_BYTES], data[(hit + 1) * PAGE_BYTES :]
        lost = bytes(len(data) - len(around[0]) - len(around[1]))
        assert salvaged == around[0] + lost + around[1]


def test_moved_or_foreign_page_is_refused() -> None:
    one, other = (encrypted(random_bytes(3 * PAGE_BYTES, seed)) for seed in (4, 5))
    pages = [one[HEAD.size + at * STRIDE_BYTES : HEAD.size + (at + 1) * STRIDE_BYTES] for at in range(3)]
    head = one[: HEAD.size]
    for order in ((1, 0, 2), (0, 2, 1), (0, 0, 2), (2, 1, 0)):
        with pytest.raises(Corrupt, match="page"):
            decrypted(head + b"".join(pages[page] for page in order))
    with pytest.raises(Corrupt, match="page 1"):
        decrypted(head + pages[0] + other[HEAD.size + STRIDE_BYTES : HEAD.size + 2 * STRIDE_BYTES] + pages[2])
    with pytest.raises(Corrupt, match="page 0"):
        decrypted(other[: HEAD.size] + b"".join(pages))


def test_object_under_another_name_or_key_is_refused() -> None:
    stored = encrypted(b"content")
    with pytest.raises(Corrupt, match="a/c"):
        decrypted(stored, name="a/c")
    with pytest.raises(Corrupt, match="page 0"):
        decrypted(stored, key=OTHER_KEY)


def test_object_truncated_or_extended_at_a_page_is_refused() -> None:
    data = random_bytes(2 * PAGE_BYTES, 6)
    stored = encrypted(data)
    for cut in (0, 10, HEAD.size, HEAD.size + 15, HEAD.size + STRIDE_BYTES, len(stored) - 1):
        with pytest.raises(Corrupt):
            decrypted(stored[:cut])
    for more in (b"x", stored[HEAD.size :]):
        with pytest.raises(Corrupt, match="padded"):
            decrypted(stored + more)
    # A head with other fields and a valid check: the pages were encrypted together with another head.
    shorter = EncryptionHead(PAGE_BYTES, OWNER, 3, stored[20:40]).pack()
    with pytest.raises(Corrupt, match="page 0"):
        decrypted(shorter + stored[HEAD.size : HEAD.size + STRIDE_BYTES])


def test_plain_object_and_later_format_are_distinguished() -> None:
    with pytest.raises(Corrupt, match="is not sealed"):
        head_of(b"NKC1" + bytes(100), "a/b")
    packed = bytearray(encrypted(b"x"))
    packed[4] = 2
    packed[56:64] = check_bytes(bytes(packed[:56]))
    with pytest.raises(FormatTooNew, match="format 2"):
        head_of(bytes(packed), "a/b")


def test_two_objects_of_equal_bytes_have_nothing_in_common() -> None:
    one, other = encrypted(bytes(PAGE_BYTES)), encrypted(bytes(PAGE_BYTES))
    assert one[HEAD.size :] != other[HEAD.size :]
    assert len({one[at : at + 16] for at in range(HEAD.size, len(one), 16)}) > PAGE_BYTES // 16


def test_page_runs_are_disjoint_and_cover_the_ranges() -> None:
    page = PAGE_BYTES
    assert page_runs([], []) == []
    assert page_runs([5], [5]) == []
    assert page_runs([0], [1]) == [(0, 1)]
    assert page_runs([0, page - 1], [1, page + 1]) == [(0, 2)]
    assert page_runs([9 * page, 0, page], [9 * page + 1, page, 2 * page]) == [(0, 2), (9, 10)]


def test_bytes_of_the_first_release_are_frozen() -> None:
    data = random_bytes(PAGE_BYTES + 1000, 7)
    stored = bytes(PageCipher(EncryptionHead(len(data), OWNER, 3, SALT), "containers/1/2.nkc", KEY).encrypt(data))
    assert decrypted(stored, "containers/1/2.nkc") == data
    assert blake3(stored).hexdigest(length=16) == "afe0132866922fa0e10720217d423b02"
