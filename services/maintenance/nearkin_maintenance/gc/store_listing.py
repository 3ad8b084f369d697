"""List a store's versions and containers, and read none of them.

    time -> containers, generations -> manifests, tombstones, retention records

Invariant: everything that was durable at `at_us` is listed, or was deleted since. Containers are listed first: a
version that a listing of manifests contains names no container that became durable after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from struct import Struct

from nearkin_shared.errors import Corrupt
from nearkin_shared.index.protocols import IndexSnapshot
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestListing, ManifestStore, key_and_version
from nearkin_shared.utils.frozen import frozen

_MARKS = Struct("<III")
"""Highest sequences of tombstones and of retention records, bytes of the manifest: as an index snapshot has them, the
first is odd for a deleted version."""


@frozen
class ListedStore:
    """Versions and containers at one moment, about 500 bytes each."""

    at_us: int
    """Time before the listing, microseconds since 1970."""
    generations: Mapping[int, Mapping[int, int]]
    """Bytes of each generation of the containers; usually one."""
    keys: Mapping[bytes, ManifestListing]
    """Objects of each key, by its digest."""

    def of(self, keys: Collection[bytes]) -> ManifestListing:
        """Return the objects of some keys."""
        found = ManifestListing([], [], [])
        for key in sorted(keys):
            for entries, of_key in zip(found, self.keys.get(key, ()), strict=False):
                entries.extend(of_key)
        return found

    def without(self, names: Collection[str]) -> ListedStore:
        """Return the listing without some manifests."""
        keys = dict(self.keys)
        for key in {parsed[0] for name in names if (parsed := key_and_version(name)) is not None}:
            manifests = [entry for entry in keys[key].manifests if entry[0] not in names]
            keys[key] = keys[key]._replace(manifests=manifests)
        return replace(self, keys=keys)

    def snapshot(self) -> IndexSnapshot:
        """Return the committed versions and the containers in the form of an index snapshot.

        A version's key is the digest of its key 16, version 8; the check of a container is its generation.

        Raises: Corrupt, if a container has several generations: a GC run or a repair has not finished.
        """
        versions: dict[bytes, bytes] = {}
        for of_key in self.keys.values():
            versions.update(_versions_of(of_key))
        containers = {}
        for container, generations in self.generations.items():
            if len(generations) != 1:
                raise Corrupt(f"container {container:016x} has {len(generations)} generations")
            containers[container] = next(iter(generations)).to_bytes(8)
        return IndexSnapshot(versions, containers)


def list_store(containers: ContainerStore, manifests: ManifestStore, now_us: int) -> ListedStore:
    """List a store.

    `now_us`: the time, read before the call.

    Raises: Corrupt for a name that no object of a version has, StoreUnavailable.
    """
    generations = {int(container): found for container, found in containers.generations().items()}
    keys: dict[bytes, ManifestListing] = {}
    for kind, entries in enumerate(manifests.listing()):
        for entry in entries:
            parsed = key_and_version(entry[0])
            if parsed is None:
                raise Corrupt(f"{entry[0]}: not the name of a version's object; move it out of the store")
            keys.setdefault(parsed[0], ManifestListing([], [], []))[kind].append(entry)
    return ListedStore(now_us, generations, keys)


def digests_in(names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the digests of the blob keys of versions in a listing's snapshot."""
    return {name: name[:-8] for name in names}


def _versions_of(listing: ManifestListing) -> dict[bytes, bytes]:
    """Return the marks of one key's committed versions."""
    highest: list[dict[int, int]] = [{}, {}]
    for found, entries in zip(highest, (listing.marks, listing.retentions), strict=True):
        for name, _ in entries:
            stem, sequence = name.rpartition("/")[2].split(".")[:2]
            found[int(stem, 16)] = max(found.get(int(stem, 16), 0), int(sequence, 16))
    versions = {}
    for name, size_bytes in listing.manifests:
        parsed = key_and_version(name)
        assert parsed is not None  # `list_store` has checked it
        key, version = parsed
        marks = _MARKS.pack(highest[0].get(version, 0), highest[1].get(version, 0), size_bytes % (1 << 32))
        versions[key + version.to_bytes(8)] = marks
    return versions
