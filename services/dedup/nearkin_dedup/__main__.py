"""Run the dedup service: `python -m nearkin_dedup`."""

from nearkin_dedup.handler import dedup_work
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command


def handler(context: Context, connect_outbox: ConnectOutbox) -> StatelessStageHandler:
    """Return the handler of topic `segments`."""
    work = dedup_work(context.settings, context.lanes())
    return StatelessStageHandler(context.settings, "dedup", "fresh", work, connect_outbox())


STAGE = PipelineStage("dedup", "segments", handler)

if __name__ == "__main__":
    command("dedup", [stage_part([STAGE])])()
