"""Search a batch of keys in the tablets of several containers.

    exact       each container that the tags name is asked for the keys that name it
    sampled     the containers that most hooks name are asked for all keys; then those where the stream was last, and
                the next ones after them

Invariant: a key is found only where a tablet has it whole; a key that is found is not asked for again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.index.tablets.tablet_cache import Tablet
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

    def ask(self, containers: Collection[int], rows: Rows, candidates: U64) -> None:
        """Ask each container for the keys that name it: `candidates` by row."""
        for container in containers:
            own = rows[candidates == np.uint64(container)]
            own = own[~self.found[own]]
            if len(own):
                self._match(container, own)

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
