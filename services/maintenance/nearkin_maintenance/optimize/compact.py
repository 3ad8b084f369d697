"""Rewrite containers: compaction, and the writers of merge, rebase and recompression.

    generation 0   block 0 | block 1 | block 2          chunks 0 1 2 3 4 5 6 7 8
    generation 1   block 0 |         |         | block 3      0 1 2 . . . 6 . 8

No recipe, base, manifest or index entry that names a chunk has to change. A block that is kept whole is copied; the
kept chunks of any other are decoded, verified, and encoded again in a block with a new number.

Invariant: a rewritten container keeps its id, and every chunk, segment and block number keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort
from nearkin_maintenance.optimize.merge.merge_writer import MergePlanner
from nearkin_maintenance.optimize.rebase.container_rebase import RebasePlan
from nearkin_maintenance.optimize.rebase.rebase_batch import BatchRebase
from nearkin_maintenance.optimize.recompress import Recompressor
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId


class Rewriter:
    """Make new generations of containers.

    Reads the blocks of one container, and their bases, at a time.
    """

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        encoder: BlockEncoderPort,
    ) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._encoder = encoder
        verified = VerifiedReader(self._containers, tenants, any_fingerprinter, encoder.helpers)
        self._block_writer = BlockWriter(self._containers, verified, encoder)
        self.gatherer = MergePlanner(self._containers, tenants, verified, encoder)
        """Plans merges and writes the containers of a merge."""
        self.recompressor = Recompressor(self._containers, encoder)
        """Selects and writes the containers to recompress."""

    def with_containers(self, containers: ContainerStore) -> Rewriter:
        """Return a rewriter of another store's containers, such as a preview's."""
        return Rewriter(containers, self._tenants, self._any_fingerprinter, self._encoder)

    def with_helper_thread(self) -> AbstractContextManager[None]:
        """Use a second core, where one exists, for as long as the `with` block runs."""
        return self._encoder.with_helper_thread()

    def rewritten(self, container: ContainerId, removal: ContainerRemoval) -> bytes:
        """Return the next generation of a container without the chunks and segments of `removal`.

        Raises: Corrupt if a kept chunk fails fingerprint verification.
        """
        directory = self._containers.directory(container)
        kept = directory.chunks.there.copy()
        kept[removal.chunks] = False
        new = NewGeneration(self._containers, directory, kept, self._encoder)
        is_joined = self._block_writer.blocks_to_merge(directory, kept)
        self._block_writer.copy_remaining(new, directory, kept, is_joined)
        self._block_writer.write_raw(new, directory, np.flatnonzero(kept & is_joined[directory.chunks.blocks]))
        return new.encode(removal.segments)

    def batch_rebase(self, removals: Mapping[int, ContainerRemoval], rebase_plan: RebasePlan) -> BatchRebase:
        """Return a rebase that removes `removals` and all dependence on dropped bases."""
        return BatchRebase(self._containers, self._block_writer, self._encoder, rebase_plan, removals)
