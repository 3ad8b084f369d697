"""Interface through which a GC run excludes other writers.

    marking, planning, encoding                      outside exclusive sections, concurrently with puts
    exclusive section: refresh live set -> effect    short: puts wait

Invariant (I6): an effect that relies on the live set is applied while no put is in flight, or is safe concurrently with
puts; the live set was refreshed in the same exclusive section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.types import U32, ContainerId


class WriterGate(Protocol):
    """Exclusion of other writers while a GC run changes the store."""

    def exclusive(self) -> AbstractContextManager[SupportsCollection]:
        """Block all other writers and yield the index.

        Raises: StoreLocked, StoreUnavailable.
        """

    def change_token(self) -> object:
        """Return a value that changes after any write to the store.

        None if no other writer can exist.
        """

    def on_rewrite_start(self) -> None:
        """Prepare for rewriting or deleting a container, for example by reserving memory.

        Called before each container.
        """

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Record, inside `exclusive()`, that a container was rewritten or deleted."""

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Look up, outside an exclusive section, the index entries that one will remove.

        Returns the value to pass to the index as `looked_up`: these entries or fewer. None: the index looks them up
        itself.
        """


class NoWriters:
    """A writer gate without exclusion, for a store in which concurrent writes are safe.

    Either no other process writes, or leases and the protection of recent containers cover concurrent writes.
    """

    def __init__(self, index: SupportsCollection) -> None:
        self._index = index

    @contextmanager
    def exclusive(self) -> Iterator[SupportsCollection]:
        """Yield the index."""
        yield self._index

    def change_token(self) -> object:
        """Return None."""

    def on_rewrite_start(self) -> None:
        """Do nothing."""

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Do nothing."""

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Return None: no process waits for the index meanwhile."""
