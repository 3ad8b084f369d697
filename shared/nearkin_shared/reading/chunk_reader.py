"""Reading chunks back. Invariant: memory is bounded by the batch asked for and the block cache, whatever the chain.

wanted rows -> plan (directories) -> encodings (one visit a block) -> deltas: the same for their bases, level by level
               blocks -> decoded together with what they lean on (`chains`)
                      -> one that cannot be: by itself, its bases are rows again

What is damaged, or leans on deltas, is walked by a stack of tasks, never by recursion; what a task holds meanwhile is
one batch, or a block and its bases. What all of them decode and hold has a bound (`walk`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import dropwhile, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import checked_block, decode_block
from nearkin_shared.formats.directory import CHUNK_ROW
from nearkin_shared.kernels.scatter_copy import gather
from nearkin_shared.kernels.table_rows import numbered, take_rows
from nearkin_shared.kernels.xdelta3 import decode_many
from nearkin_shared.limits import DEPTH_MAX
from nearkin_shared.reading.block_decoder import BlockDecoder
from nearkin_shared.reading.buffer_leases import BufferLeases
from nearkin_shared.reading.decode_budget import DecodeBudget, block_label
from nearkin_shared.reading.read_plan import BlockName, ByBlock, Plan, by_block
from nearkin_shared.storage.containers import ContainerRewritten, ContainerSource, object_name
from nearkin_shared.types import I32, U8, U32, U64, ZERO, ContainerId, Locations, Pieces, offsets_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool


@runtime_checkable
class SupportsRecordReconstruction(Protocol):
    """Where a block that is damaged may be known as it was written."""

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | memoryview | None:
        """Return the block, header and payload, None where it is not known."""


@runtime_checkable
class GenerationSource(Protocol):
    """Where a container may be there twice: who wrote it anew died before the older generation went."""

    @property
    def changes(self) -> int:
        """Return how many changes of containers were noted."""

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Return whether any of these is there in a later generation than was read, or came after `since` changes."""


REWRITTEN_MAX = 8
"""A plan is made again so often at most: of its containers, and those below, each is written anew once a day or so."""
MOVED_MAX = 256
"""So often where each time a later generation had come: a round at work overtakes who reads through chains of many
containers (of 8,700 reads beside rounds without pause, five began again more than 8 times, one 21 times)."""
WINDOW_BYTES = 4 * 1024 * 1024
"""Of rows that are looked up together: what lies close together in the stream leans on what lies close together, and of
chains through all of a batch more is wanted at the same time than the cache holds."""
LEVEL_BYTES_MAX = 64 * 1024 * 1024
"""Of distinct bases that are read together, and the deltas on them; of honest data 4 MiB lean on at most 128."""

Wanted = Plan | BlockName | list[BlockName] | int | U64
Task = Generator[Wanted, Any, Any]
"""Returns bytes; yields what it must have before it can go on, and is sent it: of a plan its bytes, of a block what it
decodes to, of several what some can be decoded to together. And, sent nothing, how many bytes it takes from now on, and
the containers by whose rows it knows what it asks for next."""


@dataclass(slots=True)
class _RunningTask:
    """A task, what it was started for, and what it holds, bytes."""

    task: Task
    wanted: Wanted
    held_bytes: int = 0
    through: list[U64] = field(default_factory=list)
    """The containers that it says it goes by, besides those of `wanted`."""


class ChunkReader:
    """Bytes of chunks by location."""

    def __init__(self, source: ContainerSource, helpers: ThreadPool = SERIAL) -> None:
        """`helpers` decode beside the caller."""
        self._source = source
        self._chains = BlockDecoder(source, self.plan, helpers)

    def tables(self, locations: Locations) -> tuple[I32, U64, list[NDArray[np.void] | None]]:
        """Return (which table each row is of, int32[n]; the container of each table; the tables, CHUNK_ROW).

        None for the built-in zero chunk's. Raises Corrupt, NotFound or StoreUnavailable.
        """
        which, containers = numbered(locations.containers)
        return (
            which,
            containers,
            [
                None if container == ZERO else self._source.directory(ContainerId(container)).rows
                for container in containers.tolist()
            ],
        )

    def plan(self, locations: Locations) -> Plan:
        """Return how the rows are kept. Raises Corrupt for an ordinal that its container does not have.

        It may have it by now: a round writes a container anew with more chunks, and what came since leans on them.
        """
        since = self._source.changes if isinstance(self._source, GenerationSource) else 0
        which, _, tables = self.tables(locations)
        rows = np.empty(len(locations), CHUNK_ROW)
        row = take_rows(tables, which, locations.ordinals, rows)
        if row < len(rows):
            container, kept = int(locations.containers[row]), tables[which[row]]
            if self._has_newer_generation([container], since):
                return self.plan(locations)
            counted = 0 if kept is None else len(kept)
            raise Corrupt(
                f"container {container:016x} has {counted} chunks, number {int(locations.ordinals[row])} is wanted"
            )
        zero = np.flatnonzero(locations.containers == np.uint64(ZERO))
        rows["lengths"][zero] = locations.ordinals[zero]
        if not rows["lengths"].all():
            row = int(np.flatnonzero(rows["lengths"] == 0)[0])
            if self._has_newer_generation([int(locations.containers[row])], since):
                return self.plan(locations)
            name = object_name(ContainerId(int(locations.containers[row])))
            raise Corrupt(f"{name}: chunk {int(locations.ordinals[row])} is wanted, and was collected as garbage")
        return Plan(locations, rows, since)

    def plan_with_bases(self, locations: Locations) -> tuple[Plan, Plan]:
        """Return how the rows are kept, and how the best bases of those are that are not raw, in order. Raises as
        `plan` does.
        """
        for _ in range(REWRITTEN_MAX):
            plan = self.plan(locations)
            try:
                return plan, self.plan(plan.bases.take(plan.depths > 0))
            except Corrupt:
                if not self._has_newer_generation(sorted(set(locations.containers.tolist())), plan.since):
                    raise
        plan = self.plan(locations)
        return plan, self.plan(plan.bases.take(plan.depths > 0))

    def fetch(self, plan: Plan) -> U8:
        """Return the rows' bytes, one after another, decoded but not yet verified. Raises Corrupt or NotFound."""
        return self._execute(self._rows, plan)  # type: ignore[no-any-return]  # what the task returns

    def lease(self, plan: Plan) -> Pieces:
        """Return the rows' bytes as `fetch` does, but where they lie in decoded blocks: few are copied.

        That keeps LENT_BYTES_MAX of blocks in memory, whatever their cache lets go of meanwhile.
        """
        return self._execute(self._lease, plan)  # type: ignore[no-any-return]

    def _execute(self, task: Callable[[Plan], Task], plan: Plan) -> Any:
        """Carry out a task, anew where a container was written anew since it was planned."""
        in_vain = 0
        for _ in range(MOVED_MAX):
            try:
                return self._run(task(plan), plan)
            except ContainerRewritten as err:
                in_vain += not err.moved
                if in_vain > REWRITTEN_MAX:
                    raise
                plan = self.plan(plan.locations)
        return self._run(task(plan), plan)

    def _run(self, task: Task, plan: Plan) -> Any:
        """Return what a task for a plan returns.

        Raises Corrupt; Rewritten where what leads to what is lost was read of an older generation than is there: the
        one that is may lean on something else. Who shares the caches may have read that one since the plan was made.
        """
        tasks = [_RunningTask(task, plan)]
        try:
            return self._walk_tasks(tasks)
        except ContainerRewritten:
            raise
        except Corrupt as err:
            if self._has_newer_generation(_containers_on_path(tasks), plan.since):
                raise _newer_generation_error(err) from err
            raise

    def _walk_tasks(self, tasks: list[_RunningTask]) -> Any:
        """Carry out the last of `tasks`, and what it wants after it; return what the first returns."""
        walk = DecodeBudget()
        answer: Any = None
        while True:
            started = tasks[-1]
            try:
                wanted = next(started.task) if answer is None else started.task.send(answer)
            except StopIteration as done:
                tasks.pop()
                answer = done.value
                if not tasks:
                    return done.value
                if isinstance(started.wanted, tuple):
                    walk.spend(answer.nbytes)
                    walk.retain(started.wanted, answer)
                continue
            answer = None
            if isinstance(wanted, int):
                started.held_bytes = wanted
                walk.spend(wanted)
                walk.hold(_walked_bytes(tasks))
            elif isinstance(wanted, np.ndarray):
                started.through.append(wanted)
            elif isinstance(wanted, list):
                walk.at = next(_walk_path(tasks), wanted[0])
                answer = self._chains.decode(wanted, walk.spend)
            elif isinstance(wanted, Plan):
                walk.spend(0, len(wanted))
                tasks.append(_RunningTask(self._rows(wanted), wanted))
            elif (answer := walk.retained(wanted)) is None:
                tasks.append(_RunningTask(self._block(wanted), wanted))

    def _lease(self, plan: Plan) -> Task:
        lending = BufferLeases(plan, self._source.buffers.take)
        whole = (plan.kinds != container_layout.XDELTA3) & (plan.locations.containers != np.uint64(ZERO))
        for rows in _windows(np.flatnonzero(whole), plan.lengths):
            yield from self._visit(plan, rows, lending.use)
        others = np.flatnonzero(~whole)
        return lending.finish(others, (yield plan.take(others)))

    def _rows(self, plan: Plan) -> Task:
        levels, which = [plan], list[NDArray[np.intp]]()
        while True:
            deltas = np.flatnonzero(levels[-1].kinds == container_layout.XDELTA3)
            if not len(deltas):
                break
            if len(levels) > DEPTH_MAX:
                raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")
            yield levels[-1].locations.containers[deltas]
            bases = levels[-1].bases.take(deltas)
            firsts, of_delta = bases.mentions()
            below = self.plan(bases.take(firsts))
            too_deep = np.flatnonzero(below.depths[of_delta] >= levels[-1].depths[deltas])
            if len(too_deep):
                raise self._too_deep(below.take(of_delta[too_deep]), "a delta's base is not shallower than the delta")
            level_bytes = below.lengths.sum(dtype=np.uint64) + levels[-1].encoded[deltas].sum(dtype=np.uint64)
            if level_bytes > LEVEL_BYTES_MAX and len(plan) > 1:
                return (yield from self._halves(plan))
            levels.append(below)
            which.append(of_delta)
        payload, lengths, of_delta = np.zeros(0, np.uint8), np.zeros(0, np.uint32), np.zeros(0, np.intp)
        while levels:
            level = levels.pop()
            payload = yield from self._level(level, payload, lengths, of_delta)
            lengths, of_delta = level.lengths, which.pop() if which else of_delta
        return payload

    def _halves(self, plan: Plan) -> Task:
        """Return the rows' bytes, one half read after the other. A row by itself is a chunk a level."""
        ends = np.cumsum(plan.lengths, dtype=np.uint64)
        out = self._source.buffers.take(int(ends[-1]))
        half = len(plan) // 2
        out[: ends[half - 1]] = yield plan.take(slice(0, half))
        out[ends[half - 1] :] = yield plan.take(slice(half, len(plan)))
        return out

    def _block(self, name: BlockName) -> Task:
        """Decode a block by itself, as it was written where what is stored of it is damaged. Raises Corrupt."""
        record = self._source.record(*name)
        try:
            return (yield from self._read_alone(name, record))
        except ContainerRewritten:
            raise
        except Corrupt as err:
            source = self._source
            whole = source.reconstruct_record(*name, err) if isinstance(source, SupportsRecordReconstruction) else None
            if whole is None or whole == record:
                raise
        return (yield from self._read_alone(name, whole))

    def _read_alone(self, name: BlockName, record: bytes | memoryview) -> Task:
        what = block_label(name)
        prefix: U8 | None = None
        checked = checked_block(record, what)  # its checksum, before anything is read for it
        told = self._source.directory(name[0]).blocks.raw[name[1] :][:1]  # none, or 0: gone since it was read
        if told.any() and told[0] != checked.raw_bytes:
            raise Corrupt(f"{what}: of {checked.raw_bytes} bytes, where its directory says {told[0]}")
        if checked.kind == container_layout.PATCH:
            prefix = yield self._base_blocks(name)
        decoded = decode_block(record, what, prefix, self._source.buffers.take)
        self._source.cache_blocks([name], [decoded])
        return decoded

    def _base_blocks(self, name: BlockName) -> Plan:
        """Return the plan of what a patch block leans on: all of it is less deep, and that ends every chain.

        Raises Corrupt; Rewritten where the block is gone.
        """
        what, (container, number) = block_label(name), name
        directory = self._source.directory(container)
        if number >= len(directory.blocks) or not directory.blocks.raw[number]:
            raise ContainerRewritten(f"{what} is gone: read again")
        if directory.blocks.kinds[number] != container_layout.PATCH:
            raise Corrupt(f"{what}: a patch block, which its directory does not say")
        plan = self.plan(directory.prefixes.of(number))
        prefix_bytes = int(plan.lengths.sum(dtype=np.uint64))
        too_deep = np.flatnonzero(plan.depths >= directory.blocks.depths[number])
        if len(too_deep) or prefix_bytes > container_layout.PREFIX_BYTES_MAX:
            why = f"{what}: bases of {prefix_bytes} bytes, or no shallower than what leans on them"
            raise self._too_deep(plan.take(too_deep), why)
        return plan

    def _too_deep(self, bases: Plan, why: str) -> Corrupt:
        """Return the error of bases as deep as what leans on them: in a later generation they may lie less deep.

        What was written since leans on that one, and an older one that is there still was read.
        """
        if self._has_newer_generation(sorted(set(bases.locations.containers.tolist())), bases.since):
            return _newer_generation_error(why)
        return Corrupt(why)

    def _has_newer_generation(self, containers: list[int], since: int | None = None) -> bool:
        """Look whether any of these is there in a later generation than was read; that is read from now on."""
        stored = [container for container in containers if container != ZERO]
        return isinstance(self._source, GenerationSource) and self._source.has_newer_generation(stored, since)

    def _level(self, plan: Plan, bases: U8, base_lengths: U32, which: NDArray[np.intp]) -> Task:
        """Return the rows' bytes; `bases` are those of distinct bases, each of its base length, `which` the deltas'."""
        zero = plan.locations.containers == np.uint64(ZERO)
        total = int(plan.lengths.sum(dtype=np.uint64))
        is_delta = plan.kinds == container_layout.XDELTA3
        yield total + len(bases) + int(plan.encoded[is_delta].sum(dtype=np.uint64))
        out = self._source.buffers.take(total)
        starts = offsets_of(plan.lengths)
        _fill_zeros(out, np.flatnonzero(zero), starts, plan.lengths)
        yield from self._copy(plan, np.flatnonzero(~is_delta & ~zero), out, starts)
        deltas = np.flatnonzero(is_delta)
        if len(deltas):
            sizes, lengths = plan.encoded[deltas], plan.lengths[deltas]
            at = offsets_of(sizes)
            encodings = np.empty(int(sizes.sum(dtype=np.uint64)), np.uint8)
            places = np.zeros(len(plan.lengths), np.uint64)
            places[deltas] = at
            yield from self._copy(plan, deltas, encodings, places)
            base_offsets, base_lengths = offsets_of(base_lengths)[which], base_lengths[which]
            decoded = decode_many(encodings, at, sizes, bases, base_offsets, base_lengths, lengths)
            gather([decoded], np.zeros(len(deltas), np.int32), offsets_of(lengths), lengths, out, starts[deltas])
        return out

    def _copy(self, plan: Plan, wanted: NDArray[np.intp], out: U8, places: U64) -> Generator[Wanted, Any, None]:
        """Copy the encodings of the wanted rows into `out`, row i at places[i]: one visit a block."""

        def copy(blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
            rows = blocks.rows_of(visits)
            which = np.repeat(np.arange(len(visits), dtype=np.int32), blocks.counts[visits])
            gather(contents, which, plan.positions[rows].astype(np.uint64), plan.encoded[rows], out, places[rows])

        return self._visit(plan, wanted, copy)

    def _visit(
        self, plan: Plan, wanted: NDArray[np.intp], use: Callable[[ByBlock, list[int], list[U8]], None]
    ) -> Generator[Wanted, Any, None]:
        """Let `use` have the blocks of the wanted rows: which of them, and what they decode to; some after others."""
        if not len(wanted):
            return
        blocks = by_block(plan, wanted)
        visits = np.argsort(blocks.rows[blocks.bounds[:-1]]).tolist()  # those close by in the stream share bases
        while visits:
            found: list[U8 | None] = yield [blocks.names[visit] for visit in visits]
            first, visits = visits[: len(found)], visits[len(found) :]
            sound = [(visit, content) for visit, content in zip(first, found, strict=True) if content is not None]
            alone = [visit for visit, content in zip(first, found, strict=True) if content is None]
            if sound:
                use(blocks, [visit for visit, _ in sound], [content for _, content in sound])
            del found, sound  # nothing is held while others are walked to, each in its time
            for visit in alone:
                use(blocks, [visit], [(yield blocks.names[visit])])


def _windows(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    """Return the rows in parts of about WINDOW_BYTES, one at least."""
    windows = np.cumsum(lengths[rows], dtype=np.int64) // WINDOW_BYTES
    cuts = np.flatnonzero(np.diff(windows)) + 1
    return [rows[first:last] for first, last in pairwise([0, *cuts.tolist(), len(rows)])]


def _newer_generation_error(why: object) -> ContainerRewritten:
    """Return the error of what was read of an older generation than is there."""
    found = ContainerRewritten(f"{why}: read again")
    found.moved = True
    return found


def _containers_on_path(tasks: list[_RunningTask]) -> list[int]:
    """Return the containers of which something was read that led to what is asked for now, ascending."""
    found = set[int]()
    for started in tasks:
        if isinstance(started.wanted, Plan):
            found.update(started.wanted.locations.containers.tolist())
        elif isinstance(started.wanted, tuple):
            found.add(started.wanted[0])
        for containers in started.through:
            found.update(containers.tolist())
    return sorted(found)


def _walk_path(tasks: list[_RunningTask]) -> Iterator[BlockName]:
    """Yield the blocks that are being walked to, what the first leans on after it."""
    return (started.wanted for started in tasks if isinstance(started.wanted, tuple))


def _walked_bytes(tasks: list[_RunningTask]) -> int:
    """Return what the tasks hold that were started for the first block that is walked to, and for what it leans on."""
    below = dropwhile(lambda started: not isinstance(started.wanted, tuple), tasks)
    return sum(started.held_bytes for started in below)


def _fill_zeros(out: U8, rows: NDArray[np.intp], starts: U64, lengths: U32) -> None:
    """Write the zero chunks `rows`, run by run: of a disk image half the bytes are some few runs."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
    for start, stop in zip(starts[firsts].tolist(), (starts[lasts] + lengths[lasts]).tolist(), strict=True):
        out[start:stop] = 0
