# size: one crash-safe sequence that no other module shares
"""Remove the data of a failed put: containers that no version references.

    1 the index withdraws their entries   2 the containers are removed   3 caches evict data read from them

Invariant (I1): the index names no removed container. The writer lock is held, so no other put can have found a chunk
in them. The GC lock is held too, so no GC run expects them; while a run is active they are kept, and that run frees
them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from nearkin.local.index_lifecycle import LocalIndex
from nearkin.local.process_lock import GC_LOCK_NAME, WriterLock
from nearkin_shared.errors import StoreLocked, StoreUnavailable
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.disk_reserve import SpaceReserve
from nearkin_shared.types import ContainerId

_log = logging.getLogger("nearkin")


class FailedPutCleaner:
    """Cleans up after the failed puts of one store."""

    def __init__(self, root: Path, containers: ContainerStore, index: LocalIndex, reserve: SpaceReserve) -> None:
        self._root = root
        self._containers = containers
        self._index = index
        self._reserve = reserve

    def remove(self, uncommitted: Sequence[ContainerId]) -> int:
        """Remove containers of an uncommitted put; return how many. Never raises StoreUnavailable."""
        if not uncommitted:
            return 0
        runs = WriterLock(self._root, "lock.round")
        try:
            runs.acquire(what=GC_LOCK_NAME)
        except (StoreLocked, StoreUnavailable):
            return 0
        removed = 0
        try:
            index = self._index.noting()
            lost = dict.fromkeys(map(int, uncommitted))
            self._reserve.run(lambda: index.withdraw(lost, {}, list(lost)))  # 1
            for container in uncommitted:
                self._containers.delete(container, 0)  # 2
                self._containers.evict(container)  # 3
                removed += 1
        except (StoreLocked, StoreUnavailable) as err:
            _log.warning("%d containers of a put that failed stay until `nearkin gc` frees them: %s", len(lost), err)
        finally:
            runs.release()
        return removed
