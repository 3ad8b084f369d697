"""Index entries of a durable container.

Invariant: an index rebuild from containers makes the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import U8, U32, U64, ContainerId
from nearkin_shared.utils.frozen import frozen

FEATURE_KEY_BYTES = 17


@frozen
class ContainerEntries:
    """All index entries of one container.

    `segment_ids` uint8[s, 20], zeros for a segment that must not be found. `super_features` by sketch name: (chunk
    ordinals uint32[c], uint64[c, k]) of the chunks that may serve as bases, in stream order, 0 for no super-feature.
    `only` uint32[c]: ordinals of the chunks that may be found, None for all; it excludes chunks pending deletion.
    """

    directory: Directory
    segment_ids: U8
    super_features: dict[str, tuple[U32, U64]]
    only: U32 | None = None

    @property
    def entries(self) -> int:
        """Return the approximate number of entries."""
        features = sum(super_features.size for _, super_features in self.super_features.values())
        return len(self.directory.chunks) + len(self.segment_ids) + features

    @property
    def findable(self) -> U32:
        """Return the ordinals of the chunks that may be found."""
        return np.flatnonzero(self.directory.chunks.there).astype(np.uint32) if self.only is None else self.only


@frozen
class PublishableContainer:
    """Container ready to be stored, and the entries to publish afterwards (I1).

    `parts` are consecutive.
    """

    container: ContainerId
    parts: Sequence[bytes | memoryview]
    claims: ContainerEntries

    @property
    def size_bytes(self) -> int:
        """Return the size of the container in bytes."""
        return self.claims.directory.container_bytes

    @property
    def data(self) -> bytes:
        """Return the container's bytes as one copy."""
        return b"".join(self.parts)


def feature_keys(sketch: str, domain: bytes, super_features: U64) -> U8:
    """Return uint8[k * n, 17] keys of uint64[n, k] super-features, grouped by rank.

    Namespace 8 (algorithm, parameters, domain), rank 1, super-feature 8. The namespace separates super-features that
    must never match: other algorithms, other parameters, other tenants.
    """
    namespace = blake2b(domain + sketch.encode(), digest_size=8, person=b"nearkin-sf").digest()
    count, ranks = super_features.shape
    keys = np.empty((ranks, count, FEATURE_KEY_BYTES), np.uint8)
    keys[:, :, :8] = np.frombuffer(namespace, np.uint8)
    keys[:, :, 8] = np.arange(ranks, dtype=np.uint8)[:, None]
    keys[:, :, 9:] = np.ascontiguousarray(super_features.T).astype("<u8").view(np.uint8).reshape(ranks, count, 8)
    return keys.reshape(-1, FEATURE_KEY_BYTES)
