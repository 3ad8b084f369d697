"""Objects of erased tenants. Invariant: the index lets go of them first; nothing of another tenant is touched.

    index forgets -> manifests and marks -> containers, staged uploads -> a local index is made again, since its free
    pages hold what it forgot -> the erasure counts as swept, once no writer can add to them

A tenant's containers lean on its own alone (I9), so no other version reads what goes here.
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
"""Containers leave the index so many at a time."""


@runtime_checkable
class _Listing(Protocol):
    def catalogs(self) -> Iterator[tuple[str, CatalogEntry]]: ...
    def withdraw_tenants(self, tenants: Collection[str]) -> None: ...


@frozen
class Swept:
    """What a run removed of erased tenants."""

    freed_bytes: int = 0
    finished: tuple[Erasure, ...] = ()
    """Erasures whose keys or objects this run removed."""


def sweep_erased(objects: ObjectStore, index: SupportsCollection, check: Callable[[], None] = lambda: None) -> Swept:
    """Remove what erased tenants have left. `check` raises where nothing may be removed any more.

    `EncryptedObjectStore.confirm_swept` comes once the index has nothing of them either. Raises StoreUnavailable: a
    later call does the rest.
    """
    if not isinstance(objects, EncryptedObjectStore):
        return Swept()
    for erasure in objects.keyring.erasures():
        if erasure.problem is not None:
            metrics.CORRUPT.labels("record").inc()
            _log.warning("gc: %s", erasure.problem)
    due = objects.keyring.list_due()
    if not due:
        return Swept()
    with_keys = {erasure.owner for erasure in due if objects.keyring.has_keys(erasure.owner)}
    withdraw_erased(objects, index)
    check()
    VersionHeads(objects).forget(name for name, _ in objects.erased_objects(due=True))
    removed = objects.sweep_erased(check)
    finished = [erasure for erasure in due if erasure.owner in with_keys]
    if removed and not finished:  # a run that was cut short has removed the keys
        finished = due
    return Swept(sum(size_bytes for _, size_bytes in removed), tuple(finished))


def remaining_after(settings: Settings, finished: Sequence[Erasure]) -> tuple[RemainingCopy, ...]:
    """Return the copies that erasures do not reach which a run has completed; the latest one decides on times."""
    if not finished:
        return ()
    closed_us = max(erasure.erased_us for erasure in finished)
    return tuple(remaining_copies(settings, moment_of(closed_us), datetime.now(UTC)))


def withdraw_erased(objects: EncryptedObjectStore, index: SupportsCollection, tenant: str | None = None) -> None:
    """Let the index name nothing of erased tenants any more; a later put would lean on what cannot be read.

    `tenant`: one of them, known by name; of others what the index lists tells.
    """
    containers = [
        int(found) for found in (id_of(name) for name, _ in objects.erased_objects(due=True)) if found is not None
    ]
    for start in range(0, len(containers), WITHDRAWN_PER_STEP):
        some = containers[start : start + WITHDRAWN_PER_STEP]
        index.withdraw(dict.fromkeys(some), {}, some)
    if isinstance(index, _Listing):
        known = {listed for listed, _ in index.catalogs()} | ({tenant} if tenant is not None else set())
        index.withdraw_tenants([named for named in sorted(known) if _is_erased(objects, named)])


def _is_erased(objects: EncryptedObjectStore, tenant: str) -> bool:
    return objects.keyring.owner_of(domain_of(tenant)) in objects.keyring.due_erasures()


def count_erasures(objects: ObjectStore) -> tuple[int, int]:
    """Return (erasures in their grace, erasure records that do not verify)."""
    if not isinstance(objects, EncryptedObjectStore):
        return 0, 0
    refused = [erasure for erasure in objects.keyring.erasures() if erasure.problem is not None]
    waiting = len(objects.keyring.unswept() - objects.keyring.due_erasures()) - len(refused)
    return waiting, len(refused)
