"""Run the delta service: `python -m nearkin_delta`."""

from nearkin_delta.handler import DeltaHandler
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command


def handler(context: Context, _: ConnectOutbox) -> DeltaHandler:
    """Return the handler of topic `paired`; it has an outbox for each of its two threads."""
    worker = f"delta-{context.worker}"
    objects = context.objects.inner
    return DeltaHandler(context.settings, context.current, context.lanes(), worker, context.authenticator, objects)


STAGE = PipelineStage("delta", "paired", handler)

if __name__ == "__main__":
    command("delta", [stage_part([STAGE])])()
