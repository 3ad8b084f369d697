"""`python -m nearkin_chunker`: frames into segments."""

from nearkin.runners.kafka.chunking import ChunkHandler
from nearkin.runners.kafka.clients import Outbox
from nearkin.runners.kafka.lag import Backlog
from nearkin.runners.kafka.worker import Context, Part, command
from nearkin_chunker import ChunkerStage


def handler(context: Context) -> ChunkHandler:
    """Return the handler of topic `frames`."""
    tenants = context.lanes()

    def stage_of(tenant: str) -> ChunkerStage:
        return ChunkerStage(context.settings, tenants[tenant].fingerprinter)

    outbox = Outbox(context.settings, f"chunker-{context.worker}", context.authenticator)
    return ChunkHandler(context.settings, stage_of, outbox, Backlog(context.settings))


if __name__ == "__main__":
    command("chunker", [Part("chunker", "frames", handler)])()
