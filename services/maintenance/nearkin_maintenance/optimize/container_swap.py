"""Another generation of a container in place of the one until now. Invariant: one of the two is there at every moment.

made, beside others -> in a turn: put, the index told what is left, the older one removed -> a pause, for the speed
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_shared.index.catalog import summarise_directory
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen


@frozen
class SwapResult:
    """What became of a container: bytes before and now."""

    before_bytes: int
    now_bytes: int


class ContainerSwap:
    """Puts generations, at a bounded speed."""

    def __init__(self, containers: ContainerStore, bytes_per_second: int) -> None:
        self._containers = containers
        self._bytes_per_second = bytes_per_second

    def with_containers(self, containers: ContainerStore) -> ContainerSwap:
        """Return what does the same, at the same speed, for the containers of another store."""
        return ContainerSwap(containers, self._bytes_per_second)

    def renew(self, index: SupportsCollection, container: ContainerId) -> None:
        """Tell the index what is left of a container, before what was goes."""
        index.renew(summarise_directory(self._containers.directory(container)))

    def replace(
        self,
        container: ContainerId,
        before_bytes: int,
        make: Callable[[], bytes | None],
        stays: Callable[[], bool],
        since: ConcurrentWrites,
    ) -> SwapResult | None:
        """Put what `make` makes; return None where it is None, or where the container `stays`, asked in the turn.

        Raises Corrupt, NoRoom, StoreLocked, StoreUnavailable.
        """
        started = time.perf_counter()
        data = make()
        if data is None:
            return None
        failpoint("compact.made")
        with since.exclusive() as index:
            if stays():
                return None
            generation = self._containers.generation(container)
            self._containers.put(container, [data], generation + 1)
            failpoint("compact.put")
            self.renew(index, container)
            failpoint("compact.renewed")
            self._containers.delete(container, generation)
            since.on_container_rewritten(container, generation + 1)
            failpoint("compact.replaced")
        allowed_seconds = (before_bytes + len(data)) / self._bytes_per_second
        time.sleep(max(0.0, allowed_seconds - (time.perf_counter() - started)))
        return SwapResult(before_bytes, len(data))
