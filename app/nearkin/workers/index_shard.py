"""Run one shard of an index.

    python -m nearkin.workers.index_shard --shard 0 --of 3 --folder FOLDER

At its start the shard adds what the object store has and its folder lacks; then it is ready. Callers prove with a token
that they have the store's secret. `monitor.port` has `/livez`, `/readyz` and `/metrics`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from nearkin.local.index_recovery import super_features_of
from nearkin_index.shard_index import ShardIndex
from nearkin_index.shard_server import ShardOptions, ShardServer, ShardStore
from nearkin_index.state_file import StateFile
from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.index_rebuild import KnownObjects, rebuild_index
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.fleet.store_owner import read_owner
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards.key_ranges import part_of
from nearkin_shared.index.shards.shard_connection import shard_token
from nearkin_shared.index.tablets.tablet_tables import TabletOptions
from nearkin_shared.kafka.worker import settings_of
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.observability import log_setup
from nearkin_shared.observability.health import Monitor
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.descriptor import Descriptor
from nearkin_shared.storage.manifests import ManifestStore, object_name
from nearkin_shared.storage.pending_deletes import GcGeneration, PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine, join_records
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.garbage_collection import exempt_started_objects

CONNECT_SECONDS_MAX = 120.0
SEQUENCE_MAX = 1 << 62


_log = logging.getLogger("nearkin.index")


@frozen
class ShardPlace:
    """Number, folder and address of a shard, as its command line has them."""

    number: int
    count: int
    folder: Path
    host: str
    port: int


class ShardTarget:
    """Index of one shard as a rebuild fills it: of each container it takes the shard's part."""

    def __init__(self, index: ShardIndex, number: int, count: int) -> None:
        self._index, self._number, self._count = index, number, count
        self.locate_chunks, self.locate_segments = index.locate_chunks, index.locate_segments
        self.locate_ranks, self.versions_of = index.locate_ranks, index.versions_of
        self.catalog, self.manifest_names, self.containers = index.catalog, index.manifest_names, index.containers
        self.commit, self.commit_many, self.mark_many = index.commit, index.commit_many, index.mark_many

    def publish(self, claims: ContainerEntries) -> None:
        """Add the shard's part of a container."""
        self.publish_many([claims])

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Add the shard's parts of containers, in order."""
        self._index.add_parts([part_of(claims, self._number, self._count) for claims in many])

    def close(self) -> None:
        """Do nothing: the rebuild does not own the index."""


def shard_store(
    settings: Settings, objects: ParityObjectStore, found: Descriptor, number: int, count: int
) -> ShardStore:
    """Return what a shard needs of a store. Raises NearkinError."""
    cache_bytes, secret = int(settings.base.cache_bytes), bytes.fromhex(found.secret)
    containers, manifests = ContainerStore(objects, domain_of(settings.tenant), cache_bytes), ManifestStore(objects)

    def complete(index: ShardIndex, known: Collection[int]) -> None:
        if number == 0:
            versions = {object_name(tenant, one.key, one.version): one.sequence for tenant, one in index.catalogs()}
        else:  # the first shard alone has the catalog
            versions = {name: SEQUENCE_MAX for name, _ in manifests.names()}
        left_out = join_records(PendingDeleteStore(objects).read(), Quarantine(objects, time.time).read())
        tenants = DomainOwners(
            lambda tenant: Fingerprinter(secret, tenant, found.fingerprint_bits), [settings.tenant], manifests
        )
        rebuild_index(
            containers,
            manifests,
            ShardTarget(index, number, count),
            tenants,
            super_features_of,
            known=KnownObjects(set(known), versions),
            pending_deletes=left_out,
        )

    return ShardStore(
        found.store_id,
        containers.of(None),
        lambda: [int(container) for container, _ in containers.ids()],
        GcGeneration(objects, refresh_seconds=0.0),
        complete,
    )


def open_shard(settings: Settings, options: ShardPlace) -> ShardServer:
    """Return the server of a shard; the first one creates the store, if `storage.create`.

    Raises: NearkinError; StoreUnavailable while there is no store.
    """
    state = StateFile(options.folder) if options.number == 0 else None
    try:
        owner = None if state is None else read_owner(state)
        objects, found = open_store_of(settings, owner, may_create=state is not None)
        if state is not None:
            state.claim(found.store_id)
        store = shard_store(settings, objects, found, options.number, options.count)
        token = shard_token(bytes.fromhex(found.secret))
        tablets = TabletOptions(memory_bytes=int(settings.index.memory))
        place = (options.number, options.count, options.folder, options.host, options.port)
        return ShardServer(ShardOptions(*place, token, int(settings.index.map_bytes), tablets), store, state)
    except BaseException:
        if state is not None:
            state.close()
        raise


def _wait_for_store(settings: Settings, place: ShardPlace) -> ShardServer:
    """Return the server once the store is there. Raises NearkinError after a while."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            return open_shard(settings, place)
        except RetryableError as err:
            if time.monotonic() > deadline:
                raise
            _log.warning("index shard %d: waiting: %s", place.number, err)
            time.sleep(1.0)


@click.command(help="Run one index shard until SIGTERM.")
@click.option("--shard", "number", type=int, required=True, help="Number of this shard, from 0.")
@click.option("--of", "count", type=int, required=True, help="Number of shards, the same for all.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Local folder of its index.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=7420, show_default=True, help="Port to listen on.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file of settings.")
def main(number: int, count: int, folder: Path, host: str, port: int, config_file: Path | None) -> None:
    """Run one shard."""
    settings = settings_of(config_file)
    log_setup.start(settings, logging.WARNING)
    monitor = Monitor(settings.monitor)
    try:
        monitor.start()
        server = _wait_for_store(settings, ShardPlace(number, count, folder, host, port))
    except NearkinError as err:
        raise click.ClickException(str(err)) from err
    monitor.on_connect({"index": server.check_ready})
    exempt_started_objects()
    server.run(monitor.pulse("calls").beat)
    monitor.stop()


if __name__ == "__main__":
    main()
