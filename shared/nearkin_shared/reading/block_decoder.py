"""Blocks with all that they lean on. Invariant: what is given agrees with its checksum; what is not is left out.

names -> what is not at hand -> what that leans on, level by level -> their records, a container in one trip
      -> decoded, all in one call, the shallow ones first

Directories alone tell what some few MiB of chunks need. Read and decoded group by group, three blocks at a time, the
26th of a row of dumps came back in twice the time, most of it spent between the kernels.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import CheckedBlock, checked_block
from nearkin_shared.formats.directory import BlockRow, Directory
from nearkin_shared.kernels.zstd_frames import decode_frames
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import TOGETHER_BYTES_MAX
from nearkin_shared.reading.read_plan import BlockName, Plan, by_block
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import I32, U8, U32, U64, ZERO, ContainerId, Locations, bounds_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

DECODED_BYTES_MAX = 96 * MIB
"""Of blocks that are decoded together: they stay in memory for so long, whatever their cache lets go of."""
CONCURRENT_SHARE = 2
"""Who decodes beside another thread of the process has this part of it: a gateway restores many versions at a time."""
ROWS_MAX = 1 << 17
"""Of bases that are planned together: 100 bytes each."""
ON_DELTAS_MAX = 1 << 16
"""Of blocks that are known to lean on deltas: 200 bytes each."""
LOST, DELTA = -1, -2
"""In place of a slot: a row that cannot be had, one that is a delta."""


@runtime_checkable
class SupportsRecords(Protocol):
    """Where several blocks of a container can be read in one trip."""

    def records(
        self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int
    ) -> Sequence[bytes | memoryview]:
        """Return the first of these blocks, as `record` does: one, and more while they decode to less than that."""


class _Request(NamedTuple):
    """A block to decode. It leans on rows `first` to `last` of the closure's."""

    name: BlockName
    slot: int
    raw_bytes: int
    kind: int
    depth: int
    first: int
    last: int


class _BudgetExceeded(Exception):
    """Blocks and all that they lean on are more than may be decoded together."""


class _DependencyClosure:
    """Blocks and what they lean on. Each has a slot, in which its bytes lie once they are at hand."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.slots: dict[BlockName, int] = {}
        self.contents: list[U8 | None] = []
        self.wanted: list[_Request] = []
        self.rows = 0
        self.raw_bytes = 0
        self._parts: list[tuple[I32, U64, U32]] = []
        self._directories: dict[ContainerId, Directory | None] = {}

    def directory(self, container: ContainerId, source: ContainerSource) -> Directory | None:
        """Return a container's directory, None where it cannot be had; each is asked for once."""
        if container not in self._directories:
            try:
                self._directories[container] = source.directory(container)
            except (Corrupt, NotFound):
                self._directories[container] = None
        return self._directories[container]

    def request(self, name: BlockName, row: BlockRow) -> slice | None:
        """Add a block that is to be decoded; return what it leans on, None where that is nothing. Raises
        _BudgetExceeded.
        """
        first, patch = self.rows, row.kind == container_layout.PATCH
        self.rows += row.last_base - row.first_base if patch else 0
        self.raw_bytes += max(row.raw_bytes, row.stop - row.start)
        if self.raw_bytes > self._bytes_max or self.rows > ROWS_MAX:
            raise _BudgetExceeded
        self.wanted.append(_Request(name, self.slots[name], row.raw_bytes, row.kind, row.depth, first, self.rows))
        return slice(row.first_base, row.last_base) if self.rows > first else None

    def add_rows(self, slots: I32, offsets: U64, lengths: U32) -> None:
        """Say where the next rows lie: in which slot, LOST or DELTA, from which byte, how many."""
        self._parts.append((slots, offsets, lengths))

    def slices(self) -> tuple[I32, U64, U32]:
        """Return where all rows lie."""
        none = np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        slots, offsets, lengths = zip(none, *self._parts, strict=True)
        return np.concatenate(slots), np.concatenate(offsets), np.concatenate(lengths)


class _DecodeSlot:
    """It is over once nobody holds it: wherever a Ctrl-C falls, who had it has it no more."""


class _DecodeSlots:
    """Whoever has the turn was the first to decode; nobody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: weakref.ref[_DecodeSlot] | None = None

    def take(self) -> _DecodeSlot | None:
        """Return the turn, None while somebody has it."""
        with self._lock:
            if self._taken is not None and self._taken() is not None:
                return None
            turn = _DecodeSlot()
            self._taken = weakref.ref(turn)
            return turn


class BlockDecoder:
    """Decodes blocks of one source, many in one call."""

    def __init__(
        self, source: ContainerSource, plan: Callable[[Locations], Plan], helpers: ThreadPool = SERIAL
    ) -> None:
        """`plan` returns how rows are kept, and raises Corrupt. `helpers` decode beside the caller."""
        self._helpers = helpers
        self._source = source
        self._plan = plan
        self._many = source if isinstance(source, SupportsRecords) else None
        self._on_deltas: set[BlockName] = set()
        """Nothing is read for these in vain. A number names one block for ever."""

    def decode(
        self, names: Sequence[BlockName], spend: Callable[[int, int], None] = lambda _bytes, _rows: None
    ) -> list[U8 | None]:
        """Return what the first of some blocks decode to, of one at least; None for one that must be looked into.

        That is one which is damaged or was written anew, leans on such a one or on deltas, or on too much. `spend` is
        told how many bytes are decoded, and rows planned. Raises StoreUnavailable, and what `spend` raises.
        """
        turn = _turns.take()
        try:
            if turn is not None:
                return self._decoded(names, spend, DECODED_BYTES_MAX, self._helpers)
            return self._decoded(names, spend, DECODED_BYTES_MAX // CONCURRENT_SHARE, SERIAL)
        finally:
            del turn  # not kept by the traceback of what was raised

    def _decoded(
        self, names: Sequence[BlockName], spend: Callable[[int, int], None], bytes_max: int, helpers: ThreadPool
    ) -> list[U8 | None]:
        count = len(names)
        while True:
            closure = _DependencyClosure(bytes_max)
            try:
                self._close(closure, names[:count])
            except _BudgetExceeded:
                spend(0, closure.rows)
                if count == 1:
                    return [None]
                count //= 2
                continue
            spend(closure.raw_bytes, closure.rows)
            self._decode(closure, helpers)
            return [closure.contents[closure.slots[name]] for name in names[:count]]

    def _close(self, closure: _DependencyClosure, names: Sequence[BlockName]) -> None:
        """Add the blocks, and all that those lean on that are not at hand. Raises _BudgetExceeded."""
        missing = self._missing(closure, names)
        while missing:
            missing = self._request_bases(closure, missing)

    def _missing(self, closure: _DependencyClosure, names: Sequence[BlockName]) -> list[BlockName]:
        """Give each block a slot; return those that are new, and not at hand."""
        new = [name for name in dict.fromkeys(names) if name not in closure.slots]
        closure.slots.update(zip(new, range(len(closure.contents), len(closure.contents) + len(new)), strict=True))
        contents = self._source.cached_blocks(new)
        closure.contents += contents
        return [
            name for name, content in zip(new, contents, strict=True) if content is None and name not in self._on_deltas
        ]

    def _request_bases(self, closure: _DependencyClosure, names: list[BlockName]) -> list[BlockName]:
        """Want these blocks; return those that they lean on, and that are new and not at hand."""
        bases, counts, depths = list[tuple[Locations, int, int]](), list[int](), list[int]()
        for container, run in groupby(names, itemgetter(0)):
            directory = closure.directory(container, self._source)
            if directory is None:
                continue
            rows_of, table = directory.block_rows, directory.prefixes.bases
            for name in run:
                if name[1] >= len(rows_of) or not rows_of[name[1]].raw_bytes:
                    continue
                mine = closure.request(name, rows_of[name[1]])
                if mine is not None:
                    first, stop = mine.start, mine.stop
                    if bases and bases[-1][0] is table and bases[-1][2] == first:  # blocks that follow one another
                        first = bases.pop()[1]
                    bases.append((table, first, stop))
                    counts.append(mine.stop - mine.start)
                    depths.append(rows_of[name[1]].depth)
        if not bases:
            return []
        slots = np.full(sum(counts), LOST, np.int32)
        try:
            plan = self._plan(Locations.join([table.take(slice(first, stop)) for table, first, stop in bases]))
        except Corrupt:
            closure.add_rows(slots, np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint32))
            return []
        delta = plan.kinds == container_layout.XDELTA3
        slots[delta] = DELTA
        whole = ~delta & (plan.locations.containers != np.uint64(ZERO))
        rows = np.flatnonzero(whole & (plan.depths < np.repeat(np.array(depths, np.uint8), counts)))
        missing = list[BlockName]()
        if len(rows):
            blocks = by_block(plan, rows)
            missing = self._missing(closure, blocks.names)
            slots[blocks.rows] = np.repeat([closure.slots[name] for name in blocks.names], blocks.counts)
        closure.add_rows(slots, plan.positions.astype(np.uint64), plan.encoded)
        return missing

    def _decode(self, closure: _DependencyClosure, helpers: ThreadPool) -> None:
        """Decode what is wanted: shallow blocks first, deeper ones lean on them."""
        if not closure.wanted:
            return
        slots, offsets, lengths = closure.slices()
        self._leave_out(closure, slots)
        found = sorted(self._verified_blocks(closure.wanted), key=lambda one: one[0].depth)
        stored = [(block, checked) for block, checked in found if checked.codec == container_layout.STORED]
        self._cache(closure, [(block, self._copied(checked.payload)) for block, checked in stored])
        frames = [(block, checked) for block, checked in found if checked.codec != container_layout.STORED]
        firsts = np.array([block.first for block, _ in frames], np.intp)
        lasts = np.array(
            [block.last if checked.kind == container_layout.PATCH else block.first for block, checked in frames],
            np.intp,
        )
        reached = np.append(0, np.cumsum(lengths, dtype=np.int64))
        too_long = reached[lasts] - reached[firsts] > container_layout.PREFIX_BYTES_MAX
        if too_long.any():
            fit = np.flatnonzero(~too_long)
            frames, firsts, lasts = [frames[place] for place in fit], firsts[fit], lasts[fit]
        bounds = bounds_of(lasts - firsts)
        rows = np.arange(int(bounds[-1])) + np.repeat(firsts - bounds[:-1], lasts - firsts)
        there = np.array([content is not None for content in closure.contents])
        buffers = [_NOTHING if content is None else content for content in closure.contents]
        outs = self._source.room_for([block.raw_bytes for block, _ in frames])
        for (block, _), out in zip(frames, outs, strict=True):
            buffers[block.slot] = out
        done = decode_frames(
            [checked.payload for _, checked in frames],
            np.array([block.slot for block, _ in frames], np.int32),
            buffers,
            there,
            slots[rows],
            offsets[rows],
            lengths[rows],
            bounds,
            helpers.run_on_all,
        )
        self._cache(
            closure, [(block, out) for (block, _), out, good in zip(frames, outs, done.tolist(), strict=True) if good]
        )

    def _leave_out(self, closure: _DependencyClosure, slots: I32) -> None:
        """Want nothing that cannot be decoded here, whatever is read for it; remember what leans on deltas."""
        there = np.array([content is not None for content in closure.contents])
        if (slots >= 0).all():
            all_there = there.copy()
            all_there[[block.slot for block in closure.wanted]] = True
            if all_there[slots].all():
                return
        on_deltas = np.array([name in self._on_deltas for name in closure.slots])
        sound = list[_Request]()
        for block in sorted(closure.wanted, key=attrgetter("depth")):
            mine = slots[block.first : block.last]
            known = mine[mine >= 0]
            if len(known) == len(mine) and there[known].all():
                there[block.slot] = True
                sound.append(block)
            elif (mine == DELTA).any() or on_deltas[known].any():
                on_deltas[block.slot] = True
                if len(self._on_deltas) >= ON_DELTAS_MAX:
                    self._on_deltas.clear()
                self._on_deltas.add(block.name)
        closure.wanted = sound

    def _verified_blocks(self, wanted: list[_Request]) -> Iterator[tuple[_Request, CheckedBlock]]:
        """Yield the blocks that are as their directories say, a container after another."""
        for container, run in groupby(sorted(wanted, key=attrgetter("name")), lambda block: block.name[0]):
            blocks = list(run)
            for block, record in zip(blocks, self._records(container, blocks), strict=True):
                if record is None:
                    continue
                try:
                    checked = checked_block(record, "a block")
                except Corrupt:
                    continue
                said = checked.kind == block.kind or checked.kind != container_layout.PATCH
                if said and checked.raw_bytes == block.raw_bytes:
                    yield block, checked

    def _records(self, container: ContainerId, blocks: list[_Request]) -> list[bytes | memoryview | None]:
        """Return some blocks of a container as they are stored, None for what cannot be read."""
        numbers = [block.name[1] for block in blocks]
        records = list[bytes | memoryview | None]()
        many = self._many
        while len(records) < len(numbers):
            left = numbers[len(records) :]
            try:
                if many is None:
                    records.append(self._source.record(container, left[0]))
                else:
                    read = many.records(container, left, DECODED_BYTES_MAX)
                    records += read
                    if len(read) < len(left):  # something among them cannot be read: ask for all of them once
                        many = None
            except (Corrupt, NotFound):
                records.append(None)
                many = None
        return records

    def _copied(self, payload: memoryview) -> U8:
        """Return a block's bytes for the cache: not in memory that others share, which were read with it."""
        read = np.frombuffer(payload, np.uint8)
        if len(read) >= TOGETHER_BYTES_MAX:
            return read
        own = self._source.buffers.take(len(read))
        own[:] = read
        return own

    def _cache(self, closure: _DependencyClosure, decoded: Sequence[tuple[_Request, U8]]) -> None:
        for block, content in decoded:
            closure.contents[block.slot] = content
        self._source.cache_blocks([block.name for block, _ in decoded], [content for _, content in decoded])


_turns = _DecodeSlots()
_NOTHING: U8 = np.zeros(0, np.uint8)
