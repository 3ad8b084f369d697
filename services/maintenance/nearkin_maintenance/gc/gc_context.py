"""Store and callbacks of a GC run.

The same steps work on the store's objects and on an overlay over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.optimize.container_swap import ContainerSwap
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.delegating import rewrap_lowest
from nearkin_shared.objectstore.metered import MeteredObjectStore
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.utils.frozen import frozen

Item = TypeVar("Item")

Steps = Callable[[int, int, str], None]
"""Progress callback: items done, items in total, and the kind of item."""


@frozen
class GcHooks:
    """Callbacks of a GC run."""

    clock: Callable[[], float] = time.time
    """Seconds since 1970."""
    check: Callable[[], None] = lambda: None
    """Called before each container is written or deleted; stops the run by raising."""
    steps: Steps | None = None
    """Receives the progress of marking and of each later step."""

    def report_progress(self, items: Sequence[Item], text: str) -> Iterator[Item]:
        """Yield the items; report before each how many are done."""
        for done, item in enumerate(items):
            if self.steps is not None:
                self.steps(done, len(items), text)
            yield item

    def now_us(self) -> int:
        """Return the time in microseconds since 1970."""
        return int(self.clock() * 1e6)


@frozen
class GcStore:
    """Objects that a GC pass reads and writes: the store's, or an overlay over them."""

    containers: ContainerStore
    manifests: ManifestStore
    pending_deletes: PendingDeleteStore
    rewriter: Rewriter
    swap: ContainerSwap
    metered: MeteredObjectStore
    """Counts the bytes that the pass writes and deletes."""


def meter_writes(objects: ObjectStore) -> tuple[MeteredObjectStore, ObjectStore]:
    """Return a meter of all bytes written and deleted, and the store with it.

    The meter wraps the lowest level of `objects`.
    """
    meters: list[MeteredObjectStore] = []

    def wrap(lowest: ObjectStore) -> ObjectStore:
        meters.append(MeteredObjectStore(lowest))
        return meters[0]

    metered_objects = rewrap_lowest(objects, wrap)
    return meters[0], metered_objects
