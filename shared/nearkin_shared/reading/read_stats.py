"""Reads through the caches of one store. Invariant: whatever interrupts a reader, what is told of the others is right.

what they have cost      how many restores are at work      which containers changed, and before which plan
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

from nearkin_shared.types import ContainerId


@dataclass(slots=True)
class ReadCosts:
    """What reading has cost so far; caches make it less. `containers` are those of which anything was read."""

    containers: set[ContainerId] = field(default_factory=set)
    directory_reads: int = 0
    block_reads: int = 0
    bytes_read: int = 0
    blocks_decoded: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def read(self, container: ContainerId, size_bytes: int, *, directories: int = 0, blocks: int = 0) -> None:
        """Count a read; from any thread."""
        with self._lock:
            self.containers.add(container)
            self.directory_reads += directories
            self.block_reads += blocks
            self.bytes_read += size_bytes


class _Restore:
    """It is at work for as long as somebody holds it: wherever a Ctrl-C falls, it is over with who held it."""


class ActiveRestores:
    """Which restores are at work through one cache. Safe between threads."""

    def __init__(self) -> None:
        self._at_work: WeakSet[_Restore] = WeakSet()

    @property
    def count(self) -> int:
        """Return how many are."""
        return len(self._at_work)

    @contextmanager
    def register(self) -> Iterator[None]:
        """Count another one for as long as the block runs."""
        restore = _Restore()
        self._at_work.add(restore)
        try:
            yield
        finally:
            del restore


class GenerationLog:
    """Which containers another generation was noted of, and when. Safe between threads.

    Each is kept once, some 100 bytes: of a store those that rounds wrote anew while it was open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[int, int] = {}
        self.count = 0

    def record(self, container: ContainerId) -> None:
        """Note a change, once nothing of the generation before it is at hand any more."""
        with self._lock:
            self._of[container] = self.count + 1
            self.count += 1

    def has_changed_since(self, containers: Iterable[int], count: int) -> bool:
        """Return whether one of these was noted after so many changes."""
        return any(self._of.get(container, 0) > count for container in containers)
