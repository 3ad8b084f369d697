"""Finished containers. Invariant: what is read of one is the same before it is written down, and after.

A builder that is full and whose blocks are all encoded leaves one behind. Writing it down needs nothing else: that may
be done on another thread while the next one is filled.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearkin_shared.formats.block import EncodedBlock
from nearkin_shared.formats.container import encode_container
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.container_entries import ContainerEntries, PublishableContainer
from nearkin_shared.types import U8, U32, U64, ContainerId
from nearkin_shared.utils.frozen import frozen


@frozen
class FinishedContainer:
    """A container that takes no more. `known` says all but where its blocks will lie; the rest is as claims want it."""

    known: Directory
    encoded: Sequence[EncodedBlock]
    segment_ids: U8
    super_features: dict[str, tuple[U32, U64]]

    @property
    def container(self) -> ContainerId:
        """Return its id."""
        return self.known.container

    @property
    def blocks(self) -> int:
        """Return how many blocks it has."""
        return len(self.encoded)

    def directory(self, container: ContainerId) -> Directory:
        """Return its directory as far as it is known."""
        assert container == self.container
        return self.known

    def record(self, block: int) -> bytes:
        """Return a block as it will be stored: a copy, so that a cache never pins the others."""
        return self.encoded[block].record

    def seal(self) -> PublishableContainer:
        """Return the container as it is put, its directory read back before anything depends on it.

        Raises Corrupt where what was written is not what was meant.
        """
        known = self.known
        encoded = encode_container(
            known.container,
            known.domain,
            known.depth_max,
            known.sketch_names,
            self.encoded,
            known.chunks,
            known.segments,
            known.prefixes,
        )
        claims = ContainerEntries(encoded.read_back("a container just built"), self.segment_ids, self.super_features)
        return PublishableContainer(known.container, encoded.parts, claims)
