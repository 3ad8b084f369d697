"""Build a container from chunks and recipes.

One open block per depth, so that a delta never makes its neighbours deeper:

    depth 0 | raw raw raw ...      |  block 0, 2, 5
    depth 1 | delta delta ...      |  block 1, 3

The encoding of a block is chosen when it closes (`block_encoder.py`); its depth may then decrease, never increase.

Invariant: a chunk has its final (container, ordinal) once it is added, and can be read back.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.block_encoder import (
    MERGED_SPAN_BYTES_MAX,
    SPAN_BYTES_MAX,
    BlockCloser,
    ClosedBlock,
    Encoding,
    OpenBlock,
)
from nearkin_delta.finished_container import FinishedContainer
from nearkin_shared.config.reduction import BlockSettings, DeltaSettings
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import (
    BlockTable,
    ChunkTable,
    Directory,
    PrefixTable,
    SegmentTable,
    positions_in_blocks,
)
from nearkin_shared.kernels.base_prefix import BaseRows
from nearkin_shared.limits import MIB
from nearkin_shared.types import SEGMENT_ID_BYTES, U8, U32, U64, ContainerId, Locations, Pieces, bounds_of, distinct
from nearkin_shared.utils.frozen import frozen

CHUNKS_MAX = 1 << 20
"""A container is finished before it holds more chunks, whatever their size."""
BLOCKS_MAX = 1 << 15
RECIPE_CHUNKS_MAX = 1 << 22
"""The same for chunks in recipes: at most 48 MiB of them in memory, and a directory is read up to 1 << 23."""
HANDED_BYTES = MIB
"""Blocks are passed to a thread in portions of this size: waking one costs 0.1 ms, a 256 KiB patch block takes one."""
CLOSING_BYTES_MAX = 32 * MIB
"""Maximum of blocks being encoded; `_submit_closed` waits above. The profile `archive`, with 30 MiB blocks, has one."""
NAMED_MAX = 1 << 15
"""The same for containers named by bases and recipes: their ids take 256 KiB, read at each opening of the directory."""
_GIVEN: deque[int] = deque(maxlen=1024)
"""Recent ids of this process: tenants with containers open at the same time share a cache keyed by id."""
_GIVEN_LOCK = threading.Lock()
_NO_BYTES: U8 = np.zeros(0, np.uint8)


def new_container_id(after: int) -> ContainerId:
    """Return an id above `after`: milliseconds since 1970 << 20, plus 20 random bits.

    If the clock was set back, the id is a random step above `after`, at most a millisecond: a container with the next
    id may have been collected, and a process that has cached that one would confuse the two.
    """
    with _GIVEN_LOCK:
        made, more = time.time_ns() // 1_000_000 << 20, secrets.randbits(20)
        found = max(made | more, after + 1 + more)
        while found in _GIVEN:  # at most len(_GIVEN) steps
            found += 1
        _GIVEN.append(found)
    return ContainerId(found)


@frozen
class Prefixes:
    """Bases of patch-block chunks: chunk i has rows bounds[i] to bounds[i + 1], best first."""

    bounds: U32
    bases: Locations
    pieces: Pieces

    def validate(self) -> BaseRows:
        """Return the bases in the form that blocks take. Raises BadInput."""
        bases, pieces = self.bases, self.pieces
        return BaseRows(
            self.bounds,
            bases.containers,
            bases.ordinals,
            pieces.buffers,
            pieces.which,
            pieces.offsets,
            pieces.lengths,
        )


@frozen
class Encodings:
    """Encoded fresh chunks in stream order: row i is `length` or `encoded` bytes of a source.

    `sources` holds two buffers, payload and deltas; `which` int32 0 or 1 selects the one for `offsets`. Chunks of patch
    blocks are not encoded, and have `prefixes` and `rest` uint32[n], their estimated bytes with these; all others have
    neither.
    """

    names: U8
    lengths: U32
    depths: U8
    sources: tuple[U8, U8]
    which: NDArray[np.int32]
    offsets: U64
    encoded: U32
    bases: Locations
    ranks: U8
    prefixes: Prefixes | None = None
    rest: U32 | None = None

    def __len__(self) -> int:
        return len(self.lengths)


@frozen
class _Closing:
    """A block being encoded, and the batch number at which it was closed."""

    block: OpenBlock
    encoding: Encoding
    turn: int


class ContainerBuilder:
    """One container that grows until it is finished; also a ContainerSource of its chunks."""

    def __init__(
        self,
        container: ContainerId,
        domain: bytes,
        block: BlockSettings,
        delta: DeltaSettings,
        kind: int,
        depth_bound: int | None = None,
        closer: BlockCloser | None = None,
        ratio: tuple[int, int] = (1, 2),
    ) -> None:
        """`depth_bound`: chunks below this depth are base candidates; no block is deeper.

        `ratio`: (bytes stored, bytes put in) of the containers before.
        """
        self.container = container
        self._domain = domain
        self._limits = int(block.raw_bytes), int(block.delta_bytes)
        self._closer = closer or BlockCloser(block)
        self._ratio = ratio
        self._depth_max = delta.max_depth if depth_bound is None else depth_bound
        self._kind = kind
        self._open: dict[int, OpenBlock] = {}
        self._to_close: list[OpenBlock] = []
        """Closed blocks, not yet counted among those being encoded."""
        self._handed: list[Encoding] = []
        """Their first ones, which the encoder has already: all of them if it has no thread, since their bytes are in
        the CPU cache and their prefix serves the next block; else in portions of HANDED_BYTES.
        """
        self._closing: dict[int, _Closing] = {}
        """Blocks being encoded, by number."""
        self._turn = 0
        self._closed: dict[int, ClosedBlock] = {}
        self.blocks = 0
        self._added: list[Encodings] = []
        self._block_numbers: list[U32] = []
        self._sketch_names: list[str] = []
        self._segment_counts: list[U32] = []
        self._segment_sketches: list[U8] = []
        self._segment_ids: list[U8] = []
        self._recipes: list[Locations] = []
        self._recipe_chunks = 0
        self._named: set[int] = set()
        self._features: dict[str, list[tuple[U32, U64]]] = {}
        self._snapshot: Directory | None = None
        self.chunks = 0
        self.segments = 0

    @property
    def empty(self) -> bool:
        """Return whether nothing was added."""
        return not self.chunks and not self.segments

    @property
    def stored_bytes_estimate(self) -> int:
        """Return the bytes of closed blocks, and an estimate for growing ones.

        Patches by the estimates of their chunks with bases, others at the ratio of the closed ones.
        """
        stored = sum(closed.block.stored_bytes for closed in self._closed.values())
        growing = self._growing()
        waiting = sum(block.used for block in growing if block.kind != container_layout.PATCH)
        patches = sum(block.rest_bytes for block in growing if block.kind == container_layout.PATCH)
        came_to, of = self.ratio
        return stored + patches + waiting * came_to // of + self.chunks * 30

    @property
    def ratio(self) -> tuple[int, int]:
        """Return (bytes stored, bytes put in) of closed non-patch blocks.

        At first those of earlier containers.
        """
        closed = [closed for closed in self._closed.values() if closed.block.kind != container_layout.PATCH]
        put_in = sum(each.chunk_bytes for each in closed)
        return (sum(each.block.stored_bytes for each in closed), put_in) if put_in else self._ratio

    @property
    def full(self) -> bool:
        """Return whether a count is near the limits of a directory."""
        return (
            self.chunks > CHUNKS_MAX
            or self.blocks > BLOCKS_MAX
            or self._recipe_chunks > RECIPE_CHUNKS_MAX
            or len(self._named) > NAMED_MAX
        )

    def add(self, fresh: Encodings) -> Locations:
        """Append chunks; return their locations."""
        count = len(fresh)
        if not count:  # for duplicates only: else 3 kB of empty arrays per batch, without bound
            return Locations.empty()
        numbers = np.zeros(count, np.uint32)
        bases = None if fresh.prefixes is None else fresh.prefixes.validate()
        windows = np.cumsum(fresh.encoded, dtype=np.int64) // self._span_bytes_max(fresh.prefixes)
        for depth in np.flatnonzero(np.bincount(fresh.depths)):
            rows = np.flatnonzero(fresh.depths == depth)
            ends = np.flatnonzero(np.diff(windows[rows])) + 1
            for part in np.split(rows, ends) if depth and self._kind == container_layout.PATCH else [rows]:
                if part[0] != rows[0] and depth in self._open:
                    self._close(int(depth))
                self._append(fresh, bases, part, int(depth), numbers)
        self._submit_closed()
        ordinals = np.arange(self.chunks, self.chunks + count, dtype=np.uint32)
        # Without its sources: they are whole batches, and duplicates keep one container open without bound.
        self._added.append(replace(fresh, sources=(_NO_BYTES, _NO_BYTES), prefixes=None, rest=None))
        self._block_numbers.append(numbers)
        self._named.update(distinct(fresh.bases.containers).tolist())
        if fresh.prefixes is not None:
            self._named.update(distinct(fresh.prefixes.bases.containers).tolist())
        self.chunks += count
        self._snapshot = None
        return Locations(np.full(count, self.container, np.uint64), ordinals)

    def _span_bytes_max(self, prefixes: Prefixes | None) -> int:
        """Return the bound on the span of a patch block within a batch with these bases.

        A base longer than any chunk of a stream was joined from several: it is stored in a merged block.
        """
        if prefixes is None or int(prefixes.pieces.lengths.max(initial=0)) <= self._closer.chunk_bytes_max:
            return SPAN_BYTES_MAX
        return MERGED_SPAN_BYTES_MAX

    def _append(
        self, fresh: Encodings, bases: BaseRows | None, rows: NDArray[np.intp], depth: int, numbers: U32
    ) -> None:
        kind = self._kind if depth else container_layout.RAW
        taken = 0
        while taken < len(rows):
            block = self._open.get(depth)
            if block is None:
                limit = self._limits[depth > 0]
                block = self._open[depth] = self._closer.begin(self.blocks, kind, depth, limit)
                self.blocks += 1
            if bases is not None and kind == container_layout.PATCH:
                part = block.add_bases(bases, rows[taken:], fresh.encoded)
            else:
                part = block.fitting(rows[taken:], fresh.encoded)
            if len(part):
                block.append(fresh.sources, fresh.which[part], fresh.offsets[part], fresh.encoded[part])
                block.record_bases(fresh.bases.take(part))
                if fresh.rest is not None:
                    block.rest_bytes += int(fresh.rest[part].sum(dtype=np.int64))
                numbers[part] = block.number
                taken += len(part)
            if block.full or not len(part):
                self._close(depth)

    def advance_stream(self, stream_bytes: int) -> None:
        """Advance the stream position; close patch blocks that would span too much of it."""
        for depth, block in list(self._open.items()):
            block.span_bytes += stream_bytes
            if block.kind == container_layout.PATCH and block.span_bytes >= SPAN_BYTES_MAX:
                self._close(depth)
        self._submit_closed()

    def _close(self, depth: int) -> None:
        """Start to encode a block.

        It counts as open until `_take`, so that results do not depend on thread timing.
        """
        self._to_close.append(self._open.pop(depth))
        ready = self._to_close[len(self._handed) :]
        if self._closer.is_synchronous or sum(block.used for block in ready) >= HANDED_BYTES:
            self._handed += self._closer.close(ready)  # a thread can begin while the rest of the batch is added

    def _submit_closed(self) -> None:
        """Submit all closed blocks, and collect earlier results if too many bytes wait.

        The results to collect depend on the blocks closed between two calls, never on the encoder's progress.
        """
        blocks, self._to_close = self._to_close, []
        encodings, self._handed = self._handed, []
        if not blocks:
            return
        waiting = [*blocks, *(closing.block for closing in self._closing.values())]
        if sum(block.used for block in waiting) > CLOSING_BYTES_MAX:
            self._take(self._turn + 1)
        if rest := blocks[len(encodings) :]:
            encodings += self._closer.close(rest)
        for block, encoding in zip(blocks, encodings, strict=True):
            self._closing[block.number] = _Closing(block, encoding, self._turn)

    def next_batch(self) -> None:
        """Begin a batch: collect the blocks that were closed before the previous batch.

        Blocks of the previous batch may still be encoded during this one. Raises Corrupt as encoding does.
        """
        self._turn += 1
        self._await_blocks(self._turn - 1)

    def _await_blocks(self, turn: int) -> None:
        """Wait for the blocks that were closed before batch `turn`, and collect the results."""
        self._submit_closed()
        self._take(turn)

    def _take(self, turn: int) -> None:
        for number, closing in [entry for entry in self._closing.items() if entry[1].turn < turn]:
            closed = closing.encoding.result()
            self._closed[number] = self._closer.await_encoding(self.container, closing.block, closed)
            del self._closing[number]
            self._snapshot = None

    def _growing(self) -> list[OpenBlock]:
        return [*self._open.values(), *self._to_close, *(closing.block for closing in self._closing.values())]

    def add_segments(self, segment_ids: U8, counts: U32, sketch: str, chunks: Locations) -> Locations:
        """Append segment recipes; return their locations.

        `chunks` has all rows, `counts` those per segment.
        """
        number = len(counts)
        if not number:
            return Locations.empty()
        if sketch not in self._sketch_names:
            self._sketch_names.append(sketch)
        self._segment_ids.append(segment_ids)
        self._segment_counts.append(counts)
        self._segment_sketches.append(np.full(number, self._sketch_names.index(sketch), np.uint8))
        self._recipes.append(chunks)
        self._recipe_chunks += len(chunks)
        self._named.update(distinct(chunks.containers).tolist())
        ordinals = np.arange(self.segments, self.segments + number, dtype=np.uint32)
        self.segments += number
        self._snapshot = None
        return Locations(np.full(number, self.container, np.uint64), ordinals)

    def add_super_features(self, sketch: str, ordinals: U32, super_features: U64) -> None:
        """Add the super-features of chunks that may serve as bases."""
        if len(ordinals):
            self._features.setdefault(sketch, []).append((ordinals, super_features))

    def directory(self, container: ContainerId) -> Directory:
        """Return the directory so far: complete but for offsets and encodings of the blocks."""
        assert container == self.container
        if self._snapshot is None:
            blocks = self._block_table()
            self._snapshot = Directory(
                container,
                self._domain,
                self._depth_max,
                tuple(self._sketch_names),
                blocks,
                self._chunk_table(blocks.kinds, blocks.depths),
                self._segment_table(),
                self._prefix_table(),
                0,
                0,
                0,
            )
        return self._snapshot

    def open_block(self, block: int) -> U8 | None:
        """Return the bytes of a block that may still grow, or None for a closed one."""
        found = next((growing for growing in self._growing() if growing.number == block), None)
        return None if found is None else found.bytes_so_far

    def record(self, block: int) -> bytes:
        """Return a closed block as stored."""
        return self._closed[block].block.record

    def _block_table(self) -> BlockTable:
        """Return the known columns of the blocks; zeros for offsets and codecs."""
        count = self.blocks
        offsets, stored, raw = np.zeros(count, np.uint64), np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        codecs, kinds, depths = np.zeros((3, count), np.uint8)
        for growing in self._growing():
            number = growing.number
            raw[number], kinds[number], depths[number] = growing.used, growing.kind, growing.depth
        for number, closed in self._closed.items():
            block = closed.block
            raw[number], kinds[number], depths[number] = block.raw_bytes, block.kind, block.depth
        return BlockTable(offsets, stored, raw, codecs, kinds, depths)

    def _chunk_table(self, kinds: U8, block_depths: U8) -> ChunkTable:
        added = self._added
        if len(added) > 1:
            self._added = added = [_join(added)]
            self._block_numbers = [np.concatenate(self._block_numbers)]
        if not added:
            none8, none32 = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
            none = Locations.empty()
            return ChunkTable(np.zeros((0, 32), np.uint8), none32, none32, none32, none32, none8, none, none8)
        (all_of,), (blocks,) = added, self._block_numbers
        encoded, bases, ranks = all_of.encoded, all_of.bases, all_of.ranks
        changed = {number: closed.encoded for number, closed in self._closed.items() if closed.encoded is not None}
        if changed:  # became deltas when they closed
            encoded = encoded.copy()
            for number, delta_bytes in changed.items():
                encoded[blocks == number] = delta_bytes
        depths = block_depths[blocks] if self.blocks else np.zeros(0, np.uint8)
        alone = (kinds[blocks] == container_layout.RAW) & (all_of.depths > 0)
        if alone.any():  # became raw when they closed
            ranks = np.where(alone, np.uint8(0), ranks)
            bases = Locations(np.where(alone, np.uint64(0), bases.containers), np.where(alone, 0, bases.ordinals))
            bases = Locations(bases.containers, bases.ordinals.astype(np.uint32))
        positions = positions_in_blocks(blocks, encoded)
        return ChunkTable(all_of.names, all_of.lengths, blocks, positions, encoded, depths, bases, ranks)

    def _segment_table(self) -> SegmentTable:
        if len(self._recipes) > 1:
            self._recipes = [Locations.join(self._recipes)]
        counts: U32 = np.concatenate([np.zeros(1, np.uint32), *self._segment_counts])
        sketches: U8 = np.concatenate([np.zeros(0, np.uint8), *self._segment_sketches])
        return SegmentTable(np.cumsum(counts, dtype=np.uint32), sketches, Locations.join(self._recipes))

    def _prefix_table(self) -> PrefixTable:
        counts, parts = np.zeros(self.blocks, np.uint32), []
        for number in range(self.blocks):
            closed = self._closed.get(number)
            if closed is not None and len(closed.prefix):
                counts[number] = len(closed.prefix)
                parts.append(closed.prefix)
        return PrefixTable(bounds_of(counts), Locations.join(parts))

    def close(self) -> None:
        """Submit all blocks for encoding; no more chunks follow."""
        for depth in list(self._open):
            self._close(depth)
        self._submit_closed()

    def finish(self) -> FinishedContainer:
        """Close all blocks, wait for them, and return the finished container."""
        self.close()
        self._await_blocks(self._turn + 1)
        return FinishedContainer(
            self.directory(self.container),
            [self._closed[number].block for number in range(self.blocks)],
            np.concatenate([np.zeros((0, SEGMENT_ID_BYTES), np.uint8), *self._segment_ids]),
            {
                sketch: (np.concatenate([o for o, _ in parts]), np.concatenate([s for _, s in parts]))
                for sketch, parts in self._features.items()
            },
        )


def _join(added: list[Encodings]) -> Encodings:
    return Encodings(
        np.concatenate([a.names for a in added]),
        np.concatenate([a.lengths for a in added]),
        np.concatenate([a.depths for a in added]),
        (_NO_BYTES, _NO_BYTES),
        np.zeros(0, np.int32),
        np.zeros(0, np.uint64),
        np.concatenate([a.encoded for a in added]),
        Locations.join([a.bases for a in added]),
        np.concatenate([a.ranks for a in added]),
    )
