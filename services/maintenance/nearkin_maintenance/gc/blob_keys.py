"""Keys of a store. Invariant: they come from manifests, so that no key is passed over because an index was lost.

manifests/3f/3fa9...: the folder is a digest of tenant and key -> one of its manifests says which these are
"""

from __future__ import annotations

from collections.abc import Iterator

from nearkin_shared.errors import PermanentError
from nearkin_shared.storage.manifests import ManifestStore

REMEMBERED_MAX = 1 << 16
"""Folders whose keys are remembered, 20 MB of them: of the others a manifest is read each time."""


class BlobKeys:
    """Tells (tenant, key) of every folder that holds a version; remembers what it has read."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}

    def of(self, manifests: ManifestStore) -> Iterator[tuple[str, str]]:
        """Yield all keys, of every tenant. One of which no manifest can be read is none. Raises StoreUnavailable."""
        by_folder: dict[str, list[str]] = {}
        for name, _ in manifests.names():
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        for folder, names in by_folder.items():
            known = self._known.get(folder) or _read(manifests, names)
            if known is None:
                continue
            if len(self._known) < REMEMBERED_MAX:
                self._known[folder] = known
            yield known


def _read(manifests: ManifestStore, names: list[str]) -> tuple[str, str] | None:
    for name in names:
        try:
            manifest = manifests.read(name)
        except PermanentError:  # broken, or collected meanwhile
            continue
        return manifest.tenant, manifest.key
    return None
