"""Check recorded histories of a key for linearizability, as Porcupine does.

Wing and Gong's search with Lowe's memory of visited states: an order of the operations is looked for that respects real
time (an operation that ended before another began comes first) and that a sequential register accepts. The register is
one key: put with a precondition, get, delete of all versions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from nearkin_shared.utils.frozen import frozen

OPERATIONS_MAX = 200
"""Operations on one key: the search is exponential in the number that overlap, not in their total number."""
State = str | None
"""Content of the newest version; None if the key has none."""
Kind = Literal["put", "get", "delete"]
ABSENT = "(absent)"


@frozen
class Operation:
    """One call: `started` and `ended` by one clock; `ended` is infinite if the call was never answered."""

    kind: Kind
    started: float
    ended: float
    value: State = None
    """The state that a put wrote, or a get read."""
    expected: State = None
    """Precondition of a put: the content of the newest version, ABSENT for none, None for any."""
    done: bool | None = True
    """Whether a put or deletion took effect; None if unknown."""


class Recorder:
    """Record the calls of several threads on one key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.operations: list[Operation] = []

    @staticmethod
    def start() -> float:
        """Return the start time of a call."""
        return time.perf_counter()

    def end(
        self, kind: Kind, started: float, value: State = None, expected: State = None, *, done: bool | None = True
    ) -> None:
        """Add a call that ends now."""
        ended = float("inf") if done is None else time.perf_counter()
        with self._lock:
            self.operations.append(Operation(kind, started, ended, value, expected, done))


def is_linearizable(operations: Iterable[Operation], first: State = None) -> bool:
    """Return whether some order of the operations explains their results, starting with the state `first`."""
    ordered = sorted(operations, key=lambda operation: operation.started)
    assert len(ordered) <= OPERATIONS_MAX
    whole = (1 << len(ordered)) - 1
    unknown = sum(1 << number for number, operation in enumerate(ordered) if operation.done is None)
    stack, visited = [(0, first)], {(0, first)}
    while stack:
        taken, state = stack.pop()
        if taken | unknown == whole:
            return True
        for number in _candidates(ordered, taken):
            for reached in _apply(state, ordered[number]):
                entry = taken | 1 << number, reached
                if entry not in visited:
                    visited.add(entry)
                    stack.append(entry)
    return False


def _candidates(ordered: Sequence[Operation], taken: int) -> list[int]:
    """Return the operations that may be next: no remaining one ended before their start."""
    left = [number for number in range(len(ordered)) if not taken >> number & 1]
    first_end = min(ordered[number].ended for number in left)
    return [number for number in left if ordered[number].started <= first_end]


def _apply(state: State, operation: Operation) -> list[State]:
    """Return the states that an operation may lead to; none if its result is impossible in this state."""
    if operation.kind == "get":
        return [state] if operation.value == state else []
    if operation.kind == "delete":
        # Two that overlap share the versions, and each reports that it deleted some: the register is empty once.
        if operation.done:
            return [None]
        took_effect = state is not None
        reached: State = None
    else:
        expected_state = None if operation.expected == ABSENT else operation.expected
        took_effect = operation.expected is None or state == expected_state
        reached = operation.value
    if operation.done is None:
        return [reached, state] if took_effect else [state]
    if operation.done:
        return [reached] if took_effect else []
    return [] if took_effect else [state]
