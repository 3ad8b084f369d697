"""Compare the compiled fingerprint table with a dict.

Invariant: equal after any calls, refused ones included.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput, RetryableError
from nearkin_shared.kernels.native import _fingerprint_table as fast
from nearkin_shared.kernels.reference import fingerprint_table_reference as plain


def keys_of(numbers: list[int], key_bytes: int) -> NDArray[np.uint8]:
    """Return keys that differ in their last byte only, so that the hash alone spreads them."""
    keys = np.zeros((len(numbers), key_bytes), np.uint8)
    keys[:, key_bytes - 2] = [number >> 8 for number in numbers]
    keys[:, key_bytes - 1] = [number & 255 for number in numbers]
    return keys


def many(rows: int, key_bytes: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(rows).integers(0, 256, (rows, key_bytes), dtype=np.uint8)


class TableAgainstDict(RuleBasedStateMachine):
    @initialize(key_bytes=st.sampled_from([8, 9, 32, 40]), max_entries=st.integers(1, 120))
    def start(self, key_bytes: int, max_entries: int) -> None:
        self.key_bytes = key_bytes
        self.fast = fast.NameTable(key_bytes, max_entries)
        self.plain = plain.NameTable(key_bytes, max_entries)

    @rule(numbers=st.lists(st.integers(0, 300), max_size=60), container=st.integers(0, 5))
    def put(self, numbers: list[int], container: int) -> None:
        keys = keys_of(numbers, self.key_bytes)
        containers = np.full(len(numbers), container, np.uint64) * np.uint64(2**61)
        ordinals = np.arange(len(numbers), dtype=np.uint32)
        refused = False
        try:
            right = self.plain.put_first_many(keys, containers, ordinals)
        except RetryableError:
            refused = True
        if refused:
            with pytest.raises(RetryableError, match="max_entries"):
                self.fast.put_first_many(keys, containers, ordinals)
        else:
            np.testing.assert_array_equal(self.fast.put_first_many(keys, containers, ordinals), right)

    @rule(ids=st.lists(st.integers(0, 5), max_size=4))
    def discard(self, ids: list[int]) -> None:
        removed = np.array(ids, np.uint64) * np.uint64(2**61)
        assert self.fast.discard_containers(removed) == self.plain.discard_containers(removed)

    @rule()
    def clear(self) -> None:
        self.fast.clear()
        self.plain.clear()
        assert self.fast.nbytes == 0

    @invariant()
    def same_answers(self) -> None:
        if hasattr(self, "fast"):
            keys = keys_of(list(range(301)), self.key_bytes)
            answers: tuple[NDArray[Any], ...] = self.fast.get_many(keys)
            right_answers: tuple[NDArray[Any], ...] = self.plain.get_many(keys)
            for got, right in zip(answers, right_answers, strict=True):
                assert got.dtype == right.dtype
                np.testing.assert_array_equal(got, right)
            assert len(self.fast) == len(self.plain) <= self.fast.max_entries


TableAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestTableAgainstDict = TableAgainstDict.TestCase


@given(st.lists(st.integers(0, 50), max_size=200), st.sampled_from([1, 2, 20, 32, 40]))
def test_first_occurrence_agrees_with_dict(numbers: list[int], key_bytes: int) -> None:
    keys = np.zeros((len(numbers), key_bytes), np.uint8)
    keys[:, -1] = numbers
    np.testing.assert_array_equal(fast.first_occurrence(keys), plain.first_occurrence(keys))


def test_large_table_keeps_entries_through_growth() -> None:
    rows = 100_000
    keys, table = many(rows), fast.NameTable(32, 1 << 20)
    containers, ordinals = np.arange(rows, dtype=np.uint64) // 500, np.arange(rows, dtype=np.uint32)
    for at in range(0, rows, 7919):
        part = slice(at, at + 7919)
        assert table.put_first_many(keys[part], containers[part], ordinals[part]).all()
    assert len(table) == rows
    assert table.nbytes <= 120 * rows
    found_containers, found_ordinals, found = table.get_many(keys)
    assert found.all()
    np.testing.assert_array_equal(found_containers, containers)
    np.testing.assert_array_equal(found_ordinals, ordinals)
    assert table.discard_containers(np.arange(0, 200, 2, dtype=np.uint64)) == rows // 2
    np.testing.assert_array_equal(table.get_many(keys)[2], containers % 2 == 1)


def test_refused_put_changes_nothing() -> None:
    table = fast.NameTable(32, 100)
    table.put_first_many(many(90), np.zeros(90, np.uint64), np.zeros(90, np.uint32))
    with pytest.raises(RetryableError, match="101 entries would exceed max_entries 100"):
        table.put_first_many(many(11), np.ones(11, np.uint64), np.zeros(11, np.uint32))
    assert len(table) == 90
    assert not table.get_many(many(11))[2].any()
    again = np.concatenate([many(90), many(10), many(10)])  # repeats take no room
    assert table.put_first_many(again, np.zeros(110, np.uint64), np.zeros(110, np.uint32)).sum() == 10


def test_strided_keys_are_accepted() -> None:
    keys = many(40)[::2]
    table = fast.NameTable(32, 100)
    table.put_first_many(keys, np.ones(20, np.uint64), np.zeros(20, np.uint32))
    assert table.get_many(keys.copy())[2].all()


def test_no_keys_are_no_error() -> None:
    for module in (fast, plain):
        table = module.NameTable(8, 1)
        none = np.zeros((0, 8), np.uint8)
        assert table.put_first_many(none, np.zeros(0, np.uint64), np.zeros(0, np.uint32)).shape == (0,)
        assert [len(part) for part in table.get_many(none)] == [0, 0, 0]
        assert table.discard_containers(np.zeros(0, np.uint64)) == 0
        assert module.first_occurrence(none).shape == (0,)


def test_both_tables_refuse_equal_arguments() -> None:
    module: Any
    for module in (fast, plain):
        for key_bytes, max_entries in ((7, 1), (41, 1), (8, 0), (8, 2**40 + 1), (True, 1), ("8", 1), (8, 1.5)):
            with pytest.raises(BadInput, match="needs a whole number"):
                module.NameTable(key_bytes, max_entries)
        table = module.NameTable(8, 10)
        good, zero64, zero32 = np.zeros((1, 8), np.uint8), np.zeros(1, np.uint64), np.zeros(1, np.uint32)
        for keys in (np.zeros((1, 9), np.uint8), np.zeros((1, 8), np.int8), np.zeros(8, np.uint8), b"12345678", None):
            with pytest.raises(BadInput, match="keys"):
                table.get_many(keys)
            with pytest.raises(BadInput, match="keys"):
                table.put_first_many(keys, zero64, zero32)
        with pytest.raises(BadInput, match="containers"):
            table.put_first_many(good, zero64.astype(np.int64), zero32)
        with pytest.raises(BadInput, match="ordinals"):
            table.put_first_many(good, zero64, zero32.astype(np.uint64))
        with pytest.raises(BadInput, match="as many"):
            table.put_first_many(good, np.zeros(2, np.uint64), zero32)
        with pytest.raises(BadInput, match="ids"):
            table.discard_containers([1])
        with pytest.raises(BadInput, match="keys"):
            module.first_occurrence(np.zeros((1, 41), np.uint8))


def test_table_shared_by_threads_is_consistent() -> None:
    table, keys = fast.NameTable(32, 1 << 16), many(20_000)
    inserted: list[int] = []

    def work(writer: int) -> None:
        mine = 0
        for at in range(0, len(keys), 500):
            part = keys[at : at + 500]
            mine += int(
                table.put_first_many(part, np.full(500, writer, np.uint64), np.arange(500, dtype=np.uint32)).sum()
            )
            assert table.get_many(part)[2].all()
        inserted.append(mine)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(inserted) == len(table) == len(keys)
    assert len(inserted) == 4
