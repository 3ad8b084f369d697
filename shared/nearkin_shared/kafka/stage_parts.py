"""Make the loops of a worker that carries consecutive stages.

    stages chunker, dedup, resemblance, delta, committer, all in one process:

    topic frames   -> chunker -> dedup -> resemblance -> delta -> topic placed
    topic segments ->            dedup -> resemblance -> delta
    topic fresh    ->                     resemblance -> delta
    topic paired   ->                                    delta
    topic placed   -> committer

Every topic of a contained stage is read, in the same consumer group as by a worker of that stage alone: workers of
different groupings share the work, so a fleet changes from one grouping to another while it runs, and dead letters of
any stage can be replayed.

Invariant: the committer reads topic `placed`, whose partition is decided by the key: one committer decides on the
versions of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.consumer_loop import Handler
from nearkin_shared.kafka.earlier_messages import EarlierMessages
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.kafka.stage_chain import ChainLink, chain
from nearkin_shared.kafka.worker import Context, WorkerPart
from nearkin_shared.utils.frozen import frozen

ConnectOutbox = Callable[[], StageOutbox]
"""Returns a new outbox to the next stage."""


@frozen
class PipelineStage:
    """One stage: its consumer group, its topic, and how its handler is made."""

    service: str
    topic: str
    make: Callable[[Context, ConnectOutbox], Handler]
    is_keyed_otherwise: bool = False
    """Its topic has another key than the topic of the stage before, so its messages always go through Kafka."""


def stage_part(stages: Sequence[PipelineStage], *, is_fed_in_memory: bool = False) -> WorkerPart:
    """Return the loop that carries the records of the first stage's topic through all.

    `is_fed_in_memory`: the stage before is in the same process.
    """
    first = stages[0]

    def make(context: Context) -> Handler:
        def outbox_of(service: str) -> Outbox:
            return Outbox(context.settings, f"{service}-{context.worker}", context.authenticator)

        links = [ChainLink(one.service, one.topic, partial(one.make, context)) for one in stages]
        earlier = EarlierMessages(context.settings, [(one.service, one.topic) for one in stages[1:]])
        return chain(context.settings, links, outbox_of, earlier)

    return WorkerPart(first.service, first.topic, make, is_fed_in_memory)


def parts_of(stages: Sequence[PipelineStage], chosen: Collection[str]) -> list[WorkerPart]:
    """Return one loop for each of the `chosen` stages.

    It continues through the chosen stages that follow directly. `stages`: all stages, in the order of the pipeline.
    """
    found = []
    for number, stage in enumerate(stages):
        if stage.service not in chosen:
            continue
        run = [stage]
        for following in stages[number + 1 :]:
            if following.service not in chosen or following.is_keyed_otherwise:
                break
            run.append(following)
        before = stages[number - 1].service if number and not stage.is_keyed_otherwise else None
        found.append(stage_part(run, is_fed_in_memory=before in chosen))
    return found
