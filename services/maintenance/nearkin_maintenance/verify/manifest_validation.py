"""What a manifest may name. Invariant: memory for what one names is taken once the store is known to hold it.

    containers named -> listed, or looked up one by one      segments far up -> as many as the directory has

Some KB of a manifest can name 2^24 containers, and segment 2^23 of each: a mask of every one of them would end a round
for want of memory. Such a manifest is damaged: what its version needs is not known, so nothing is freed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import ContainerId, distinct, group_by_container

SEGMENTS_ASSUMED = 1024
"""A container is taken to have so many without a look at its directory: one of 4 MiB has some dozens of its own."""


class ValidatingManifestReader:
    """Reads manifests of which every name is one that the store has, or had a moment ago."""

    def __init__(self, manifests: ManifestStore, containers: ContainerStore, listed: Collection[int]) -> None:
        """`listed`: the containers of a listing; one that came since is looked up."""
        self._manifests = manifests
        self._containers = containers
        self._listed = np.sort(np.fromiter(listed, np.uint64, len(listed)))

    def read(self, name: str) -> Manifest:
        """Return the manifest under an object name. Raises NotFound, StoreUnavailable, Corrupt, FormatTooNew."""
        manifest = self._manifests.read(name)
        segments = manifest.segments
        named = distinct(segments.containers)
        at = np.searchsorted(self._listed, named)
        known = np.zeros(len(named), np.bool_)
        within = at < len(self._listed)
        known[within] = self._listed[at[within]] == named[within]
        for container in named[~known].tolist():
            self._segments_of(name, container, len(named))
        far = segments.ordinals >= SEGMENTS_ASSUMED
        ordinals = segments.ordinals[far]
        for container, rows in group_by_container(segments.containers[far]):
            highest, count = int(ordinals[rows].max()), self._segments_of(name, container, len(named))
            if highest >= count:
                raise Corrupt(
                    f"{name}: names segment {highest} of {object_name(ContainerId(container))}, which has {count}"
                )
        return manifest

    def _segments_of(self, name: str, container: int, named: int) -> int:
        try:
            return len(self._containers.directory(ContainerId(container)).segments)
        except (Corrupt, NotFound) as err:
            raise Corrupt(f"{name}: one of the {named} containers that it names: {err}") from err
