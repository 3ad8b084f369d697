"""Reading chunks back. Invariant: memory is bounded by the batch asked for and the block cache, whatever the chain.

wanted rows -> plan (directories) -> encodings (one visit a block) -> deltas: the same for their bases, level by level
               a patch block -> its bases, which are rows again

A chain is walked by a stack of tasks, never by recursion. What a task holds meanwhile is one batch or one prefix.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import Corrupt, NotFound
from nearkin.formats import container as fmt
from nearkin.kernels.gather import gather
from nearkin.kernels.xdelta3 import decode_many
from nearkin.limits import DEPTH_MAX
from nearkin.records import U8, U32, U64, ZERO, Bools, ContainerId, Locations
from nearkin.stage import Contents
from nearkin.store.containers import ContainerSource, Rewritten, object_name


@runtime_checkable
class SupportsMendedRecords(Protocol):
    """Where a block that is damaged may be known as it was written."""

    def mended_record(self, container: ContainerId, block: int, why: Corrupt) -> bytes | None:
        """Return the block, header and payload, None where it is not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How each wanted row is kept: `rows` CHUNK_ROW[n], zeros but for the length where the built-in zero chunk is.

    Each column is a copy, contiguous as kernels want it.
    """

    locations: Locations
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> U32:
        """Return uint32[n] bytes of the chunks."""
        return np.ascontiguousarray(self.rows["lengths"])

    @property
    def encoded(self) -> U32:
        """Return uint32[n] bytes of their encodings."""
        return np.ascontiguousarray(self.rows["encoded"])

    @property
    def blocks(self) -> U32:
        """Return uint32[n] numbers of their blocks."""
        return np.ascontiguousarray(self.rows["blocks"])

    @property
    def positions(self) -> U32:
        """Return uint32[n]: where in the decoded block each encoding starts, bytes."""
        return np.ascontiguousarray(self.rows["positions"])

    @property
    def depths(self) -> U8:
        """Return uint8[n] deltas to decode."""
        return np.ascontiguousarray(self.rows["depths"])

    @property
    def bases(self) -> Locations:
        """Return where the bases lie, (0, 0) at depth 0."""
        rows = self.rows
        return Locations(rows["base_containers"].copy(), rows["base_ordinals"].copy())

    @property
    def names(self) -> U8:
        """Return uint8[n, 32] names."""
        return np.ascontiguousarray(self.rows["names"])

    @property
    def ranks(self) -> U8:
        """Return uint8[n]: what found the bases."""
        return np.ascontiguousarray(self.rows["ranks"])

    @property
    def kinds(self) -> U8:
        """Return uint8[n] kinds of their blocks: docs/formats/container.md."""
        return np.ascontiguousarray(self.rows["kinds"])

    def take(self, which: NDArray[np.intp] | Bools | slice) -> Plan:
        """Return some of the rows."""
        return Plan(self.locations.take(which), self.rows[which])


CONTENTS_BYTES_MAX = 32 * 1024 * 1024
"""Of bases read for one batch, at most."""

HELD_BYTES_MAX = 8 * 1024 * 1024
"""Of decoded blocks from which rows are copied together, and the block that passes it."""

REWRITTEN_MAX = 8
"""A plan is made again so often at most: of its containers, and those below, each is written anew once a day or so."""
MISSING_MAX = 1 << 16
_NO_LENGTHS: U32 = np.zeros(0, np.uint32)
Task = Generator[Any, U8, U8]
"""Returns bytes; yields what it must have before it can go on, and is sent it."""
Wanted = tuple[ContainerId, int] | Plan
"""A block, as (container, number), or rows."""


def offsets_of(lengths: U32) -> U64:
    """Return where each of the consecutive pieces starts, bytes."""
    wide = lengths.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


class ChunkReader:
    """Bytes of chunks by location."""

    def __init__(self, source: ContainerSource) -> None:
        self._source = source
        self._missing: set[int] = set()
        """Containers that were collected, and that older recipes still name."""

    def plan(self, locations: Locations) -> Plan:
        """Return how the rows are kept. Raises Corrupt for an ordinal that its container does not have."""
        rows = np.zeros(len(locations), fmt.CHUNK_ROW)
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
        """Return the rows' bytes, one after another, decoded but not yet verified. Raises Corrupt or NotFound.

        Where a container was written anew since it was planned, it is looked at again.
        """
        for _ in range(REWRITTEN_MAX):
            try:
                return self._fetched(plan)
            except Rewritten:
                plan = self.plan(plan.locations)
        return self._fetched(plan)

    def _fetched(self, plan: Plan) -> U8:
        tasks: list[Task] = [self._rows(plan)]
        answer: U8 | None = None
        while True:
            try:
                wanted = next(tasks[-1]) if answer is None else tasks[-1].send(answer)
            except StopIteration as done:
                tasks.pop()
                answer = done.value
                if not tasks:
                    return done.value  # type: ignore[no-any-return]  # what a Task returns
                continue
            answer = None
            if isinstance(wanted, Plan):
                tasks.append(self._rows(wanted))
                continue
            tasks.append(self._block(*wanted))

    def _rows(self, plan: Plan) -> Task:
        levels = [plan]
        while True:
            deltas = np.flatnonzero(levels[-1].kinds == fmt.XDELTA3)
            if not len(deltas):
                break
            if len(levels) > DEPTH_MAX:
                raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")
            below = self.plan(levels[-1].bases.take(deltas))
            if np.any(below.depths >= levels[-1].depths[deltas]):
                raise Corrupt("a delta's base is not shallower than the delta")
            levels.append(below)
        payload, lengths = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        while levels:
            level = levels.pop()
            payload = yield from self._level(level, payload, lengths)
            lengths = level.lengths
        return payload

    def _block(self, container: ContainerId, number: int) -> Task:
        record = self._source.record(container, number)
        what = f"{object_name(container)} block {number}"
        try:
            return (yield from self._decoded(container, number, record, what))
        except Corrupt as err:
            source = self._source
            whole = source.mended_record(container, number, err) if isinstance(source, SupportsMendedRecords) else None
            if whole is None or whole == record:
                raise
        return (yield from self._decoded(container, number, whole, what))

    def _decoded(self, container: ContainerId, number: int, record: bytes | memoryview, what: str) -> Task:
        """Decode a block. All that it leans on is shallower: that ends every chain."""
        prefix: U8 | None = None
        if fmt.kind_of(record) == fmt.PATCH:
            fmt.decode_block(record, what)  # its checksum, before anything is read for it
            directory = self._source.directory(container)
            if not directory.blocks.raw[number]:
                raise Rewritten(f"{what} is gone: read again")
            depth = int(directory.blocks.depths[number])
            if directory.blocks.kinds[number] != fmt.PATCH:
                raise Corrupt(f"{what}: a patch block, which its directory does not say")
            plan = self.plan(directory.prefixes.of(number))
            prefix_bytes = int(plan.lengths.sum(dtype=np.uint64))
            if np.any(plan.depths >= depth) or prefix_bytes > fmt.PREFIX_BYTES_MAX:
                raise Corrupt(f"{what}: bases of {prefix_bytes} bytes, or no shallower than what leans on them")
            prefix = yield plan
        decoded = fmt.decode_block(record, what, prefix, self._source.buffers.take)
        self._source.keep(container, number, decoded)
        return decoded

    def contents(self, locations: Locations, depth_below: int | None = None) -> Contents:
        """Return bytes and depths of what can be read; a chunk that is lost or broken is not available, no error.

        With `depth_below` chunks as deep as that are replaced as `Reads` says. What comes after CONTENTS_BYTES_MAX is
        not available either.
        """
        if self._missing and not (there := self._there(locations)).all():
            return self._some(locations, there, depth_below)
        try:
            return self._contents(locations, depth_below)
        except (Corrupt, NotFound):
            there = self._there(locations)
            if not there.all():  # garbage that was collected: what is around it is read as ever
                return self._some(locations, there, depth_below)
            return self._contents_piecewise(locations, depth_below)

    def _some(self, locations: Locations, there: Bools, depth_below: int | None) -> Contents:
        rows = np.flatnonzero(there)
        return _spread(self.contents(locations.take(rows), depth_below), rows, locations)

    def _there(self, locations: Locations) -> Bools:
        """Return which rows are chunks that their containers have."""
        there = np.ones(len(locations), np.bool_)
        for container, rows in grouped(locations.containers):
            if container == ZERO:
                continue
            lengths = self._lengths(container)
            ordinals = locations.ordinals[rows]
            there[rows] = ordinals < len(lengths)
            beyond = np.zeros(1, np.uint32)
            there[rows] &= np.concatenate([lengths, beyond])[np.minimum(ordinals, len(lengths))] > 0
        return there

    def _lengths(self, container: int) -> U32:
        """Return the lengths of a container's chunks, none where it is not there."""
        if container in self._missing:
            return _NO_LENGTHS
        try:
            return self._source.directory(ContainerId(container)).chunks.lengths
        except (Corrupt, NotFound):
            if len(self._missing) >= MISSING_MAX:
                self._missing.clear()
            self._missing.add(container)
            return _NO_LENGTHS

    def _contents(self, locations: Locations, depth_below: int | None) -> Contents:
        plan = self.plan(locations)
        if depth_below is not None:
            plan = self._replaced(plan, depth_below)
        distinct, which = _distinct(plan.locations)
        lengths = plan.lengths[distinct]
        kept = np.cumsum(lengths, dtype=np.uint64) <= CONTENTS_BYTES_MAX
        lengths = np.where(kept, lengths, 0).astype(np.uint32)
        payload = self.fetch(plan.take(distinct[kept]))
        offsets = offsets_of(lengths)
        return Contents(plan.locations, payload, offsets[which], lengths[which], plan.depths, kept[which])

    def _replaced(self, plan: Plan, depth_below: int) -> Plan:
        """Return the plan of the first ancestor of each row that is less deep than `depth_below`."""
        containers, ordinals = plan.locations.containers.copy(), plan.locations.ordinals.copy()
        replaced = Plan(Locations(containers, ordinals), plan.rows)
        for _ in range(DEPTH_MAX + 1):
            deep = np.flatnonzero(replaced.depths >= depth_below)
            if not len(deep):
                return replaced
            below = self.plan(replaced.bases.take(deep))
            containers[deep], ordinals[deep] = below.locations.containers, below.locations.ordinals
            replaced.rows[deep] = below.rows
        raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")

    def _contents_piecewise(self, locations: Locations, depth_below: int | None) -> Contents:
        """Read container by container, leaving out what fails: only on the way through damage."""
        count = len(locations)
        lengths, depths, available = np.zeros(count, np.uint32), np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        found = Locations(locations.containers.copy(), locations.ordinals.copy())
        offsets, parts, position = np.zeros(count, np.uint64), [], 0
        for _, rows in grouped(locations.containers):
            try:
                part = self._contents(locations.take(rows), depth_below)
            except (Corrupt, NotFound):
                continue
            lengths[rows], depths[rows], available[rows] = part.lengths, part.depths, part.available
            found.containers[rows], found.ordinals[rows] = part.locations.containers, part.locations.ordinals
            offsets[rows] = part.offsets + np.uint64(position)
            parts.append(part.payload)
            position += len(part.payload)
        payload = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        return Contents(found, payload, offsets, lengths, depths, available)

    def _level(self, plan: Plan, bases: U8, base_lengths: U32) -> Task:
        """Return the rows' bytes; `bases` are those of the deltas' bases, in order, each of its base length."""
        zero = plan.locations.containers == np.uint64(ZERO)
        total = int(plan.lengths.sum(dtype=np.uint64))
        out = self._source.buffers.take(total)
        starts = offsets_of(plan.lengths)
        _fill_zeros(out, np.flatnonzero(zero), starts, plan.lengths)
        is_delta = plan.kinds == fmt.XDELTA3
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

    def _copy(self, plan: Plan, wanted: NDArray[np.intp], out: U8, places: U64) -> Generator[Wanted, U8, None]:
        """Copy the encodings of the wanted rows into `out`, row i at places[i]: one visit a block.

        Blocks gather until HELD_BYTES_MAX are held, then all their rows are copied in one call.
        """
        if not len(wanted):
            return
        containers, blocks = plan.locations.containers[wanted], plan.blocks[wanted]
        order = np.lexsort((blocks, containers))
        wanted, containers, blocks = wanted[order], containers[order], blocks[order]
        changes = np.flatnonzero((containers[1:] != containers[:-1]) | (blocks[1:] != blocks[:-1])) + 1
        starts = np.concatenate([np.zeros(1, np.intp), changes])
        stops = [*changes.tolist(), len(wanted)]
        held: list[U8] = []
        held_bytes = first = copied = 0
        for number, (container, block) in enumerate(
            zip(containers[starts].tolist(), blocks[starts].tolist(), strict=True)
        ):
            content = self._source.decoded(container, block)
            if content is None:
                content = yield container, block
            held.append(content)
            held_bytes += len(content)
            if held_bytes >= HELD_BYTES_MAX or number == len(stops) - 1:
                rows = wanted[copied : stops[number]]
                sizes = np.diff(np.append(starts[first : number + 1], stops[number]))
                which = np.repeat(np.arange(len(held), dtype=np.int32), sizes)
                positions = plan.positions[rows].astype(np.uint64)
                gather(held, which, positions, plan.encoded[rows], out, places[rows])
                held, held_bytes, first, copied = [], 0, number + 1, stops[number]


def _spread(found: Contents, rows: NDArray[np.intp], locations: Locations) -> Contents:
    """Return what was found of some rows as answers for all of `locations`: the others are not available."""
    count = len(locations)
    replaced = Locations(locations.containers.copy(), locations.ordinals.copy())
    replaced.containers[rows], replaced.ordinals[rows] = found.locations.containers, found.locations.ordinals
    offsets, lengths = np.zeros(count, np.uint64), np.zeros(count, np.uint32)
    depths, available = np.zeros(count, np.uint8), np.zeros(count, np.bool_)
    offsets[rows], lengths[rows] = found.offsets, found.lengths
    depths[rows], available[rows] = found.depths, found.available
    return Contents(replaced, found.payload, offsets, lengths, depths, available)


def grouped(containers: U64) -> list[tuple[int, NDArray[np.intp]]]:
    """Return (container, its rows) for each container, rows ascending. Unlike np.unique it does not import numpy.ma."""
    if not len(containers):
        return []
    if (containers[1:] == containers[0]).all():
        return [(int(containers[0]), np.arange(len(containers)))]
    order = np.argsort(containers, kind="stable")
    changes = np.flatnonzero(np.diff(containers[order])) + 1
    return [(int(containers[rows[0]]), rows) for rows in np.split(order, changes)]


def _fill_zeros(out: U8, rows: NDArray[np.intp], starts: U64, lengths: U32) -> None:
    """Write the zero chunks `rows`, run by run: of a disk image half the bytes are some few runs."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
    for start, stop in zip(starts[firsts].tolist(), (starts[lasts] + lengths[lasts]).tolist(), strict=True):
        out[start:stop] = 0


def _distinct(locations: Locations) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (a row of each location, in the order of its first mention; which of these each row is)."""
    order = np.lexsort((locations.ordinals, locations.containers))
    containers, ordinals = locations.containers[order], locations.ordinals[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (containers[1:] != containers[:-1]) | (ordinals[1:] != ordinals[:-1])
    firsts = order[new]  # lexsort is stable: each group starts with its first mention
    by_mention = np.argsort(firsts)
    place = np.empty(len(firsts), np.intp)
    place[by_mention] = np.arange(len(firsts))
    which = np.empty(len(order), np.intp)
    which[order] = place[np.cumsum(new) - 1]
    return firsts[by_mention], which
