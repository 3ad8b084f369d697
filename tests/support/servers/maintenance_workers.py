"""Run maintenance workers over one store of objects and one index in Redis.

Invariant: all processes see the same clock.

python -m tests.support.servers.maintenance_workers ROOT URL PREFIX NOW LEASE_SECONDS POINT:COUNT:ACTION [TABLES]

does one GC run with an armed failpoint.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from nearkin.block_recoder import BlockRecoder
from nearkin.local.index_recovery import super_features_of
from nearkin_maintenance import DomainOwners, Rewriter, rebuild_index
from nearkin_maintenance.gc.gc_tables import GcTables
from nearkin_maintenance.gc.gc_worker import GcWorker, GcWorkerPorts
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import HYBRID, GcSettings
from nearkin_shared.errors import NearkinError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.fleet.lease import LEASE_SECONDS, Lease
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.factory import with_parity
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import GcGeneration
from nearkin_shared.types import ContainerId
from nearkin_shared.utils import failpoints
from tests.support.data.stores import SMALL, objects, settings

CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": 0}})
MAP_BYTES = 1 << 26
GC = GcSettings(grace_seconds=3600, interval_seconds=60)


def copy_objects(root: Path, elsewhere: ObjectStore) -> None:
    """Copy the objects of a local store to another object store."""
    for name, data in objects(root).items():
        elsewhere.put_new(name, data)


class Fleet:
    """One store and its index, as seen by any process of a fleet."""

    def __init__(self, objects: ObjectStore, url: str, prefix: str, now: float, chosen: Settings = CHOSEN) -> None:
        self.objects, self.now, self.chosen = objects, now, chosen
        self.url, self.prefix = url, prefix
        found = descriptor.read(objects)
        self.secret, self.bits = bytes.fromhex(found.secret), found.fingerprint_bits
        generation = GcGeneration(objects, 0.0)
        self.index = RedisIndex(RedisSettings(url=url, prefix=prefix), domain_of("default"), generation)
        self.manifests = ManifestStore(objects)

    def fill_index(self) -> None:
        """Fill the index from the objects."""
        rebuild_index(self.containers(self.objects), self.manifests, self.index, self.tenants(), super_features_of)
        name, lease_key = self.index.epochs.current.name, f"{self.index.prefix}:{{m}}:lease"
        with Lease(self.index.state) as lease:
            assert lease.take()
            held = self.index.server.one(("GET", lease_key))
            assert self.index.server.one(RedisServer.call("whole", [self.index.epochs.key, lease_key], name, held))
        assert not self.index.check()

    def stored_bytes(self) -> int:
        """Return the bytes of all objects that versions, and GC runs, need."""
        return sum(size for folder in ("containers", "manifests", "gc") for _, size in self.objects.names(folder))

    def read(self, key: str, version: int) -> bytes:
        """Return the content of a version, read with empty caches."""
        manifest = self.manifests.read_visible("default", key, version)
        containers = self.containers(self.objects)
        return b"".join(
            VersionReader(
                manifest.info, manifest, containers, self.fingerprinter("default"), 0, manifest.size_bytes
            ).pieces()
        )

    def check_index(self) -> None:
        """Assert that the index names no deleted container, and every existing one."""
        containers = self.containers(self.objects)
        present = {container: containers.directory(container).chunks.there for container, _ in containers.ids()}
        for table in ("chunks", "features"):
            for location in self.index.entries()[table].values():
                container, ordinal = int.from_bytes(location[:8], "little"), int.from_bytes(location[8:], "little")
                assert present[ContainerId(container)][ordinal], table
        assert {summary.container for summary in self.index.containers()} == present.keys()

    def tenants(self) -> DomainOwners:
        """Return the existing tenants."""
        return DomainOwners(self.fingerprinter, ["default"], self.manifests)

    def fingerprinter(self, tenant: str) -> Fingerprinter:
        """Return the fingerprinter of a tenant."""
        return Fingerprinter(self.secret, tenant, self.bits)

    def containers(self, over: ObjectStore) -> ContainerStore:
        """Return a ContainerStore with caches of its own."""
        return ContainerStore(over, domain_of("default"), 8 << 20)

    def make_gc_worker(
        self,
        over: ObjectStore | None = None,
        gc: GcSettings = GC,
        lease_seconds: float = LEASE_SECONDS,
        tables: Path | None = None,
    ) -> GcWorker:
        """Return a maintenance worker's GC worker with the fleet's clock.

        `tables`: its folder for the tables of `gc.mode = hybrid`.
        """

        def rewriter(containers: ContainerStore) -> Rewriter:
            return Rewriter(containers, self.tenants(), self.fingerprinter("default"), BlockRecoder(self.chosen))

        return GcWorker(
            self.index,
            over or self.objects,
            # The test sets the fleet's clock.
            GcWorkerPorts(
                lambda: replace(gc, trust_clock=True),
                self.containers,
                rewriter,
                tables=None if tables is None else GcTables(tables, MAP_BYTES),
            ),
            lease_seconds=lease_seconds,
            clock=lambda: self.now,
        )


def main(root: str, url: str, prefix: str, now: str, lease_seconds: str, armed: str, tables: str = "") -> None:
    """Do one GC run; print the name of the error that ended it, or `done`.

    `tables`: folder of the tables of `gc.mode = hybrid`.
    """
    objects = LocalObjectStore(Path(root))
    fleet = Fleet(with_parity(objects, CHOSEN) if tables else objects, url, prefix, float(now))
    gc = replace(GC, mode=HYBRID, compact_below=0.0) if tables else GC
    worker = fleet.make_gc_worker(gc=gc, lease_seconds=float(lease_seconds), tables=Path(tables) if tables else None)
    failpoints.arm(armed)
    try:
        print("done" if worker.run_once() is not None else "none")
    except NearkinError as err:
        print(type(err).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
