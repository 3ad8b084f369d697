"""A gateway in front of the pipeline. Invariant: it holds no state of its own; any other one answers the same.

Kafka takes uploads and tells outcomes, Redis lists, the object store has what is committed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from nearkin.config import Settings
from nearkin.errors import Retryable
from nearkin.index.redis import RedisIndex
from nearkin.index.redis.key_locks import RedisKeyLocks
from nearkin.index.redis.rounds import ToldRounds
from nearkin.retention import guard_of
from nearkin.runners.kafka.authentication import EnvelopeAuthenticator, authenticator_of
from nearkin.runners.kafka.checking import redis_memory_check
from nearkin.runners.kafka.fleet import connect_fleet
from nearkin.runners.kafka.hot import HotSettings
from nearkin.store import descriptor
from nearkin.store.deletion import Deletions
from nearkin.store.manifests import ManifestStore
from nearkin.store.objects import ObjectStore
from nearkin.store.pauses import Pauses
from nearkin_gateway.catalogue import Catalogue
from nearkin_gateway.hot import HotChanges
from nearkin_gateway.ingest_kafka import KafkaIngest
from nearkin_gateway.listing import PipelineListing
from nearkin_gateway.outcomes import Outcomes, Tickets
from nearkin_gateway.pipeline_state import PipelineState
from nearkin_gateway.resumable import Resumable
from nearkin_gateway.state import Gateway, shares_of
from nearkin_gateway.tokens import token_file
from nearkin_gateway.watching import Watch

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
        watch: Watch,
        hot: HotSettings,
        index: RedisIndex,
    ) -> None:
        super().__init__(settings, client_id, authenticator)
        self._watch, self._hot, self._index = watch, hot, index
        self.state = PipelineState(settings)

    async def open(self) -> None:
        """Start all. Raises StoreUnavailable."""
        await asyncio.to_thread(self._hot.start)
        await self._watch.open()
        await super().open()

    async def close(self) -> None:
        """End all."""
        await super().close()
        await self._watch.close()
        await asyncio.to_thread(self.state.close)
        await asyncio.to_thread(self._hot.stop)
        await asyncio.to_thread(self._index.close)


def pipeline_gateway(settings: Settings, config_file: Path | None) -> Gateway:
    """Return the parts of a gateway, waiting for servers that are not up yet. Raises NearkinError."""
    objects, found, index = _connected(settings)
    client_id = f"gateway-{socket.gethostname()}"
    outcomes = Outcomes(int(settings.gateway.outcomes_bytes))
    authenticator = authenticator_of(settings, found)
    watch = Watch(settings, outcomes, client_id, authenticator)
    hot = HotSettings(settings, config_file, authenticator)
    ingest = PipelineIngest(settings, client_id, authenticator, watch, hot, index)

    async def publish(message: bytes) -> None:
        await ingest.publish("config", CONFIG_KEY, message)

    return Gateway(
        hot=HotChanges(settings, hot, publish),
        tokens=token_file(settings.auth.tokens_file),
        ingest=ingest,
        outcomes=outcomes,
        tickets=Tickets(bytes.fromhex(found.secret)),
        catalogue=Catalogue(objects, found, settings, PipelineListing(index, found, objects)),
        deletions=Deletions(
            ManifestStore(objects, RedisKeyLocks(index)), index.mark_many, guard=guard_of(settings.retention, time.time)
        ),
        resumable=Resumable(objects, settings.gateway.resumable_max, shares_of(settings.gateway)),
        collecting=JanitorRounds(index),
        pauses=Pauses(objects),
        workers=watch,
        pipeline=ingest.state,
        checks={"redis": redis_memory_check(settings)},
    )


class JanitorRounds:
    """Rounds that the janitors of the fleet do, as Redis knows of them."""

    def __init__(self, index: RedisIndex) -> None:
        self._told = ToldRounds(index)

    def collected(self) -> dict[str, object] | None:
        """Return what the last round did, and why a later one did not end; None before the first one."""
        last = self._told.last()
        if last is None:
            return None
        at = last.pop("failed_at", None) if "failure" in last else last.get("at")
        last.pop("regular_at", None), last.pop("freeing_at", None)  # between janitors
        moment = datetime.fromtimestamp(float(at or 0), UTC).isoformat(timespec="milliseconds")
        return {"failure": None, **last, "ended": moment.replace("+00:00", "Z")}

    def ask(self) -> None:
        """Ask the janitors for a round."""
        self._told.ask()


def _connected(settings: Settings) -> tuple[ObjectStore, descriptor.Descriptor, RedisIndex]:
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            return connect_fleet(settings)
        except Retryable as err:
            if time.monotonic() > deadline:
                raise
            _log.warning("waiting: %s", err)
            time.sleep(RETRY_SECONDS)
