"""Order and reachability of containers.

Invariant: every container follows those on which it depends, and occurs once.

Ids ascend in stream order, so with one writer ascending ids are that order. With several writers, one may finish a
container early on which another writer's container, with a lower id but still open, then depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import ZERO, ContainerId, Locations, distinct, group_by_container


def topological_order(ids: Iterable[int], dependencies_of: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield `ids` in their order, but each after its dependencies among them.

    A cycle is broken at any point.
    """
    is_yielded = dict.fromkeys(ids, False)  # -> whether it was yielded
    for first in is_yielded:
        stack = {} if is_yielded[first] else {first: iter(dependencies_of(first))}
        while stack:
            last = next(reversed(stack))
            dependency = next((c for c in stack[last] if is_yielded.get(c) is False and c not in stack), None)
            if dependency is not None:
                stack[dependency] = iter(dependencies_of(dependency))
                continue
            del stack[last]
            is_yielded[last] = True
            yield last


def reachable_containers(
    segments: Locations,
    directory_of: Callable[[ContainerId], Directory | None],
    bases_of: Callable[[int], Iterable[int]],
) -> set[int]:
    """Return the containers that hold segments, their chunks, and the bases of these.

    `directory_of` returns None for a container that cannot be read: containers that only this one names are left out.
    """
    reached: set[int] = set()
    for container, rows in group_by_container(segments.containers):
        reached.add(container)
        directory = directory_of(ContainerId(container))
        if directory is None:
            continue
        table, ordinals = directory.segments, segments.ordinals[rows]
        is_needed = np.bincount(ordinals[ordinals < len(table)], minlength=len(table)) > 0
        chunks = table.chunks.take(np.repeat(is_needed, np.diff(table.bounds)))
        reached.update(distinct(chunks.containers).tolist())
    reached.discard(int(ZERO))
    waiting = list(reached)
    while waiting:
        bases = set(bases_of(waiting.pop())) - reached - {int(ZERO)}
        reached |= bases
        waiting.extend(bases)
    return reached
