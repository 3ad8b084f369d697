"""Manifests in an object store. Invariant: a version exists exactly when its manifest does (I2)."""

from __future__ import annotations

from collections.abc import Iterator

from blake3 import blake3

from nearkin.errors import Corrupt
from nearkin.formats.manifest import Manifest, decode_manifest, encode_manifest
from nearkin.store.objects import ObjectStore


def key_digest(tenant: str, key: str) -> str:
    """Return what stands for (tenant, key) in object names: 32 hex digits; a key never becomes a path (I9)."""
    return blake3(tenant.encode() + b"\0" + key.encode()).hexdigest(length=16)


def object_name(tenant: str, key: str, version: int) -> str:
    """Return the object name of one version's manifest."""
    digest = key_digest(tenant, key)
    return f"manifests/{digest[:2]}/{digest}/{version:016x}.nkm"


class ManifestStore:
    """Manifests by (tenant, key, version)."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def put(self, manifest: Manifest) -> int:
        """Commit a version; return the manifest's bytes. Raises AlreadyExists (another put took this number)."""
        data = encode_manifest(manifest)
        self._objects.put_new(object_name(manifest.tenant, manifest.key, manifest.version), data)
        return len(data)

    def get(self, tenant: str, key: str, version: int) -> Manifest:
        """Return one version's manifest. Raises NotFound, Corrupt or StoreUnavailable."""
        name = object_name(tenant, key, version)
        manifest = decode_manifest(self._objects.get(name), name)
        if (manifest.tenant, manifest.key, manifest.version) != (tenant, key, version):
            raise Corrupt(f"{name}: is the manifest of {manifest.key!r} version {manifest.version}")
        return manifest

    def size_bytes(self, manifest: Manifest) -> int:
        """Return how many bytes a stored manifest takes. Raises NotFound or StoreUnavailable."""
        return self._objects.size_bytes(object_name(manifest.tenant, manifest.key, manifest.version))

    def versions(self, tenant: str, key: str) -> list[int]:
        """Return the numbers of a key's versions, ascending, from the object store itself."""
        folder = object_name(tenant, key, 0).rpartition("/")[0]
        found = []
        for name, _ in self._objects.names(folder):
            try:
                found.append(int(name.rpartition("/")[2].removesuffix(".nkm"), 16))
            except ValueError as err:
                raise Corrupt(f"{name}: not a manifest's name; move it out of the store") from err
        return sorted(found)

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield (object name, bytes) of every manifest, in no order."""
        return self._objects.names("manifests")

    def read(self, name: str) -> Manifest:
        """Return the manifest that lies under an object name. Raises NotFound, Corrupt or StoreUnavailable."""
        manifest = decode_manifest(self._objects.get(name), name)
        if object_name(manifest.tenant, manifest.key, manifest.version) != name:
            raise Corrupt(f"{name}: is the manifest of {manifest.key!r} version {manifest.version}")
        return manifest
