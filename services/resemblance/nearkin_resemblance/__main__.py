"""Run the resemblance service: `python -m nearkin_resemblance`."""

from nearkin_resemblance.handler import resemblance_work
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command


def handler(context: Context, connect_outbox: ConnectOutbox) -> StatelessStageHandler:
    """Return the handler of topic `fresh`."""
    work = resemblance_work(context.lanes(), context.current, context.objects.inner)
    return StatelessStageHandler(context.settings, "resemblance", "paired", work, connect_outbox())


STAGE = PipelineStage("resemblance", "fresh", handler)

if __name__ == "__main__":
    command("resemblance", [stage_part([STAGE])])()
