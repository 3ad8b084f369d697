"""Compaction. Invariant: a container written anew keeps its id, and every number in it means what it did.

    generation 0   block 0 | block 1 | block 2          chunks 0 1 2 3 4 5 6 7 8
    generation 1   block 0 |         |         | block 3      0 1 2 . . . 6 . 8

So no recipe, base, manifest or index entry that names a chunk has to change. Blocks that stay whole are copied as they
are; of the others what is kept is decoded, compared with its name, and encoded again under a number of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rebase import RebasePlan
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort
from nearkin_maintenance.optimize.merge_writer import MergePlanner
from nearkin_maintenance.optimize.rebase_batch import BatchRebase
from nearkin_maintenance.optimize.recompress import Recompressor
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId


class Rewriter:
    """Makes new generations of containers. Reads one container's blocks, and what they lean on, at a time."""

    def __init__(
        self,
        containers: ContainerStore,
        tenants: DomainOwners,
        any_fingerprinter: Fingerprinter,
        recode: BlockEncoderPort,
    ) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._recode = recode
        verified = VerifiedReader(self._containers, tenants, any_fingerprinter, recode.helpers)
        self._laying = BlockWriter(self._containers, verified, recode)
        self.gatherer = MergePlanner(self._containers, tenants, verified, recode)
        """Makes the generations that hold what was gathered."""
        self.recompressor = Recompressor(self._containers, recode)
        """Makes the generations that hold the same in fewer bytes."""

    def with_containers(self, containers: ContainerStore) -> Rewriter:
        """Return what does the same for the containers of another store, such as one that is a preview's."""
        return Rewriter(containers, self._tenants, self._any_fingerprinter, self._recode)

    def with_helper_thread(self) -> AbstractContextManager[None]:
        """Use a second core, where there is one, for as long as the block runs."""
        return self._recode.with_helper_thread()

    def rewritten(self, container: ContainerId, drop: ContainerRemoval) -> bytes:
        """Return a container without what is dropped.

        Raises Corrupt where what is kept is not what its name says.
        """
        directory = self._containers.directory(container)
        kept = directory.chunks.there.copy()
        kept[drop.chunks] = False
        new = NewGeneration(self._containers, directory, kept, self._recode)
        joined = self._laying.blocks_to_merge(directory, kept)
        self._laying.copy_remaining(new, directory, kept, joined)
        self._laying.raw(new, directory, np.flatnonzero(kept & joined[directory.chunks.blocks]))
        return new.encode(drop.segments)

    def batch_rebase(self, drops: Mapping[int, ContainerRemoval], rebasing: RebasePlan) -> BatchRebase:
        """Return what makes containers without what is dropped, and of which nothing leans on what is given up."""
        return BatchRebase(self._containers, self._laying, self._recode, rebasing, drops)
