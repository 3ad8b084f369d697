"""Test manifests.

They round trip, each damage is detected, and hostile ones are refused within bounds.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats import manifest as fmt
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.manifest import Manifest, decode_manifest, encode_manifest
from nearkin_shared.limits import KEY_BYTES_MAX, METADATA_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.results import Ledger
from nearkin_shared.types import CONTAINER_ID_MIN, SELF, ZERO, Locations
from tests.support.data import samples

REFUSALS = (Corrupt, FormatTooNew)


def resealed(body: bytes | bytearray) -> bytes:
    return bytes(body) + columns.check_bytes(bytes(body))


def body() -> bytearray:
    return bytearray(encode_manifest(samples.small_manifest())[: -columns.CHECK_BYTES])


def with_tables(table: Any, run_columns: list[Any]) -> bytes:
    """Return the small manifest with other segment tables and a valid checksum."""
    empty = replace(samples.small_manifest(), segments=Locations.empty(), known=np.zeros(0, np.bool_))
    start = encode_manifest(empty)[: -columns.CHECK_BYTES - 16]
    return resealed(start + columns.pack([np.array(table, "<u8")]) + columns.pack(run_columns))


def run_columns(refs: Any, steps: Any, counts: Any, known: Any) -> list[Any]:
    return [np.array(refs, "<u4"), np.array(steps, "<u4"), np.array(counts, "<u4"), np.array(known, "u1")]


def test_manifest_round_trips() -> None:
    made = samples.small_manifest()
    found = decode_manifest(encode_manifest(made), "m")
    assert found.segments.containers.tolist() == made.segments.containers.tolist()
    assert found.segments.ordinals.tolist() == made.segments.ordinals.tolist()
    assert found.known.tolist() == made.known.tolist()
    nothing = Locations.empty(), np.zeros(0, np.bool_)
    same: dict[str, Any] = {"segments": nothing[0], "known": None}
    assert replace(found, **same) == replace(made, **same)


@pytest.mark.parametrize("segments", [0, 1, 2])
def test_lengths_that_differ_from_the_rule_are_kept(segments: int) -> None:
    lengths = np.full(segments, 900, np.uint32)
    where = Locations(np.full(segments, 9, np.uint64), np.arange(segments, dtype=np.uint32))
    made = Manifest(
        "t", "k", 1, 0, 900 * segments, bytes(32), None, 0.0, Ledger(), where, np.ones(segments, np.bool_),
        lengths=lengths,
    )  # fmt: skip
    data = encode_manifest(made)
    assert data[4] == (3 if segments > 1 else 2)
    for encoded in (data, encode_manifest(replace(made, lengths=None))):
        found = decode_manifest(encoded, "m").lengths
        if segments > 1 and encoded is not data:
            assert found is None
        else:
            assert found is not None
            assert found.dtype == np.uint32
            assert found.tolist() == lengths.tolist()


@pytest.mark.parametrize(
    "lengths", [[617_283, 617_284], [1_234_567] + 6 * [0], 7 * [176_367], 6 * [176_367] + [176_366]]
)
def test_lengths_with_another_sum_are_refused(lengths: list[int]) -> None:
    wrong = np.array(lengths, "<u4")
    with pytest.raises(BadInput, match=f"{len(lengths)} lengths of 7 segments"):
        encode_manifest(replace(samples.small_manifest(), lengths=wrong))
    data = body() + columns.pack([wrong])
    data[4] = 3
    with pytest.raises(Corrupt, match=f"m: {len(lengths)} lengths of 7 segments, {sum(lengths)} bytes of 1234567"):
        decode_manifest(resealed(data), "m")


def test_manifest_of_many_lengths_takes_two_bytes_for_each() -> None:
    segments = 4000
    lengths = np.random.default_rng(1).integers(64 << 10, 192 << 10, segments).astype(np.uint32)
    where = Locations(np.full(segments, 9, np.uint64), np.arange(segments, dtype=np.uint32))
    known, size = np.ones(segments, np.bool_), int(lengths.sum())
    made = Manifest("t", "k", 1, 0, size, bytes(32), None, 0.0, Ledger(), where, known, lengths=lengths)
    assert len(encode_manifest(made)) - len(encode_manifest(replace(made, lengths=None))) < 2.3 * segments


def test_manifest_of_an_empty_blob_is_small() -> None:
    empty = Manifest("t", "k", 1, 0, 0, bytes(32), None, 0.0, Ledger(), Locations.empty(), np.zeros(0, np.bool_))
    data = encode_manifest(empty)
    assert len(data) == 188 + 2 + 16 + 8
    assert decode_manifest(data, "m").sha256 is None


def test_each_flipped_bit_is_detected() -> None:
    data = bytearray(encode_manifest(samples.small_manifest()))
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(REFUSALS):
            decode_manifest(bytes(data), "m")
        data[position // 8] ^= 1 << position % 8
    decode_manifest(bytes(data), "m")


def test_each_truncation_is_detected() -> None:
    data = encode_manifest(samples.small_manifest())
    for length in range(len(data) - columns.CHECK_BYTES):
        with pytest.raises(REFUSALS):
            decode_manifest(data[:length], "m")
        with pytest.raises(REFUSALS):
            decode_manifest(resealed(data[:length]), "m")


def test_random_bytes_are_no_manifest() -> None:
    chance = random.Random(1)
    for length in (0, 3, 4, 171, 180, 181, 1000):
        for start in (b"", b"NKM1", b"NKM1\2\0\0\0"):
            with pytest.raises(REFUSALS):
                decode_manifest(start + chance.randbytes(length), "m")
            with pytest.raises(REFUSALS):
                decode_manifest(resealed(start + chance.randbytes(length)), "m")


def test_random_changes_are_refused_or_parse() -> None:
    """The checksum is valid, as a hostile writer would make it."""
    chance = random.Random(2)
    for _ in range(3000):
        wrong = body()
        for _ in range(chance.randint(1, 3)):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        try:
            found = decode_manifest(resealed(wrong), "m")
        except REFUSALS:
            continue
        assert len(found.segments) == len(found.known)
        assert int(found.segments.containers.min(initial=2)) > ZERO


@pytest.mark.parametrize(
    ("at", "value", "error"), [(4, 5, FormatTooNew), (6, 2, FormatTooNew), (4, 0, Corrupt), (4, 1, Corrupt)]
)
def test_unknown_versions_and_flags_are_refused(at: int, value: int, error: type[Exception]) -> None:
    wrong = body()
    wrong[at] = value
    with pytest.raises(error, match="format"):
        decode_manifest(resealed(wrong), "m")


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([5], run_columns([2], [0], [0xFFFFFFFF], [1])),
        ([5], run_columns([2] * 9, [0] * 9, [fmt.SEGMENTS_MAX // 8] * 9, [1] * 9)),
        ([5], run_columns([SELF], [0], [1], [1])),
        ([5], run_columns([ZERO], [0], [1], [1])),
        ([5], run_columns([3], [0], [1], [1])),
        ([5], run_columns([2], [0], [1], [2])),
        ([5], run_columns([2], [1], [1], [1])),
        ([5], run_columns([2], [2 * ROWS_MAX], [1], [1])),
        ([5], run_columns([2], [0], [0], [1])),
        ([5, 5], run_columns([2], [0], [1], [1])),
        ([0], run_columns([2], [0], [1], [1])),
        ([1], run_columns([2], [0], [1], [1])),
    ],
)
def test_invalid_segments_are_corrupt_without_allocation(table: list[int], found: list[Any]) -> None:
    data = with_tables(table, found)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode_manifest(data, "m")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


METADATA_AT = 188 + len("default") + len("backups/täglich.tar".encode())


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 60000,
        b'{"a":' * 9000 + b"1" + b"}" * 9000,
        b"[]",
        b'"text"',
        b'{"a": 1}',
        b'{"a": null}',
        b'{"a": "\\ud800"}',
        b'{"\xff": "b"}',
        b"{",
        b"9" * 5000,
        b"{}" + b" " * METADATA_BYTES_MAX,
    ],
    ids=range(11),
)
def test_invalid_metadata_is_corrupt(text: bytes) -> None:
    made = body()
    old_bytes = int.from_bytes(made[104:108], "little")
    made[104:108] = len(text).to_bytes(4, "little")
    made[METADATA_AT : METADATA_AT + old_bytes] = text
    with pytest.raises(Corrupt):
        decode_manifest(resealed(made), "m")


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "ä" * TENANT_BYTES_MAX},
        {"key": "ä" * KEY_BYTES_MAX},
        {"key": "\ud800"},
        {"metadata": {"a": "\ud800"}},
        {"metadata": {"control characters take six bytes each": "\x01" * (METADATA_BYTES_MAX // 4)}},
        {"metadata": {"quotes take two": '"' * (METADATA_BYTES_MAX - 100)}},
        {"metadata": {"number": 1}},
        {"created_us": -1},
        {"created_us": fmt.CREATED_US_MAX + 1},
    ],
    ids=range(9),
)
def test_manifest_that_a_reader_would_refuse_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        encode_manifest(replace(samples.small_manifest(), **change))


@pytest.mark.parametrize("container", [0, 1])
def test_segment_without_container_is_not_written(container: int) -> None:
    made = samples.small_manifest()
    containers = made.segments.containers.copy()
    containers[3] = container
    with pytest.raises(BadInput, match=f"a segment of container {container}; want a container id"):
        encode_manifest(replace(made, segments=Locations(containers, made.segments.ordinals)))


def test_segments_above_the_reader_s_limit_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "SEGMENTS_MAX", 6)
    with pytest.raises(BadInput, match="7 segments: want at most 6"):
        encode_manifest(samples.small_manifest())


def test_version_may_span_more_than_65536_containers() -> None:
    """16-bit references could not name 100,000 containers.

    Of 4 MiB each they are 400 GiB of one version.
    """
    holders = np.repeat(np.arange(100, 100_100, dtype=np.uint64), 2)
    made = replace(
        samples.small_manifest(),
        segments=Locations(holders, np.arange(len(holders), dtype=np.uint32) % 7),
        known=np.arange(len(holders)) % 5 == 0,
    )
    found = decode_manifest(encode_manifest(made), "m")
    assert np.array_equal(found.segments.containers, holders)
    assert np.array_equal(found.segments.ordinals, made.segments.ordinals)
    assert np.array_equal(found.known, made.known)


def test_fields_at_their_bounds_round_trip() -> None:
    made = replace(
        samples.small_manifest(),
        tenant="t" * TENANT_BYTES_MAX,
        key="ä" * (KEY_BYTES_MAX // 2),
        metadata={"m": "x" * (METADATA_BYTES_MAX - len('{"m": ""}'))},
        version=(1 << 64) - 1,
        size_bytes=(1 << 64) - 1,
        created_us=fmt.CREATED_US_MAX,
    )
    found = decode_manifest(encode_manifest(made), "m")
    assert (found.tenant, found.key, found.metadata) == (made.tenant, made.key, made.metadata)
    assert (found.version, found.size_bytes, found.created_us) == (made.version, made.size_bytes, made.created_us)
    assert found.info.created.isoformat() == "9999-12-31T23:59:59.999999+00:00"


@given(
    container=st.integers(CONTAINER_ID_MIN, 2**64 - 1),
    ordinal=st.integers(0, ROWS_MAX - 1),
    known=st.booleans(),
)
def test_one_segment_is_encoded_as_many_are(container: int, ordinal: int, known: bool) -> None:
    """The short way of small blobs writes the same bytes."""
    segments = Locations(np.array([container], np.uint64), np.array([ordinal], np.uint32))
    given_manifest = replace(
        samples.small_manifest(), segments=segments, known=np.array([known]), lengths=None, size_bytes=1
    )
    assert fmt._encode_one(given_manifest) == fmt._encode_locations(given_manifest)
    found = decode_manifest(encode_manifest(given_manifest), "m")
    assert (found.segments.containers[0], found.segments.ordinals[0], found.known[0]) == (container, ordinal, known)


@pytest.mark.parametrize("ordinal", [ROWS_MAX - 1, ROWS_MAX])
@pytest.mark.parametrize("container", [SELF, ZERO, CONTAINER_ID_MIN])
def test_one_segment_out_of_bounds_is_refused(container: int, ordinal: int) -> None:
    segments = Locations(np.array([container], np.uint64), np.array([ordinal], np.uint32))
    made = replace(samples.small_manifest(), segments=segments, known=np.array([True]), lengths=None, size_bytes=1)
    if container == CONTAINER_ID_MIN and ordinal < ROWS_MAX:
        assert decode_manifest(encode_manifest(made), "m").segments.ordinals[0] == ordinal
        return
    with pytest.raises(BadInput, match="container"):
        encode_manifest(made)


@given(
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())) | st.integers()
    ),
    copies=st.sampled_from([1, 200, 2000, 20_000]),
)
@example(metadata={"escaped": "\1"}, copies=20_000)
@example(metadata={"a": "z"}, copies=METADATA_BYTES_MAX - 9)
@example(metadata={"a": "z"}, copies=METADATA_BYTES_MAX - 8)
def test_metadata_are_checked_as_they_are_encoded(metadata: Any, copies: int) -> None:
    """A batch's table is refused for the same metadata as a manifest."""
    repeated = {name: value * copies if isinstance(value, str) else value for name, value in metadata.items()}

    def problem(of: Any) -> str | None:
        try:
            of(repeated)
        except BadInput as err:
            return str(err)
        return None

    assert problem(fmt.check_metadata) == problem(fmt.encode_metadata)
