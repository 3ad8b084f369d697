"""Test what callers rely on in fingerprints, check tags and names, with the chosen kernel."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.fingerprint import TagKey, check_tags, names, sha1_many, zero_mask

SECRET = b"s" * 32


def one(payload: bytes) -> tuple[bytes, NDArray[np.uint64], NDArray[np.uint32]]:
    return payload, np.zeros(1, np.uint64), np.array([len(payload)], np.uint32)


def test_sha1_gives_the_published_examples() -> None:
    assert sha1_many(*one(b"abc")).tobytes().hex() == "a9993e364706816aba3e25717850c26c9cd0d89d"
    assert sha1_many(*one(b"")).tobytes().hex() == "da39a3ee5e6b4b0d3255bfef95601890afd80709"
    assert sha1_many(*one(b"a" * 1_000_000)).tobytes().hex() == "34aa973cd4c4daa4f61eeb2bdbad27316534016f"


def test_no_chunks_give_empty_results() -> None:
    none64, none32 = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    for payload in (b"", b"abc"):
        assert sha1_many(payload, none64, none32).shape == (0, 20)
        assert check_tags(payload, none64, none32, TagKey(SECRET, b"")).shape == (0,)
        assert zero_mask(payload, none64, none32).dtype == np.bool_
    assert names(np.zeros((0, 20), np.uint8), none64, none32).shape == (0, 32)


def test_any_kind_of_buffer_is_accepted() -> None:
    data = bytes(range(256)) * 5
    offsets, lengths = np.array([3, 300], np.uint64), np.array([200, 900], np.uint32)
    frozen = np.frombuffer(data, np.uint8)
    assert not frozen.flags.writeable
    answers = {
        sha1_many(payload, offsets, lengths).tobytes()
        for payload in (data, bytearray(data), memoryview(data), frozen, frozen.copy())
    }
    assert len(answers) == 1


def test_strided_offsets_and_lengths_are_accepted() -> None:
    offsets, lengths = np.array([0, 9, 1, 9], np.uint64)[::2], np.array([3, 9, 2, 9], np.uint32)[::2]
    packed = sha1_many(b"abc", offsets.copy(), lengths.copy())
    assert sha1_many(b"abc", offsets, lengths).tobytes() == packed.tobytes()


def test_zero_mask_detects_one_bit_anywhere() -> None:
    for length in (1, 2, 15, 16, 17, 4096):
        for at in {0, length // 2, length - 1}:
            payload = bytearray(length)
            assert zero_mask(*one(bytes(payload))).tolist() == [True]
            payload[at] = 1
            assert zero_mask(*one(bytes(payload))).tolist() == [False]


def test_zero_mask_does_not_read_past_a_chunk() -> None:
    offsets, lengths = np.array([1, 1, 0], np.uint64), np.array([4, 5, 0], np.uint32)
    assert zero_mask(b"\x01\x00\x00\x00\x00\x01", offsets, lengths).tolist() == [True, False, True]


def test_chunk_out_of_range_is_named() -> None:
    with pytest.raises(BadInput, match=r"chunk 1: offset 2 \+ length 2 .* 3"):
        sha1_many(b"abc", np.array([0, 2], np.uint64), np.array([3, 2], np.uint32))


def test_each_bit_of_a_chunk_changes_its_tag() -> None:
    key, length = TagKey(SECRET, b"t"), 2100
    base = np.random.default_rng(5).integers(0, 256, length, dtype=np.uint8)
    flipped = np.tile(base, (length * 8 + 1, 1))
    for bit in range(length * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    rows = len(flipped)
    offsets, lengths = np.arange(rows, dtype=np.uint64) * np.uint64(length), np.full(rows, length, np.uint32)
    assert len(np.unique(check_tags(flipped.ravel(), offsets, lengths, key))) == rows


def test_trailing_zero_bytes_change_the_tag() -> None:
    lengths = np.arange(1, 2200, dtype=np.uint32)
    tags = check_tags(bytes(2200), np.zeros(len(lengths), np.uint64), lengths, TagKey(SECRET, b"t"))
    assert len(np.unique(tags)) == len(lengths)


def test_swapped_blocks_change_the_tag() -> None:
    x, y = b"x" * 2048, b"y" * 2048
    key = TagKey(SECRET, b"t")
    assert check_tags(*one(x + y), key)[0] != check_tags(*one(y + x), key)[0]


def test_domains_and_secrets_give_unrelated_tags() -> None:
    keys = [TagKey(SECRET, b"a"), TagKey(SECRET, b"b"), TagKey(SECRET, b"a\x00"), TagKey(b"t" * 32, b"a")]
    assert len({int(check_tags(*one(b"content"), key)[0]) for key in keys}) == len(keys)
    assert check_tags(*one(b"content"), TagKey(SECRET, b"a")) == check_tags(*one(b"content"), keys[0])


def test_tag_key_is_immutable_and_hidden_in_its_repr() -> None:
    key = TagKey(SECRET, b"tenant")
    assert "s" * 8 not in repr(key)
    assert key.material.hex()[:16] not in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(AttributeError):
        key._material = b""


@pytest.mark.parametrize(
    ("secret", "domain"), [(b"short", b""), ("s" * 32, b""), (SECRET, "text"), (SECRET, b"d" * 256)]
)
def test_wrong_secret_or_domain_is_refused(secret: object, domain: object) -> None:
    with pytest.raises(BadInput) as caught:
        TagKey(secret, domain)  # type: ignore[arg-type]
    assert "short" not in str(caught.value)


def test_names_consist_of_fingerprint_tag_and_length() -> None:
    fingerprint = np.arange(20, dtype=np.uint8).reshape(1, 20)
    named = names(fingerprint, np.array([0x1122334455667788], np.uint64), np.array([0xAABBCCDD], np.uint32))
    assert named.tobytes() == bytes(range(20)) + bytes.fromhex("8877665544332211") + bytes.fromhex("ddccbbaa")


def test_kernel_shared_by_threads_is_consistent() -> None:
    payload = np.random.default_rng(9).bytes(600_000)
    lengths = np.full(60, 10_000, np.uint32)
    offsets = np.arange(60, dtype=np.uint64) * np.uint64(10_000)
    right = sha1_many(payload, offsets, lengths).tobytes()
    answers: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                all(sha1_many(payload, offsets, lengths).tobytes() == right for _ in range(10))
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
