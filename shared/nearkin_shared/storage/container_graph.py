# size: one pure algorithm, used by verify, repair and GC.
"""Topological order of containers.

Invariant: every container follows those on which it depends, and occurs once.

Ids ascend in stream order, so with one writer ascending ids are that order. With several writers, one may finish a
container early on which another writer's container, with a lower id but still open, then depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


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
