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
    refer,
)

PARTS = [random_bytes(100_000, 1), random_bytes(50_000, 2)]


def attempt(began_ms: int = 1_764_000_000_000) -> UploadAttempt:
    return UploadAttempt(began_ms.to_bytes(6, "big") + b"r" * 10, "tenant", "key", b"o" * 16, began_ms * 1000)


def stored(objects: ObjectStore, one: UploadAttempt, position: int) -> StagedFrame:
    staged = refer(one, position, PARTS)
    put_pack(objects, staged, PARTS)
    return staged


@pytest.fixture
def objects() -> ObjectStore:
    return memory_objects()


def test_pack_is_read_by_its_reference(objects: ObjectStore) -> None:
    staged = stored(objects, attempt(), 7)
    found = decode(encode(staged), "m")
    assert found == staged
    assert isinstance(found, StagedFrame)
    assert (found.envelope.position, found.size_bytes) == (7, 150_000)
    assert read_pack(objects, found.pack).tobytes() == b"".join(PARTS)


def test_reference_is_small(objects: ObjectStore) -> None:
    assert len(encode(stored(objects, attempt(), 0))) < 200


def test_repeated_put_of_a_pack_is_accepted(objects: ObjectStore) -> None:
    """The answer to the first request may be lost."""
    staged = stored(objects, attempt(), 0)
    put_pack(objects, staged, PARTS)
    assert read_pack(objects, staged.pack).tobytes() == b"".join(PARTS)


@pytest.mark.parametrize("change", [b"short", b"x" * 150_000])
def test_changed_pack_is_refused(objects: ObjectStore, change: bytes) -> None:
    staged = stored(objects, attempt(), 0)
    name = pack_name(staged.pack)
    objects.delete(name)
    objects.put_new(name, change)
    with pytest.raises(Corrupt, match=f"{name}: {len(change)} bytes that are not the 150000 of its reference"):
        read_pack(objects, staged.pack)


def test_deleted_pack_is_not_found(objects: ObjectStore) -> None:
    staged = stored(objects, attempt(), 0)
    delete_pack(objects, pack_name(staged.pack))
    with pytest.raises(NotFound):
        read_pack(objects, staged.pack)


def test_packs_are_deleted_by_their_own_age(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload may take longer than Kafka's retention: its latest packs are needed."""
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - 10_000 * 1_000_000)
    old = stored(objects, attempt(), 0)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    recent = stored(objects, attempt(), 150_000)
    objects.put_new(f"{FOLDER}/not-a-pack", b"x")
    assert delete_expired(objects, now_ns // 1_000_000 - 5_000) == 1
    assert {name for name, _ in objects.names(FOLDER)} == {f"{FOLDER}/not-a-pack", pack_name(recent.pack)}
    with pytest.raises(NotFound):
        read_pack(objects, old.pack)


def test_reference_has_a_format_of_its_own(objects: ObjectStore) -> None:
    """A worker without staging refuses it by its version, and never takes it for a frame."""
    data = bytearray(encode(stored(objects, attempt(), 0)))
    assert data[4] == 3
    assert is_staged(bytes(data))
    data[4] = 9
    with pytest.raises(FormatTooNew):
        decode(bytes(data), "m")


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": 0}, {"origin": b"short"}, {"blake3": b"short"}], ids=lambda wrong: next(iter(wrong))
)
def test_invalid_reference_is_not_encoded(wrong: dict[str, object]) -> None:
    staged = StagedFrame(Envelope(b"b" * 16, "t", "k"), b"o" * 16, 1, 2, 10, b"d" * 32)
    with pytest.raises(BadInput):
        encode(replace(staged, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("size_bytes", [0, (64 << 20) + 1, (1 << 64) - 1])
def test_reference_out_of_bounds_is_refused(size_bytes: int) -> None:
    data = bytearray(encode(StagedFrame(Envelope(b"b" * 16, "t", "k"), b"o" * 16, 1, 2, 10, b"d" * 32)))
    data[-72:-64] = np.uint64(size_bytes).tobytes()
    with pytest.raises(Corrupt, match="a reference to"):
        decode(bytes(data), "m")
