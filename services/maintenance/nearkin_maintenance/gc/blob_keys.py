# size: a cache of the fleet's worker alone; a GC run does not use it
"""List the keys of a store from its manifests.

    manifests/3f/3fa9...: the folder is a digest of tenant and key -> one of its manifests records both

Invariant: a key is listed even if the index was lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from nearkin_shared.errors import PermanentError
from nearkin_shared.storage.manifests import ManifestStore

REMEMBERED_MAX = 1 << 16
"""Folders whose keys are cached, 20 MB: for others a manifest is read each time."""


class BlobKeys:
    """Reader of the (tenant, key) of every folder with a version; caches the results."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[str, str]] = {}

    def of(self, manifests: ManifestStore) -> Iterator[tuple[str, str]]:
        """Yield all keys, of every tenant; a key without a readable manifest is omitted.

        Raises: StoreUnavailable.
        """
        by_folder: dict[str, list[str]] = {}
        for name, _ in manifests.names():
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        for folder, names in by_folder.items():
            found = self._cache.get(folder) or _read(manifests, names)
            if found is None:
                continue
            if len(self._cache) < REMEMBERED_MAX:
                self._cache[folder] = found
            yield found


def _read(manifests: ManifestStore, names: list[str]) -> tuple[str, str] | None:
    for name in names:
        try:
            manifest = manifests.read(name)
        except PermanentError:  # broken, or collected meanwhile
            continue
        return manifest.tenant, manifest.key
    return None
