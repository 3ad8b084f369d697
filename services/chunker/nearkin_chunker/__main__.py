"""Run the chunker: `python -m nearkin_chunker`."""

from nearkin_chunker import ChunkerStage
from nearkin_chunker.handler import ChunkerHandler
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command


def handler(context: Context, connect_outbox: ConnectOutbox) -> ChunkerHandler:
    """Return the handler of topic `frames`."""
    tenants = context.lanes()

    def stage_of(tenant: str) -> ChunkerStage:
        return ChunkerStage(context.settings, tenants[tenant].fingerprinter)

    return ChunkerHandler(
        context.settings, stage_of, connect_outbox(), Backlog(context.settings), context.objects.inner
    )


STAGE = PipelineStage("chunker", "frames", handler)

if __name__ == "__main__":
    command("chunker", [stage_part([STAGE])])()
