"""Run the resemblance service: `python -m nearkin_resemblance`."""

from nearkin_resemblance.handler import resemblance_work
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.worker import Context, WorkerPart, command


def handler(context: Context) -> StatelessStageHandler:
    """Return the handler of topic `fresh`."""
    outbox = Outbox(context.settings, f"resemblance-{context.worker}", context.authenticator)
    work = resemblance_work(context.lanes(), context.current)
    return StatelessStageHandler(context.settings, "resemblance", "paired", work, outbox)


if __name__ == "__main__":
    command("resemblance", [WorkerPart("resemblance", "fresh", handler)])()
