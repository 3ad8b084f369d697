"""Test parity objects: they restore written bytes, or report too much damage."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.parity_object import HEAD, Scheme, encode_parity, head_of, reconstruct, scheme_of

NAME = "containers/1a200/1a20082bad40bb55.nkc"
SCHEME = Scheme(8, 3)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 500, 513, 8 * 4096, 100_001])
def test_any_flipped_bit_is_repaired_with_damaged_parity(size_bytes: int) -> None:
    """The parity object itself may be damaged too."""
    data, draw = random_bytes(size_bytes, 3), random.Random(size_bytes)
    parity = encode_parity(NAME, data, SCHEME)
    assert len(parity) == head_of(parity, NAME).parity_bytes
    assert reconstruct(NAME, data, parity) == data
    for _ in range(30):
        broken = parity
        for _ in range(2):
            broken = flipped(broken, draw.randrange(8 * len(parity)))
        found = flipped(data, draw.randrange(8 * size_bytes)) if size_bytes else b"?"
        try:
            assert reconstruct(NAME, found, broken) == data
        except Corrupt:  # both flips hit heads
            assert broken[: HEAD.size] != parity[: HEAD.size]
            assert broken[-HEAD.size :] != parity[-HEAD.size :]


@pytest.mark.parametrize("harm", ["stretch", "scattered", "short", "long", "zeros"])
def test_damage_up_to_the_bound_is_repaired(harm: str) -> None:
    data = random_bytes(300_000, 5)
    parity, draw, found = encode_parity(NAME, data, SCHEME), random.Random(9), bytearray(data)
    match harm:
        case "stretch":  # two whole shards, and parts of two more: three damaged sectors of any column at most
            found[50_000 : 50_000 + 2 * 37_500] = random_bytes(2 * 37_500, 1)
        case "scattered":
            for sector in draw.sample(range(300_000 // 4096), 12):
                found[sector * 4096] ^= 0xFF
        case "short":
            del found[300_000 - 60_000 :]
        case "long":
            found += b"more"
        case "zeros":
            found[:37_500] = bytes(37_500)
    assert reconstruct(NAME, bytes(found), parity) == data


def test_damage_above_the_bound_is_detected() -> None:
    """No wrong object is returned."""
    data = random_bytes(300_000, 5)
    parity = encode_parity(NAME, data, SCHEME)
    assert reconstruct(NAME, b"", parity) is None
    assert reconstruct(NAME, bytes(300_000), parity) is None
    assert reconstruct(NAME, data[:150_000], parity) is None


def test_small_object_is_restored_from_parity_alone() -> None:
    data = random_bytes(150, 2)
    assert reconstruct(NAME, b"", encode_parity(NAME, data, SCHEME)) == data


def test_foreign_truncated_or_newer_parity_is_refused() -> None:
    data = random_bytes(9000, 2)
    parity = encode_parity(NAME, data, SCHEME)
    with pytest.raises(Corrupt, match="belongs to another object"):
        reconstruct(NAME.replace("55", "56"), data, parity)
    for cut in (b"", parity[:40], parity[200:-200]):
        with pytest.raises(Corrupt, match="both of its heads"):
            reconstruct(NAME, data, cut)
    assert reconstruct(NAME, flipped(data, 99), parity[: -len(parity) // 5]) == data
    newer = bytearray(parity[: HEAD.size - 8])
    newer[4] = 2
    newer += blake3(newer).digest(length=8)
    with pytest.raises(FormatTooNew, match="format 2"):
        reconstruct(NAME, data, bytes(newer) + parity[HEAD.size :])


def test_parity_size_is_little_above_the_scheme_s_share() -> None:
    assert len(encode_parity(NAME, random_bytes(4 << 20, 1), Scheme(28, 4))) < (4 / 28 + 0.004) * (4 << 20)


@pytest.mark.parametrize("text", ["", "rs", "rs-0-1", "rs-1-0", "rs-30-3", "rs-1", "RS-2-1", "rs-2-1 "])
def test_invalid_scheme_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="rs-28-4"):
        scheme_of(text)


def test_schemes_are_parsed() -> None:
    assert scheme_of("none") is None
    assert scheme_of("rs-28-4") == Scheme(28, 4)


def test_head_beyond_the_parity_size_allocates_nothing() -> None:
    sound = encode_parity(NAME, b"n" * 10_000, Scheme(4, 2))
    fields = list(HEAD.unpack(sound[: HEAD.size]))
    for object_bytes, shard_bytes in ((3 << 30, 1 << 30), (1 << 30, 1 << 28)):  # 6 GiB and 1.5, for some 5 KB of parity
        fields[3], fields[7] = object_bytes, shard_bytes
        lead = HEAD.pack(*fields)[:-CHECK_BYTES]
        with pytest.raises(Corrupt, match="shards of"):
            head_of(lead + check_bytes(lead) + sound[HEAD.size :], NAME)
