"""Turns of a round. Invariant: an effect that leans on what marking found is done while no put is in flight, or is safe
beside them; what came since marking was looked at in the same turn.

    marking, planning, encoding          outside of turns: puts and rounds side by side
    turn: look what came -> effect       short: puts wait
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.types import U32, ContainerId


class WriterGate(Protocol):
    """How a round comes to write: with everybody else kept out for a moment, or beside them."""

    def exclusive(self) -> AbstractContextManager[SupportsCollection]:
        """Keep out whoever else writes, and give the index. Raises StoreLocked, StoreUnavailable."""

    def change_token(self) -> object:
        """Return what is another as soon as anybody may have stored anything since; None where that never matters."""

    def on_rewrite_start(self) -> None:
        """Hear, before each, that containers are written anew or removed: what a round takes its memory for."""

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Hear, in a turn, that a container was written anew or removed."""

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Look up, outside of a turn, what the index is to forget in one: these, or fewer. None: it looks by itself."""


class NoWriters:
    """A round that keeps nobody out: nobody else writes, or leases and young containers guard what comes."""

    def __init__(self, index: SupportsCollection) -> None:
        self._index = index

    @contextmanager
    def exclusive(self) -> Iterator[SupportsCollection]:
        """Give the index."""
        yield self._index

    def change_token(self) -> object:
        """Return None."""

    def on_rewrite_start(self) -> None:
        """Do nothing."""

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Do nothing."""

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Return None: nobody waits for the index meanwhile."""
