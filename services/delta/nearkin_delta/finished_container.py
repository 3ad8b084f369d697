"""Encode a finished container into the object to store.

A builder whose blocks are all encoded returns a FinishedContainer. Encoding it needs no other state, so that another
thread can do it while the builder fills the next container.

Invariant: reads of a finished container return the same before and after it is stored.
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
    """A container that takes no more chunks.

    `known` is its directory but for the block offsets.
    """

    known: Directory
    encoded: Sequence[EncodedBlock]
    segment_ids: U8
    super_features: dict[str, tuple[U32, U64]]

    @property
    def container(self) -> ContainerId:
        """Return the container id."""
        return self.known.container

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.encoded)

    def directory(self, container: ContainerId) -> Directory:
        """Return the directory, without block offsets."""
        assert container == self.container
        return self.known

    def record(self, block: int) -> bytes:
        """Return a block as stored: a copy, so that a cache does not pin the other blocks."""
        return self.encoded[block].record

    def seal(self) -> PublishableContainer:
        """Return the container to store; its directory has been decoded again.

        Raises: Corrupt if the decoded directory differs.
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
