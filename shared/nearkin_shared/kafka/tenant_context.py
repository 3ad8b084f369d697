"""Keep the resources of a worker for each tenant.

Invariant (I9): tenants share connections, but no names, bases or containers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.index.protocols import Index
from nearkin_shared.kafka.record_guard import TENANTS_MAX, BoundedCache
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import check_keys
from nearkin_shared.pipeline.lookups import EmbeddedLookups, InFlight
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.pending_delete_watch import PendingDeleteFilter, PendingDeleteWatcher
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.utils.frozen import frozen


@frozen
class TenantContext:
    """A tenant's names, index and containers, as one worker sees them."""

    fingerprinter: Fingerprinter
    index: Index
    pending: PendingIndex
    in_flight: InFlight
    containers: ContainerStore
    facts: EmbeddedLookups
    collected: PendingDeleteFilter
    quarantine: Quarantine


TenantContexts = BoundedCache[str, TenantContext]


def tenant_contexts(
    settings: Settings,
    objects: ObjectStore,
    secret: bytes,
    fingerprint_bits: int,
    index_of: Callable[[bytes], Index],
    rounds: Callable[[], object] = lambda: None,
) -> TenantContexts:
    """Return the contexts of all tenants, each created on first use.

    `rounds` returns a value that changes after each GC run. Raises TenantErased for an erased tenant, KeysLost for one
    whose keys are missing.
    """
    quarantine = Quarantine(objects, time.time)
    watch = PendingDeleteWatcher(PendingDeleteStore(objects), settings.gc.grace_seconds, rounds, quarantine)
    # One cache for all: a cache for each tenant took TENANTS_MAX times `base.cache_bytes`, and as often 48 MiB.
    every = ContainerStore(objects, b"", int(settings.base.cache_bytes))

    def make(tenant: str) -> TenantContext:
        fingerprinter = Fingerprinter(secret, tenant, fingerprint_bits)
        index = index_of(fingerprinter.domain)
        pending = PendingIndex(index, fingerprinter.domain)
        containers = every.of(fingerprinter.domain)
        in_flight = InFlight(containers)
        domain, few_bytes = fingerprinter.domain, 1 << 20
        collected = PendingDeleteFilter(watch, containers, lambda: ContainerStore(objects, domain, few_bytes))
        facts = EmbeddedLookups(pending, in_flight, collected)
        return TenantContext(fingerprinter, index, pending, in_flight, containers, facts, collected, quarantine)

    def check(tenant: str) -> None:
        check_keys(objects, tenant, index_of(b"").catalog)

    return BoundedCache(make, TENANTS_MAX, check)
