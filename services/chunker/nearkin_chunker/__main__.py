"""Run the chunker: `python -m nearkin_chunker`."""

from nearkin_chunker import ChunkerStage
from nearkin_chunker.handler import ChunkerHandler
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.kafka.worker import Context, WorkerPart, command


def handler(context: Context) -> ChunkerHandler:
    """Return the handler of topic `frames`."""
    tenants = context.lanes()

    def stage_of(tenant: str) -> ChunkerStage:
        return ChunkerStage(context.settings, tenants[tenant].fingerprinter)

    outbox = Outbox(context.settings, f"chunker-{context.worker}", context.authenticator)
    return ChunkerHandler(context.settings, stage_of, outbox, Backlog(context.settings))


if __name__ == "__main__":
    command("chunker", [WorkerPart("chunker", "frames", handler)])()
