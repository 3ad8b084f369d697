"""Find the version that an earlier attempt committed, by the origin in its manifest.

Invariant: once an attempt is committed, a later attempt with its origin finds that version, after any restart too.

The search reads manifests from the newest version back. Origins of a key are kept, so that each manifest is read once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.manifest import LOCAL_ORIGIN, NO_ORIGIN, Manifest
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from nearkin_shared.utils.frozen import frozen

VERSIONS_MAX = 10_000
"""Newest versions of a key that a search reads at most: about 1 s on a local disk, once per process."""
OLDER_MAX = 16
"""Versions older than the first attempt that a search passes over: a copied version keeps its creation time."""
ORIGINS_MAX = 50_000
"""Origins kept of all keys: about 10 MB of memory."""
_log = logging.getLogger("nearkin")


@frozen
class BlobOrigin:
    """Identity of a thing to be stored once, however many attempts it takes."""

    id: bytes
    """16 bytes that all attempts share."""
    first_attempt_us: int | None = None
    """Earliest time of an attempt, in microseconds since 1970; None: no attempt was made before this one."""


def local_origin(origin: BlobOrigin) -> BlobOrigin:
    """Return the origin for a store with one writer, different from all origins of services."""
    digest = blake3(origin.id).digest(len(NO_ORIGIN) - len(LOCAL_ORIGIN))
    return BlobOrigin(LOCAL_ORIGIN + digest, origin.first_attempt_us)


@dataclass(slots=True)
class _KeyOrigins:
    """Origins of the versions of one key, as far as their manifests were read."""

    from_us: int
    newest: int = 0
    """Highest version number that was read."""
    versions: dict[bytes, int] = field(default_factory=dict)


class CommittedOrigins:
    """Versions of a store by origin. Safe between threads."""

    def __init__(self, read: Callable[[str, str, int], Manifest], older_max: int | None = None) -> None:
        """Search manifests through `read`, which raises NotFound, Corrupt or StoreUnavailable.

        `older_max`: in place of OLDER_MAX.
        """
        self._read = read
        self._older_max = older_max
        self._keys: OrderedDict[tuple[str, str], _KeyOrigins] = OrderedDict()
        self._count = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without a held lock in a process that was forked."""
        self._lock = threading.Lock()

    def find(
        self,
        tenant: str,
        key: str,
        versions: Collection[int],
        origin: BlobOrigin,
        versions_max: int | None = None,
    ) -> Manifest | None:
        """Return the committed version with this origin, deleted or not; None if there is none.

        `versions`: numbers of the key's manifests, as just listed. The newest `versions_max` of these are read at
        most, VERSIONS_MAX by default. Raises StoreUnavailable.
        """
        if origin.first_attempt_us is None or not versions:
            return None
        from_us = origin.first_attempt_us - CLOCK_SKEW_SECONDS_MAX * 1_000_000
        with self._lock:
            found = self._origins_of(tenant, key, versions, from_us, versions_max or VERSIONS_MAX)
            version = found.get(origin.id)
        return None if version is None else self._read_or_none(tenant, key, version)

    def _origins_of(
        self, tenant: str, key: str, versions: Collection[int], from_us: int, versions_max: int
    ) -> dict[bytes, int]:
        """Return the origins of a key's versions that were created since `from_us`, or some more."""
        found = self._keys.pop((tenant, key), None)
        if found is not None:
            self._count -= len(found.versions)
        if found is None or from_us < found.from_us:
            found = _KeyOrigins(from_us)
        self._read_newer(tenant, key, sorted(versions, reverse=True)[:versions_max], found)
        self._keys[tenant, key] = found
        self._count += len(found.versions)
        while self._count > ORIGINS_MAX and len(self._keys) > 1:
            self._count -= len(self._keys.popitem(last=False)[1].versions)
        return found.versions

    def _read_newer(self, tenant: str, key: str, versions: Sequence[int], found: _KeyOrigins) -> None:
        """Read the manifests of `versions`, newest first, that were not read before."""
        older = 0
        for version in versions:
            if version <= found.newest:
                break
            manifest = self._read_or_none(tenant, key, version)
            if manifest is None:
                continue
            if manifest.origin != NO_ORIGIN:
                found.versions[manifest.origin] = min(version, found.versions.get(manifest.origin, version))
            older += manifest.created_us < found.from_us
            if older > (OLDER_MAX if self._older_max is None else self._older_max):
                break
        found.newest = max(found.newest, *versions)

    def _read_or_none(self, tenant: str, key: str, version: int) -> Manifest | None:
        """Return a manifest; None if GC removed it meanwhile or it is damaged."""
        try:
            return self._read(tenant, key, version)
        except (NotFound, Corrupt) as err:
            _log.warning("key %r version %d: not searched for the origin of a repeated upload: %s", key, version, err)
            return None
