"""`python -m nearkin_delta`: encodes and stores chunks, commits versions, and rebuilds an index that was lost."""

from nearkin.index.redis.key_locks import RedisKeyLocks
from nearkin.runners.kafka.committing import CommitHandler
from nearkin.runners.kafka.lag import Backlog
from nearkin.runners.kafka.placing import PlaceHandler
from nearkin.runners.kafka.worker import Context, Part, command
from nearkin.store.manifests import ManifestStore


def placer(context: Context) -> PlaceHandler:
    """Return the handler of topic `paired`."""
    worker = f"delta-{context.worker}"
    return PlaceHandler(context.settings, context.current, context.lanes(), worker, context.authenticator)


def committer(context: Context) -> CommitHandler:
    """Return the handler of topic `placed`."""
    locks = RedisKeyLocks(context.index)
    manifests, worker = ManifestStore(context.objects, locks), f"committer-{context.worker}"
    backlog, authenticator = Backlog(context.settings), context.authenticator
    return CommitHandler(context.settings, manifests, context.lanes(), worker, backlog, authenticator, locks)


if __name__ == "__main__":
    command("delta", [Part("delta", "paired", placer), Part("committer", "placed", committer)])()
