"""Recompress raw blocks with a slower search.

    put      4 MiB at 180 to 600 MB/s, since a caller waits      generation 0
    GC run   the same at 50 to 150 MB/s, a fifth smaller         generation 1

Once: a container of a later generation was recompressed when it was rewritten (container_rewriter.py). Dependents of a
chunk are unaffected. docs/adr/0036-recompression-by-gc.md

Invariant: each block decodes to the same bytes as before, under the same number.
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
"""Compressible blocks take at least one byte in this many of a container: about a fifth of them is saved."""
BYTES_MIN = 32 * KIB
"""Minimum of such bytes: to rewrite a container costs a request, a rename and a sync."""
RUN_BYTES_MAX = 4 * GIB
"""Containers per GC run, a few minutes of work; the next run continues."""


@frozen
class Recompressor:
    """Selects containers to recompress and starts their next generations."""

    containers: ContainerStore
    encoder: BlockEncoderPort

    def chosen(self, ids: Mapping[int, int], recent: Collection[int], live_set: LiveSet) -> list[ContainerId]:
        """Return containers of generation 0 that may shrink, oldest first.

        `ids`: the bytes of each.

        A container without needed chunks is left out: it is deleted later. Raises Corrupt if a needed object cannot be
        read.
        """
        if not self.encoder.can_recompress:
            return []
        recent_ids = set(recent)
        eligible = [
            ContainerId(c) for c in sorted(ids) if c not in recent_ids and self._saves_bytes(ContainerId(c), ids[c])
        ]
        needed = live_set.transitive_closure(live_set.chunks) if eligible else {}
        chosen, total_bytes = list[ContainerId](), 0
        for container in eligible:
            if container in needed and needed[container].any():
                total_bytes += ids[container]
                if chosen and total_bytes > RUN_BYTES_MAX:
                    break
                chosen.append(container)
        return chosen

    def _saves_bytes(self, container: ContainerId, container_bytes: int) -> bool:
        """Return whether a container is of generation 0 and has enough bytes that may shrink."""
        if container_bytes < BYTES_MIN or self.containers.generation(container):
            return False
        try:
            directory = self.containers.directory(container)
        except (Corrupt, NotFound):
            return False
        stored_bytes = int(directory.blocks.stored[may_compress_further(directory)].sum(dtype=np.int64))
        return stored_bytes >= max(BYTES_MIN, container_bytes // SHARE_MIN)

    def start(self, container: ContainerId) -> NewGeneration:
        """Start the next generation, which is no larger. Raises Corrupt."""
        directory = self.containers.directory(container)
        new = NewGeneration(self.containers, directory, directory.chunks.there, self.encoder)
        for number in np.flatnonzero(directory.blocks.raw > 0).tolist():
            new.copy(number)
        return new


class ContainerRecompression:
    """Makes the next generations of containers in order.

    Starts one while the previous one is encoded.
    """

    def __init__(self, recompressor: Recompressor, containers: Sequence[ContainerId]) -> None:
        self._recompressor = recompressor
        self._following = dict(pairwise(containers))
        self._started: tuple[ContainerId, NewGeneration] | None = None

    def data(self, container: ContainerId) -> bytes:
        """Return the next generation of a container, which is no larger. Raises Corrupt."""
        started, self._started = self._started, None
        new = started[1] if started is not None and started[0] == container else self._recompressor.start(container)
        following = self._following.get(container)
        if following is not None and not self._recompressor.encoder.helpers.is_serial:
            with suppress(Corrupt, NotFound):  # raised again when this container is next
                self._started = following, self._recompressor.start(following)
        return new.encode(np.zeros(0, np.uint32))
