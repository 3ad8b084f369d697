# size: a migration that can be deleted with the releases that need it
"""Authenticate tombstones of an older release, if the operator vouches for them.

The setting `gc.sign_old_records` requests it, once. Invariant: the content of a tombstone is unchanged. A process that
dies in between leaves some signed, and a later run signs the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage.manifests import ManifestStore, marked_version

_log = logging.getLogger("nearkin")


@runtime_checkable
class _SupportsMarking(Protocol):
    def mark_many(self, marks: Sequence[MarkedVersion]) -> None: ...


def sign_old_marks(objects: ObjectStore, index: object, check: Callable[[], None] = lambda: None) -> int:
    """Write a MAC into every tombstone without one, and record its new size in the index.

    Returns the number of versions. An unreadable tombstone is skipped. `check` raises if nothing may be changed any
    more.

    Raises: StoreUnavailable.
    """
    manifests = ManifestStore(objects)
    if not isinstance(objects, ParityObjectStore) or not manifests.authenticates_marks:
        return 0
    signed: dict[str, MarkedVersion] = {}
    sizes = dict(manifests.names_and_marks()[1])
    for name in sorted(sizes):
        with suppress(Corrupt, NotFound):
            mark = manifests.read_mark(name)
            if mark.authenticated:
                continue
            check()
            data = manifests.encode_mark(mark)
            objects.replace(name, data)
            if objects.has_some:
                objects.renew_parity(name, data)
            manifest_name, _ = marked_version(name)
            sizes[name] = len(data)
            total = sum(
                size for tombstone_name, size in sizes.items() if tombstone_name.startswith(f"{manifest_name[:-4]}.")
            )
            signed[manifest_name] = MarkedVersion(mark.tenant, mark.key, mark.version, mark.sequence, total)
    if signed and isinstance(index, _SupportsMarking):
        index.mark_many(list(signed.values()))
    if signed:
        _log.info("gc: tombstones of %d versions were signed; unset gc.sign_old_records", len(signed))
    return len(signed)
