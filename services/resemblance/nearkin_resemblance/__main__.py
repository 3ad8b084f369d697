"""Run the resemblance service: `python -m nearkin_resemblance`."""

from nearkin_resemblance.handler import resemblance_handler
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command


def handler(context: Context, connect_outbox: ConnectOutbox) -> StatelessStageHandler:
    """Return the handler of topic `fresh`."""
    lanes, objects = context.lanes(), context.objects.inner
    return resemblance_handler(context.settings, lanes, context.current, objects, connect_outbox())


STAGE = PipelineStage("resemblance", "fresh", handler)

if __name__ == "__main__":
    command("resemblance", [stage_part([STAGE])])()
