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

from nearkin_maintenance.domain_owners import Tenants
from nearkin_maintenance.gc.gc_plan import Drop
from nearkin_maintenance.optimize.block_writer import Laying
from nearkin_maintenance.optimize.container_rebase import Rebasing
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.encoder_port import Recoder
from nearkin_maintenance.optimize.merge_writer import Gatherer
from nearkin_maintenance.optimize.rebase_batch import SideBySide
from nearkin_maintenance.optimize.recompress import Recompressor
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId


class Rewriter:
    """Makes new generations of containers. Reads one container's blocks, and what they lean on, at a time."""

    def __init__(
        self, containers: ContainerStore, tenants: Tenants, any_fingerprinter: Fingerprinter, recode: Recoder
    ) -> None:
        self._containers = containers.of(None)
        self._tenants = tenants
        self._any_fingerprinter = any_fingerprinter
        self._recode = recode
        verified = VerifiedReader(self._containers, tenants, any_fingerprinter, recode.helpers)
        self._laying = Laying(self._containers, verified, recode)
        self.gatherer = Gatherer(self._containers, tenants, verified, recode)
        """Makes the generations that hold what was gathered."""
        self.recompressor = Recompressor(self._containers, recode)
        """Makes the generations that hold the same in fewer bytes."""

    def over(self, containers: ContainerStore) -> Rewriter:
        """Return what does the same for the containers of another store, such as one that is a preview's."""
        return Rewriter(containers, self._tenants, self._any_fingerprinter, self._recode)

    def on_two_cores(self) -> AbstractContextManager[None]:
        """Use a second core, where there is one, for as long as the block runs."""
        return self._recode.on_two_cores()

    def rewritten(self, container: ContainerId, drop: Drop) -> bytes:
        """Return a container without what is dropped.

        Raises Corrupt where what is kept is not what its name says.
        """
        directory = self._containers.directory(container)
        kept = directory.chunks.there.copy()
        kept[drop.chunks] = False
        new = NewGeneration(self._containers, directory, kept, self._recode)
        joined = self._laying.joined(directory, kept)
        self._laying.rest(new, directory, kept, joined)
        self._laying.raw(new, directory, np.flatnonzero(kept & joined[directory.chunks.blocks]))
        return new.encoded(drop.segments)

    def side_by_side(self, drops: Mapping[int, Drop], rebasing: Rebasing) -> SideBySide:
        """Return what makes containers without what is dropped, and of which nothing leans on what is given up."""
        return SideBySide(self._containers, self._laying, self._recode, rebasing, drops)
