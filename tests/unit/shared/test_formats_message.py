"""Test messages: they round trip, and `decode` refuses every hostile one."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import message as fmt
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.message import (
    End,
    Frame,
    Fresh,
    MessageKind,
    Paired,
    Placed,
    Segments,
    decode,
    encode,
    encode_paired,
    read_header,
)
from nearkin_shared.formats.message_batches import read_fresh, read_paired, read_segments
from nearkin_shared.results import Ledger
from nearkin_shared.types import FreshBatch, Locations, PairedBatch, SegmentBatch
from tests.support.data.messages import BLOB, mark_known, mixed_content, pair, segment


def assert_same_batch(found: SegmentBatch, sent: SegmentBatch, carried: np.ndarray) -> None:
    for name in ("lengths", "names", "zero", "chunk_bounds", "segment_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(sent, name))
    for row in np.flatnonzero(carried).tolist():
        bytes_found = found.payload[int(found.offsets[row]) :][: int(found.lengths[row])]
        bytes_sent = sent.payload[int(sent.offsets[row]) :][: int(sent.lengths[row])]
        assert bytes_found.tobytes() == bytes_sent.tobytes()


def test_frame_round_trips() -> None:
    found = decode(encode(Frame(BLOB, np.frombuffer(b"some bytes", np.uint8))), "test")
    assert isinstance(found, Frame)
    assert found.envelope == BLOB
    assert found.payload.tobytes() == b"some bytes"


def test_segments_round_trip_without_bytes_of_zero_chunks() -> None:
    sent = segment(mixed_content())
    data = encode(Segments(BLOB, sent))
    assert len(data) < 560_000
    found = decode(data, "test")
    assert isinstance(found, Segments)
    assert_same_batch(found.batch, sent, ~sent.zero)


def test_fresh_chunks_alone_carry_their_bytes() -> None:
    sent = mark_known(segment(mixed_content()))
    found = decode(encode(Fresh(BLOB, sent)), "test")
    assert isinstance(found, Fresh)
    np.testing.assert_array_equal(found.batch.fresh, sent.fresh)
    np.testing.assert_array_equal(found.batch.first, sent.first)
    np.testing.assert_array_equal(found.batch.chunk_locations.containers, sent.chunk_locations.containers)
    assert len(found.batch.batch.payload) == int(sent.batch.lengths[sent.fresh].sum())
    carried = np.zeros(len(sent.first), np.bool_)
    carried[sent.fresh] = True
    assert_same_batch(found.batch.batch, sent.batch, carried)


def test_pairs_round_trip() -> None:
    sent = pair(mark_known(segment(mixed_content())))
    found = decode(encode(Paired(BLOB, sent)), "test")
    assert isinstance(found, Paired)
    assert found.batch.sketch == sent.sketch
    np.testing.assert_array_equal(found.batch.super_features, sent.super_features)
    np.testing.assert_array_equal(found.batch.bases.ordinals, sent.bases.ordinals)
    np.testing.assert_array_equal(found.batch.base_found, sent.base_found)


def test_placed_segments_and_their_savings_round_trip() -> None:
    segments = Locations(np.array([5, 6], np.uint64), np.array([1, 2], np.uint32))
    sent = Placed(
        BLOB,
        segments,
        np.array([True, False]),
        np.array([9, 8], np.uint32),
        Ledger(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    )
    found = decode(encode(sent), "test")
    assert isinstance(found, Placed)
    assert found.ledger == sent.ledger
    np.testing.assert_array_equal(found.segments.containers, segments.containers)
    np.testing.assert_array_equal(found.known, sent.known)
    np.testing.assert_array_equal(found.lengths, sent.lengths)


@pytest.mark.parametrize("first_us", [None, 0, 100])
@pytest.mark.parametrize("failure", [None, "the upload was cut"])
def test_end_round_trips(failure: str | None, first_us: int | None) -> None:
    sent = End(BLOB, 123, b"o" * 16, 10**12, b"b" * 32, b"c" * 32, 17, failure, {"a": "ü"}, None, first_us)
    assert decode(encode(sent), "test") == sent


def end_with(**changes: object) -> bytes:
    """Return an end with other JSON values, as another program may write it."""
    ours = encode(End(BLOB, 123, b"o" * 16, 10, b"b" * 32, None, 17, None, {"a": "b"}))
    text = ours[read_header(ours, "ours").starts[-1] :]
    other = json.dumps(json.loads(text) | changes).encode()
    header = bytearray(ours[: -len(text)])
    header[40:44] = len(other).to_bytes(4, "little")
    return bytes(header) + other


@pytest.mark.parametrize("metadata", [[], ["a"], "a", "", 5, None, {"a": 1}, {"a": "\ud800"}])
def test_metadata_that_is_no_map_of_texts_is_refused(metadata: object) -> None:
    with pytest.raises(Corrupt, match="does not parse"):
        decode(end_with(metadata=metadata), "test")


@pytest.mark.parametrize("began_us", [-1, CREATED_US_MAX + 1, (1 << 63) - 1, True, 1.0, "1"])
def test_upload_that_began_at_no_time_is_refused(began_us: object) -> None:
    """The committer formats this time for a failed blob; an error would stop it."""
    with pytest.raises(Corrupt, match="began_us"):
        decode(end_with(began_us=began_us), "test")


@pytest.mark.parametrize("failure", ["lost \ud800 half", ["\udfff"], "\ud800" * 1000])
def test_each_failure_reason_is_encodable(failure: object) -> None:
    """A file name that is not UTF-8 appears in an error message as surrogates."""
    found = decode(end_with(failure=failure), "test")
    assert isinstance(found, End)
    assert found.failure
    assert len(found.failure.encode()) <= 4 * fmt.FAILURE_CHARACTERS_MAX
    sent = End(BLOB, 123, b"o" * 16, failure=str(failure))
    assert decode(encode(sent), "test") == replace(sent, failure=found.failure)


@pytest.mark.parametrize(("container", "ordinal"), [(0, 0), (1, 8192), (1, 0xFFFFFFFF), (5, ROWS_MAX)])
def test_base_of_no_container_is_refused(container: int, ordinal: int) -> None:
    """The zero chunk must not be accepted as a base.

    Then the whole container that the delta was written to was refused.
    """
    pairs = pair(mark_known(segment(mixed_content()[:60_000])))
    where = Locations(pairs.bases.containers.copy(), pairs.bases.ordinals.copy())
    row = int(np.flatnonzero(pairs.base_found)[0])
    where.containers[row], where.ordinals[row] = container, ordinal
    with pytest.raises(Corrupt, match="a location that no container has"):
        decode(encode(Paired(BLOB, replace(pairs, bases=where))), "test")
    not_found = pairs.base_found.copy()
    not_found[row] = False  # a row without a base is not read
    decode(encode(Paired(BLOB, replace(pairs, bases=where, base_found=not_found))), "test")


@pytest.mark.parametrize(("container", "ordinal"), [(1, 8192), (99, ROWS_MAX)])
def test_known_chunk_of_no_container_is_refused(container: int, ordinal: int) -> None:
    fresh = mark_known(segment(mixed_content()[:60_000]))
    where = Locations(fresh.chunk_locations.containers.copy(), fresh.chunk_locations.ordinals.copy())
    row = int(np.flatnonzero(fresh.chunk_known)[0])
    where.containers[row], where.ordinals[row] = container, ordinal
    with pytest.raises(Corrupt, match="a location that no container has"):
        decode(encode(Fresh(BLOB, replace(fresh, chunk_locations=where))), "test")


def test_later_version_is_distinguished_from_garbage() -> None:
    data = bytearray(encode(Frame(BLOB, np.zeros(3, np.uint8))))
    data[4] = 7  # 2: precondition, 3: reference to a pack, 4: sparse, 5: of a batch, 6: references of segments
    with pytest.raises(FormatTooNew, match="message format 7"):
        decode(bytes(data), "test")
    with pytest.raises(Corrupt, match="not a Nearkin message"):
        decode(b"{}", "test")


def test_frame_above_its_bound_is_refused_on_both_sides() -> None:
    with pytest.raises(BadInput, match="payload bytes"):
        encode(Frame(BLOB, np.zeros(fmt.SEGMENT_BYTES_MAX + 1, np.uint8)))
    with pytest.raises(Corrupt, match="too many"):
        decode(bytes(fmt.MESSAGE_BYTES_MAX + 1), "test")


WHOLE = [
    encode(message)
    for message in (
        Frame(BLOB, np.arange(50, dtype=np.uint8)),
        Segments(BLOB, segment(mixed_content()[:60_000])),
        Fresh(BLOB, mark_known(segment(mixed_content()[:60_000]))),
        Paired(BLOB, pair(mark_known(segment(mixed_content()[:60_000])))),
        Placed(BLOB, Locations.empty(3), np.zeros(3, np.bool_), np.zeros(3, np.uint32), Ledger()),
        End(BLOB, 123, b"o" * 16, 10, b"b" * 32, None, 17, None, {}),
    )
]


@settings(max_examples=400, deadline=None)
@given(
    which=st.integers(0, len(WHOLE) - 1),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    cut=st.floats(0, 1) | st.none(),
    head_only=st.booleans(),
)
def test_damage_is_refused_or_stays_within_all_bounds(
    which: int, flips: list[tuple[float, int]], cut: float | None, head_only: bool
) -> None:
    data = bytearray(WHOLE[which])
    reach = min(len(data), 400) if head_only else len(data)
    for place, value in flips:
        data[int(place * (reach - 1))] = value
    if cut is not None:
        del data[int(cut * len(data)) :]
    try:
        found = decode(bytes(data), "test")
    except (Corrupt, FormatTooNew):
        return
    if isinstance(found, Segments | Fresh | Paired):
        batch = {Segments: lambda f: f.batch, Fresh: lambda f: f.batch.batch, Paired: lambda f: f.batch.fresh.batch}[
            type(found)
        ](found)
        assert int(batch.lengths.sum(dtype=np.uint64)) <= fmt.CHUNKS_MAX * fmt.SEGMENT_BYTES_MAX
        if isinstance(found, Segments):
            carried = np.flatnonzero(~batch.zero)
        else:
            carried = (found.batch if isinstance(found, Fresh) else found.batch.fresh).fresh
        ends = batch.offsets[carried] + batch.lengths[carried]
        assert not len(ends) or int(ends.max()) <= len(batch.payload)


def joint(values: list[bytes]) -> list[SegmentBatch | FreshBatch | PairedBatch]:
    """Decode messages of one kind together."""
    messages = [fmt.read_header(value, f"message {number}") for number, value in enumerate(values)]
    if messages[0].kind is MessageKind.SEGMENTS:
        joined = read_segments(messages)
        return [joined.part(number) for number in range(len(messages))]
    return [*(read_fresh if messages[0].kind is MessageKind.FRESH else read_paired)(messages)]


def assert_equal(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if not is_dataclass(found):
        np.testing.assert_array_equal(found, expected)
        return
    for one in fields(found):
        assert_equal(getattr(found, one.name), getattr(expected, one.name))


SEVERAL = [segment(mixed_content(seed)[: 50_000 * seed]) for seed in (1, 2, 5)]
BY_KIND = [
    [encode(Segments(BLOB, batch)) for batch in SEVERAL],
    [encode(Fresh(BLOB, mark_known(batch))) for batch in SEVERAL],
    [encode(Paired(BLOB, pair(mark_known(batch)))) for batch in SEVERAL],
]


@pytest.mark.parametrize("values", BY_KIND)
def test_messages_decoded_together_equal_single_ones(values: list[bytes]) -> None:
    for found, value in zip(joint(values), values, strict=True):
        alone = decode(value, "alone")
        assert isinstance(alone, Segments | Fresh | Paired)
        assert_equal(found, alone.batch)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.integers(0, len(BY_KIND) - 1),
    which=st.integers(0, len(SEVERAL) - 1),
    flips=st.lists(st.tuples(st.integers(64, 6000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_message_is_refused_among_others_as_it_is_alone(kind: int, which: int, flips: list[tuple[int, int]]) -> None:
    values = list(BY_KIND[kind])
    data = bytearray(values[which])
    for place, value in flips:
        data[place % len(data)] = value
    values[which] = bytes(data)
    try:
        alone = decode(values[which], "alone")
    except Corrupt:
        with pytest.raises(Corrupt):
            joint(values)
        return
    assert isinstance(alone, Segments | Fresh | Paired)
    assert_equal(joint(values)[which], alone.batch)


def test_kinds_are_not_decoded_together() -> None:
    messages = [fmt.read_header(values[0], "mixed") for values in BY_KIND[:2]]
    with pytest.raises(TypeError, match="an unexpected kind"):
        read_segments(messages)


def test_pairs_of_an_encoded_fresh_message_are_equal_bytes() -> None:
    """Reusing the encoded columns gives the bytes of encoding the pairs."""
    for batch in SEVERAL:
        fresh = mark_known(batch)
        pairs = pair(fresh)
        made = encode_paired(fmt.read_header(encode(Fresh(BLOB, fresh)), "fresh"), pairs)
        assert made.join() == encode(Paired(BLOB, pairs))
    with pytest.raises(BadInput, match="fresh chunks"):
        encode_paired(fmt.read_header(BY_KIND[1][0], "fresh"), pairs)
