"""Check frozen tags and names: if a tag changes, every stored chunk becomes unknown."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.fingerprint import TagKey
from nearkin_shared.kernels.native import _fingerprint as fast
from nearkin_shared.kernels.reference import fingerprint_reference as plain

SECRET = bytes(range(32))
LENGTHS = np.array([0, 1, 64, 65, 2048, 2049, 8192, 65536, 921600], np.uint32)
TAGS = [
    "06c4d84a8363561e",
    "f0ac521b1e712e69",
    "e3cd68f9b3158935",
    "08579f9e20b58dd1",
    "27dedf6e3ab627f7",
    "26f461eafef5f7a4",
    "0fdb7c4fd90e8bce",
    "646e8d58a9ea8362",
    "75b549731db51554",
]
NAMES = "e4f673bc7be2e3407788d7e0aa0e87b37b64a8ebabad26f47795486fa8a61d4e"
MATERIAL = "6f224b7c37739d42b07d6562e62a869f5c9356a36195f59d74178ad9602fcea4"


def corpus() -> tuple[bytes, NDArray[np.uint64]]:
    payload = b"".join(hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(28_800 + 32))
    return payload, np.arange(len(LENGTHS), dtype=np.uint64) * np.uint64(7)


def test_check_tags_are_frozen() -> None:
    payload, offsets = corpus()
    for kernel in (fast, plain):
        tags = kernel.check_tags(payload, offsets, LENGTHS, TagKey(SECRET, b"tenant-a"))
        assert [f"{tag:016x}" for tag in tags.tolist()] == TAGS  # else stored chunks stop being recognised


def test_names_are_frozen() -> None:
    payload, offsets = corpus()
    for kernel in (fast, plain):
        tags = kernel.check_tags(payload, offsets, LENGTHS, TagKey(SECRET, b"tenant-a"))
        named = kernel.names(kernel.sha1_many(payload, offsets, LENGTHS), tags, LENGTHS)
        assert hashlib.sha256(named.tobytes()).hexdigest() == NAMES


def test_key_derivation_is_frozen() -> None:
    assert hashlib.sha256(TagKey(SECRET, b"tenant-a").material).hexdigest() == MATERIAL
