"""Restore. Invariant: nothing leaves before its name is verified; a mismatch raises, it never ends quietly (I8).

manifest -> segments -> chunk locations -> (a few MiB at a time) plan, fetch, verify -> the bytes
                                            `- one piece ahead of the reader, in a thread -'
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.eviction_hints import EvictionHints
from nearkin_shared.reading.read_ahead import ReadAhead
from nearkin_shared.reading.read_plan import Placed, Plan, announce_upcoming
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.containers import ContainerSource, ContainerStore, object_name
from nearkin_shared.types import U8, U32, ZERO, ContainerId, Locations, distinct, group_by_container, offsets_of
from nearkin_shared.utils.prefetch import PrefetchIterator
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool, all_cores
from nearkin_shared.validation import write_pieces

BATCH_BYTES = 4 * 1024 * 1024
GROUP_SEGMENTS = 64
GROUP_CHUNKS_MAX = 1 << 18
"""Of segments that are planned together, and the one that passes it: 100 bytes each, and 64 usual ones have 1,000."""
PLANS_AHEAD = 4
"""Batches whose blocks are asked for before they are wanted, where a read takes long."""
DIRECTORIES_AHEAD_MAX = 64
FORESEEN_SHARE = 8
"""Of a range that is smaller than this part of the cache all fits into it, mostly."""
VerifiedPieces = Generator[memoryview, None, None] | PrefetchIterator[memoryview]
"""An iterator; who stops early closes it."""


class Blob:
    """A version, or a range of one: iterate it for verified pieces, `read` it, or `write_to` a file."""

    def __init__(
        self,
        info: VersionInfo,
        manifest: Manifest,
        source: ContainerStore,
        fingerprinter: Fingerprinter,
        start: int,
        stop: int,
    ) -> None:
        self.info = info
        self.costs = source.costs
        """What reading has cost so far."""
        self.size_bytes = stop - start
        """Bytes of the range, not of the version."""
        self._manifest = manifest
        self._source = source
        self._fingerprinter = fingerprinter
        self._start, self._stop = start, stop

    def __iter__(self) -> VerifiedPieces:
        """Return the range's bytes in order, a few MiB at a time. Raises Corrupt before anything wrong is given out.

        Whoever stops early closes it: that waits for what is being read. While one piece is out the next is read and
        verified.
        """
        if self.size_bytes <= BATCH_BYTES:  # a thread would take longer
            return self._pieces(None, None)
        return PrefetchIterator("nearkin-restore", self._reading)

    @contextmanager
    def _reading(self) -> Iterator[Iterator[memoryview]]:
        """Give the pieces, read with all cores.

        Where the store is far some more are planned, and on their way; of a near one many are planned, so that what
        none of them wants is let go. Far away that would be the directories of all that they lean on, one trip each,
        before the first byte.
        """
        ahead = ReadAhead(self._source, PLANS_AHEAD) if self._source.far else None
        foresight = EvictionHints(self._source) if ahead is None and self._is_long else None
        with ExitStack() as steps:  # from the last one up; each is done, whatever interrupts another
            if ahead is not None:
                steps.callback(ahead.close)
            steps.enter_context(self._source.restores.register())
            yield self._pieces(ahead, foresight, steps.enter_context(all_cores("nearkin-decode")))

    @property
    def _is_long(self) -> bool:
        return self.size_bytes * FORESEEN_SHARE > self._source.blocks.bytes_max

    def _pieces(
        self, ahead: ReadAhead | None, foresight: EvictionHints | None, helpers: ThreadPool = SERIAL
    ) -> Generator[memoryview, None, None]:
        whole = self._start == 0 and self._stop == self.info.size_bytes
        if whole and not self._stop and len(self._manifest.segments):
            raise self._longer()
        reader = ChunkReader(self._source if ahead is None else ahead, helpers)
        hasher = blake3()
        for position, plan in self._planned(ahead, foresight):
            ends = offsets_of(plan.lengths) + plan.lengths
            total = int(ends[-1])
            wanted_from, wanted_to = max(self._start - position, 0), min(self._stop - position, total)
            first = int(np.searchsorted(ends, wanted_from, side="right"))
            last = int(np.searchsorted(ends, wanted_to)) + 1
            skipped = int(ends[first - 1]) if first else 0
            payload = self._verified(reader, plan.take(slice(first, last)))
            if foresight is not None:
                foresight.batch_read()
            if whole:
                if position + total > self._stop:
                    raise self._longer()
                hasher.update(payload)
                if position + total >= self._stop and hasher.digest() != self._manifest.blake3:
                    # Before the last piece is given out: a wrong whole must not look like a good one.
                    raise Corrupt(
                        f"{self._named()}: BLAKE3 of the whole does not agree with its manifest: run `nearkin verify`"
                    )
            yield payload.data[wanted_from - skipped : wanted_to - skipped]

    def _planned(self, ahead: ReadAhead | None, foresight: EvictionHints | None) -> Iterator[Placed]:
        """Return the plans of the range's batches; some after the one that is wanted are made, and told of, then."""
        plans = self._of_range()
        if foresight is not None:
            return foresight.track_plans(plans)
        if ahead is None:
            return plans
        first, last, _ = self._segments
        of = distinct(self._manifest.segments.containers[first:last])
        ahead.directories(of.tolist()[:DIRECTORIES_AHEAD_MAX])
        return announce_upcoming(plans, ahead.request, PLANS_AHEAD)

    def _of_range(self) -> Iterator[Placed]:
        """Yield the plan of each batch that has bytes of the range. Raises Corrupt where the range goes on."""
        first, last, position = self._segments
        for plan in planned_batches(self._manifest, self._source, first, last):
            here, position = position, position + int(plan.lengths.sum(dtype=np.int64))
            if here >= self._stop:
                return
            if position > self._start:
                yield here, plan
        if position < self._stop:
            raise Corrupt(
                f"{self._named()}: its segments end at byte {position} of {self.info.size_bytes}: run `nearkin verify`"
            )

    @property
    def _segments(self) -> tuple[int, int, int]:
        """Return (the first segment to plan, behind the last one, where in the blob the first begins).

        All, where the manifest does not tell how long they are: then each must be looked at up to the range.
        """
        lengths = self._manifest.lengths
        if lengths is None or not len(lengths):
            return 0, len(self._manifest.segments), 0
        ends = np.cumsum(lengths, dtype=np.int64)
        first = int(np.searchsorted(ends, self._start, side="right"))
        last = int(np.searchsorted(ends, self._stop)) + 1
        return first, last, int(ends[first - 1]) if first else 0

    def read(self) -> bytes:
        """Return the range's bytes."""
        return b"".join(self)

    def write_to(self, file: BinaryIO, progress: Callable[[int], None] | None = None) -> int:
        """Write the range's bytes; return how many. `progress` hears of each piece's bytes."""
        with closing(iter(self)) as pieces:
            return write_pieces(pieces, file, progress)

    def _verified(self, reader: ChunkReader, plan: Plan) -> U8:
        payload = reader.fetch(plan)
        stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
        found = self._fingerprinter.name_chunks(payload, offsets_of(plan.lengths)[stored], plan.lengths[stored])
        wrong = stored[np.any(found != plan.names[stored], axis=1)]
        if len(wrong):
            container = ContainerId(int(plan.locations.containers[wrong[0]]))
            raise Corrupt(
                f"{self._named()}: {len(wrong)} chunks are not what their names say, the first in "
                f"{object_name(container)}: run `nearkin verify`"
            )
        return payload

    def _longer(self) -> Corrupt:
        return Corrupt(f"{self._named()}: its chunks go on behind byte {self.info.size_bytes}: run `nearkin verify`")

    def _named(self) -> str:
        return f"{self.info.key!r} version {self.info.version}"


def planned_batches(
    manifest: Manifest, source: ContainerSource, first_segment: int = 0, last_segment: int | None = None
) -> Iterator[Plan]:
    """Yield how the chunks of a version's segments are kept, in order, about BATCH_BYTES of chunks at a time.

    From the first of them to before the last: all. Raises Corrupt where one is not as long as its manifest says.
    """
    reader, some = ChunkReader(source), slice(first_segment, last_segment)
    lengths, position = None if manifest.lengths is None else manifest.lengths[some], 0
    for segments in _groups(manifest.segments.take(some), source):
        chunks, counts = segment_chunks(segments, source)
        plan = reader.plan(chunks)
        if lengths is not None:
            _check_lengths(manifest, plan, counts, lengths[position : position + len(segments)])
            position += len(segments)
        portion = np.cumsum(plan.lengths, dtype=np.int64) // BATCH_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(chunks)]
        for first, last in pairwise(bounds):
            if last > first:  # all are zero where a version is empty
                yield plan.take(slice(first, last))


def _check_lengths(manifest: Manifest, plan: Plan, counts: NDArray[np.int64], lengths: U32) -> None:
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(plan.lengths, dtype=np.int64)])
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    found = ends[bounds[1:]] - ends[bounds[:-1]]
    wrong = (found != lengths).nonzero()[0]
    if len(wrong):
        raise Corrupt(
            f"{manifest.key!r} version {manifest.version}: a segment of {lengths[wrong[0]]} bytes has chunks of "
            f"{found[wrong[0]]}: run `nearkin verify`"
        )


def _groups(segments: Locations, source: ContainerSource) -> Iterator[Locations]:
    """Yield GROUP_SEGMENTS at a time, or fewer where these have very many chunks. Raises Corrupt."""
    for start in range(0, len(segments), GROUP_SEGMENTS):
        group = segments.take(slice(start, start + GROUP_SEGMENTS))
        _, counts = _recipes(group, source)
        portion = np.cumsum(counts) // GROUP_CHUNKS_MAX
        for first, last in pairwise([0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(group)]):
            yield group.take(slice(first, last))


def _recipes(segments: Locations, source: ContainerSource) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (where in its container's recipes each segment's begins; how many chunks it has). Raises Corrupt."""
    counts = np.zeros(len(segments), np.int64)
    starts = np.zeros(len(segments), np.int64)
    for container, mine in group_by_container(segments.containers):
        table = source.directory(ContainerId(container)).segments
        ordinals = segments.ordinals[mine]
        if int(ordinals.max()) >= len(table):
            name = object_name(ContainerId(container))
            raise Corrupt(f"{name} has {len(table)} recipes, number {int(ordinals.max())} is wanted")
        starts[mine] = table.bounds[ordinals]
        counts[mine] = table.bounds[ordinals + 1].astype(np.int64) - table.bounds[ordinals]
    return starts, counts


def segment_chunks(segments: Locations, source: ContainerSource) -> tuple[Locations, NDArray[np.int64]]:
    """Return (the chunk locations of segments, one segment after another; how many of each). Raises Corrupt."""
    starts, counts = _recipes(segments, source)
    total = int(counts.sum())
    result = Locations.empty(total)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(starts, counts) + within
    holders = np.repeat(segments.containers, counts)
    for container, mine in group_by_container(holders):
        chunks = source.directory(ContainerId(container)).segments.chunks
        result.containers[mine], result.ordinals[mine] = chunks.containers[rows[mine]], chunks.ordinals[rows[mine]]
    return result, counts
