"""A gateway before the pipeline: Kafka in, Redis for listings, the object store for what is committed."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from nearkin.config import Settings
from nearkin.errors import Retryable, StoreUnavailable
from nearkin.fingerprints import Fingerprinter
from nearkin.index.redis import RedisIndex
from nearkin.records import Stats
from nearkin.runners.kafka.clients import create_topics
from nearkin.runners.kafka.hot import HotSettings
from nearkin.store import descriptor
from nearkin.store.objects import ObjectStore
from nearkin.store.opening import open_store_of
from nearkin.sums import sum_up
from nearkin_gateway.catalogue import Catalogue
from nearkin_gateway.hot import HotChanges
from nearkin_gateway.ingest_kafka import KafkaIngest
from nearkin_gateway.outcomes import Outcomes, Tickets
from nearkin_gateway.state import Gateway
from nearkin_gateway.tokens import token_file
from nearkin_gateway.watching import Watch

CONNECT_SECONDS_MAX = 120.0
RETRY_SECONDS = 1.0
CONFIG_KEY = b"settings"
"""Of all messages of the compacted topic `config`: the newest is kept."""
_log = logging.getLogger("nearkin.gateway")


class RedisListing:
    """The index of the workers. While it is being rebuilt it may hold less than the store: then it lists nothing."""

    def __init__(self, index: RedisIndex, found: descriptor.Descriptor, objects: ObjectStore) -> None:
        self._index = index
        self._secret, self._bits = bytes.fromhex(found.secret), found.fingerprint_bits
        self._descriptor_bytes = objects.size_bytes(descriptor.NAME)

    def versions(
        self, tenant: str, prefix: str, after_key: str, after_version: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield (key, version) by key and version, after what was given. Raises StoreUnavailable."""
        self._check()
        if not after_key:
            return self._index.manifest_names(tenant, prefix)
        return self._index.names_after(tenant, prefix, after_key, after_version)

    def stats(self, tenant: str) -> Stats:
        """Return a tenant's sums; its containers as the index knows them. Raises StoreUnavailable."""
        self._check()
        index = self._index.for_domain(Fingerprinter(self._secret, tenant, self._bits).domain)
        containers = list(index.containers())
        return sum_up(
            ((tenant, entry) for entry in index.catalog(tenant)),
            containers,
            sum(container.container_bytes for container in containers) + self._descriptor_bytes,
            descriptor_bytes=self._descriptor_bytes,
            index_bytes=0,
        )

    def _check(self) -> None:
        if self._index.check():
            raise StoreUnavailable("the index was lost and is being rebuilt: blobs can be read, listings come later")


class PipelineIngest(KafkaIngest):
    """The same, with what else a gateway reads and keeps open."""

    def __init__(self, settings: Settings, client_id: str, watch: Watch, hot: HotSettings, index: RedisIndex) -> None:
        super().__init__(settings, client_id)
        self._watch, self._hot, self._index = watch, hot, index

    async def open(self) -> None:
        """Start all. Raises StoreUnavailable."""
        await asyncio.to_thread(self._hot.start)
        await self._watch.open()
        await super().open()

    async def close(self) -> None:
        """End all."""
        await super().close()
        await self._watch.close()
        await asyncio.to_thread(self._hot.stop)
        await asyncio.to_thread(self._index.close)


def pipeline_gateway(settings: Settings, config_file: Path | None) -> Gateway:
    """Return the parts of a gateway, waiting for servers that are not up yet. Raises NearkinError."""
    objects, found, index = _connected(settings)
    client_id = f"gateway-{socket.gethostname()}"
    outcomes = Outcomes(int(settings.gateway.outcomes_bytes))
    watch = Watch(settings, outcomes, client_id)
    hot = HotSettings(settings, config_file)
    ingest = PipelineIngest(settings, client_id, watch, hot, index)

    async def publish(message: bytes) -> None:
        await ingest.publish("config", CONFIG_KEY, message)

    return Gateway(
        hot=HotChanges(settings, hot, publish),
        tokens=token_file(settings.auth.tokens_file),
        ingest=ingest,
        outcomes=outcomes,
        tickets=Tickets(bytes.fromhex(found.secret)),
        catalogue=Catalogue(objects, found, settings, RedisListing(index, found, objects)),
        workers=watch,
    )


def _connected(settings: Settings) -> tuple[ObjectStore, descriptor.Descriptor, RedisIndex]:
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            create_topics(settings)
            objects, found = open_store_of(settings)
            return objects, found, RedisIndex(settings.redis, b"")
        except Retryable as err:
            if time.monotonic() > deadline:
                raise
            _log.warning("waiting: %s", err)
            time.sleep(RETRY_SECONDS)
