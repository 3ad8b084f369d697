# size: the interface that the app floor implements
"""Interface of the stages in a gateway with `gateway.edge`, which the app floor hands in.

frames -> SourceReducer.reduce -> messages with the chunks that the store lacks, and recipes of all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message_layout import Envelope
from nearkin_shared.limits import MIB

if TYPE_CHECKING:
    from nearkin_shared.fleet.fleet_index import FleetIndex
    from nearkin_shared.storage.descriptor import Descriptor

BATCH_BYTES = 4 * MIB
"""Bytes cut and looked up together: one request to the index for 500 chunks and more."""


class SourceReducer(Protocol):
    """The bytes of one upload that are not cut yet. Not shared between threads."""

    def reduce(self, frames: Sequence[bytes | bytearray], *, final: bool) -> list[bytes]:
        """Cut frames of at most BATCH_BYTES and one frame; return encoded messages of kind SPARSE.

        Blocks while the index is asked. `final`: no frame follows.
        """

    def keep_alive(self) -> bytes:
        """Return an encoded message without segments, for the position that `reduce` has reached."""


class SourceDedup(Protocol):
    """The chunker and dedup stages with an index. Thread-safe."""

    def open(self, envelope: Envelope) -> SourceReducer:
        """Return a reducer of a new upload."""


ConnectEdge = Callable[[Settings, "Descriptor", "FleetIndex"], SourceDedup]
"""Returns the stages. Raises ConfigError."""
