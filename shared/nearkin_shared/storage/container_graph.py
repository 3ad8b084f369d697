"""Order of containers. Invariant: whatever a container leans on comes before it, and each comes once.

Ids ascend in stream order, so with one writer ascending ids are that order. With several, one may seal early what
another, whose container is older but still open, then leans on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def topological_order(ids: Iterable[int], leans_on: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield `ids` in their order, but each after those of them that it leans on. A circle is cut anywhere."""
    wanted = dict.fromkeys(ids, False)  # -> whether it was yielded
    for first in wanted:
        waiting = {} if wanted[first] else {first: iter(leans_on(first))}
        while waiting:
            last = next(reversed(waiting))
            below = next((c for c in waiting[last] if wanted.get(c) is False and c not in waiting), None)
            if below is not None:
                waiting[below] = iter(leans_on(below))
                continue
            del waiting[last]
            wanted[last] = True
            yield last
