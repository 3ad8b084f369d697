# size: the Kafka side of the stage; the stage itself imports no Kafka client
"""Apply the resemblance stage to messages of topic `fresh`, for `StatelessStageHandler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nearkin_resemblance import ResemblanceStage
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import UndecodedMessage, encode_paired
from nearkin_shared.formats.message_batches import read_fresh
from nearkin_shared.kafka.relay_handler import OutgoingMessage, Work
from nearkin_shared.kafka.tenant_context import TenantContexts
from nearkin_shared.pipeline.batched import run_stage_batched


def resemblance_work(lanes: TenantContexts, current: Callable[[], Settings]) -> Work:
    """Return the resemblance stage's work, with the algorithm that is set at the time."""
    made: tuple[Settings, ResemblanceStage] | None = None

    def work(tenant: str, messages: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        nonlocal made
        batches = read_fresh(messages)
        settings = current()
        if made is None or made[0] is not settings:
            made = settings, ResemblanceStage(settings)
        found = run_stage_batched(made[1], batches, lanes[tenant].facts)
        return [
            OutgoingMessage("paired", message.envelope, partial(encode_paired, message, pairs))
            for message, pairs in zip(messages, found, strict=True)
        ]

    return work
