"""Restore of versions.

Invariant: every chunk is verified before its bytes are returned; a mismatch raises and never ends quietly (I8).

    manifest -> segments -> chunk locations -> (a few MiB at a time) plan, fetch, verify -> the bytes
                                           `- one piece ahead of the reader, in a thread -'
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.chunk_ranges import PlacedChunks
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.eviction_hints import EvictionHints
from nearkin_shared.reading.read_ahead import ReadAhead
from nearkin_shared.reading.read_plan import Placed, ReadPlan, announce_upcoming
from nearkin_shared.reading.read_stats import ReadCosts
from nearkin_shared.reading.tree_reader import TreeContentCheck, TreeReader
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.containers import ContainerRewritten, ContainerSource, ContainerStore, object_name
from nearkin_shared.types import (
    U8,
    U32,
    ZERO,
    ContainerId,
    Locations,
    StoredChunks,
    distinct,
    group_by_container,
    offsets_of,
)
from nearkin_shared.utils.prefetch import PrefetchIterator
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool, all_cores

BATCH_BYTES = 4 * 1024 * 1024
GROUP_SEGMENTS = 64
GROUP_CHUNKS_MAX = 1 << 18
"""Bound on chunks planned together, beyond the last segment: 100 bytes each; 64 usual segments have 1,000."""
PLANS_AHEAD = 4
"""Batches whose blocks are requested in advance, if reads have a high latency."""
DIRECTORIES_AHEAD_MAX = 64
HINTED_SHARE = 8
"""A range smaller than 1/8 of the cache usually fits into it with all its bases."""
VerifiedPieces = Generator[memoryview, None, None] | PrefetchIterator[memoryview]
"""Iterator; a caller that stops early closes it."""
Rows = TypeVar("Rows", ReadPlan, Locations)
Result = TypeVar("Result")


class VersionReader:
    """Bytes [start, stop) of a version, read and verified in pieces."""

    def __init__(
        self,
        info: VersionInfo,
        manifest: Manifest,
        source: ContainerStore,
        fingerprinter: Fingerprinter,
        start: int,
        stop: int,
        *,
        is_part: bool = False,
    ) -> None:
        """Open a range. `is_part`: the caller verifies the whole version itself."""
        self.info = info
        self._is_part = is_part
        self.costs: ReadCosts = source.costs
        """Costs of reads so far."""
        self.size_bytes: int = stop - start
        """Bytes of the range, not of the version."""
        self._manifest = manifest
        self._source = source
        self._fingerprinter = fingerprinter
        self._start, self._stop = start, stop

    def part(self, start: int, stop: int) -> VersionReader:
        """Return a reader of the bytes [start, stop) of this range; costs are counted together."""
        first, last = self._start + start, self._start + stop
        return VersionReader(
            self.info, self._manifest, self._source, self._fingerprinter, first, last, is_part=self._is_part
        )

    def pieces(self) -> VerifiedPieces:
        """Return the range's bytes in order, a few MiB at a time.

        A caller that stops early closes the iterator, which waits for the read in progress. While one piece is
        processed the next one is read and verified.

        Raises: Corrupt, before wrong bytes are returned.
        """
        if self.size_bytes <= BATCH_BYTES:  # a thread would take longer
            return self._pieces(None, None)
        return PrefetchIterator("nearkin-restore", self._reading)

    def read(self) -> bytes:
        """Return the range's bytes."""
        return b"".join(self.pieces())

    @contextmanager
    def _reading(self) -> Iterator[Iterator[memoryview]]:
        """Yield the pieces, read with all cores.

        With a high-latency store a few batches are requested ahead; with a near one many are planned ahead, so that
        blocks that none of them needs are evicted. For a high-latency store that would require the directories of all
        bases, one read each, before the first byte.
        """
        ahead = ReadAhead(self._source, PLANS_AHEAD) if self._source.far else None
        hints = EvictionHints(self._source) if ahead is None and self._is_long else None
        with ExitStack() as steps:  # closed in reverse order, each even if another is interrupted
            if ahead is not None:
                steps.callback(ahead.close)
            steps.enter_context(self._source.restores.register())
            yield self._pieces(ahead, hints, steps.enter_context(all_cores("nearkin-decode")))

    @property
    def _is_long(self) -> bool:
        return self.size_bytes * HINTED_SHARE > self._source.blocks.bytes_max

    def _pieces(
        self, ahead: ReadAhead | None, hints: EvictionHints | None, helpers: ThreadPool = SERIAL
    ) -> Generator[memoryview, None, None]:
        is_complete = self._start == 0 and self._stop == self.info.size_bytes and not self._is_part
        if is_complete and not self._stop and len(self._manifest.segments):
            raise self._overlong_error()
        reader = ChunkReader(self._source if ahead is None else ahead, helpers)
        check = self._whole_check() if is_complete else None
        with self._noting_damage():
            plans = self._plans(ahead, hints)
        while True:
            with self._noting_damage():
                placed = next(plans, None)
            if placed is None:
                return
            position, plan = placed
            ends = offsets_of(plan.lengths) + plan.lengths
            total = int(ends[-1])
            piece_start, piece_stop = max(self._start - position, 0), min(self._stop - position, total)
            first = int(np.searchsorted(ends, piece_start, side="right"))
            last = int(np.searchsorted(ends, piece_stop)) + 1
            skipped = int(ends[first - 1]) if first else 0
            if check is not None and position + total > self._stop:
                raise self._overlong_error()
            position += skipped
            plan, verified = plan.take(slice(first, last)), partial(self._verified, reader)
            for payload in before_damage(plan, verified, self._note, is_divided=self.info.is_tree):
                if check is not None:
                    check(payload.data, position + len(payload) >= self._stop)
                yield payload.data[max(self._start - position, 0) : self._stop - position]
                position += len(payload)
            if hints is not None:
                hints.batch_read()

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """Report damage that is found while chunks are looked up."""
        try:
            yield
        except ContainerRewritten:
            raise
        except Corrupt as err:
            self._source.on_damage(err, Locations.empty(), self._source)
            raise

    def _note(self, err: Corrupt, plan: ReadPlan) -> None:
        self._source.on_damage(err, plan.locations, self._source)

    def _whole_check(self) -> Callable[[memoryview, bool], None]:
        """Return a function that compares the pieces of the whole version with its digest.

        It raises Corrupt before the piece is returned: a wrong version must not look complete.
        """
        if self._manifest.is_tree:
            return self._tree_check()
        hasher = blake3()

        def check(piece: memoryview, is_last: bool) -> None:
            hasher.update(piece)
            if is_last and hasher.digest() != self._manifest.blake3:
                raise Corrupt(f"{self._label()}: BLAKE3 of the version differs from its manifest; run `nearkin verify`")

        return check

    def _tree_check(self) -> Callable[[memoryview, bool], None]:
        contents = TreeContentCheck(self.tree())

        def check(piece: memoryview, _: bool) -> None:
            wrong = contents.update(piece)
            if wrong is not None:
                raise Corrupt(
                    f"{self._label()}: BLAKE3 of {wrong.entry.path!r} differs from its entry; run `nearkin verify`"
                )

        return check

    def chunks(self) -> Iterator[PlacedChunks]:
        """Yield the chunks with bytes of the range, a few MiB at a time, without reading them.

        Raises Corrupt, StoreUnavailable.
        """
        for start, plan in self._range_plans():
            stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
            part, starts = plan.take(stored), offsets_of(plan.lengths)[stored].astype(np.int64)
            yield PlacedChunks(starts + start, StoredChunks(part.names, part.lengths, part.locations))

    def tree(self) -> TreeReader:
        """Return a reader of the entries.

        Raises Corrupt if the version is not a tree or is damaged.
        """

        def read_range(start: int, stop: int) -> bytes:
            part = VersionReader(
                self.info, self._manifest, self._source, self._fingerprinter, start, stop, is_part=True
            )
            return part.read()

        digest = self._manifest.blake3 if self._manifest.is_tree else None
        tree = TreeReader.open(read_range, self.info.size_bytes, self._label(), digest)
        tree.location = f"{self.info.key}@{self.info.version}"
        return tree

    def _plans(self, ahead: ReadAhead | None, hints: EvictionHints | None) -> Iterator[Placed]:
        """Yield the plans of the range's batches, with later ones announced in advance."""
        plans = self._range_plans()
        if hints is not None:
            return hints.track_plans(plans)
        if ahead is None:
            return plans
        first, last, _ = self._segments
        containers = distinct(self._manifest.segments.containers[first:last])
        ahead.directories(containers.tolist()[:DIRECTORIES_AHEAD_MAX])
        return announce_upcoming(plans, ahead.request, PLANS_AHEAD)

    def _range_plans(self) -> Iterator[Placed]:
        """Yield the plan of each batch with bytes of the range.

        Raises: Corrupt, if the range continues beyond the segments.
        """
        first, last, position = self._segments
        for plan in planned_batches(self._manifest, self._source, first, last):
            start, position = position, position + plan.size_bytes
            if start >= self._stop:
                return
            if position <= self._start:
                continue
            if isinstance(plan, LostChunks):
                raise plan.failure
            yield start, plan
        if position < self._stop:
            raise Corrupt(
                f"{self._label()}: its segments end at byte {position} of {self.info.size_bytes}; run `nearkin verify`"
            )

    @property
    def _segments(self) -> tuple[int, int, int]:
        """Return (first segment to plan, end segment, position of the first in the blob).

        All segments, if the manifest has no lengths: each is then planned up to the range.
        """
        lengths = self._manifest.lengths
        if lengths is None or not len(lengths):
            return 0, len(self._manifest.segments), 0
        ends = np.cumsum(lengths, dtype=np.int64)
        first = int(np.searchsorted(ends, self._start, side="right"))
        last = int(np.searchsorted(ends, self._stop)) + 1
        return first, last, int(ends[first - 1]) if first else 0

    def _verified(self, reader: ChunkReader, plan: ReadPlan) -> U8:
        payload = reader.fetch(plan)
        stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
        found = self._fingerprinter.name_chunks(payload, offsets_of(plan.lengths)[stored], plan.lengths[stored])
        wrong = stored[np.any(found != plan.names[stored], axis=1)]
        if len(wrong):
            container = ContainerId(int(plan.locations.containers[wrong[0]]))
            raise Corrupt(
                f"{self._label()}: {len(wrong)} chunks failed fingerprint verification, the first in "
                f"{object_name(container)}; run `nearkin verify`"
            )
        return payload

    def _overlong_error(self) -> Corrupt:
        return Corrupt(f"{self._label()}: its chunks continue beyond byte {self.info.size_bytes}; run `nearkin verify`")

    def _label(self) -> str:
        return f"{self.info.key!r} version {self.info.version}"


def before_damage(
    rows: Rows,
    read: Callable[[Rows], Result],
    on_damage: Callable[[Corrupt, Rows], None] | None = None,
    *,
    is_divided: bool,
) -> Iterator[Result]:
    """Yield what `read` returns for all rows at once.

    If some are damaged and `is_divided`, in halves up to the first of these: of a tree, a reader may need only files
    that precede it. `on_damage` is called with the first error. Raises Corrupt, in place of the damaged row.
    """
    parts = [rows]
    while parts:
        part = parts.pop()
        try:
            result = read(part)
        except ContainerRewritten:
            raise
        except Corrupt as err:
            if part is rows and on_damage is not None:
                on_damage(err, rows)
            if len(part) <= 1 or not is_divided:
                raise
            half = len(part) // 2
            parts += (part.take(slice(half, None)), part.take(slice(0, half)))
        else:
            yield result


class LostChunks(NamedTuple):
    """Consecutive chunks of a segment that cannot be planned."""

    size_bytes: int
    failure: Corrupt


def planned_batches(
    manifest: Manifest, source: ContainerSource, first_segment: int = 0, last_segment: int | None = None
) -> Iterator[ReadPlan | LostChunks]:
    """Yield plans of the chunks of a version's segments, about BATCH_BYTES at a time.

    Of the segments from `first_segment` to before `last_segment`; all by default. Chunks of a tree whose containers
    cannot be read are LostChunks, between the other ones of their segment.

    Raises: Corrupt, if a segment's length differs from the manifest.
    """
    reader, selection = ChunkReader(source), slice(first_segment, last_segment)
    lengths, position = None if manifest.lengths is None else manifest.lengths[selection], 0
    is_tree = manifest.info.is_tree

    def planned(segments: Locations) -> tuple[list[ReadPlan | LostChunks], int]:
        chunks, counts = segment_chunks(segments, source)
        known = None if lengths is None else lengths[position : position + len(segments)]
        try:
            plan = reader.plan(chunks)
        except ContainerRewritten:
            raise
        except Corrupt as err:
            if len(segments) > 1 or known is None or not is_tree:
                raise
            return _plans_around_lost(chunks, int(known[0]), reader, err), 1
        if known is not None:
            _check_lengths(manifest, plan, counts, known)
        return [plan], len(segments)

    groups = _groups(manifest.segments.take(selection), source, is_divided=is_tree)
    found = (before_damage(segments, planned, is_divided=is_tree) for segments in groups)
    for plans, count in chain.from_iterable(found):
        position += count
        for plan in plans:
            if isinstance(plan, LostChunks):
                yield plan
                continue
            portion = np.cumsum(plan.lengths, dtype=np.int64) // BATCH_BYTES
            bounds = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(plan)]
            for first, last in pairwise(bounds):
                if last > first:  # all are zero if a version is empty
                    yield plan.take(slice(first, last))


def _plans_around_lost(
    chunks: Locations, length_bytes: int, reader: ChunkReader, failure: Corrupt
) -> list[ReadPlan | LostChunks]:
    """Return plans of a segment's chunks before the first lost one and after the last.

    The positions of chunks between lost ones, whose lengths are unknown, are unknown too. Raises Corrupt.
    """
    is_lost = np.zeros(len(chunks), np.bool_)
    for _, rows in group_by_container(chunks.containers):
        try:
            reader.plan(chunks.take(rows))
        except ContainerRewritten:
            raise
        except Corrupt:
            is_lost[rows] = True
    lost = np.flatnonzero(is_lost)
    if not len(lost):
        raise failure
    before = reader.plan(chunks.take(slice(0, int(lost[0]))))
    after = reader.plan(chunks.take(slice(int(lost[-1]) + 1, None)))
    lost_bytes = length_bytes - before.size_bytes - after.size_bytes
    if lost_bytes <= 0:
        raise failure
    return [before, LostChunks(lost_bytes, failure), after]


def _check_lengths(manifest: Manifest, plan: ReadPlan, counts: NDArray[np.int64], lengths: U32) -> None:
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(plan.lengths, dtype=np.int64)])
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    found = ends[bounds[1:]] - ends[bounds[:-1]]
    wrong = (found != lengths).nonzero()[0]
    if len(wrong):
        raise Corrupt(
            f"{manifest.key!r} version {manifest.version}: a segment of {lengths[wrong[0]]} bytes has chunks of "
            f"{found[wrong[0]]}: run `nearkin verify`"
        )


def _groups(segments: Locations, source: ContainerSource, *, is_divided: bool) -> Iterator[Locations]:
    """Yield GROUP_SEGMENTS at a time, or fewer if they have many chunks. Raises Corrupt."""

    def divided(group: Locations) -> list[Locations]:
        _, counts = _recipes(group, source)
        portion = np.cumsum(counts) // GROUP_CHUNKS_MAX
        bounds = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(group)]
        return [group.take(slice(first, last)) for first, last in pairwise(bounds)]

    for start in range(0, len(segments), GROUP_SEGMENTS):
        group = segments.take(slice(start, start + GROUP_SEGMENTS))
        for parts in before_damage(group, divided, is_divided=is_divided):
            yield from parts


def _recipes(segments: Locations, source: ContainerSource) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (start of each segment's recipe in its container; number of chunks).

    Raises: Corrupt.
    """
    counts = np.zeros(len(segments), np.int64)
    starts = np.zeros(len(segments), np.int64)
    for container, rows_here in group_by_container(segments.containers):
        table = source.directory(ContainerId(container)).segments
        ordinals = segments.ordinals[rows_here]
        if int(ordinals.max()) >= len(table):
            name = object_name(ContainerId(container))
            raise Corrupt(f"{name} has {len(table)} recipes, but number {int(ordinals.max())} is needed")
        starts[rows_here] = table.bounds[ordinals]
        counts[rows_here] = table.bounds[ordinals + 1].astype(np.int64) - table.bounds[ordinals]
    return starts, counts


def segment_chunks(segments: Locations, source: ContainerSource) -> tuple[Locations, NDArray[np.int64]]:
    """Return (chunk locations of segments, consecutive; number of chunks of each).

    Raises: Corrupt.
    """
    starts, counts = _recipes(segments, source)
    total = int(counts.sum())
    result = Locations.empty(total)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(starts, counts) + within
    holders = np.repeat(segments.containers, counts)
    for container, rows_here in group_by_container(holders):
        chunks = source.directory(ContainerId(container)).segments.chunks
        result.containers[rows_here], result.ordinals[rows_here] = (
            chunks.containers[rows[rows_here]],
            chunks.ordinals[rows[rows_here]],
        )
    return result, counts
