# size: one client
"""Upload with the code of a gateway that deduplicates, without HTTP."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from nearkin.workers.edge_dedup import connect_edge
from nearkin_gateway.backends.edge_upload import EdgeUploads
from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.kafka_ingest import KafkaIngest
from nearkin_gateway.backends.pack_writer import PackStore
from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.uploads.upload_status import new_id
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.fleet_store import connect_fleet
from nearkin_shared.kafka.message_authentication import authenticator_of
from tests.support.servers.pipeline import Uploader


class EdgeUploader(Uploader):
    """Client that cuts blobs, asks the index, and sends what the store lacks."""

    def __init__(self, settings: Settings, tenant: str = "default", *, staged: bool = True) -> None:
        """`staged`: large uploads go through packs."""
        super().__init__(settings, tenant)
        objects, found, self._index = connect_fleet(settings)
        self._pool = WorkerPool("edge", 8)
        self.edge = EdgeUploads(connect_edge(settings, found, self._index), self._pool)
        packs = PackStore(objects.inner) if staged else None
        self.ingest = KafkaIngest(settings, f"edge-{os.getpid()}", authenticator_of(settings, found), packs)
        self._runner = asyncio.Runner()
        self._runner.run(self.ingest.open())

    def put(self, key: str, pieces: Iterable[bytes], **_: Any) -> str:
        """Send a blob; return its id once Kafka has all of it."""
        return self._runner.run(self._put(key, pieces))

    async def _put(self, key: str, pieces: Iterable[bytes]) -> str:
        blob, hasher, size_bytes = new_id(), blake3(), 0
        request = UploadRequest(self._tenant, key, blob, blob, time.time_ns() // 1000)
        upload = self.edge.begin(self.ingest, request)
        for piece in pieces:
            hasher.update(piece)
            size_bytes += len(piece)
            await upload.write(piece)
        await upload.finish(UploadResult(size_bytes, hasher.digest()))
        return blob.hex()

    def close(self) -> None:
        """Release all connections."""
        self._runner.run(self.ingest.close())
        self._runner.run(self._pool.close())
        self._runner.close()
        self._index.close()
        super().close()
