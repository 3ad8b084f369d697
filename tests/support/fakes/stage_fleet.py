"""Stages of a worker over objects in memory and a real index, with Kafka's side of their outboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nearkin_chunker import ChunkerStage
from nearkin_chunker.handler import ChunkerHandler
from nearkin_dedup.handler import dedup_work
from nearkin_delta import handler as delta_handler
from nearkin_delta.handler import DeltaHandler
from nearkin_resemblance.handler import resemblance_handler
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.message import Encoded, End, Placed, decode, joined
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.consumer_loop import Handler
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.stage_chain import ChainLink, chain
from nearkin_shared.kafka.tenant_context import TenantContexts, tenant_contexts
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects

SETTINGS = Settings()


class KafkaFake(Outbox):
    """Kafka's side of an outbox: messages by topic. With `is_away` no message is acknowledged."""

    is_away = False

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.dead: list[dict[str, bytes | None]] = []
        self.dead_records: list[tuple[bytes, bytes]] = []
        """Key and value of each dead letter."""
        self.sent_messages = 0

    @property
    def acknowledged_messages(self) -> int:
        return self.sent_messages

    def poll_acks(self) -> None: ...

    def send(self, name: str, key: bytes, value: Encoded, headers: Mapping[str, bytes]) -> None:
        self.sent.append((name, joined(value)))
        self.sent_messages += 1

    def send_to(self, full: str, key: Any, value: Any, headers: Any) -> None:
        self.dead.append(dict(headers))
        self.dead_records.append((key, value))

    def flush(self) -> None:
        if self.is_away:
            raise StoreUnavailable("kafka: a message was not delivered")

    def close(self) -> None: ...


class NoBacklog:
    """Kafka without unread frames."""

    def unread(self, *_: object) -> bool:
        return False

    def close(self) -> None: ...


@contextmanager
def indexed_tenants(folder: Path, objects: ObjectStore | None = None) -> Iterator[TenantContexts]:
    """Yield contexts of tenants over objects (by default in memory), with an index for each domain below a folder."""
    indexes: list[LmdbIndex] = []

    def index_of(domain: bytes) -> LmdbIndex:
        indexes.append(LmdbIndex(folder / domain.hex(), domain, 1 << 26))
        return indexes[-1]

    yield tenant_contexts(SETTINGS, memory_objects() if objects is None else objects, b"s" * 32, 160, index_of)
    for index in indexes:
        index.close()


class Fleet:
    """Stages over objects in memory and a real index, with the outboxes that reach Kafka."""

    def __init__(self, tenants: TenantContexts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outboxes: list[KafkaFake] = []
        self.tenants = tenants
        self.objects = memory_objects()
        monkeypatch.setattr(delta_handler, "Outbox", self.outbox)

    def outbox(self, *_: object) -> KafkaFake:
        self.outboxes.append(KafkaFake())
        return self.outboxes[-1]

    def chunker_of(self, stage_of: Callable[[str], ChunkerStage]) -> Callable[[Callable[[], StageOutbox]], Handler]:
        backlog: Any = NoBacklog()
        return lambda connect: ChunkerHandler(SETTINGS, stage_of, connect(), backlog, self.objects)

    def delta_of(self, _: Callable[[], StageOutbox]) -> DeltaHandler:
        return DeltaHandler(SETTINGS, lambda: SETTINGS, self.tenants, "w", None, self.objects)

    def links(self) -> list[ChainLink]:
        tenants = self.tenants

        def stage_of(tenant: str) -> ChunkerStage:
            return ChunkerStage(SETTINGS, tenants[tenant].fingerprinter)

        def relay(stage: str, following: str, work: Any) -> Callable[[Callable[[], StageOutbox]], Handler]:
            return lambda connect: StatelessStageHandler(SETTINGS, stage, following, work, connect())

        def resemblance(connect: Callable[[], StageOutbox]) -> Handler:
            return resemblance_handler(SETTINGS, tenants, lambda: SETTINGS, self.objects, connect())

        return [
            ChainLink("chunker", "frames", self.chunker_of(stage_of)),
            ChainLink("dedup", "segments", relay("dedup", "fresh", dedup_work(SETTINGS, tenants))),
            ChainLink("resemblance", "fresh", resemblance),
            ChainLink("delta", "paired", self.delta_of),
        ]

    def chained(self, links: list[ChainLink]) -> Handler:
        made = chain(SETTINGS, links, self.outbox)
        made.on_assigned(0, "")
        return made

    def placed(self) -> list[Placed | End]:
        values = [value for outbox in self.outboxes for name, value in outbox.sent if name == "placed"]
        found = [decode(value, "placed") for value in values]
        assert all(isinstance(one, Placed | End) for one in found)
        return found  # type: ignore[return-value]
