# size: the entry point of a process
"""Run the delta service: `python -m nearkin_delta`."""

from nearkin_delta.handler import DeltaHandler
from nearkin_shared.kafka.worker import Context, WorkerPart, command


def placer(context: Context) -> DeltaHandler:
    """Return the handler of topic `paired`."""
    worker = f"delta-{context.worker}"
    return DeltaHandler(context.settings, context.current, context.lanes(), worker, context.authenticator)


if __name__ == "__main__":
    command("delta", [WorkerPart("delta", "paired", placer)])()
