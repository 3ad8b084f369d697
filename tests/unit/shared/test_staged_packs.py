"""Test packs of uploads in the object store, and the references to them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew, NotFound
from nearkin_shared.formats.message import Envelope, StagedFrame, decode, encode, is_staged
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.staged_packs import (
    FOLDER,
    UploadAttempt,
    delete_expired,
    delete_pack,
    pack_name,
    put_pack,
    read_pack,
)

PARTS = [random_bytes(100_000, 1), random_bytes(50_000, 2)]


def attempt(began_ms: int = 1_764_000_000_000) -> UploadAttempt:
    return UploadAttempt(began_ms.to_bytes(6, "big") + b"r" * 10, "tenant", "key", b"o" * 16, began_ms * 1000)


@pytest.fixture
def objects() -> ObjectStore:
    return memory_objects()


def test_pack_is_read_by_its_reference(objects: ObjectStore) -> None:
    staged = put_pack(objects, attempt(), 7, PARTS)
    found = decode(encode(staged), "m")
    assert found == staged
    assert isinstance(found, StagedFrame)
    assert (found.envelope.position, found.size_bytes) == (7, 150_000)
    assert read_pack(objects, found).tobytes() == b"".join(PARTS)


def test_reference_is_small(objects: ObjectStore) -> None:
    assert len(encode(put_pack(objects, attempt(), 0, PARTS))) < 200


def test_repeated_put_of_a_pack_is_accepted(objects: ObjectStore) -> None:
    """The answer to the first request may be lost."""
    assert put_pack(objects, attempt(), 0, PARTS) == put_pack(objects, attempt(), 0, PARTS)


@pytest.mark.parametrize("change", [b"short", b"x" * 150_000])
def test_changed_pack_is_refused(objects: ObjectStore, change: bytes) -> None:
    staged = put_pack(objects, attempt(), 0, PARTS)
    name = pack_name(staged.envelope.blob, 0)
    objects.delete(name)
    objects.put_new(name, change)
    with pytest.raises(Corrupt, match=f"{name}: {len(change)} bytes that are not the 150000 of its reference"):
        read_pack(objects, staged)


def test_deleted_pack_is_not_found(objects: ObjectStore) -> None:
    staged = put_pack(objects, attempt(), 0, PARTS)
    delete_pack(objects, pack_name(staged.envelope.blob, 0))
    with pytest.raises(NotFound):
        read_pack(objects, staged)


def test_packs_are_deleted_by_the_age_of_their_upload(objects: ObjectStore) -> None:
    now_ms = time.time_ns() // 1_000_000
    old, young = attempt(now_ms - 10_000), attempt(now_ms)
    for one in (old, young):
        put_pack(objects, one, 0, PARTS)
        put_pack(objects, one, 150_000, PARTS)
    objects.put_new(f"{FOLDER}/not-a-pack", b"x")
    assert delete_expired(objects, now_ms - 5_000) == 2
    assert sorted(name for name, _ in objects.names(FOLDER)) == sorted(
        [f"{FOLDER}/not-a-pack", pack_name(young.blob, 0), pack_name(young.blob, 150_000)]
    )


def test_reference_has_a_format_of_its_own(objects: ObjectStore) -> None:
    """A worker without staging refuses it by its version, and never takes it for a frame."""
    data = bytearray(encode(put_pack(objects, attempt(), 0, PARTS)))
    assert data[4] == 3
    assert is_staged(bytes(data))
    data[4] = 9
    with pytest.raises(FormatTooNew):
        decode(bytes(data), "m")


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": 0}, {"origin": b"short"}, {"blake3": b"short"}], ids=lambda wrong: next(iter(wrong))
)
def test_invalid_reference_is_not_encoded(wrong: dict[str, object]) -> None:
    staged = StagedFrame(Envelope(b"b" * 16, "t", "k"), b"o" * 16, 1, 10, b"d" * 32)
    with pytest.raises(BadInput):
        encode(replace(staged, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("size_bytes", [0, (64 << 20) + 1, (1 << 64) - 1])
def test_reference_out_of_bounds_is_refused(size_bytes: int) -> None:
    data = bytearray(encode(StagedFrame(Envelope(b"b" * 16, "t", "k"), b"o" * 16, 1, 10, b"d" * 32)))
    data[-64:-56] = np.uint64(size_bytes).tobytes()
    with pytest.raises(Corrupt, match="a reference to"):
        decode(bytes(data), "m")
