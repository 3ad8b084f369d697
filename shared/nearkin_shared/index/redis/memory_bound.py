"""Bound of the memory that index entries take in Redis.

Near the bound publications leave out super-features, beyond it all entries. The chunks are stored, listed in their
container and restored, but a later copy of them is stored again. Containers, versions, locks and leases are still
recorded: a full Redis costs duplicates and does not stop the pipeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.redis.connection import NodeMemory, RedisServer
from nearkin_shared.observability import metrics

READ_SECONDS = 1.0
"""How long one reading of the servers' memory counts."""
LOG_SECONDS = 60.0
ENTRIES_SHARE = 0.95
"""Share of `maxmemory` that entries may fill where no bound is set; containers and versions need the rest."""
FEATURES_SHARE = 0.9
"""Share of the bound up to which super-features are published."""
_log = logging.getLogger("nearkin.index")


def fullness_of(nodes: list[NodeMemory], bytes_max: int) -> float:
    """Return the memory in use as a share of the bound of entries; 0 without a bound.

    `bytes_max` bounds all primaries together, 0: ENTRIES_SHARE of `maxmemory` of each. The fuller of both counts.
    """
    shares = [node.used_bytes / (node.bytes_max * ENTRIES_SHARE) for node in nodes if node.bytes_max]
    if bytes_max:
        shares.append(sum(node.used_bytes for node in nodes) / bytes_max)
    return max(shares, default=0.0)


class MemoryBound:
    """Selection of the entries that may be published, by the memory in use. Shared by threads."""

    def __init__(self, server: RedisServer, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`bytes_max`: as `redis.bytes_max`."""
        self._server = server
        self._bytes_max = bytes_max
        self._clock = clock
        self._fullness = 0.0
        self._read_again = self._log_again = -np.inf

    def fullness(self) -> float:
        """Return the share of the bound in use, at most READ_SECONDS old.

        Raises StoreUnavailable.
        """
        now = self._clock()
        if now >= self._read_again:
            self._fullness = fullness_of(self._server.memory(), self._bytes_max)
            self._read_again = now + READ_SECONDS
        return self._fullness

    def fit(self, claims: ContainerEntries) -> ContainerEntries:
        """Return the entries of a container that may be published. Raises StoreUnavailable."""
        fullness = self.fullness()
        if fullness < FEATURES_SHARE:
            return claims
        fitting = replace(claims, super_features={})
        if fullness >= 1:
            fitting = replace(fitting, segment_ids=np.zeros_like(claims.segment_ids), only=np.zeros(0, np.uint32))
            metrics.UNPUBLISHED_CHUNKS.inc(len(claims.findable))
        self._warn(fullness)
        return fitting

    def _warn(self, fullness: float) -> None:
        now = self._clock()
        if now < self._log_again:
            return
        self._log_again = now + LOG_SECONDS
        lost = "copies of new chunks are stored again" if fullness >= 1 else "new super-features are not published"
        _log.warning(
            "%s: the index uses %.0f %% of its memory: %s; raise redis.bytes_max and maxmemory, or add servers",
            self._server.name,
            100 * fullness,
            lost,
        )
