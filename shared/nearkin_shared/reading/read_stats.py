"""Statistics of the reads through the caches of one store.

Invariant: after the interruption of a reader the data of the others are correct.

    costs of reads    number of active restores    changed containers, with the order of changes
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
    """Costs of reads so far, which caches lower; `containers` are those that were read."""

    containers: set[ContainerId] = field(default_factory=set)
    directory_reads: int = 0
    block_reads: int = 0
    bytes_read: int = 0
    blocks_decoded: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def read(self, container: ContainerId, size_bytes: int, *, directories: int = 0, blocks: int = 0) -> None:
        """Count a read, from any thread."""
        with self._lock:
            self.containers.add(container)
            self.directory_reads += directories
            self.block_reads += blocks
            self.bytes_read += size_bytes


class _Restore:
    """Token of a restore; the restore ends with the last reference to it.

    A Ctrl-C therefore ends it wherever it arrives.
    """


class ActiveRestores:
    """Restores in progress through one cache. Safe between threads."""

    def __init__(self) -> None:
        self._restores: WeakSet[_Restore] = WeakSet()

    @property
    def count(self) -> int:
        """Return the number of restores."""
        return len(self._restores)

    @contextmanager
    def register(self) -> Iterator[None]:
        """Count another restore while the block runs."""
        restore = _Restore()
        self._restores.add(restore)
        try:
            yield
        finally:
            del restore


class GenerationLog:
    """Log of containers with another generation, in order. Safe between threads.

    Each container has one entry of about 100 bytes: those that GC runs rewrote while the store was open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._change_of: dict[int, int] = {}
        self.count = 0

    def record(self, container: ContainerId) -> None:
        """Record a change, after all data of the earlier generation were evicted."""
        with self._lock:
            self._change_of[container] = self.count + 1
            self.count += 1

    def has_changed_since(self, containers: Iterable[int], count: int) -> bool:
        """Return whether one of these changed after `count` changes."""
        return any(self._change_of.get(container, 0) > count for container in containers)
