"""Other bases in several containers. Invariant: what is decided leans on what was decided, or is as deep as ever.

    place   1  2  3        what lies at one place of the stream is decided in each container, the oldest first, and
    c1      a  d  g        then what lies at the next: what all of them lean on is decoded once, not once for each
    c2      b  e  h
    c3      c  f  i

One container after another, the last 16 of 20 dumps had 10.9 GB decoded for 1.3 that differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rebase import ContainerRebase, RebaseContext, RebasePlan, RebaseTask
from nearkin_maintenance.optimize.encoder_port import BlockEncoderPort
from nearkin_shared.errors import Corrupt
from nearkin_shared.limits import MIB
from nearkin_shared.reading.base_reader import BaseReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId

SIDE_CHUNKS_MAX = 1 << 20
"""Of the containers that are made side by side: 60 bytes each."""
SIDE_BYTES_MAX = 64 * MIB
"""Of what is encoded of them. Where it becomes more, the last ones wait, and are made with those that come then."""


class BatchRebase:
    """Makes next generations of which chunks lean on others than before."""

    def __init__(
        self,
        containers: ContainerStore,
        laying: BlockWriter,
        recode: BlockEncoderPort,
        rebasing: RebasePlan,
        drops: Mapping[int, ContainerRemoval],
    ) -> None:
        self._means = RebaseContext(containers, laying, recode, BaseReader(containers, recode.helpers), rebasing, {})
        self._drops = drops

    def generations(
        self, order: Sequence[ContainerId], told: Callable[[Sequence[RebaseTask]], Iterable[RebaseTask]]
    ) -> Iterator[bytes]:
        """Yield the next generation of each container, in an order in which each comes after those it leans on.

        `told` yields tasks, and may end all by raising. Raises Corrupt in the turn of one that cannot be made.
        """
        left = list(order)
        while left:
            for data in self._some(left, told):
                yield data
                del left[0]

    def _some(
        self, order: Sequence[ContainerId], told: Callable[[Sequence[RebaseTask]], Iterable[RebaseTask]]
    ) -> Iterator[bytes]:
        """Yield the first of them, one at least, made side by side. Raises Corrupt where the next one is broken."""
        underway, broken = self._begin_all(order)
        tasks = sorted(task for which, one in enumerate(underway) for task in one.tasks(which))
        held_bytes = 0
        for task in told(tasks):
            if task.which >= len(underway):
                continue
            try:
                held_bytes += underway[task.which].execute(task)
            except Corrupt as err:
                held_bytes = _release_from(underway, task.which)
                broken = err
            while held_bytes > SIDE_BYTES_MAX and len(underway) > 1:
                held_bytes = _release_from(underway, len(underway) - 1)
                broken = None  # it comes later, and is broken then
        waiting = deque(underway)
        del underway
        while waiting:
            yield waiting.popleft().encode()
        if broken is not None:
            raise broken

    def _begin_all(self, order: Sequence[ContainerId]) -> tuple[list[ContainerRebase], Corrupt | None]:
        underway, chunks = list[ContainerRebase](), 0
        for container in order:
            try:
                directory = self._means.containers.directory(container)
            except Corrupt as err:
                return underway, err
            chunks += len(directory.chunks)
            if underway and chunks > SIDE_CHUNKS_MAX:
                break
            underway.append(ContainerRebase(self._means, directory, self._drops[container]))
        return underway, None


def _release_from(underway: list[ContainerRebase], first: int) -> int:
    """Let go of containers from one on; return the bytes that are encoded of the others."""
    for one in underway[first:]:
        one.rollback_depths()
    del underway[first:]
    return sum(one.held_bytes for one in underway)
