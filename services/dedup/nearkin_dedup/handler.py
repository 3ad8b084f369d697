# size: the Kafka side of the stage; the stage itself imports no Kafka client
"""Apply the dedup stage to messages of topic `segments`, for `StatelessStageHandler`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from nearkin_dedup import DedupStage
from nearkin_dedup.sparse_segments import ClaimedLookups, check_complete, check_names
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import Encoded, Envelope, Fresh, MessageKind, UndecodedMessage, encode_parts
from nearkin_shared.formats.message_batches import JoinedSegments, read_segments, read_sparse
from nearkin_shared.formats.message_layout import describe_messages
from nearkin_shared.formats.payload_references import distinct_packs, encode_referenced
from nearkin_shared.kafka.coalesce import fresh_of_run, runs_of
from nearkin_shared.kafka.relay_handler import OutgoingMessage, Work
from nearkin_shared.kafka.tenant_context import TenantContext, TenantContexts
from nearkin_shared.observability.stage_metrics import count_fresh
from nearkin_shared.pipeline.stage import run_stage
from nearkin_shared.types import FreshBatch


def dedup_work(settings: Settings, lanes: TenantContexts) -> Work:
    """Return the dedup stage's work; a blob's messages are joined into as few as fit."""

    def work(tenant: str, messages: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        results: list[OutgoingMessage | None] = [None] * len(messages)
        forms: dict[tuple[bool, bool], list[int]] = {}
        for number, message in enumerate(messages):
            forms.setdefault((message.kind is MessageKind.SPARSE, message.is_referenced), []).append(number)
        for numbers in forms.values():
            chosen = [messages[number] for number in numbers]
            joined, found = decide(lanes[tenant], chosen)
            count_fresh(found)
            for run in runs_of(joined, found, settings.features.super_features):
                envelope = chosen[run.start].envelope
                outgoing = OutgoingMessage("fresh", envelope, partial(_fresh, envelope, joined, found, run))
                results[numbers[run.stop - 1]] = outgoing
        return results

    return work


def decide(lane: TenantContext, messages: Sequence[UndecodedMessage]) -> tuple[JoinedSegments, FreshBatch]:
    """Return the segments of messages of one kind, and which chunks are fresh.

    Raises: Corrupt, PermanentError for sparse segments that lack bytes, RetryableError.
    """
    if messages[0].kind is not MessageKind.SPARSE:
        joined = read_segments(messages)
        return joined, run_stage(_stage(joined), joined.batch, lane.facts)
    sparse, what = read_sparse(messages), describe_messages(messages)
    check_names(sparse, lane.fingerprinter, what)
    lookups = ClaimedLookups(sparse, lane, what)
    found = run_stage(_stage(sparse.joined), sparse.joined.batch, lookups)
    check_complete(sparse, found, what)
    return sparse.joined, found


def _stage(joined: JoinedSegments) -> DedupStage:
    """Return the stage that decides each message independently."""
    counts = np.diff(joined.segment_starts)
    return DedupStage(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))


def _fresh(envelope: Envelope, joined: JoinedSegments, found: FreshBatch, run: slice) -> Encoded:
    fresh, messages = Fresh(envelope, fresh_of_run(joined, found, run)), joined.messages[run]
    return encode_referenced(fresh, distinct_packs(messages)) if messages[0].is_referenced else encode_parts(fresh)
