"""Run the dedup service: `python -m nearkin_dedup`."""

from nearkin_dedup.handler import dedup_work
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.worker import Context, WorkerPart, command


def handler(context: Context) -> StatelessStageHandler:
    """Return the handler of topic `segments`."""
    outbox = Outbox(context.settings, f"dedup-{context.worker}", context.authenticator)
    return StatelessStageHandler(
        context.settings, "dedup", "fresh", dedup_work(context.settings, context.lanes()), outbox
    )


if __name__ == "__main__":
    command("dedup", [WorkerPart("dedup", "segments", handler)])()
