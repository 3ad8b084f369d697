# size: the Kafka side of the stage; the stage itself imports no Kafka client
"""Apply the resemblance stage to messages of topic `fresh`, for `StatelessStageHandler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from nearkin_resemblance import ResemblanceStage
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotFound
from nearkin_shared.formats.message import UndecodedMessage, encode_paired
from nearkin_shared.formats.message_batches import read_fresh
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.kafka.payload_reader import PayloadReader
from nearkin_shared.kafka.relay_handler import OutgoingMessage, StatelessStageHandler, Work
from nearkin_shared.kafka.tenant_context import TenantContexts
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.pipeline.batched import run_stage_batched
from nearkin_shared.types import FreshBatch, Locations, PairedBatch


def resemblance_work(
    lanes: TenantContexts, current: Callable[[], Settings], objects: ObjectStore, *, looks_up: bool = True
) -> Work:
    """Return the resemblance stage's work, with the algorithm that is set at the time.

    `objects` have the packs of references. Without `looks_up`, the delta stage requests all base candidates.
    """
    made: tuple[Settings, ResemblanceStage] | None = None
    reader = PayloadReader(objects)

    def work(tenant: str, messages: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        nonlocal made
        settings = current()
        if made is None or made[0] is not settings:
            made = settings, ResemblanceStage(settings, looks_up=looks_up)
        stage = made[1]
        found = [_without_pairs(message, stage.sketch.name, settings) for message in messages]
        readable: list[tuple[int, UndecodedMessage]] = []
        for number, message in enumerate(messages):
            with suppress(NotFound):  # its blob has ended: the delta stage decides
                readable.append((number, reader.with_bytes(message)))
        batches = read_fresh([message for _, message in readable]) if readable else []
        results = run_stage_batched(stage, batches, lanes[tenant].facts)
        for (number, _), pairs in zip(readable, results, strict=True):
            found[number] = pairs
        return [
            OutgoingMessage("paired", message.envelope, partial(encode_paired, message, pairs))
            for message, pairs in zip(messages, found, strict=True)
        ]

    return work


def _without_pairs(message: UndecodedMessage, sketch: str, settings: Settings) -> PairedBatch:
    """Return the pairs of a message whose bytes do not exist any more: none."""
    count = message.counts.fresh
    return PairedBatch(
        fresh=FreshBatch.empty(),
        sketch=sketch,
        super_features=np.zeros((count, settings.features.super_features), np.uint64),
        base_found=np.zeros(count, np.bool_),
        bases=Locations.empty(count),
        base_rank=np.zeros(count, np.uint8),
    )


def resemblance_handler(
    settings: Settings,
    lanes: TenantContexts,
    current: Callable[[], Settings],
    objects: ObjectStore,
    outbox: StageOutbox,
) -> StatelessStageHandler:
    """Return the handler of topic `fresh`.

    A delta stage of the same process would at once repeat the lookup for every chunk without a candidate: it alone
    looks up.
    """
    looks_up = "delta" not in outbox.stages_in_memory
    work = resemblance_work(lanes, current, objects, looks_up=looks_up)
    return StatelessStageHandler(settings, "resemblance", "paired", work, outbox)
