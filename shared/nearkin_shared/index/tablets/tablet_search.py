"""Search a batch of keys in the tablets of several containers.

    exact       each container that the tags name is asked for the keys that name it
    sampled     the containers that most hooks name are asked for all keys; then those where the stream was last, and
                the next ones after them

Invariant: a key is found only where a tablet has it whole; a key that is found is not asked for again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.index.tablets.tablet_cache import Tablet, are_equal
from nearkin_shared.types import U8, U64, Bools, Locations

CHAMPIONS_MIN, KEYS_A_CHAMPION = 16, 64
"""So many containers, or one for so many keys, are opened for the hooks of a batch."""
RECENT_MAX = 32
"""Containers of each kind, published last and hit last, that are asked for what hooks did not find."""

TabletOf = Callable[[int], Tablet | None]
Rows = NDArray[np.int64]


def champions(candidates: U64, keys: int) -> set[int]:
    """Return the containers with most hooks, by which a batch of keys named its candidates."""
    different, hooks = np.unique(candidates, return_counts=True)
    limit = max(CHAMPIONS_MIN, keys // KEYS_A_CHAMPION)
    return set(different[np.argsort(-hooks, kind="stable")][:limit].tolist())


class RecentContainers:
    """Containers in which names were found last, and those published last.

    Apart: a stream that hits many old containers does not evict the changes of the last versions, of which each
    container has few names, and so seldom a hook.
    """

    def __init__(self) -> None:
        self._hit: OrderedDict[int, None] = OrderedDict()
        self._published: OrderedDict[int, None] = OrderedDict()

    def note_hits(self, containers: Iterable[int]) -> None:
        """Note containers in which names were found, the last one at the end."""
        self._note(self._hit, containers)

    def note_published(self, containers: Iterable[int]) -> None:
        """Note published containers, the last one at the end."""
        self._note(self._published, containers)

    @staticmethod
    def _note(noted: OrderedDict[int, None], containers: Iterable[int]) -> None:
        for container in containers:
            noted[container] = None
            noted.move_to_end(container)
        while len(noted) > RECENT_MAX:
            noted.popitem(last=False)

    @property
    def containers(self) -> Collection[int]:
        """Return the containers."""
        return self._hit.keys() | self._published.keys()


class TabletSearch:
    """One batch of keys, and what was found of them."""

    def __init__(self, keys: U8, tags: U64, tablet_of: TabletOf) -> None:
        self._keys = keys
        self._tags = tags
        self._tablet_of = tablet_of
        self._tried: set[int] = set()
        self.locations: Locations = Locations.empty(len(keys))
        self.found: Bools = np.zeros(len(keys), np.bool_)
        self.hits: list[int] = []
        """Containers in which keys were found."""

    def ask(self, containers: Sequence[int], rows: Rows, candidates: U64) -> None:
        """Ask each container for the keys that name it.

        `candidates` are given by row, ascending; `containers` in the order to ask.
        """
        positions = _positions(containers, candidates)
        if not _is_first(rows).all():
            order = np.lexsort((positions, rows))
            rows, positions = rows[order], positions[order]
        is_open = (positions >= 0) & ~self.found[rows]
        rows, positions = rows[is_open], positions[is_open]
        while len(rows):
            is_first = _is_first(rows)
            self._match_each(containers, rows[is_first], positions[is_first])
            is_open = ~is_first & ~self.found[rows]
            rows, positions = rows[is_open], positions[is_open]

    def _match_each(self, containers: Sequence[int], rows: Rows, positions: Rows) -> None:
        """Look for each key in one container.

        Few calls of numpy are made for each container: a batch names hundreds, and each has few of its keys.
        """
        order = np.argsort(positions, kind="stable")
        rows, positions = rows[order], positions[order]
        keys, tags = self._keys[rows], self._tags[rows]
        near, near_tags, ordinals = ~keys, ~tags, np.zeros(len(rows), np.uint32)
        for start, end in pairwise([*np.flatnonzero(_is_first(positions)).tolist(), len(rows)]):
            container, here = containers[positions[start]], slice(start, end)
            tablet = self._tablet_of(container)
            self._tried.add(container)
            if tablet is not None and len(tablet.tags):
                at = tablet.tags.searchsorted(tags[here])
                tablet.names.take(at, 0, near[here], "clip")
                tablet.tags.take(at, 0, near_tags[here], "clip")
                tablet.ordinals.take(at, 0, ordinals[here], "clip")
        is_there = are_equal(near, keys)
        found_at = positions[is_there]
        self.hits += [containers[at] for at in found_at[_is_first(found_at)].tolist()]
        for row in np.flatnonzero(~is_there & (near_tags == tags)).tolist():  # the next key of its tablet may be it
            self._match(containers[positions[row]], rows[row : row + 1])
        there = rows[is_there]
        self.locations.containers[there] = np.array(containers, np.uint64)[found_at]
        self.locations.ordinals[there], self.found[there] = ordinals[is_there], True

    def ask_for_all(self, containers: Sequence[int], named: Collection[int], rows: Rows, candidates: U64) -> None:
        """Ask containers for all keys, in the order given.

        Those of `named` only if a key that names one is open.
        """
        for container in containers:
            own = rows[candidates == np.uint64(container)]
            if container not in named or not self.found[own].all():
                self._match(container, np.flatnonzero(~self.found))

    def follow(self, neighbours: Callable[[int], Collection[int]]) -> None:
        """Ask the containers next to those where keys were found."""
        waiting = deque(container for hit in self.hits for container in neighbours(hit))
        while waiting and not self.found.all():
            container = waiting.popleft()
            if container in self._tried:
                continue
            if self._match(container, np.flatnonzero(~self.found)):
                waiting.extendleft(neighbours(container))

    def _match(self, container: int, rows: Rows) -> bool:
        """Look for keys in a container; return whether any is there."""
        self._tried.add(container)
        tablet = self._tablet_of(container) if len(rows) else None
        if tablet is None:
            return False
        ordinals, is_there = tablet.find(self._keys[rows], self._tags[rows])
        rows = rows[is_there]
        self.locations.containers[rows], self.locations.ordinals[rows] = container, ordinals[is_there]
        self.found[rows] = True
        if len(rows):
            self.hits.append(container)
        return bool(len(rows))


def _positions(containers: Sequence[int], candidates: U64) -> Rows:
    """Return the position of each candidate among the containers, -1 for no such one."""
    if not len(containers):
        return np.full(len(candidates), -1)
    ids = np.array(containers, np.uint64)
    if len(ids) == 1:
        return np.where(candidates == ids[0], 0, -1)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, candidates, sorter=order), len(ids) - 1)
    found = order[at]
    return np.where(ids[found] == candidates, found, -1)


def _is_first(values: Rows) -> Bools:
    """Return which of sorted values differ from the one before."""
    is_first: Bools = np.empty(len(values), np.bool_)  # np.ones takes twice as long for few
    is_first[:1] = True
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first
