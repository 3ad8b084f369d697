"""Decoder of blocks with their bases, many in one call.

Invariant: every returned block agrees with its checksum; others are left out.

    names -> blocks not cached -> the bases of these, level by level -> their records, one read per container
          -> decoded in one call, by ascending depth

Directories alone determine the blocks needed for a few MiB of chunks. Decoded group by group, three blocks at a time,
the 26th version of a series of dumps took twice as long to restore, mostly outside the kernels.
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
from nearkin_shared.objectstore.local import TOGETHER_BYTES_MAX
from nearkin_shared.reading.read_plan import BlockName, ReadPlan, by_block
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import I32, U8, U32, U64, ZERO, ContainerId, Locations, bounds_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

DECODED_BYTES_MAX = 96 * MIB
"""Bound on blocks decoded together, which stay in memory until all are decoded."""
CONCURRENT_SHARE = 2
"""Divisor of that bound for a decoder concurrent with another one of the process, as in a gateway."""
ROWS_MAX = 1 << 17
"""Bound on bases planned together: 100 bytes each."""
ON_DELTAS_MAX = 1 << 16
"""Bound on remembered blocks with deltas as bases: 200 bytes each."""
LOST, DELTA = -1, -2
"""Values in place of a slot: an unreadable row, and a delta."""


@runtime_checkable
class SupportsRecords(Protocol):
    """Source that reads several blocks of a container in one read."""

    def records(
        self, container: ContainerId, blocks: Sequence[int], raw_bytes_max: int
    ) -> Sequence[bytes | memoryview]:
        """Return the first blocks as `record` does: one, and more up to `raw_bytes_max`."""


class _Request(NamedTuple):
    """Block to decode; its bases are the closure's rows from `first` to `last`."""

    name: BlockName
    slot: int
    raw_bytes: int
    kind: int
    depth: int
    first: int
    last: int


class _BudgetExceeded(Exception):
    """Blocks and their bases exceed the bound of one decode call."""


class _DependencyClosure:
    """Blocks and their bases; each has a slot, with its bytes once decoded."""

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
        """Return a container's directory, or None if unreadable; read once."""
        if container not in self._directories:
            try:
                self._directories[container] = source.directory(container)
            except (Corrupt, NotFound):
                self._directories[container] = None
        return self._directories[container]

    def request(self, name: BlockName, row: BlockRow) -> slice | None:
        """Add a block to decode; return its rows of bases, or None without bases.

        Raises: _BudgetExceeded.
        """
        first, patch = self.rows, row.kind == container_layout.PATCH
        self.rows += row.last_base - row.first_base if patch else 0
        self.raw_bytes += max(row.raw_bytes, row.stop - row.start)
        if self.raw_bytes > self._bytes_max or self.rows > ROWS_MAX:
            raise _BudgetExceeded
        self.wanted.append(_Request(name, self.slots[name], row.raw_bytes, row.kind, row.depth, first, self.rows))
        return slice(row.first_base, row.last_base) if self.rows > first else None

    def add_rows(self, slots: I32, offsets: U64, lengths: U32) -> None:
        """Add the positions of the next rows: slot (or LOST, DELTA), byte offset, length."""
        self._parts.append((slots, offsets, lengths))

    def slices(self) -> tuple[I32, U64, U32]:
        """Return the positions of all rows."""
        none = np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        slots, offsets, lengths = zip(none, *self._parts, strict=True)
        return np.concatenate(slots), np.concatenate(offsets), np.concatenate(lengths)


class _DecodeSlot:
    """Token of the first decoder; freed with its last reference.

    A Ctrl-C therefore releases it wherever it arrives.
    """


class _DecodeSlots:
    """Slot for one decoder at a time, without waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token: weakref.ref[_DecodeSlot] | None = None

    def take(self) -> _DecodeSlot | None:
        """Return the token, or None while another thread has it."""
        with self._lock:
            if self._token is not None and self._token() is not None:
                return None
            token = _DecodeSlot()
            self._token = weakref.ref(token)
            return token


class BlockDecoder:
    """Decoder of blocks of one source."""

    def __init__(
        self, source: ContainerSource, plan: Callable[[Locations], ReadPlan], helpers: ThreadPool = SERIAL
    ) -> None:
        """Create the decoder.

        `plan` returns the plan of rows, and raises Corrupt. `helpers` decode concurrently with the caller.
        """
        self._helpers = helpers
        self._source = source
        self._plan = plan
        self._record_source = source if isinstance(source, SupportsRecords) else None
        self._on_deltas: set[BlockName] = set()
        """Blocks with deltas as bases, which are not read in vain. A block number is never reused."""

    def decode(
        self, names: Sequence[BlockName], spend: Callable[[int, int], None] = lambda _bytes, _rows: None
    ) -> list[U8 | None]:
        """Return the decoded bytes of the first blocks, at least one; None for failures.

        A block fails if it is damaged or was rewritten, if a base is, or if its bases are deltas or exceed the bound.
        `spend` receives the number of decoded bytes and of planned rows.

        Raises: StoreUnavailable, and the exceptions of `spend`.
        """
        token = _decode_slots.take()
        try:
            if token is not None:
                return self._decode_up_to(names, spend, DECODED_BYTES_MAX, self._helpers)
            return self._decode_up_to(names, spend, DECODED_BYTES_MAX // CONCURRENT_SHARE, SERIAL)
        finally:
            del token  # not kept by the traceback of an exception

    def _decode_up_to(
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
        """Add the blocks and all their bases that are not cached. Raises _BudgetExceeded."""
        missing = self._missing(closure, names)
        while missing:
            missing = self._request_bases(closure, missing)

    def _missing(self, closure: _DependencyClosure, names: Sequence[BlockName]) -> list[BlockName]:
        """Assign a slot to each block; return the new ones that are not cached."""
        new = [name for name in dict.fromkeys(names) if name not in closure.slots]
        closure.slots.update(zip(new, range(len(closure.contents), len(closure.contents) + len(new)), strict=True))
        contents = self._source.cached_blocks(new)
        closure.contents += contents
        return [
            name for name, content in zip(new, contents, strict=True) if content is None and name not in self._on_deltas
        ]

    def _request_bases(self, closure: _DependencyClosure, names: list[BlockName]) -> list[BlockName]:
        """Request these blocks; return their bases that are new and not cached."""
        bases, counts, depths = list[tuple[Locations, int, int]](), list[int](), list[int]()
        for container, run in groupby(names, itemgetter(0)):
            directory = closure.directory(container, self._source)
            if directory is None:
                continue
            rows_of, table = directory.block_rows, directory.prefixes.bases
            for name in run:
                if name[1] >= len(rows_of) or not rows_of[name[1]].raw_bytes:
                    continue
                own_rows = closure.request(name, rows_of[name[1]])
                if own_rows is not None:
                    first, stop = own_rows.start, own_rows.stop
                    if bases and bases[-1][0] is table and bases[-1][2] == first:  # consecutive blocks
                        first = bases.pop()[1]
                    bases.append((table, first, stop))
                    counts.append(own_rows.stop - own_rows.start)
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
        is_raw = ~delta & (plan.locations.containers != np.uint64(ZERO))
        rows = np.flatnonzero(is_raw & (plan.depths < np.repeat(np.array(depths, np.uint8), counts)))
        missing = list[BlockName]()
        if len(rows):
            blocks = by_block(plan, rows)
            missing = self._missing(closure, blocks.names)
            slots[blocks.rows] = np.repeat([closure.slots[name] for name in blocks.names], blocks.counts)
        closure.add_rows(slots, plan.positions.astype(np.uint64), plan.encoded)
        return missing

    def _decode(self, closure: _DependencyClosure, helpers: ThreadPool) -> None:
        """Decode the requested blocks by ascending depth, since bases have a lower depth."""
        if not closure.wanted:
            return
        slots, offsets, lengths = closure.slices()
        self._drop_undecodable(closure, slots)
        found = sorted(self._verified_blocks(closure.wanted), key=lambda one: one[0].depth)
        stored = [(block, checked) for block, checked in found if checked.codec == container_layout.STORED]
        self._cache(closure, [(block, self._copy_if_shared(checked.payload)) for block, checked in stored])
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
            frames, firsts, lasts = [frames[row] for row in fit], firsts[fit], lasts[fit]
        bounds = bounds_of(lasts - firsts)
        rows = np.arange(int(bounds[-1])) + np.repeat(firsts - bounds[:-1], lasts - firsts)
        is_available = np.array([content is not None for content in closure.contents])
        buffers = [_NO_BYTES if content is None else content for content in closure.contents]
        outs = self._source.room_for([block.raw_bytes for block, _ in frames])
        for (block, _), out in zip(frames, outs, strict=True):
            buffers[block.slot] = out
        done = decode_frames(
            [checked.payload for _, checked in frames],
            np.array([block.slot for block, _ in frames], np.int32),
            buffers,
            is_available,
            slots[rows],
            offsets[rows],
            lengths[rows],
            bounds,
            helpers.run_on_all,
        )
        self._cache(
            closure, [(block, out) for (block, _), out, good in zip(frames, outs, done.tolist(), strict=True) if good]
        )

    def _drop_undecodable(self, closure: _DependencyClosure, slots: I32) -> None:
        """Drop requests that cannot be decoded here; remember blocks on deltas."""
        is_available = np.array([content is not None for content in closure.contents])
        if (slots >= 0).all():
            will_be_available = is_available.copy()
            will_be_available[[block.slot for block in closure.wanted]] = True
            if will_be_available[slots].all():
                return
        on_deltas = np.array([name in self._on_deltas for name in closure.slots])
        decodable = list[_Request]()
        for block in sorted(closure.wanted, key=attrgetter("depth")):
            own_rows = slots[block.first : block.last]
            own_slots = own_rows[own_rows >= 0]
            if len(own_slots) == len(own_rows) and is_available[own_slots].all():
                is_available[block.slot] = True
                decodable.append(block)
            elif (own_rows == DELTA).any() or on_deltas[own_slots].any():
                on_deltas[block.slot] = True
                if len(self._on_deltas) >= ON_DELTAS_MAX:
                    self._on_deltas.clear()
                self._on_deltas.add(block.name)
        closure.wanted = decodable

    def _verified_blocks(self, wanted: list[_Request]) -> Iterator[tuple[_Request, CheckedBlock]]:
        """Yield the blocks that agree with their directories, container by container."""
        for container, run in groupby(sorted(wanted, key=attrgetter("name")), lambda block: block.name[0]):
            blocks = list(run)
            for block, record in zip(blocks, self._records(container, blocks), strict=True):
                if record is None:
                    continue
                try:
                    checked = checked_block(record, "a block")
                except Corrupt:
                    continue
                is_expected_kind = checked.kind == block.kind or checked.kind != container_layout.PATCH
                if is_expected_kind and checked.raw_bytes == block.raw_bytes:
                    yield block, checked

    def _records(self, container: ContainerId, blocks: list[_Request]) -> list[bytes | memoryview | None]:
        """Return blocks of a container as stored, None for unreadable ones."""
        numbers = [block.name[1] for block in blocks]
        records = list[bytes | memoryview | None]()
        many = self._record_source
        while len(records) < len(numbers):
            left = numbers[len(records) :]
            try:
                if many is None:
                    records.append(self._source.record(container, left[0]))
                else:
                    read = many.records(container, left, DECODED_BYTES_MAX)
                    records += read
                    if len(read) < len(left):  # one of them is unreadable: read the rest one by one
                        many = None
            except (Corrupt, NotFound):
                records.append(None)
                many = None
        return records

    def _copy_if_shared(self, payload: memoryview) -> U8:
        """Copy a small block out of a shared read buffer, which the cache must not keep."""
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


_decode_slots = _DecodeSlots()
_NO_BYTES: U8 = np.zeros(0, np.uint8)
