"""Replace the stored generation of a container by its next one.

make, concurrently with writers -> exclusive section: put, renew index entries, delete the old one -> rate-limit pause

Invariant: one of the two generations exists at every moment.
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
    """Bytes of a container before and after its rewrite."""

    before_bytes: int
    now_bytes: int


class ContainerSwap:
    """Write new generations at a bounded speed."""

    def __init__(self, containers: ContainerStore, bytes_per_second: int) -> None:
        self._containers = containers
        self._bytes_per_second = bytes_per_second

    def with_containers(self, containers: ContainerStore) -> ContainerSwap:
        """Return the same swap, at the same speed, over another container store."""
        return ContainerSwap(containers, self._bytes_per_second)

    def renew(self, index: SupportsCollection, container: ContainerId) -> None:
        """Update the index summary of a container before its old generation is deleted."""
        index.renew(summarise_directory(self._containers.directory(container)))

    def replace(
        self,
        container: ContainerId,
        before_bytes: int,
        make: Callable[[], bytes | None],
        should_skip: Callable[[], bool],
        concurrent: ConcurrentWrites,
    ) -> SwapResult | None:
        """Store the bytes that `make` returns.

        None if it returns None or `should_skip()` holds in the exclusive section.

        Raises: Corrupt, NoRoom, StoreLocked, StoreUnavailable.
        """
        started = time.perf_counter()
        data = make()
        if data is None:
            return None
        failpoint("compact.made")
        with concurrent.exclusive() as index:
            if should_skip():
                return None
            generation = self._containers.generation(container)
            self._containers.put(container, [data], generation + 1)
            failpoint("compact.put")
            self.renew(index, container)
            failpoint("compact.renewed")
            self._containers.delete(container, generation)
            concurrent.on_container_rewritten(container, generation + 1)
            failpoint("compact.replaced")
        allowed_seconds = (before_bytes + len(data)) / self._bytes_per_second
        time.sleep(max(0.0, allowed_seconds - (time.perf_counter() - started)))
        return SwapResult(before_bytes, len(data))
