"""Delete the objects of erased tenants.

    withdraw from index -> manifests, tombstones -> containers, staged uploads -> rebuild a local index, whose free
    pages still contain withdrawn entries -> mark the erasure as swept, once no writer can add to it

Invariant: the index is withdrawn first; no object of another tenant is touched. Bases of a tenant's chunks are in
containers of the same tenant (I9), so no other version needs these objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from nearkin_maintenance.gc.tenant_erasure import remaining_copies
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.erasure_records import Erasure
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.manifest import moment_of
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.results import RemainingCopy
from nearkin_shared.storage.containers import id_of
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin")

WITHDRAWN_PER_STEP = 1024
"""Containers that are withdrawn from the index per call."""


@runtime_checkable
class _SupportsTenantRemoval(Protocol):
    def catalogs(self) -> Iterator[tuple[str, CatalogEntry]]: ...
    def withdraw_tenants(self, tenants: Collection[str]) -> None: ...


@frozen
class ErasureSweep:
    """Objects of erased tenants that one run deleted."""

    freed_bytes: int = 0
    finished: tuple[Erasure, ...] = ()
    """Erasures that are not recorded as swept yet: this run, or an earlier one, deleted their keys and objects."""


def sweep_erased(
    objects: ObjectStore, index: SupportsCollection, check: Callable[[], None] = lambda: None
) -> ErasureSweep:
    """Delete the remaining objects of erased tenants.

    `check` raises if nothing may be deleted any more. `EncryptedObjectStore.confirm_swept` is called later, once the
    index has no entries of them.

    Raises: StoreUnavailable; a later call deletes the rest.
    """
    if not isinstance(objects, EncryptedObjectStore):
        return ErasureSweep()
    for erasure in objects.keyring.erasures():
        if erasure.problem is not None:
            metrics.CORRUPT.labels("record").inc()
            _log.warning("gc: %s", erasure.problem)
    due_erasures = objects.keyring.list_due()
    if not due_erasures:
        return ErasureSweep()
    withdraw_erased(objects, index)
    check()
    VersionHeads(objects).forget(name for name, _ in objects.erased_objects(due=True))
    removed = objects.sweep_erased(check)
    # All that are due, although nothing may be left: an earlier run may have died before its report.
    return ErasureSweep(sum(size_bytes for _, size_bytes in removed), tuple(due_erasures))


def remaining_after(settings: Settings, finished: Sequence[Erasure]) -> tuple[RemainingCopy, ...]:
    """Return the copies that completed erasures do not reach.

    The latest erasure determines the times.
    """
    if not finished:
        return ()
    latest_us = max(erasure.erased_us for erasure in finished)
    return tuple(remaining_copies(settings, moment_of(latest_us), datetime.now(UTC)))


def withdraw_erased(objects: EncryptedObjectStore, index: SupportsCollection, tenant: str | None = None) -> None:
    """Withdraw the entries of erased tenants from the index.

    Otherwise a later put could use chunks that cannot be decrypted as bases. `tenant`: the name of one erased tenant;
    the names of others are those that the index lists.
    """
    containers = [
        int(found) for found in (id_of(name) for name, _ in objects.erased_objects(due=True)) if found is not None
    ]
    for start in range(0, len(containers), WITHDRAWN_PER_STEP):
        batch = containers[start : start + WITHDRAWN_PER_STEP]
        index.withdraw(dict.fromkeys(batch), {}, batch)
    if isinstance(index, _SupportsTenantRemoval):
        known = {name for name, _ in index.catalogs()} | ({tenant} if tenant is not None else set())
        index.withdraw_tenants([listed for listed in sorted(known) if _is_erased(objects, listed)])


def _is_erased(objects: EncryptedObjectStore, tenant: str) -> bool:
    return objects.keyring.owner_of(domain_of(tenant)) in objects.keyring.due_erasures()


def count_erasures(objects: ObjectStore) -> tuple[int, int]:
    """Return (erasures in their grace, erasure records without effect)."""
    if not isinstance(objects, EncryptedObjectStore):
        return 0, 0
    erasures, due = objects.keyring.erasures(), objects.keyring.due_erasures()
    refused = sum(erasure.problem is not None for erasure in erasures)
    waiting = sum(erasure.problem is None and erasure.owner not in due for erasure in erasures)
    return waiting, refused
