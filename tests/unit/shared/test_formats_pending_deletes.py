"""Test pending-delete records: they round trip, or are reported as damaged."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns, pending_delete_record
from nearkin_shared.formats.columns import check_bytes
from nearkin_shared.formats.pending_delete_record import (
    FIXED,
    MAGIC,
    PendingDelete,
    decode_record,
    encode_record,
    select_fitting,
)
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.pending_deletes import PendingDeleteStore, record_bytes
from nearkin_shared.utils import failpoints

ordinals = st.sets(st.integers(0, 300), max_size=40).map(lambda rows: np.array(sorted(rows), np.uint32))
entries = st.builds(PendingDelete, st.integers(0, 1 << 50), ordinals, ordinals, st.booleans())
records = st.dictionaries(st.integers(2, (1 << 64) - 1), entries, max_size=8)


def plain(record: dict[int, PendingDelete]) -> dict[int, tuple[int, list[int], list[int], bool]]:
    return {c: (e.at_us, e.chunks.tolist(), e.segments.tolist(), e.whole) for c, e in record.items()}


def example() -> dict[int, PendingDelete]:
    rows = np.array([0, 1, 2, 7, 9, 10], np.uint32)
    return {1 << 40: PendingDelete(5, rows, rows[:2], False), (1 << 40) + 1: PendingDelete(6, rows, rows, True)}


@given(record=records, sequence=st.integers(0, (1 << 64) - 1))
@runs(deadline=None, max_examples=100)
def test_record_round_trips(record: dict[int, PendingDelete], sequence: int) -> None:
    found, back = decode_record(encode_record(sequence, record), "r")
    assert (found, plain(back)) == (sequence, plain(record))


@given(record=records, later=st.integers(1, 1 << 40))
@runs(deadline=None, max_examples=50)
def test_record_size_is_independent_of_the_clock(record: dict[int, PendingDelete], later: int) -> None:
    moved = {c: PendingDelete(e.at_us + later, e.chunks, e.segments, e.whole) for c, e in record.items()}
    assert record_bytes(moved) == record_bytes(record)


def test_each_flipped_bit_and_truncation_is_detected() -> None:
    data = encode_record(3, example())
    for at in range(len(data)):
        with pytest.raises(Corrupt):
            decode_record(data[:at], "r")
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(Corrupt):
                decode_record(bytes(broken), "r")


@pytest.mark.parametrize(("at", "value", "error"), [(4, 3, FormatTooNew), (6, 1, FormatTooNew), (4, 0, Corrupt)])
def test_another_format_is_distinguished_from_damage(at: int, value: int, error: type[Exception]) -> None:
    body = bytearray(encode_record(3, example())[:-8])
    body[at : at + 2] = value.to_bytes(2, "little")
    with pytest.raises(error):
        decode_record(bytes(body) + check_bytes(bytes(body)), "r")


def runs_of(starts: list[int], counts: list[int], entries: int) -> bytes:
    """Return a record whose entries all have the same runs of chunks.

    The runs are not expanded here.
    """
    body = FIXED.pack(MAGIC, 1, 0, 3, entries) + np.zeros(entries, "<i8").tobytes()
    runs_each = np.full(entries, len(starts), "<u4")
    body += columns.pack([np.arange(5, 5 + entries, dtype="<u8"), np.zeros(entries, "u1"), runs_each, 0 * runs_each])
    body += columns.pack([np.tile(np.array(starts, "<u4"), entries), np.tile(np.array(counts, "<u4"), entries)])
    return body + check_bytes(body)


def test_few_bytes_never_expand_beyond_memory() -> None:
    record = decode_record(runs_of([0, 9], [8, 2], 3), "r")[1]
    assert [entry.chunks.tolist() for entry in record.values()] == [[*range(8), 9, 10]] * 3
    many = runs_of([0], [1 << 23], 60)
    assert len(many) < 700
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="r: 503316480 chunks and segments, at most 134217728"):
            decode_record(many, "r")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_entries_beyond_one_record_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    record = example()
    assert select_fitting(record) == record
    monkeypatch.setattr(pending_delete_record, "ORDINALS_MAX", 8)
    assert plain(select_fitting(record)) == plain(dict(list(record.items())[:1]))
    encode_record(1, select_fitting(record))
    with pytest.raises(BadInput, match="20 pending chunks and segments: want at most 8"):
        encode_record(1, record)


def test_highest_record_is_valid_and_lower_ones_are_removed() -> None:
    objects = memory_objects()
    store = PendingDeleteStore(objects)
    assert store.read() == {}
    store.replace(example())
    assert list(store.list_records()) == [1]
    newer = {9: PendingDelete(7, np.zeros(0, np.uint32), np.zeros(0, np.uint32), True)}
    objects.put_new(f"gc/{5:016x}.nkg", encode_record(5, newer))  # its writer died before it removed the previous one
    assert plain(store.read()) == plain(newer)
    store.replace(example())
    assert store.list_records() == {6: record_bytes(example())}
    store.replace({})
    assert store.list_records() == {7: record_bytes({})}
    assert store.read() == {}


def test_store_without_pending_deletes_has_no_record() -> None:
    store = PendingDeleteStore(memory_objects())
    store.replace({})
    assert store.list_records() == {}
    assert store.is_consistent()


def test_record_of_a_delayed_writer_is_never_valid(tmp_path: Path) -> None:
    """A writer is delayed before it writes record 1.

    Meanwhile others mark, free, and are left without pending deletes.
    """
    late, meanwhile = PendingDeleteStore(LocalObjectStore(tmp_path)), PendingDeleteStore(LocalObjectStore(tmp_path))
    names: list[str] = []

    def collected_meanwhile(name: str) -> None:
        names.append(name)
        if len(names) == 1:
            assert name == "object.begun"
            meanwhile.replace({1 << 30: PendingDelete(9, np.zeros(0, np.uint32), np.zeros(0, np.uint32), True)})
            meanwhile.replace({})

    failpoints.arm((), collected_meanwhile)
    try:
        with pytest.raises(AlreadyExists, match="of another writer is newer"):
            late.replace(example())
    finally:
        failpoints.disarm()
    assert meanwhile.read() == {}
    assert not meanwhile.is_consistent()  # the next run removes this record
    meanwhile.replace({})
    assert meanwhile.is_consistent()


def test_damaged_record_or_two_records_are_inconsistent() -> None:
    objects = memory_objects()
    store = PendingDeleteStore(objects)
    store.replace(example())
    assert store.is_consistent()
    objects.put_new(f"gc/{9:016x}.nkg", encode_record(9, example()))
    assert not store.is_consistent()
    objects.delete(f"gc/{9:016x}.nkg")
    objects.delete(f"gc/{1:016x}.nkg")
    objects.put_new(f"gc/{1:016x}.nkg", encode_record(1, example())[:-1])
    assert not store.is_consistent()


def test_damaged_record_has_no_entries_and_unknown_name_fails() -> None:
    objects = memory_objects()
    store = PendingDeleteStore(objects)
    objects.put_new(f"gc/{2:016x}.nkg", encode_record(3, example()))  # under another record's name
    assert store.read() == {}
    with pytest.raises(Corrupt, match="is record 3"):
        store.at(2)
    objects.put_new("gc/notes.txt", b"mine")
    with pytest.raises(Corrupt, match="move it out"):
        store.list_records()
