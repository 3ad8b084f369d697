"""Run the maintenance service: `python -m nearkin.workers.maintenance`.

It rebuilds a lost index in Redis, scrubs the object store, runs garbage collection, and trims Kafka's topics.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nearkin.block_recoder import BlockRecoder
from nearkin.local.index_recovery import super_features_of
from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.blob_keys import BlobKeys
from nearkin_maintenance.gc.erased_tenants import remaining_after
from nearkin_maintenance.gc.gc_run import require_service_mode
from nearkin_maintenance.gc.gc_tables import GcTables
from nearkin_maintenance.gc.gc_worker import GcWorker, GcWorkerPorts
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.redis_index_recovery import recover_index
from nearkin_maintenance.verify.scrub_worker import BackgroundScrub
from nearkin_shared.checkpoint_expiry import checkpoint_keys, expire_checkpoints
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.index.redis import RedisIndex, rebuild_in_background
from nearkin_shared.index.redis.background_rebuild import RebuildTarget
from nearkin_shared.kafka.lag import LagWatch
from nearkin_shared.kafka.trimmer import TrimThread
from nearkin_shared.kafka.worker import Context, command
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.retention import apply_policies, guard_of
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine, join_records


def start(context: Context) -> Callable[[], None]:
    """Watch the index and the lag, trim topics, collect garbage; return what ends that.

    One maintenance worker of the fleet rebuilds or collects at a time (a lease).
    """
    require_service_mode(context.settings.gc)
    manifests = ManifestStore(context.objects)

    def fingerprinter(tenant: str) -> Fingerprinter:
        return Fingerprinter(context.secret, tenant, context.found.fingerprint_bits)

    stop_rebuilding = _keep_complete(context, fingerprinter)
    stop_looking = LagWatch(context.settings).start()
    stop_trimming = TrimThread(context.settings).start()

    scrub = BackgroundScrub(context.objects, context.current, fingerprinter, context.index)
    scrub.start()

    def containers(objects: ObjectStore) -> ContainerStore:
        return ContainerStore(objects, domain_of(context.settings.tenant), int(context.settings.base.cache_bytes))

    def rewriter(found: ContainerStore) -> Rewriter:
        settings = context.current()
        tenants = DomainOwners(fingerprinter, [settings.tenant], manifests)
        return Rewriter(found, tenants, fingerprinter(settings.tenant), BlockRecoder(settings))

    keys = BlobKeys()

    def forgetting(objects: ObjectStore, check: Callable[[], None]) -> tuple[int, int]:
        settings, listed = context.current(), ManifestStore(objects, FleetKeyLocks(context.index.state))

        def note(marks: Sequence[MarkedVersion]) -> None:
            check()
            context.index.mark_many(marks)

        deletions = Deletions(listed, note, guard=guard_of(settings.retention, time.time), heads=VersionHeads(objects))
        undelete_seconds = settings.deletion.undelete_seconds
        # index shards do not list tenants
        tenants = context.index.tenants() if isinstance(context.index, RedisIndex) else [settings.tenant]
        stale_bytes = expire_checkpoints(checkpoint_keys(context.index, tenants), listed, deletions, time.time())
        found = keys.of(listed) if settings.retention.policies else ()
        count, marks_bytes = apply_policies(settings.retention, found, listed, deletions, undelete_seconds, time.time())
        return count, marks_bytes + stale_bytes

    rounds = GcWorker(
        context.index,
        context.objects,
        GcWorkerPorts(
            lambda: context.current().gc,
            containers,
            rewriter,
            forgetting,
            lambda finished: remaining_after(context.current(), finished),
            GcTables(tables_folder(context.found.store_id), int(context.settings.index.map_bytes)),
        ),
    ).start()

    def stop() -> None:
        rounds.stop()
        scrub.stop()
        stop_trimming()
        stop_looking()
        stop_rebuilding()

    return stop


def _keep_complete(context: Context, fingerprinter: Callable[[str], Fingerprinter]) -> Callable[[], None]:
    """Rebuild an index in Redis when that is needed; return the function that ends it."""
    if not isinstance(context.index, RedisIndex):
        return lambda: None

    def rebuild(index: RebuildTarget) -> object:
        settings, manifests = context.settings, ManifestStore(context.objects)
        containers = ContainerStore(context.objects, domain_of(settings.tenant), int(settings.base.cache_bytes))
        tenants = DomainOwners(fingerprinter, [settings.tenant], manifests)
        left_out = join_records(
            PendingDeleteStore(context.objects).read(), Quarantine(context.objects, time.time).read()
        )
        return recover_index(containers, manifests, index, tenants, super_features_of, left_out)

    return rebuild_in_background(context.index, rebuild).stop


def tables_folder(store_id: str) -> Path:
    """Return the folder of a store's GC tables, in the folder of temporary files (TMPDIR)."""
    return Path(tempfile.gettempdir(), f"nearkin-gc-{os.geteuid()}", store_id)


if __name__ == "__main__":
    command("maintenance", [], start)()
