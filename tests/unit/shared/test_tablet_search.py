"""Search of tablets, equal to a plain search of each container in turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.index.tablets.tablet_cache import Tablet, are_equal
from nearkin_shared.index.tablets.tablet_search import TabletSearch
from nearkin_shared.types import U8, U64

WIDTH = 20
KEYS = 12
Content = dict[int, list[int] | None]


def keys_of(numbers: list[int]) -> U8:
    """Return keys that differ in the last byte alone."""
    keys = np.zeros((len(numbers), WIDTH), np.uint8)
    keys[:, -1] = numbers
    return keys


def tags_of(numbers: list[int]) -> U64:
    """Return tags that several keys share."""
    return np.array([1000 + number // 3 for number in numbers], np.uint64)


def tablet_of(numbers: list[int]) -> Tablet:
    return Tablet.make(keys_of(numbers), tags_of(numbers), np.arange(len(numbers), dtype=np.uint32))


keys = st.integers(0, KEYS - 1)
contents = st.dictionaries(st.integers(1, 6), st.one_of(st.none(), st.lists(keys, max_size=8)), max_size=6)


@given(contents, st.lists(keys, max_size=20), st.data())
def test_search_finds_what_each_container_in_turn_has(content: Content, wanted: list[int], data: st.DataObject) -> None:
    """Of several containers the first in the order given; of equal keys the lowest ordinal; lost ones have none."""
    order = data.draw(st.permutations(sorted(content)))
    pairs = [(row, one) for row in range(len(wanted)) for one in data.draw(st.permutations(sorted(content)))]
    named = [pair for pair in pairs if data.draw(st.booleans())]
    tablets = {one: None if numbers is None else tablet_of(numbers) for one, numbers in content.items()}
    search = TabletSearch(keys_of(wanted), tags_of(wanted), tablets.__getitem__)
    rows = np.array([row for row, _ in named], np.int64)
    search.ask(order, rows, np.array([one for _, one in named], np.uint64))
    for row, number in enumerate(wanted):
        here = [one for one in order if (row, one) in named and number in (content[one] or [])]
        assert bool(search.found[row]) == bool(here)
        expected = (here[0], (content[here[0]] or []).index(number)) if here else (0, 0)
        assert (search.locations.containers[row], search.locations.ordinals[row]) == expected
    assert set(search.hits) == set(search.locations.containers[search.found].tolist())


def test_container_without_open_keys_is_not_read() -> None:
    """Once the first container has all keys, the second one's directory is not read."""
    asked = []

    def tablet(container: int) -> Tablet:
        asked.append(container)
        return tablet_of([1, 4])

    search = TabletSearch(keys_of([1, 4]), tags_of([1, 4]), tablet)
    search.ask([5, 4], np.array([0, 0, 1, 1]), np.array([4, 5, 4, 5], np.uint64))
    assert search.found.all()
    assert asked == [5]


@pytest.mark.parametrize("width", [20, 32])
def test_keys_are_compared_in_full(width: int) -> None:
    """A difference in any byte is seen."""
    keys = np.random.default_rng(0).integers(0, 256, (width, width), dtype=np.uint8)
    others = keys ^ np.eye(width, dtype=np.uint8)
    assert are_equal(keys, keys.copy()).all()
    assert not are_equal(keys, others).any()
