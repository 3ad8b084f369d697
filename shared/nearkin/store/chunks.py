"""Reading chunks back. Invariant: memory is bounded by the batch asked for and the block cache, whatever the chain.

wanted rows -> plan (directories) -> encodings (one visit a block) -> deltas: the same for their bases, level by level
               a patch block -> its bases, which are rows again

A chain is walked by a stack of tasks, never by recursion, and level by level: all blocks of a depth, and then what they
lean on, together. What a task holds meanwhile is one batch, or a group of blocks and their bases.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import Corrupt
from nearkin.formats import layout
from nearkin.formats.block import decode_block, kind_of, raw_bytes_of
from nearkin.formats.directory import CHUNK_ROW
from nearkin.kernels.gather import gather
from nearkin.kernels.xdelta3 import decode_many
from nearkin.limits import DEPTH_MAX
from nearkin.records import U8, U32, U64, ZERO, ContainerId, Locations, Pieces, grouped, offsets_of
from nearkin.store.containers import ContainerSource, Rewritten, object_name
from nearkin.store.lending import Lending
from nearkin.store.plans import BlockName, ByBlock, Plan, by_block


@runtime_checkable
class SupportsMendedRecords(Protocol):
    """Where a block that is damaged may be known as it was written."""

    def mended_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | memoryview | None:
        """Return the block, header and payload, None where it is not known."""


@runtime_checkable
class SupportsRecords(Protocol):
    """Where several blocks of a container can be read in one trip."""

    def records(
        self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int
    ) -> Sequence[bytes | memoryview]:
        """Return the first of these blocks, as `record` does: one, and more while they decode to less than that."""


@runtime_checkable
class SupportsGenerations(Protocol):
    """Where a container may be there twice: who wrote it anew died before the older generation went."""

    def moved(self, containers: Iterable[int]) -> bool:
        """Return whether any of these is there in a later generation than was read."""


HELD_BYTES_MAX = 8 * 1024 * 1024
"""Of decoded blocks from which rows are copied together, and the block that passes it."""

REWRITTEN_MAX = 8
"""A plan is made again so often at most: of its containers, and those below, each is written anew once a day or so."""
WINDOW_BYTES = 4 * 1024 * 1024
"""Of rows that are looked up together: what lies close together in the stream leans on what lies close together, and of
chains through all of a batch more is wanted at the same time than the cache holds."""
GROUP_BYTES_MAX = 4 * 1024 * 1024
"""Of blocks that are decoded together, and of bases that are read for them together; and the one that passes it."""
GROUP_BLOCKS_MAX = 64
GROUP_BASES_MAX = 1 << 17
"""Of blocks whose bases are planned together, and the one that passes it: 70 bytes each."""

Wanted = Plan | list[BlockName]
Task = Generator[Wanted, Any, Any]
"""Returns bytes; yields what it must have before it can go on, and is sent it: of a plan its bytes, of blocks what the
first of them decode to."""


class ChunkReader:
    """Bytes of chunks by location."""

    def __init__(self, source: ContainerSource) -> None:
        self._source = source
        self._many = source if isinstance(source, SupportsRecords) else None

    def plan(self, locations: Locations) -> Plan:
        """Return how the rows are kept. Raises Corrupt for an ordinal that its container does not have."""
        rows = np.zeros(len(locations), CHUNK_ROW)
        for container, mine in grouped(locations.containers):
            ordinals = locations.ordinals[mine]
            if container == ZERO:
                rows["lengths"][mine] = ordinals
                continue
            kept = self._source.directory(ContainerId(container)).rows
            if int(ordinals.max()) >= len(kept):
                raise Corrupt(
                    f"container {container:016x} has {len(kept)} chunks, number {int(ordinals.max())} is wanted"
                )
            rows[mine] = kept[ordinals]
        if not rows["lengths"].all():
            row = int(np.flatnonzero(rows["lengths"] == 0)[0])
            name = object_name(ContainerId(int(locations.containers[row])))
            raise Corrupt(f"{name}: chunk {int(locations.ordinals[row])} is wanted, and was collected as garbage")
        return Plan(locations, rows)

    def fetch(self, plan: Plan) -> U8:
        """Return the rows' bytes, one after another, decoded but not yet verified. Raises Corrupt or NotFound."""
        return self._carried_out(self._rows, plan)  # type: ignore[no-any-return]  # what the task returns

    def lent(self, plan: Plan) -> Pieces:
        """Return the rows' bytes as `fetch` does, but where they lie in decoded blocks: few are copied.

        That keeps LENT_BYTES_MAX of blocks in memory, whatever their cache lets go of meanwhile.
        """
        return self._carried_out(self._lent, plan)  # type: ignore[no-any-return]

    def _carried_out(self, task: Callable[[Plan], Task], plan: Plan) -> Any:
        """Carry out a task, anew where a container was written anew since it was planned."""
        for _ in range(REWRITTEN_MAX):
            try:
                return self._run(task(plan))
            except Rewritten:
                plan = self.plan(plan.locations)
        return self._run(task(plan))

    def _run(self, task: Task) -> Any:
        tasks = [task]
        answer: Any = None
        while True:
            try:
                wanted = next(tasks[-1]) if answer is None else tasks[-1].send(answer)
            except StopIteration as done:
                tasks.pop()
                answer = done.value
                if not tasks:
                    return done.value
                continue
            answer = None
            tasks.append(self._rows(wanted) if isinstance(wanted, Plan) else self._blocks(wanted))

    def _lent(self, plan: Plan) -> Task:
        lending = Lending(plan, self._source.buffers.take)
        whole = (plan.kinds != layout.XDELTA3) & (plan.locations.containers != np.uint64(ZERO))
        for rows in _windows(np.flatnonzero(whole), plan.lengths):
            yield from self._visit(plan, rows, lending.use)
        others = np.flatnonzero(~whole)
        return lending.ended(others, (yield plan.take(others)))

    def _rows(self, plan: Plan) -> Task:
        levels = [plan]
        while True:
            deltas = np.flatnonzero(levels[-1].kinds == layout.XDELTA3)
            if not len(deltas):
                break
            if len(levels) > DEPTH_MAX:
                raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")
            below = self.plan(levels[-1].bases.take(deltas))
            too_deep = np.flatnonzero(below.depths >= levels[-1].depths[deltas])
            if len(too_deep):
                raise self._too_deep(below.take(too_deep), "a delta's base is not shallower than the delta")
            levels.append(below)
        payload, lengths = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        while levels:
            level = levels.pop()
            payload = yield from self._level(level, payload, lengths)
            lengths = level.lengths
        return payload

    def _blocks(self, wanted: list[BlockName]) -> Task:
        """Decode the first of some blocks of one depth, of which none leans on another: about GROUP_BYTES_MAX."""
        records = self._records(wanted)
        found: list[U8 | None] = [None] * len(records)
        patches = []
        for number, record in enumerate(records):
            if kind_of(record) == layout.PATCH:
                patches.append(number)
            else:
                found[number] = self._tried(wanted[number], record, None)
        for together in self._few_bases(wanted, patches):
            for some, plan, bounds in self._planned(wanted, records, together):
                payload = yield plan
                for number, prefix in zip(some, np.split(payload, bounds), strict=True):
                    found[number] = self._tried(wanted[number], records[number], prefix)
        for number, record in enumerate(records):
            if found[number] is None:
                found[number] = yield from self._alone(wanted[number], record)
        return found

    def _records(self, wanted: list[BlockName]) -> list[bytes | memoryview]:
        """Read the first of some blocks: about GROUP_BYTES_MAX, a container in one trip where that can be."""
        records = list[bytes | memoryview]()
        left_bytes = GROUP_BYTES_MAX
        for container, run in groupby(wanted, itemgetter(0)):
            blocks = [block for _, block in run]
            while blocks and left_bytes > 0:
                if self._many is None:
                    read: Sequence[bytes | memoryview] = [self._source.record(container, blocks[0])]
                else:
                    read = self._many.records(container, blocks, left_bytes)
                records += read
                left_bytes -= sum(map(raw_bytes_of, read))
                blocks = blocks[len(read) :]
            if left_bytes <= 0:
                break
        return records

    def _tried(self, name: BlockName, record: bytes | memoryview, prefix: U8 | None) -> U8 | None:
        """Decode a block; None where that fails: why is looked into for that block alone."""
        try:
            return self._decoded(name, record, prefix)
        except Corrupt:
            return None

    def _decoded(self, name: BlockName, record: bytes | memoryview, prefix: U8 | None) -> U8:
        checked = prefix is not None  # by who found out what that is
        decoded = decode_block(record, _called(name), prefix, self._source.buffers.take, checked=checked)
        self._source.keep(*name, decoded)
        return decoded

    def _few_bases(self, names: list[BlockName], patches: list[int]) -> Iterator[list[int]]:
        """Yield some of `patches` after one another: each time those of GROUP_BASES_MAX, mostly all."""
        some, bases = list[int](), 0
        for number in patches:
            container, block = names[number]
            bounds = self._source.directory(container).prefixes.bounds
            bases += int(np.diff(bounds[block : block + 2]).sum())
            some.append(number)
            if bases >= GROUP_BASES_MAX:
                yield some
                some, bases = [], 0
        yield some

    def _planned(
        self, names: list[BlockName], records: list[bytes | memoryview], patches: list[int]
    ) -> Iterator[tuple[list[int], Plan, NDArray[np.intp]]]:
        """Yield (some of `patches`, the plan of all their bases, where one's bytes end and the next one's begin).

        Where not all can be planned, none is.
        """
        if not patches:
            return
        try:
            plan, rows, ends = self._leaned_on(
                [names[number] for number in patches], [records[number] for number in patches]
            )
        except Corrupt:
            return
        first = 0
        while first < len(patches):
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + GROUP_BYTES_MAX, "right")) - 1)
            some = plan.take(slice(int(rows[first]), int(rows[last])))
            yield patches[first:last], some, ends[first + 1 : last] - ends[first]
            first = last

    def _alone(self, name: BlockName, record: bytes | memoryview) -> Task:
        """Decode a block by itself, as it was written where what is stored of it is damaged. Raises Corrupt."""
        try:
            return (yield from self._by_itself(name, record))
        except Rewritten:
            raise
        except Corrupt as err:
            source = self._source
            whole = source.mended_record(*name, err) if isinstance(source, SupportsMendedRecords) else None
            if whole is None or whole == record:
                raise
        return (yield from self._by_itself(name, whole))

    def _by_itself(self, name: BlockName, record: bytes | memoryview) -> Task:
        prefix: U8 | None = None
        if kind_of(record) == layout.PATCH:
            plan, _, _ = self._leaned_on([name], [record])
            prefix = yield plan
        return self._decoded(name, record, prefix)

    def _leaned_on(
        self, names: list[BlockName], records: list[bytes | memoryview]
    ) -> tuple[Plan, NDArray[np.intp], NDArray[np.intp]]:
        """Return the plan of what patch blocks lean on, one after another, and its rows and bytes up to each block.

        Raises Corrupt; Rewritten where a block is gone. What is leaned on is shallower: that ends every chain.
        """
        bases, depths = [], []
        for (container, number), record in zip(names, records, strict=True):
            what = _called((container, number))
            decode_block(record, what)  # its checksum, before anything is read for it
            directory = self._source.directory(container)
            if number >= len(directory.blocks) or not directory.blocks.raw[number]:
                raise Rewritten(f"{what} is gone: read again")
            if directory.blocks.kinds[number] != layout.PATCH:
                raise Corrupt(f"{what}: a patch block, which its directory does not say")
            bases.append(directory.prefixes.of(number))
            depths.append(directory.blocks.depths[number])
        plan = self.plan(Locations.join(bases))
        counts = np.array([len(some) for some in bases], np.intp)
        rows = np.append(0, np.cumsum(counts))
        ends = np.append(0, np.cumsum(plan.lengths, dtype=np.intp))[rows]
        limits = np.repeat(np.array(depths, np.uint8), counts)
        prefix_bytes = int(np.diff(ends).max())
        too_deep = np.flatnonzero(plan.depths >= limits)
        if len(too_deep) or prefix_bytes > layout.PREFIX_BYTES_MAX:
            what = ", ".join(map(_called, names))
            why = f"{what}: bases of {prefix_bytes} bytes, or no shallower than what leans on them"
            raise self._too_deep(plan.take(too_deep), why)
        return plan, rows, ends

    def _too_deep(self, bases: Plan, why: str) -> Corrupt:
        """Return the error of bases as deep as what leans on them: in a later generation they may lie less deep.

        What was written since leans on that one, and an older one that is there still was read.
        """
        containers = sorted(set(bases.locations.containers.tolist()) - {ZERO})
        if isinstance(self._source, SupportsGenerations) and self._source.moved(containers):
            return Rewritten(f"{why}: read again")
        return Corrupt(why)

    def _level(self, plan: Plan, bases: U8, base_lengths: U32) -> Task:
        """Return the rows' bytes; `bases` are those of the deltas' bases, in order, each of its base length."""
        zero = plan.locations.containers == np.uint64(ZERO)
        total = int(plan.lengths.sum(dtype=np.uint64))
        out = self._source.buffers.take(total)
        starts = offsets_of(plan.lengths)
        _fill_zeros(out, np.flatnonzero(zero), starts, plan.lengths)
        is_delta = plan.kinds == layout.XDELTA3
        yield from self._copy(plan, np.flatnonzero(~is_delta & ~zero), out, starts)
        deltas = np.flatnonzero(is_delta)
        if len(deltas):
            sizes, lengths = plan.encoded[deltas], plan.lengths[deltas]
            at = offsets_of(sizes)
            encodings = np.empty(int(sizes.sum(dtype=np.uint64)), np.uint8)
            places = np.zeros(len(plan.lengths), np.uint64)
            places[deltas] = at
            yield from self._copy(plan, deltas, encodings, places)
            decoded = decode_many(encodings, at, sizes, bases, offsets_of(base_lengths), base_lengths, lengths)
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
        """Let `use` have the blocks of the wanted rows: which of them, and what they decode to.

        Blocks gather until HELD_BYTES_MAX are held. Those that are not at hand come last, shallow ones first: what a
        deeper one leans on may be among them.
        """
        if not len(wanted):
            return
        blocks = by_block(plan, wanted)
        visits: list[int] = []
        held: list[U8] = []
        missing: list[int] = []
        held_bytes = 0
        for visit, name in enumerate(blocks.names):
            content = self._source.decoded(*name)
            if content is None:
                missing.append(visit)
                continue
            visits.append(visit)
            held.append(content)
            held_bytes += len(content)
            if held_bytes >= HELD_BYTES_MAX:
                use(blocks, visits, held)
                visits, held, held_bytes = [], [], 0
        if visits:
            use(blocks, visits, held)
        depths = plan.depths[blocks.rows[blocks.bounds[:-1]]].tolist()
        missing.sort(key=depths.__getitem__)
        while missing:
            level = [visit for visit in missing[:GROUP_BLOCKS_MAX] if depths[visit] == depths[missing[0]]]
            held = yield [blocks.names[visit] for visit in level]
            use(blocks, level[: len(held)], held)
            missing = missing[len(held) :]


def _windows(rows: NDArray[np.intp], lengths: U32) -> list[NDArray[np.intp]]:
    """Return the rows in parts of about WINDOW_BYTES, one at least."""
    windows = np.cumsum(lengths[rows], dtype=np.int64) // WINDOW_BYTES
    return np.split(rows, np.flatnonzero(np.diff(windows)) + 1)


def _called(name: BlockName) -> str:
    return f"{object_name(name[0])} block {name[1]}"


def _fill_zeros(out: U8, rows: NDArray[np.intp], starts: U64, lengths: U32) -> None:
    """Write the zero chunks `rows`, run by run: of a disk image half the bytes are some few runs."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
    for start, stop in zip(starts[firsts].tolist(), (starts[lasts] + lengths[lasts]).tolist(), strict=True):
        out[start:stop] = 0
