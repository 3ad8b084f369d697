"""Blocks that a deeper search makes smaller. Invariant: each decodes to what it did, under the number that it had.

    a put    4 MiB at 180 to 600 MB/s, since somebody waits      generation 0
    a round  the same at 50 to 150 MB/s, a fifth smaller         generation 1

Once: what is of a later generation was compressed so with whatever else was done to it (container_rewriter.py). Nothing
that leans on a chunk sees a difference. docs/adr/0036-recompression-by-gc.md
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, may_compress_further
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.limits import GIB, KIB
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.frozen import frozen

SHARE_MIN = 4
"""Blocks that may come smaller take one byte in so many of a container at least: about a fifth of that is saved."""
BYTES_MIN = 32 * KIB
"""And so many: to put a container anew costs a request, a rename, a sync."""
RUN_BYTES_MAX = 4 * GIB
"""Of containers in one round, which takes minutes then: the next one goes on."""


@frozen
class Recompressor:
    """Tells which containers are worth it, and begins their next generations."""

    containers: ContainerStore
    recode: BlockEncoderPort

    def chosen(self, ids: Mapping[int, int], young: Collection[int], reach: LiveSet) -> list[ContainerId]:
        """Return those that are as they were put, and may come smaller; `ids`: the bytes of each. The oldest first.

        What no version needs, and nothing that one needs leans on, goes as it is. Raises Corrupt where something that
        is needed cannot be read.
        """
        if not self.recode.can_recompress:
            return []
        too_young = set(young)
        worth = [
            ContainerId(c) for c in sorted(ids) if c not in too_young and self._saves_bytes(ContainerId(c), ids[c])
        ]
        needed = reach.transitive_closure(reach.chunks) if worth else {}
        chosen, total_bytes = list[ContainerId](), 0
        for container in worth:
            if container in needed and needed[container].any():
                total_bytes += ids[container]
                if chosen and total_bytes > RUN_BYTES_MAX:
                    break
                chosen.append(container)
        return chosen

    def _saves_bytes(self, container: ContainerId, container_bytes: int) -> bool:
        """Return whether a container is as it was put, and much of it may come smaller."""
        if container_bytes < BYTES_MIN or self.containers.generation(container):
            return False
        try:
            directory = self.containers.directory(container)
        except (Corrupt, NotFound):
            return False
        stored_bytes = int(directory.blocks.stored[may_compress_further(directory)].sum(dtype=np.int64))
        return stored_bytes >= max(BYTES_MIN, container_bytes // SHARE_MIN)

    def begin(self, container: ContainerId) -> NewGeneration:
        """Begin the next generation: no larger. Raises Corrupt."""
        directory = self.containers.directory(container)
        new = NewGeneration(self.containers, directory, directory.chunks.there, self.recode)
        for number in np.flatnonzero(directory.blocks.raw > 0).tolist():
            new.copy(number)
        return new


class ContainerRecompression:
    """Makes the next generations of some containers, in order; begins one while the one before it ends."""

    def __init__(self, recompressor: Recompressor, containers: Sequence[ContainerId]) -> None:
        self._recompressor = recompressor
        self._following = dict(pairwise(containers))
        self._ahead: tuple[ContainerId, NewGeneration] | None = None

    def data(self, container: ContainerId) -> bytes:
        """Return the next generation of a container: no larger. Raises Corrupt."""
        ahead, self._ahead = self._ahead, None
        new = ahead[1] if ahead is not None and ahead[0] == container else self._recompressor.begin(container)
        following = self._following.get(container)
        if following is not None and not self._recompressor.recode.helpers.is_serial:
            with suppress(Corrupt, NotFound):  # it is said when its turn comes
                self._ahead = following, self._recompressor.begin(following)
        return new.encode(np.zeros(0, np.uint32))
