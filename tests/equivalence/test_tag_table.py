"""Compare the compiled tag table with its reference, and both with a dict.

Invariant: saved bytes are equal after any calls, and no container of a tag is missed.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _tag_table as fast
from nearkin_shared.kernels.reference import tag_table_reference as plain

Tables = pytest.mark.parametrize("module", [fast, plain], ids=["cython", "python"])


def tags_of(seed: int, count: int) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


def saved(table: Any) -> list[bytes]:
    return [table.save_partition(i) for i in range(plain.PARTITIONS)]


class TableAgainstReference(RuleBasedStateMachine):
    @initialize(partitions=st.sampled_from([1, 3, 256]), filter_bits=st.sampled_from([8, 16, 24]))
    def start(self, partitions: int, filter_bits: int) -> None:
        self.partitions = np.uint64(partitions)
        self.fast, self.plain = fast.TagTable(filter_bits), plain.TagTable(filter_bits)
        self.model: dict[int, set[int]] = {}

    def tags(self, seed: int, count: int) -> NDArray[np.uint64]:
        """Return tags of few partitions, so that these grow."""
        tags = tags_of(seed, count)
        top = (tags >> np.uint64(56)) % self.partitions
        return (tags & np.uint64((1 << 56) - 1)) | top << np.uint64(56)

    @rule(seed=st.integers(0, 9), count=st.integers(0, 400), number=st.sampled_from([0, 1, 7, 300, 70000, 1 << 22]))
    def put(self, seed: int, count: int, number: int) -> None:
        tags = self.tags(seed, count)
        self.fast.put_many(tags, number)
        self.plain.put_many(tags, number)
        for tag in tags.tolist():
            self.model.setdefault(tag, set()).add(number)

    @rule(seed=st.integers(0, 9), count=st.integers(0, 400), number=st.sampled_from([0, 7, 300, 5 << 20]))
    def remove(self, seed: int, count: int, number: int) -> None:
        tags = self.tags(seed, count)
        assert self.fast.remove_many(tags, number) == self.plain.remove_many(tags, number)
        for tag in tags.tolist():
            self.model.get(tag, set()).discard(number)

    @rule(numbers=st.lists(st.sampled_from([1, 300, 70000, 5]), max_size=3))
    def remove_containers(self, numbers: list[int]) -> None:
        gone = np.array(numbers, np.uint32)
        assert self.fast.remove_containers(gone) == self.plain.remove_containers(gone)
        for found in self.model.values():
            found.difference_update(numbers)

    @rule(levels=st.lists(st.integers(0, 5), max_size=400))
    def keep_levels(self, levels: list[int]) -> None:
        """Hooks stay; a table that was thinned a little too far before keeps more."""
        by_number = np.array(levels, np.uint8)
        assert self.fast.keep_levels(by_number) == self.plain.keep_levels(by_number)
        for tag, numbers in self.model.items():
            mix = int(plain.tag_mixes(np.array([tag], np.uint64))[0])
            numbers.difference_update(
                [number for number in numbers if number < len(levels) and mix >> (32 - levels[number])]
            )

    @rule()
    def reload(self) -> None:
        for table in (self.fast, self.plain):
            for i, data in enumerate(saved(table)):
                table.load_partition(i, data)

    @invariant()
    def same_answers(self) -> None:
        if not hasattr(self, "fast"):
            return
        assert saved(self.fast) == saved(self.plain)
        figures = [(len(t), t.nbytes, t.tag_bits, t.dropped) for t in (self.fast, self.plain)]
        assert figures[0] == figures[1]
        assert figures[0][3] == 0
        tags = np.concatenate([self.tags(99, 50), np.array(list(self.model), np.uint64)])
        rows, numbers = self.fast.candidates(tags)
        answers: tuple[NDArray[Any], ...] = (rows, numbers)
        right_answers: tuple[NDArray[Any], ...] = self.plain.candidates(tags)
        for got, right in zip(answers, right_answers, strict=True):
            assert got.dtype == right.dtype
            np.testing.assert_array_equal(got, right)
        found = set(zip(tags[rows].tolist(), numbers.tolist(), strict=True))
        assert found >= {(tag, number) for tag, containers in self.model.items() for number in containers}


TableAgainstReference.TestCase.settings = settings(max_examples=25, stateful_step_count=8, deadline=None)
TestTableAgainstReference = TableAgainstReference.TestCase


def test_large_table_finds_all_in_six_bytes_an_entry() -> None:
    """At every size: each growth adds a sixteenth."""
    table, tags = fast.TagTable(), tags_of(1, 1_000_000)
    for number in range(2000):
        table.put_many(tags[number * 500 : number * 500 + 500], number)
        if number > 200 and number % 50 == 0:
            assert table.nbytes <= 5.65 * len(table)
    rows, numbers = table.candidates(tags)
    assert np.isin(np.arange(len(tags)), rows[numbers == rows // 500]).all()
    assert len(rows) < len(tags) * 1.001
    assert (table.dropped, table.tag_bits >= 16) == (0, True)
    assert len(table.candidates(tags_of(2, 1_000_000))[0]) < 100


def test_thinned_table_shrinks_and_finds_all_hooks() -> None:
    """Tags of level 4, one in sixteen, are left; a table that fills again keeps its bits."""
    table, tags = fast.TagTable(), tags_of(1, 400_000)
    for number in range(800):
        table.put_many(tags[number * 500 : number * 500 + 500], number)
    before_bytes, before_bits = table.nbytes, table.tag_bits
    is_hook = fast.tag_mixes(tags) >> np.uint32(28) == 0
    assert table.keep_levels(np.full(800, 4, np.uint8)) == np.count_nonzero(~is_hook)
    assert 0.06 < is_hook.mean() < 0.065
    assert table.nbytes < before_bytes / 4
    rows, numbers = table.candidates(tags)
    assert set(np.flatnonzero(is_hook).tolist()) <= set(rows[numbers == rows // 500].tolist())
    for number in range(800):
        table.put_many(tags[number * 500 : number * 500 + 500], number)
    assert (len(table), table.dropped) == (400_000, 0)
    assert table.tag_bits >= before_bits - 2
    rows, numbers = table.candidates(tags)
    assert np.isin(np.arange(len(tags)), rows[numbers == rows // 500]).all()


@pytest.mark.parametrize("filter_bits", [8, 12, 16])
def test_filter_bits_give_their_false_positive_rate(filter_bits: int) -> None:
    """Some eight entries are compared, half of them in the other role."""
    table = fast.TagTable(filter_bits)
    table.put_many(tags_of(1, 200_000), 1)
    absent = tags_of(2, 200_000)
    rate = len(table.candidates(absent)[0]) / len(absent)
    assert 1.5 < rate * 2**filter_bits < 5


@Tables
def test_ninth_copy_of_a_tag_is_dropped_and_counted(module: Any) -> None:
    """Two buckets have eight entries; a table of one tag stays small."""
    table = module.TagTable()
    tag = tags_of(7, 1)
    for number in range(20):
        table.put_many(tag, number)
    assert (len(table), table.dropped) == (8, 12)
    assert len(table.candidates(tag)[1]) == 8
    assert table.nbytes <= 20 * 80


def test_saved_table_never_changes() -> None:
    """A snapshot of one release is read by the next."""
    table = fast.TagTable()
    for number in range(100):
        table.put_many(tags_of(number, 500), number * 3)
    digest = hashlib.sha256(b"".join(saved(table))).hexdigest()
    assert digest == "b77d9fec96494cb96c6c484dc4bba9a4ae073025356a83db724a42558d3a4948"


@Tables
@given(data=st.binary(max_size=120))
def test_load_of_garbage_is_refused_or_safe(module: Any, data: bytes) -> None:
    table = module.TagTable()
    try:
        table.load_partition(3, data)
    except BadInput as err:
        assert "partition 3" in str(err)  # noqa: PT017 - some data are a partition
    table.candidates(tags_of(1, 100))
    table.put_many(tags_of(2, 3000), 5)
    assert set(table.candidates(tags_of(2, 3000))[0].tolist()) == set(range(3000))


@Tables
def test_bad_arguments_are_refused_by_name(module: Any) -> None:
    table = module.TagTable()
    tags = tags_of(1, 2)
    for call, name in (
        (lambda: module.TagTable(7), "filter_bits 7"),
        (lambda: module.TagTable(True), "filter_bits True"),
        (lambda: table.put_many(tags.astype(np.uint32), 1), "tags uint32"),
        (lambda: table.put_many(tags.reshape(1, 2), 1), "tags uint64"),
        (lambda: table.put_many(tags, -1), "number -1"),
        (lambda: table.put_many(tags, plain.NUMBER_MAX + 1), "number "),
        (lambda: table.candidates([1]), "tags list"),
        (lambda: table.remove_many(tags, 1.0), "number 1.0"),
        (lambda: table.remove_containers(tags), "numbers uint64"),
        (lambda: table.keep_levels(np.array([16], np.uint8)), "levels up to 16"),
        (lambda: table.keep_levels(tags), "levels uint64"),
        (lambda: module.tag_mixes([1]), "tags list"),
        (lambda: table.save_partition(256), "partition 256"),
        (lambda: table.load_partition(0, b""), "partition 0"),
        (lambda: table.load_partition(0, "x"), "partition 0"),
    ):
        with pytest.raises(BadInput, match=name):
            call()
    assert len(table) == 0
    table.put_many(tags, plain.NUMBER_MAX)
    assert table.candidates(tags)[1].tolist() == [plain.NUMBER_MAX] * 2


def test_tag_mixes_equal_the_reference() -> None:
    """Of no tag, one, and many."""
    for count in (0, 1, 5000):
        np.testing.assert_array_equal(fast.tag_mixes(tags_of(3, count)), plain.tag_mixes(tags_of(3, count)))


@Tables
def test_flipped_count_of_saved_partition_is_refused(module: Any) -> None:
    table = module.TagTable()
    table.put_many(np.arange(10, dtype=np.uint64), 1)
    data = bytearray(table.save_partition(0))
    data[8] ^= 1
    with pytest.raises(BadInput, match="partition 0: its entries differ"):
        table.load_partition(0, bytes(data))


@Tables
def test_entry_without_a_hash_is_refused(module: Any) -> None:
    """In the last of 5 buckets the highest rest is no hash's: a larger table would have it beyond its last bucket."""
    buckets, hash_bits, number_bits = 5, 36, 5
    rest = (1 << hash_bits - 2) - 1
    entry = (rest << number_bits + 1 | 1).to_bytes(5, "little")
    header = np.array([(buckets, hash_bits, number_bits, 0, 1)], plain.HEADER).tobytes()
    with pytest.raises(BadInput, match="no hash"):
        module.TagTable().load_partition(0, header + bytes((buckets - 1) * 20) + entry + bytes(15))


def test_threads_put_and_ask_one_table() -> None:
    """Each finds its own tags at once."""
    table = fast.TagTable()
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(20):
            tags = tags_of(number * 100 + step, 500)
            table.put_many(tags, number)
            rows, numbers = table.candidates(tags)
            wrong.extend([number] * (len(set(rows[numbers == number].tolist())) != 500))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert (len(table), table.dropped) == (4 * 20 * 500, 0)


def test_small_table_drops_nothing() -> None:
    """Both buckets of a tag may be one while a partition has few."""
    for seed in range(40):
        table = fast.TagTable()
        table.put_many(tags_of(seed, 3000), 1)
        assert (len(table), table.dropped) == (3000, 0)
