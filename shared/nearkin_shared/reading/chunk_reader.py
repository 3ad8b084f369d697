"""Reader of chunks by location.

Invariant: memory is bounded by the requested batch and the block cache, regardless of the base chains.

    rows -> plan (directories) -> encodings (one visit per block) -> deltas: the same for their bases, level by level
            blocks -> decoded together with their bases (`block_decoder`)
                   -> failed blocks: one by one, their bases are rows again

Damaged blocks, and those with deltas as bases, are decoded by a stack of tasks, never by recursion; a task holds one
batch, or a block and its bases. `decode_budget` bounds the bytes decoded and held by all of them.
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
from nearkin_shared.reading.read_plan import BlockName, ByBlock, ReadPlan, by_block
from nearkin_shared.storage.containers import ContainerRewritten, ContainerSource, object_name
from nearkin_shared.types import I32, U8, U32, U64, ZERO, ContainerId, Locations, Pieces, offsets_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool


@runtime_checkable
class SupportsRecordReconstruction(Protocol):
    """Source that may reconstruct a damaged block."""

    def reconstruct_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | memoryview | None:
        """Return the block, header and payload, or None."""


@runtime_checkable
class GenerationSource(Protocol):
    """Source in which two generations of a container may exist after a crash."""

    @property
    def changes(self) -> int:
        """Return the number of recorded container changes."""

    def has_newer_generation(self, containers: Iterable[int], since: int | None = None) -> bool:
        """Return whether a container has a later generation, or changed after `since`."""


REWRITTEN_MAX = 8
"""Bound on repeated plans: each container of a chain is rewritten at most about once a day."""
MOVED_MAX = 256
"""Bound on repeats of which each found a later generation: a GC run may overtake a reader of a long chain.

Of 8,700 reads concurrent with continuous GC runs, five were repeated more than 8 times, one of them 21 times.
"""
WINDOW_BYTES = 4 * 1024 * 1024
"""Bytes of rows that are looked up together.

Rows close together in the stream have bases close together; chains through a whole batch would exceed the cache.
"""
LEVEL_BYTES_MAX = 64 * 1024 * 1024
"""Bound on distinct bases read together, and their deltas; 4 MiB of honest data have bases of at most 128."""

Wanted = ReadPlan | BlockName | list[BlockName] | int | U64
Task = Generator[Wanted, Any, Any]
"""Generator that returns bytes and yields requests, whose results are sent back.

A plan yields its bytes, a block its decoded bytes, several blocks those that could be decoded together. An int
announces the bytes that the task holds from now on, and an array the containers that determine its next request;
neither has a result.
"""


@dataclass(slots=True)
class _RunningTask:
    """Task, the request for which it was started, and the bytes that it holds."""

    task: Task
    wanted: Wanted
    held_bytes: int = 0
    through: list[U64] = field(default_factory=list)
    """Containers that the task announced, besides those of `wanted`."""


class ChunkReader:
    """Reader of the bytes of chunks by location."""

    def __init__(self, source: ContainerSource, helpers: ThreadPool = SERIAL) -> None:
        """Create the reader; `helpers` decode concurrently with the caller."""
        self._source = source
        self._block_decoder = BlockDecoder(source, self.plan, helpers)

    def tables(self, locations: Locations) -> tuple[I32, U64, list[NDArray[np.void] | None]]:
        """Return (table number of each row, int32[n]; container of each table; tables).

        A table is CHUNK_ROW[m], None for the built-in zero chunk.

        Raises: Corrupt, NotFound, StoreUnavailable.
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

    def plan(self, locations: Locations) -> ReadPlan:
        """Return the plan of the rows.

        A missing ordinal may exist by now: a GC run rewrites a container with more chunks, and later data depend on
        them.

        Raises: Corrupt, for an ordinal that its container lacks.
        """
        since = self._source.changes if isinstance(self._source, GenerationSource) else 0
        which, _, tables = self.tables(locations)
        rows = np.empty(len(locations), CHUNK_ROW)
        row = take_rows(tables, which, locations.ordinals, rows)
        if row < len(rows):
            container, table = int(locations.containers[row]), tables[which[row]]
            if self._has_newer_generation([container], since):
                return self.plan(locations)
            counted = 0 if table is None else len(table)
            raise Corrupt(
                f"container {container:016x}: no chunk {int(locations.ordinals[row])}, it has {counted} chunks"
            )
        zero = np.flatnonzero(locations.containers == np.uint64(ZERO))
        rows["lengths"][zero] = locations.ordinals[zero]
        if not rows["lengths"].all():
            row = int(np.flatnonzero(rows["lengths"] == 0)[0])
            if self._has_newer_generation([int(locations.containers[row])], since):
                return self.plan(locations)
            name = object_name(ContainerId(int(locations.containers[row])))
            raise Corrupt(f"{name}: chunk {int(locations.ordinals[row])} is needed, but was collected as garbage")
        return ReadPlan(locations, rows, since)

    def plan_with_bases(self, locations: Locations) -> tuple[ReadPlan, ReadPlan]:
        """Return the plan of the rows, and that of the best bases of those that are not raw.

        Raises: as `plan` does.
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

    def fetch(self, plan: ReadPlan) -> U8:
        """Return the rows' consecutive bytes, decoded but not yet verified.

        Raises: Corrupt, NotFound.
        """
        return self._execute(self._rows, plan)  # type: ignore[no-any-return]  # what the task returns

    def lease(self, plan: ReadPlan) -> Pieces:
        """Return the rows' bytes within decoded blocks where possible; few are copied.

        The leases keep LEASED_BYTES_MAX of blocks in memory, even if the cache evicts them.
        """
        return self._execute(self._lease, plan)  # type: ignore[no-any-return]

    def _execute(self, task: Callable[[ReadPlan], Task], plan: ReadPlan) -> Any:
        """Execute a task; repeat it if a container was rewritten since its plan."""
        unmoved = 0
        for _ in range(MOVED_MAX):
            try:
                return self._run(task(plan), plan)
            except ContainerRewritten as err:
                unmoved += not err.moved
                if unmoved > REWRITTEN_MAX:
                    raise
                plan = self.plan(plan.locations)
        return self._run(task(plan), plan)

    def _run(self, task: Task, plan: ReadPlan) -> Any:
        """Return the result of a task for a plan.

        Raises: Corrupt. ContainerRewritten, if the path to the lost data was read in an older generation than the
        current one, whose bases may differ. A user of the same caches may have read that one since the plan was made.
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
        """Execute the last of `tasks` and its requests; return the result of the first."""
        budget = DecodeBudget()
        answer: Any = None
        while True:
            running = tasks[-1]
            try:
                wanted = next(running.task) if answer is None else running.task.send(answer)
            except StopIteration as done:
                tasks.pop()
                answer = done.value
                if not tasks:
                    return done.value
                if isinstance(running.wanted, tuple):
                    budget.spend(answer.nbytes)
                    budget.retain(running.wanted, answer)
                continue
            answer = None
            if isinstance(wanted, int):
                running.held_bytes = wanted
                budget.spend(wanted)
                budget.hold(_walked_bytes(tasks))
            elif isinstance(wanted, np.ndarray):
                running.through.append(wanted)
            elif isinstance(wanted, list):
                budget.at = next(_walk_path(tasks), wanted[0])
                answer = self._block_decoder.decode(wanted, budget.spend)
            elif isinstance(wanted, ReadPlan):
                budget.spend(0, len(wanted))
                tasks.append(_RunningTask(self._rows(wanted), wanted))
            elif (answer := budget.retained(wanted)) is None:
                tasks.append(_RunningTask(self._block(wanted), wanted))

    def _lease(self, plan: ReadPlan) -> Task:
        leases = BufferLeases(plan, self._source.buffers.take)
        is_raw = (plan.kinds != container_layout.XDELTA3) & (plan.locations.containers != np.uint64(ZERO))
        for rows in _windows(np.flatnonzero(is_raw), plan.lengths):
            yield from self._visit(plan, rows, leases.use)
        others = np.flatnonzero(~is_raw)
        return leases.finish(others, (yield plan.take(others)))

    def _rows(self, plan: ReadPlan) -> Task:
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
            bases_plan = self.plan(bases.take(firsts))
            too_deep = np.flatnonzero(bases_plan.depths[of_delta] >= levels[-1].depths[deltas])
            if len(too_deep):
                raise self._too_deep(
                    bases_plan.take(of_delta[too_deep]), "a delta's base has no lower depth than the delta"
                )
            level_bytes = bases_plan.lengths.sum(dtype=np.uint64) + levels[-1].encoded[deltas].sum(dtype=np.uint64)
            if level_bytes > LEVEL_BYTES_MAX and len(plan) > 1:
                return (yield from self._halves(plan))
            levels.append(bases_plan)
            which.append(of_delta)
        payload, lengths, of_delta = np.zeros(0, np.uint8), np.zeros(0, np.uint32), np.zeros(0, np.intp)
        while levels:
            level = levels.pop()
            payload = yield from self._level(level, payload, lengths, of_delta)
            lengths, of_delta = level.lengths, which.pop() if which else of_delta
        return payload

    def _halves(self, plan: ReadPlan) -> Task:
        """Return the rows' bytes, one half after the other; a single row needs a chunk per level."""
        ends = np.cumsum(plan.lengths, dtype=np.uint64)
        out = self._source.buffers.take(int(ends[-1]))
        half = len(plan) // 2
        out[: ends[half - 1]] = yield plan.take(slice(0, half))
        out[ends[half - 1] :] = yield plan.take(slice(half, len(plan)))
        return out

    def _block(self, name: BlockName) -> Task:
        """Decode a block by itself, reconstructed if damaged. Raises Corrupt."""
        record = self._source.record(*name)
        try:
            return (yield from self._read_alone(name, record))
        except ContainerRewritten:
            raise
        except Corrupt as err:
            source = self._source
            is_raw = source.reconstruct_record(*name, err) if isinstance(source, SupportsRecordReconstruction) else None
            if is_raw is None or is_raw == record:
                raise
        return (yield from self._read_alone(name, is_raw))

    def _read_alone(self, name: BlockName, record: bytes | memoryview) -> Task:
        what = block_label(name)
        prefix: U8 | None = None
        checked = checked_block(record, what)  # its checksum, before anything is read for it
        directory_bytes = self._source.directory(name[0]).blocks.raw[name[1] :][
            :1
        ]  # empty or 0: removed since it was read
        if directory_bytes.any() and directory_bytes[0] != checked.raw_bytes:
            raise Corrupt(f"{what}: has {checked.raw_bytes} bytes, but {directory_bytes[0]} in its directory")
        if checked.kind == container_layout.PATCH:
            prefix = yield self._base_blocks(name)
        decoded = decode_block(record, what, prefix, self._source.buffers.take)
        self._source.cache_blocks([name], [decoded])
        return decoded

    def _base_blocks(self, name: BlockName) -> ReadPlan:
        """Return the plan of a patch block's bases, all of lower depth, so that chains end.

        Raises: Corrupt. ContainerRewritten, if the block was removed.
        """
        what, (container, number) = block_label(name), name
        directory = self._source.directory(container)
        if number >= len(directory.blocks) or not directory.blocks.raw[number]:
            raise ContainerRewritten(f"{what} was removed; read the container again")
        if directory.blocks.kinds[number] != container_layout.PATCH:
            raise Corrupt(f"{what}: a patch block, but not in its directory")
        plan = self.plan(directory.prefixes.of(number))
        prefix_bytes = int(plan.lengths.sum(dtype=np.uint64))
        too_deep = np.flatnonzero(plan.depths >= directory.blocks.depths[number])
        if len(too_deep) or prefix_bytes > container_layout.PREFIX_BYTES_MAX:
            why = f"{what}: bases of {prefix_bytes} bytes, or at no lower depth than the block"
            raise self._too_deep(plan.take(too_deep), why)
        return plan

    def _too_deep(self, bases: ReadPlan, why: str) -> Corrupt:
        """Return the error for bases at too great a depth.

        If an older generation was read, they may have a lower depth in the later one, on which newer data depend.
        """
        if self._has_newer_generation(sorted(set(bases.locations.containers.tolist())), bases.since):
            return _newer_generation_error(why)
        return Corrupt(why)

    def _has_newer_generation(self, containers: list[int], since: int | None = None) -> bool:
        """Return whether a container has a later generation, which is read from now on."""
        stored = [container for container in containers if container != ZERO]
        return isinstance(self._source, GenerationSource) and self._source.has_newer_generation(stored, since)

    def _level(self, plan: ReadPlan, bases: U8, base_lengths: U32, which: NDArray[np.intp]) -> Task:
        """Return the rows' bytes.

        `bases` are the bytes of distinct bases with lengths `base_lengths`; `which` is the base of each delta.
        """
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

    def _copy(self, plan: ReadPlan, wanted: NDArray[np.intp], out: U8, places: U64) -> Generator[Wanted, Any, None]:
        """Copy the encodings of the rows into `out`, row i at `places[i]`: one visit per block."""

        def copy(blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
            rows = blocks.rows_of(visits)
            which = np.repeat(np.arange(len(visits), dtype=np.int32), blocks.counts[visits])
            gather(contents, which, plan.positions[rows].astype(np.uint64), plan.encoded[rows], out, places[rows])

        return self._visit(plan, wanted, copy)

    def _visit(
        self, plan: ReadPlan, wanted: NDArray[np.intp], use: Callable[[ByBlock, list[int], list[U8]], None]
    ) -> Generator[Wanted, Any, None]:
        """Pass the blocks of the rows to `use`, with their decoded bytes, in groups."""
        if not len(wanted):
            return
        blocks = by_block(plan, wanted)
        visits = np.argsort(blocks.rows[blocks.bounds[:-1]]).tolist()  # neighbours in the stream share bases
        while visits:
            found: list[U8 | None] = yield [blocks.names[visit] for visit in visits]
            first, visits = visits[: len(found)], visits[len(found) :]
            decoded_visits = [
                (visit, content) for visit, content in zip(first, found, strict=True) if content is not None
            ]
            failed_visits = [visit for visit, content in zip(first, found, strict=True) if content is None]
            if decoded_visits:
                use(blocks, [visit for visit, _ in decoded_visits], [content for _, content in decoded_visits])
            del found, decoded_visits  # nothing is held while failed blocks are decoded one by one
            for visit in failed_visits:
                use(blocks, [visit], [(yield blocks.names[visit])])


def _windows(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    """Return the rows in parts of about WINDOW_BYTES, one at least."""
    windows = np.cumsum(lengths[rows], dtype=np.int64) // WINDOW_BYTES
    cuts = np.flatnonzero(np.diff(windows)) + 1
    return [rows[first:last] for first, last in pairwise([0, *cuts.tolist(), len(rows)])]


def _newer_generation_error(why: object) -> ContainerRewritten:
    """Return the error for data read from an older generation."""
    found = ContainerRewritten(f"{why}; a newer generation exists, read again")
    found.moved = True
    return found


def _containers_on_path(tasks: list[_RunningTask]) -> list[int]:
    """Return the containers whose data led to the current request, ascending."""
    found = set[int]()
    for running in tasks:
        if isinstance(running.wanted, ReadPlan):
            found.update(running.wanted.locations.containers.tolist())
        elif isinstance(running.wanted, tuple):
            found.add(running.wanted[0])
        for containers in running.through:
            found.update(containers.tolist())
    return sorted(found)


def _walk_path(tasks: list[_RunningTask]) -> Iterator[BlockName]:
    """Yield the blocks being decoded one by one; each is a base of the one before."""
    return (running.wanted for running in tasks if isinstance(running.wanted, tuple))


def _walked_bytes(tasks: list[_RunningTask]) -> int:
    """Return the bytes held by the tasks from the first single block on."""
    bases_plan = dropwhile(lambda running: not isinstance(running.wanted, tuple), tasks)
    return sum(running.held_bytes for running in bases_plan)


def _fill_zeros(out: U8, rows: NDArray[np.intp], starts: U64, lengths: U32) -> None:
    """Write the zero chunks `rows` run by run: half of a disk image may be a few runs."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
    for start, stop in zip(starts[firsts].tolist(), (starts[lasts] + lengths[lasts]).tolist(), strict=True):
        out[start:stop] = 0
