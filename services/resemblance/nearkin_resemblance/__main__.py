"""`python -m nearkin_resemblance`: finds the base candidates of fresh chunks."""

from nearkin.runners.kafka.clients import Outbox
from nearkin.runners.kafka.relaying import RelayHandler, resemblance_work
from nearkin.runners.kafka.worker import Context, Part, command


def handler(context: Context) -> RelayHandler:
    """Return the handler of topic `fresh`."""
    outbox = Outbox(context.settings, f"resemblance-{context.worker}", context.authenticator)
    work = resemblance_work(context.lanes(), context.current)
    return RelayHandler(context.settings, "resemblance", "paired", work, outbox)


if __name__ == "__main__":
    command("resemblance", [Part("resemblance", "fresh", handler)])()
