"""Numbered containers and the tags of their entries, in memory.

Where memory is short, only the tags that are hooks.

Invariant: numbers ascend in the order of publication, so that of several containers the lowest number was the first.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import RetryableError
from nearkin_shared.index.tablets import hook_levels
from nearkin_shared.index.tablets.hook_levels import HookLevels
from nearkin_shared.index.tablets.tablet_cache import words_of
from nearkin_shared.index.tablets.tag_snapshot import TagSnapshot
from nearkin_shared.kernels.tag_table import NUMBER_MAX, TagTable, tag_mixes
from nearkin_shared.types import U8, U64, distinct

_IDS_MIN = 64
_BYTES_A_NUMBER = 9
_BYTES_A_SORTED = 16
_BYTES_A_RECENT = 100
RECENT_MAX = 4096
"""Containers that are found by a dict, at 100 bytes each, until they are merged into the sorted ids, at 16."""
_SEGMENT_TAG_AT = 12
_SEGMENT_MIXES = np.arange(1, 16, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""Keep the tags of segments apart from those of chunks; each is a choice of a segment's tag."""
BYTES_A_TAG = 5.7
"""Memory for a tag in a table that is about to grow."""


class ContainerTags:
    """Tags of containers that have a number."""

    def __init__(
        self,
        filter_bits: int,
        snapshot: TagSnapshot | None = None,
        *,
        bytes_max: int | None = None,
        level: int | None = None,
    ) -> None:
        """Create the table.

        `bytes_max` bounds its memory: fewer tags are hooks then; `level` fixes which are.
        """
        self.table: TagTable = TagTable(filter_bits) if snapshot is None else snapshot.tags
        found = np.zeros(0, np.uint64) if snapshot is None else snapshot.ids
        start = level if level is not None else 0 if bytes_max is None else hook_levels.LEVEL_FIRST
        marks = None if snapshot is None else snapshot.marks
        self.hooks: HookLevels = HookLevels(start, marks, is_fixed=level is not None)
        self._bytes_max = bytes_max
        self._count = len(found)
        self._ids: U64 = np.zeros(max(_IDS_MIN, self._count), np.uint64)
        self._ids[: self._count] = found
        self._live = int(np.count_nonzero(found))
        self._recent: dict[int, int] = {}
        self._sorted: U64 = np.zeros(0, np.uint64)
        self._numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        self._is_ascending = False
        """Whether ids ascend with numbers: then they need no second order."""
        self._merge()
        self._fit()

    def _merge(self) -> None:
        """Sort the ids of all containers, unless they ascend."""
        ids = self._ids[: self._count]
        self._recent.clear()
        self._is_ascending = bool((ids[1:] > ids[:-1]).all() and (ids[:1] > 0).all())
        numbers = np.zeros(0, np.int64) if self._is_ascending else np.flatnonzero(ids)
        self._numbers = numbers[np.argsort(ids[numbers], kind="stable")]
        self._sorted = ids[self._numbers]

    def _number(self, container: int) -> int | None:
        """Return the number of a container that has one."""
        if self._is_ascending:
            at = int(np.searchsorted(self._ids[: self._count], np.uint64(container)))
            return at if at < self._count and self._ids[at] == container else None
        number = self._recent.get(container)
        if number is None:
            at = int(np.searchsorted(self._sorted, np.uint64(container)))
            if at < len(self._sorted) and self._sorted[at] == container:
                number = int(self._numbers[at])
        return number if number is not None and self._ids[number] == container else None

    def __contains__(self, container: int) -> bool:
        return self._number(container) is not None

    def __len__(self) -> int:
        return self._live

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of tags and numbers."""
        return int(self.table.nbytes) + self._number_bytes

    @property
    def _number_bytes(self) -> int:
        in_order = len(self._sorted) * _BYTES_A_SORTED + len(self._recent) * _BYTES_A_RECENT
        return self._count * _BYTES_A_NUMBER + in_order

    def _fit(self) -> None:
        """Remove hooks until the memory is within its bound, or one in some thousand is left."""
        if self._bytes_max is None:
            return
        while len(self.table) * BYTES_A_TAG + self._number_bytes > self._bytes_max:
            if not self.hooks.raise_lowest(self._ids[: self._count] > 0):
                return
            self.table.keep_levels(self.hooks.levels)

    @property
    def missed_share(self) -> float:
        """Return the share of duplicates that a lookup is expected to miss, at most."""
        return self.hooks.loss(self._ids[: self._count] > 0)

    @property
    def snapshot(self) -> TagSnapshot:
        """Return the content of a snapshot."""
        return TagSnapshot(self.table, self._ids[: self._count], self.hooks.marks)

    def containers(self) -> Collection[int]:
        """Return the ids of all containers."""
        ids = self._ids[: self._count]
        found: list[int] = ids[ids > 0].tolist()
        return found

    def add(self, container: int) -> None:
        """Number a container, unless it has a number.

        Raises: RetryableError, above the highest number.
        """
        if container in self:
            return
        if self._count > NUMBER_MAX:
            raise RetryableError(f"index: {self._count} containers were numbered; run rebuild-index")
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids), np.uint64)])
        if self._is_ascending and self._count and container < self._ids[self._count - 1]:
            self._is_ascending = False
            self._merge_ascending()
        self._ids[self._count] = container
        if not self._is_ascending:
            self._recent[container] = self._count
        self.hooks.append()
        self._count += 1
        self._live += 1
        if len(self._recent) > max(RECENT_MAX, self._count // 64):
            self._merge()
        self._fit()

    def _merge_ascending(self) -> None:
        """Give ascending ids the order of others: an id that does not ascend follows."""
        self._numbers = np.arange(self._count)
        self._sorted = self._ids[: self._count].copy()

    def put(self, container: int, tags: U64) -> None:
        """Add the hooks among the tags of a numbered container."""
        number = self._number(container)
        assert number is not None
        self.table.put_many(self.hooks.hooks(number, tags), number)

    def remove(self, container: int, tags: U64) -> None:
        """Remove tags of a container, if it has a number."""
        number = self._number(container)
        if number is not None and len(tags):
            self.table.remove_many(tags, number)

    def retire(self, containers: Collection[int]) -> None:
        """Remove containers; tags that are left of them have no container."""
        numbers = {number for container in containers if (number := self._number(container)) is not None}
        self._ids[list(numbers)] = 0
        self._live -= len(numbers)
        if numbers and self._is_ascending:
            self._merge()

    def purge(self, containers: Collection[int]) -> None:
        """Remove containers with all their tags, in time proportional to the table."""
        numbers = [number for container in containers if (number := self._number(container)) is not None]
        self.table.remove_containers(np.array(numbers, np.uint32))
        self.retire(containers)

    def candidates(self, tags: U64) -> tuple[NDArray[np.int64], U64]:
        """Return (rows, containers): containers that may have a tag, by row.

        The first published is first.
        """
        rows, numbers = self.table.candidates(tags)
        if not len(rows):
            return rows, np.zeros(0, np.uint64)
        is_numbered = numbers < self._count  # a foreign snapshot may have others
        rows, containers = rows[is_numbered], self._ids[numbers[is_numbered]]
        return rows[containers > 0], containers[containers > 0]

    def first_published(self, containers: U64) -> list[int]:
        """Return different numbered containers in the order of their publication."""
        different: list[int] = distinct(containers).tolist()
        return different if self._is_ascending else self.in_order(different)

    def in_order(self, containers: Collection[int]) -> list[int]:
        """Return those of the containers that have a number, by number."""
        numbers = {container: number for container in containers if (number := self._number(container)) is not None}
        return sorted(numbers, key=numbers.__getitem__)

    def successor(self, container: int) -> int | None:
        """Return the container published after one, if it is still there."""
        number = self._number(container)
        if number is None or number + 1 >= self._count:
            return None
        return int(self._ids[number + 1]) or None

    def neighbours(self, container: int) -> list[int]:
        """Return the containers published before and after one, if they are still there."""
        number = self._number(container)
        if number is None:
            return []
        ids = self._ids[max(0, number - 1) : min(self._count, number + 2)].tolist()
        return [found for found in ids if found not in (0, container)]

    def last(self, count: int) -> list[int]:
        """Return the containers published last."""
        ids: list[int] = self._ids[max(0, self._count - count) : self._count].tolist()
        return [container for container in ids if container]

    def mark_stable(self, containers: Collection[int]) -> None:
        """Note that a batch found names in containers."""
        for container in containers:
            number = self._number(container)
            if number is not None:
                self.hooks.mark_stable(number)


def tags_of_segments(ids: U8) -> U64:
    """Return the tags of segments: of eight mixes of an id the one with the highest level.

    Segments are fewer than chunks, so that they have more hooks.
    """
    choices = words_of(ids, _SEGMENT_TAG_AT) ^ _SEGMENT_MIXES[:, None]
    best = tag_mixes(choices.ravel()).reshape(choices.shape).argmin(axis=0)
    tags: U64 = choices[best, np.arange(len(ids))]
    return tags
