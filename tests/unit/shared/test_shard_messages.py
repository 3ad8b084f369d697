"""Requests to an index shard that are refused, and the parts of containers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from nearkin_shared.errors import BadInput
from nearkin_shared.index.shards import shard_messages as messages
from nearkin_shared.index.shards.key_ranges import owners_of_names, owners_of_values, part_of
from nearkin_shared.index.shards.shard_messages import KEYS_A_REQUEST, ContainerPart, FeatureRows, Located, Lookup
from tests.support.conformance.index_contract import first_claims


def changed(**fields: object) -> bytes:
    """Return an encoded publication of one part with other fields."""
    raw = msgspec.msgpack.decode(messages.encode(part_of(first_claims(), 0, 1)))
    return msgspec.msgpack.encode({"parts": [{**raw, **fields}]})


@pytest.mark.parametrize(
    "fields",
    [
        {"names": b"x"},
        {"ordinals": b"abc"},
        {"ordinals": b"\xff" * 12},
        {"hidden": b"\x09\0\0\0"},
        {"segment_ids": bytes(21)},
        {"chunks": (1 << 24) + 1},
        {"chunks": -1},
        {"container": 5},
        {"container": -1},
        {"domain": bytes(17)},
        {"features": {"s": {"ranks": 0, "ordinals": b"", "values": b""}}},
        {"features": {"s": {"ranks": 2, "ordinals": bytes(4), "values": bytes(8)}}},
        {"features": {"s" * 5000: {"ranks": 1, "ordinals": bytes(4), "values": bytes(8)}}},
        {"summary": None},
    ],
)
def test_part_with_lengths_that_disagree_is_refused(fields: dict[str, object]) -> None:
    """Nothing of it reaches the index; without the change it is taken."""
    assert len(messages.decode_request("publish", changed()).parts) == 1
    with pytest.raises(BadInput):
        messages.decode_request("publish", changed(**fields))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"[1]", bytes(1000)])
@pytest.mark.parametrize("call", sorted(set(messages.REQUESTS) - {"containers", "generation", "clock", "ready"}))
def test_request_that_is_no_message_is_refused(call: str, body: bytes) -> None:
    """The error names the call."""
    with pytest.raises(BadInput, match=f"request {call}"):
        messages.decode_request(call, body)


def test_lookup_of_too_many_or_cut_keys_is_refused() -> None:
    """A request has whole keys, and at most KEYS_A_REQUEST."""
    assert len(Lookup("chunks", bytes(64)).rows) == 2
    for keys in (bytes(33), bytes(32 * (KEYS_A_REQUEST + 1))):
        with pytest.raises(BadInput):
            assert Lookup("chunks", keys).rows is None


def test_answer_with_other_rows_than_asked_is_refused() -> None:
    """A shard cannot shift the rows of a batch."""
    answer = Located(bytes(16), bytes(8), bytes(2))
    assert len(answer.columns(2)[0]) == 2
    with pytest.raises(BadInput):
        answer.columns(3)


def test_every_entry_is_in_one_part() -> None:
    """The parts of three shards together are the part of one."""
    whole, parts = part_of(first_claims(), 0, 1), [part_of(first_claims(), number, 3) for number in range(3)]
    assert sorted(b"".join(part.ordinals for part in parts)) == sorted(whole.ordinals)
    segments = sum(np.frombuffer(part.segment_ids, np.uint8).astype(np.int64) for part in parts)
    assert segments.tobytes() == np.frombuffer(whole.segment_ids, np.uint8).astype(np.int64).tobytes()  # type: ignore[union-attr]
    assert _values(parts) == _values([whole])


def _values(parts: list[ContainerPart]) -> list[int]:
    rows: list[FeatureRows] = [found for part in parts for found in part.features.values()]
    return sorted(value for found in rows for value in found.arrays[1].ravel().tolist() if value)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_load_of_shards_is_within_a_tenth(count: int) -> None:
    """Of 300,000 random names and super-features no shard has a tenth more than its share."""
    random = np.random.default_rng(count)
    names = random.integers(0, 256, (300_000, 32), np.uint8)
    values = random.integers(1, 1 << 63, 300_000, np.uint64)
    for owners in (owners_of_names(names, count), owners_of_values(values, count)):
        load = np.bincount(owners, minlength=count)
        assert len(load) == count
        assert load.max() * count <= 1.1 * len(names)
