"""Blocks with all that they lean on. Invariant: what is given agrees with its checksum; what is not is left out.

names -> what is not at hand -> what that leans on, level by level -> their records, a container in one trip
      -> decoded, all of a depth in one call, the shallow ones first

Directories alone tell what some few MiB of chunks need. Read and decoded group by group, three blocks at a time, the
26th of a row of dumps came back in twice the time, most of it spent between the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from nearkin.errors import Corrupt, NotFound
from nearkin.formats import layout
from nearkin.formats.block import CheckedBlock, checked_block
from nearkin.formats.directory import Directory
from nearkin.kernels.frames import decode_frames
from nearkin.limits import MIB
from nearkin.records import I32, U8, U32, U64, ZERO, ContainerId, Locations, bounds_of
from nearkin.store.containers import ContainerSource
from nearkin.store.plans import BlockName, Plan, by_block

DECODED_BYTES_MAX = 48 * MIB
"""Of blocks that are decoded together: they stay in memory for so long, whatever their cache lets go of."""
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


class _Wanted(NamedTuple):
    """A block to decode. It leans on rows `first` to `last` of the closure's."""

    name: BlockName
    slot: int
    raw_bytes: int
    kind: int
    depth: int
    first: int
    last: int


class _TooMuch(Exception):
    """Blocks and all that they lean on are more than may be decoded together."""


class _Closure:
    """Blocks and what they lean on. Each has a slot, in which its bytes lie once they are at hand."""

    def __init__(self) -> None:
        self.slots: dict[BlockName, int] = {}
        self.contents: list[U8 | None] = []
        self.wanted: list[_Wanted] = []
        self.rows = 0
        self._raw_bytes = 0
        self._parts: list[tuple[I32, U64, U32]] = []

    def want(self, name: BlockName, directory: Directory) -> Locations | None:
        """Add a block that is to be decoded; return what it leans on, None where it is not there. Raises _TooMuch."""
        table, block = directory.blocks, name[1]
        raw_bytes = int(table.raw[block]) if block < len(table) else 0
        if not raw_bytes:
            return None
        kind, first = int(table.kinds[block]), self.rows
        bases = directory.prefixes.of(block) if kind == layout.PATCH else Locations.empty()
        self.rows += len(bases)
        self._raw_bytes += max(raw_bytes, int(table.stored[block]))
        if self._raw_bytes > DECODED_BYTES_MAX or self.rows > ROWS_MAX:
            raise _TooMuch
        depth = int(table.depths[block])
        self.wanted.append(_Wanted(name, self.slots[name], raw_bytes, kind, depth, first, self.rows))
        return bases

    def lean(self, slots: I32, offsets: U64, lengths: U32) -> None:
        """Say where the next rows lie: in which slot, LOST or DELTA, from which byte, how many."""
        self._parts.append((slots, offsets, lengths))

    def slices(self) -> tuple[I32, U64, U32]:
        """Return where all rows lie."""
        none = np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        slots, offsets, lengths = zip(none, *self._parts, strict=True)
        return np.concatenate(slots), np.concatenate(offsets), np.concatenate(lengths)


class Chains:
    """Decodes blocks of one source, many in one call."""

    def __init__(self, source: ContainerSource, plan: Callable[[Locations], Plan]) -> None:
        """`plan` returns how rows are kept, and raises Corrupt."""
        self._source = source
        self._plan = plan
        self._many = source if isinstance(source, SupportsRecords) else None
        self._on_deltas: set[BlockName] = set()
        """Nothing is read for these in vain. A number names one block for ever."""

    def decoded(self, names: Sequence[BlockName]) -> list[U8 | None]:
        """Return what the first of some blocks decode to, of one at least; None for one that must be looked into.

        That is one which is damaged or was written anew, leans on such a one or on deltas, or on too much.
        Raises StoreUnavailable.
        """
        count = len(names)
        while True:
            try:
                closure = self._closure(names[:count])
            except _TooMuch:
                if count == 1:
                    return [None]
                count //= 2
                continue
            self._decode(closure)
            return [closure.contents[closure.slots[name]] for name in names[:count]]

    def _closure(self, names: Sequence[BlockName]) -> _Closure:
        """Return the blocks, and all that those lean on that are not at hand. Raises _TooMuch."""
        closure = _Closure()
        missing = self._missing(closure, names)
        while missing:
            missing = self._below(closure, missing)
        return closure

    def _missing(self, closure: _Closure, names: Sequence[BlockName]) -> list[BlockName]:
        """Give each block a slot; return those that are new, and not at hand."""
        missing = list[BlockName]()
        for name in names:
            if name not in closure.slots:
                closure.slots[name] = len(closure.contents)
                content = self._source.decoded(*name)
                closure.contents.append(content)
                if content is None and name not in self._on_deltas:
                    missing.append(name)
        return missing

    def _below(self, closure: _Closure, names: list[BlockName]) -> list[BlockName]:
        """Want these blocks; return those that they lean on, and that are new and not at hand."""
        bases, counts, depths = list[Locations](), list[int](), list[int]()
        for container, run in groupby(names, itemgetter(0)):
            try:
                directory = self._source.directory(container)
            except (Corrupt, NotFound):
                continue
            for name in run:
                mine = closure.want(name, directory)
                if mine is not None and len(mine):
                    bases.append(mine)
                    counts.append(len(mine))
                    depths.append(closure.wanted[-1].depth)
        if not bases:
            return []
        slots = np.full(sum(counts), LOST, np.int32)
        try:
            plan = self._plan(Locations.join(bases))
        except Corrupt:
            closure.lean(slots, np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint32))
            return []
        delta = plan.kinds == layout.XDELTA3
        slots[delta] = DELTA
        whole = ~delta & (plan.locations.containers != np.uint64(ZERO))
        rows = np.flatnonzero(whole & (plan.depths < np.repeat(np.array(depths, np.uint8), counts)))
        missing = list[BlockName]()
        if len(rows):
            blocks = by_block(plan, rows)
            missing = self._missing(closure, blocks.names)
            slots[blocks.rows] = np.repeat([closure.slots[name] for name in blocks.names], blocks.counts)
        closure.lean(slots, plan.positions.astype(np.uint64), plan.encoded)
        return missing

    def _decode(self, closure: _Closure) -> None:
        """Decode what is wanted: shallow blocks first, deeper ones lean on them."""
        if not closure.wanted:
            return
        slices = closure.slices()
        self._leave_out(closure, slices[0])
        checked = list(self._checked(closure.wanted))
        checked.sort(key=lambda found: found[0].depth)
        for _, run in groupby(checked, lambda found: found[0].depth):
            self._decode_depth(closure, list(run), slices)

    def _leave_out(self, closure: _Closure, slots: I32) -> None:
        """Want nothing that cannot be decoded here, whatever is read for it; remember what leans on deltas."""
        there = np.array([content is not None for content in closure.contents])
        if (slots >= 0).all():
            all_there = there.copy()
            all_there[[block.slot for block in closure.wanted]] = True
            if all_there[slots].all():
                return
        on_deltas = np.array([name in self._on_deltas for name in closure.slots])
        sound = list[_Wanted]()
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

    def _checked(self, wanted: list[_Wanted]) -> Iterator[tuple[_Wanted, CheckedBlock]]:
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
                said = checked.kind == block.kind or checked.kind != layout.PATCH
                if said and checked.raw_bytes == block.raw_bytes:
                    yield block, checked

    def _records(self, container: ContainerId, blocks: list[_Wanted]) -> list[bytes | memoryview | None]:
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

    def _decode_depth(
        self, closure: _Closure, blocks: list[tuple[_Wanted, CheckedBlock]], slices: tuple[I32, U64, U32]
    ) -> None:
        """Decode blocks of which none leans on another."""
        frames = list[tuple[_Wanted, CheckedBlock]]()
        for block, checked in blocks:
            if checked.codec == layout.STORED:
                self._keep(closure, block, np.frombuffer(checked.payload, np.uint8))
            else:
                frames.append((block, checked))
        slots, offsets, lengths = slices
        at_hand = np.array([content is not None for content in closure.contents])
        lost = np.append(0, np.cumsum((slots < 0) | ~at_hand[slots]))
        ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        some = [
            (block, checked)
            for block, checked in frames
            if lost[block.first] == lost[block.last] and ends[block.last] - ends[block.first] <= layout.PREFIX_BYTES_MAX
        ]
        if not some:
            return
        counts = np.array([block.last - block.first for block, _ in some], np.intp)
        counts[[checked.kind != layout.PATCH for _, checked in some]] = 0
        bounds = bounds_of(counts)
        firsts = np.array([block.first for block, _ in some], np.intp)
        rows = np.arange(int(bounds[-1])) + np.repeat(firsts - bounds[:-1], counts)
        outs = [self._source.buffers.take(block.raw_bytes) for block, _ in some]
        done = decode_frames(
            [checked.payload for _, checked in some],
            outs,
            [_NOTHING if content is None else content for content in closure.contents],
            slots[rows],
            offsets[rows],
            lengths[rows],
            bounds,
        )
        for (block, _), out, good in zip(some, outs, done.tolist(), strict=True):
            if good:
                self._keep(closure, block, out)

    def _keep(self, closure: _Closure, block: _Wanted, decoded: U8) -> None:
        closure.contents[block.slot] = decoded
        self._source.keep(*block.name, decoded)


_NOTHING: U8 = np.zeros(0, np.uint8)
