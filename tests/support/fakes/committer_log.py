"""A partition of `placed`, and the committer that reads it.

Invariant: objects and index are real; events are recorded in place of being sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_client

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Placed, encode
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.tenant_context import tenant_contexts
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.results import Ledger
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import Locations
from tests.support.fakes.committers import EmptyBacklog, RecordingOutbox
from tests.support.servers.redis_server import RedisServer

SEGMENT_BYTES = 1000
BEGAN_US = time.time_ns() // 1000


class CommitterLog:
    """Partition 0 of `placed`, and its committer, over Redis and objects in a folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objects, self.found = open_store_of(settings)
        self.manifests = ManifestStore(self.objects)
        self.index = RedisIndex(settings.redis, b"")
        self.stored = stored_segments(settings)
        self.records: list[Record] = []
        self.begin()

    def begin(self) -> None:
        """Replace the committer by one without any state."""
        made = tenant_contexts(
            self.settings,
            self.objects,
            bytes.fromhex(self.found.secret),
            self.found.fingerprint_bits,
            self.index.for_domain,
        )
        self.handler = CommitterHandler(self.settings, self.manifests, made, "w", EmptyBacklog(), None)
        self.handler.on_assigned(0, "")
        outbox: Any = self.handler._outbox
        self.outbox: RecordingOutbox = outbox

    def add_segments(self, number: int, sequence: int, count: int = 1) -> None:
        """Add `count` segments of blob `number`."""
        rows = np.arange(sequence, sequence + count) % len(self.stored)
        segments = self.stored.take(rows)
        lengths = np.full(count, SEGMENT_BYTES, np.uint32)
        self._add(number, Placed(envelope(number, sequence), segments, np.zeros(count, np.bool_), lengths, Ledger()))

    def add_end(
        self, number: int, segments: int, size_bytes: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Add the end of blob `number`; `size_bytes` is by default the sum of its segments."""
        size = segments * SEGMENT_BYTES if size_bytes is None else size_bytes
        whole = End(
            envelope(number, segments),
            *start_of(number),
            size,
            bytes(32),
            None,
            segments,
            metadata=dict(metadata or {}),
        )
        self._add(number, whole)

    def _add(self, number: int, message: Placed | End | BatchEnd) -> None:
        record = Record("placed", 0, len(self.records), blob_of(number), encode(message), {}, ())
        self.records.append(record)

    def read(self, start: int = 0) -> dict[str, str]:
        """Pass on all records from `start`; return the last event of each key."""
        self.handler.handle(self.records[start:])
        while self.handler.has_ready_blobs:
            self.handler.idle()
        return self.states()

    def states(self) -> dict[str, str]:
        return {event["key"]: event["state"] for event in self.outbox.events}

    def committable(self) -> int:
        return next(offset for _, offset, _ in self.handler.committable())


def stored_segments(settings: Settings) -> Locations:
    """Store a blob of the tenant and return its segments: the committer refuses segments that no container has."""
    of_tenant = with_changes(Settings(), {"tenant": "t"})
    with open_store(Path(str(settings.object_store.url)), settings=of_tenant) as store:
        store.put("stored", random_bytes(1 << 20, 1))
        return store._manifests.get("t", "stored", 1).segments


def blob_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def envelope(number: int, sequence: int) -> Envelope:
    return Envelope(blob_of(number), "t", f"k{number}", sequence * SEGMENT_BYTES, sequence)


def start_of(number: int) -> tuple[int, bytes]:
    return BEGAN_US, blob_of(number)


@contextmanager
def committer_log(server: RedisServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommitterLog]:
    """Yield an empty log; Redis is emptied first."""
    monkeypatch.setattr(committer_handler, "Outbox", RecordingOutbox)
    with redis_client.Redis.from_url(server.url) as client:
        client.flushall()
    changes = {
        "object_store": {"url": str(folder / "objects")},
        "storage": {"create": True},
        "redis": {"url": server.url},
        "kafka": {"upload_idle_seconds": 1},
    }
    made = CommitterLog(with_changes(Settings(), changes))
    yield made
    made.handler._begun.close()
    made.index.close()
