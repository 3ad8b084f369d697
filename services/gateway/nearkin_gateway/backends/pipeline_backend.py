"""Build a gateway in front of the pipeline.

Invariant: it holds no state that other gateways lack.

Kafka takes uploads and has their outcomes, the index has the listings, the object store has the committed data.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.auth.tokens import token_file
from nearkin_gateway.backends.edge_upload import EdgeUploads
from nearkin_gateway.backends.event_consumer import EventConsumer
from nearkin_gateway.backends.ingest_backend import UploadRequest
from nearkin_gateway.backends.kafka_ingest import KafkaIngest, KafkaUpload, check_request
from nearkin_gateway.backends.pack_writer import PackStore
from nearkin_gateway.backends.source_dedup import ConnectEdge
from nearkin_gateway.blocking_threads import WorkerPools
from nearkin_gateway.catalog.pipeline_listing import PipelineListing
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_gateway.monitoring.pipeline_state import PipelineState
from nearkin_gateway.setting_changes import ConfigChanges
from nearkin_gateway.state import Gateway, shares_of
from nearkin_gateway.uploads.resumable_store import Resumable
from nearkin_gateway.uploads.upload_status import UploadIds, UploadStatuses
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, RetryableError
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.fleet.shared_state import SharedState
from nearkin_shared.kafka.fleet_store import connect_fleet
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator, authenticator_of
from nearkin_shared.kafka.readiness_checks import gateway_checks
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.retention import guard_of
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore

CONNECT_SECONDS_MAX = 120.0
RETRY_SECONDS = 1.0
CONFIG_KEY = b"settings"
"""Of all messages of the compacted topic `config`: the newest is kept."""
_log = logging.getLogger("nearkin.gateway")


class PipelineIngest(KafkaIngest):
    """The same, with what else a gateway reads and keeps open."""

    def __init__(
        self,
        settings: Settings,
        client_id: str,
        authenticator: EnvelopeAuthenticator,
        watch: EventConsumer,
        hot: LiveConfig,
        index: FleetIndex,
        packs: PackStore | None,
        edge: EdgeUploads | None = None,
    ) -> None:
        super().__init__(settings, client_id, authenticator, packs)
        self._edge = edge
        self._watch, self._hot, self._index = watch, hot, index
        self.state = PipelineState(settings)
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all. Raises StoreUnavailable."""
        await asyncio.to_thread(self._hot.start)
        await self._watch.open()
        await super().open()
        if self.packs is not None:
            retention_hours = self._settings.kafka.retention_hours
            self._sweeper = asyncio.create_task(self.packs.delete_expired_for_ever(retention_hours))

    async def begin(self, intent: UploadRequest) -> KafkaUpload:
        """Start an upload; with `gateway.edge` as sparse segments. Raises NearkinError."""
        if self._edge is None:
            return await super().begin(intent)
        check_request(intent)
        return self._edge.begin(self, intent)

    async def close(self) -> None:
        """End all."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().close()
        await self._watch.close()
        await asyncio.to_thread(self.state.close)
        await asyncio.to_thread(self._hot.stop)
        await asyncio.to_thread(self._index.close)


def pipeline_gateway(settings: Settings, config_file: Path | None, connect_edge: ConnectEdge | None = None) -> Gateway:
    """Return the parts of a gateway, after waiting for servers that start.

    `connect_edge`: returns the stages for `gateway.edge`. Raises NearkinError.
    """
    if settings.gateway.edge and connect_edge is None:
        raise ConfigError('gateway.edge "true": this program has no stages; run `python -m nearkin.workers.gateway`')
    objects, found, index = _connect(settings)
    client_id = f"gateway-{socket.gethostname()}"
    outcomes = UploadStatuses(limits.UPLOAD_STATUS_BYTES)
    authenticator = authenticator_of(settings, found)
    watch = EventConsumer(settings, outcomes, client_id, authenticator)
    hot = LiveConfig(settings, config_file, authenticator)
    packs = None  # plaintext of an encrypted store does not belong in its object store
    if settings.storage.encryption == "none":
        packs = PackStore(objects.inner)
    pools, edge = WorkerPools(), None
    if settings.gateway.edge and connect_edge is not None:
        edge = EdgeUploads(connect_edge(settings, found, index), pools.edge)
    ingest = PipelineIngest(settings, client_id, authenticator, watch, hot, index, packs, edge)

    async def publish(message: bytes) -> None:
        await ingest.publish("config", CONFIG_KEY, message)

    return Gateway(
        hot=ConfigChanges(settings, hot, publish),
        tokens=token_file(settings.auth.tokens_file),
        ingest=ingest,
        outcomes=outcomes,
        tickets=UploadIds(bytes.fromhex(found.secret)),
        catalogue=VersionCatalog(objects, found, settings, PipelineListing(index, found, objects)),
        deletions=Deletions(
            ManifestStore(objects, FleetKeyLocks(index.state)),
            index.mark_many,
            guard=guard_of(settings.retention, time.time),
            heads=VersionHeads(objects),
        ),
        resumable=Resumable(objects, limits.RESUMABLE_MAX, shares_of(settings.gateway)),
        collecting=FleetGcControl(index.state),
        pauses=GcPauseFlag(objects),
        workers=watch,
        pools=pools,
        pipeline=ingest.state,
        checks=gateway_checks(settings),
    )


class FleetGcControl:
    """GC runs of the maintenance services of a fleet, as recorded in the shared state."""

    def __init__(self, state: SharedState) -> None:
        self._gc_status = GcStatusStore(state)

    def last_run(self) -> dict[str, object] | None:
        """Return the result of the last run, and the error of a later one; None before the first."""
        last = self._gc_status.last()
        if last is None:
            return None
        at = last.pop("failed_at", None) if "failure" in last else last.get("at")
        last.pop("regular_at", None), last.pop("freeing_at", None)  # between maintenance workers
        moment = datetime.fromtimestamp(float(at or 0), UTC).isoformat(timespec="milliseconds")
        return {"failure": None, **last, "ended": moment.replace("+00:00", "Z")}

    def request_run(self) -> None:
        """Request a GC run from the maintenance services."""
        self._gc_status.request_run()


def _connect(settings: Settings) -> tuple[ParityObjectStore, descriptor.Descriptor, FleetIndex]:
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            return connect_fleet(settings)
        except RetryableError as err:
            if time.monotonic() > deadline:
                raise
            _log.warning("waiting: %s", err)
            time.sleep(RETRY_SECONDS)
