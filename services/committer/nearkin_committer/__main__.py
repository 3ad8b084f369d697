"""Run the committer: `python -m nearkin_committer`."""

from nearkin_committer.handler import CommitterHandler
from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.kafka.stage_parts import ConnectOutbox, PipelineStage, stage_part
from nearkin_shared.kafka.worker import Context, command
from nearkin_shared.storage.manifests import ManifestStore


def handler(context: Context, _: ConnectOutbox) -> CommitterHandler:
    """Return the handler of topic `placed`; it has its own outbox."""
    locks = FleetKeyLocks(context.index.state)
    manifests, worker = ManifestStore(context.objects, locks), f"committer-{context.worker}"
    backlog, authenticator = Backlog(context.settings), context.authenticator
    return CommitterHandler(
        context.settings, manifests, context.lanes(), worker, backlog, authenticator, locks, context.commits
    )


STAGE = PipelineStage("committer", "placed", handler, is_keyed_otherwise=True)

if __name__ == "__main__":
    command("committer", [stage_part([STAGE])])()
