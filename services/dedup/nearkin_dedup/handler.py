# size: the Kafka side of the stage; the stage itself imports no Kafka client
"""Apply the dedup stage to messages of topic `segments`, for `StatelessStageHandler`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from nearkin_dedup import DedupStage
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import Envelope, Fresh, UndecodedMessage, encode
from nearkin_shared.formats.message_batches import JoinedSegments, read_segments
from nearkin_shared.kafka.coalesce import fresh_of_run, runs_of
from nearkin_shared.kafka.relay_handler import OutgoingMessage, Work
from nearkin_shared.kafka.tenant_context import TenantContexts
from nearkin_shared.observability.stage_metrics import count_fresh
from nearkin_shared.pipeline.stage import run_stage
from nearkin_shared.types import FreshBatch


def dedup_work(settings: Settings, lanes: TenantContexts) -> Work:
    """Return the dedup stage's work; a blob's messages are joined into as few as fit."""

    def work(tenant: str, messages: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        joined = read_segments(messages)
        counts = np.diff(joined.segment_starts)
        stage = DedupStage(np.repeat(np.arange(len(messages), dtype=np.uint32), counts))
        found = run_stage(stage, joined.batch, lanes[tenant].facts)
        count_fresh(found)
        results: list[OutgoingMessage | None] = [None] * len(messages)
        for run in runs_of(joined, found, settings.features.super_features):
            envelope = messages[run.start].envelope
            results[run.stop - 1] = OutgoingMessage("fresh", envelope, partial(_fresh, envelope, joined, found, run))
        return results

    return work


def _fresh(envelope: Envelope, joined: JoinedSegments, found: FreshBatch, run: slice) -> bytes:
    return encode(Fresh(envelope, fresh_of_run(joined, found, run)))
