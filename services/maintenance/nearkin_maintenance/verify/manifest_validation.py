"""Read manifests and check that the containers and segments that they name exist.

    containers     in a listing, or looked up one by one
    segments       ordinals from SEGMENTS_ASSUMED on are compared with the directory

Invariant: memory for the references of a manifest is allocated only after the store is known to hold their targets. A
manifest of some KB can name 2^24 containers, and segment 2^23 of each: a mask for every one would end a GC run for lack
of memory. Such a manifest is damaged: the needs of its version are unknown, so nothing is freed.
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
"""Ordinals accepted without reading a directory; a container of 4 MiB has some dozen segments."""


class ValidatingManifestReader:
    """Manifest reader that refuses references to containers and segments that do not exist."""

    def __init__(self, manifests: ManifestStore, containers: ContainerStore, known_containers: Collection[int]) -> None:
        """`known_containers`: ids of a listing; a later container is looked up."""
        self._manifests = manifests
        self._containers = containers
        self._known_containers = np.sort(np.fromiter(known_containers, np.uint64, len(known_containers)))

    def read(self, name: str) -> Manifest:
        """Return the manifest with an object name.

        Raises: NotFound, StoreUnavailable, Corrupt, FormatTooNew.
        """
        manifest = self._manifests.read(name)
        segments = manifest.segments
        containers = distinct(segments.containers)
        positions = np.searchsorted(self._known_containers, containers)
        is_known = np.zeros(len(containers), np.bool_)
        is_within = positions < len(self._known_containers)
        is_known[is_within] = self._known_containers[positions[is_within]] == containers[is_within]
        for container in containers[~is_known].tolist():
            self._count_segments(name, container, len(containers))
        is_high = segments.ordinals >= SEGMENTS_ASSUMED
        ordinals = segments.ordinals[is_high]
        for container, rows in group_by_container(segments.containers[is_high]):
            highest, count = int(ordinals[rows].max()), self._count_segments(name, container, len(containers))
            if highest >= count:
                target = object_name(ContainerId(container))
                raise Corrupt(f"{name}: names segment {highest} of {target}, which has {count} segments")
        return manifest

    def _count_segments(self, name: str, container: int, containers: int) -> int:
        try:
            return len(self._containers.directory(ContainerId(container)).segments)
        except (Corrupt, NotFound) as err:
            raise Corrupt(f"{name}: one of the {containers} containers that it names: {err}") from err
