"""Define the arrays and batches that pass between stages.

Chunks are arrays over one payload, never objects:

    payload   | chunk 0 | chunk 1 | chunk 2 | ...      uint8
    offsets   uint64[n] bytes from the payload's start
    lengths   uint32[n] bytes
    names     uint8[n, 32]: fingerprint 20, check tag 8, length 4
    segments  chunk_bounds uint32[s + 1]: segment j is chunks chunk_bounds[j] .. chunk_bounds[j + 1]

Stored chunks, which are in many decoded blocks, are `Pieces`.

Invariant: values never change after they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.utils.frozen import frozen

ContainerId = NewType("ContainerId", int)
"""64 bits: creation in ms since 1970 << 20, plus 20 random bits. Ids sort in stream order."""

SELF = ContainerId(0)
"""In a recipe: the container that contains the recipe."""
ZERO = ContainerId(1)
"""In a recipe: the built-in all-zero chunk (MAD2, section 4.2); its ordinal is the chunk's length in bytes."""
CONTAINER_ID_MIN = 2

NAME_BYTES = 32
SEGMENT_ID_BYTES = 20

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

IntegerT = TypeVar("IntegerT", bound=np.integer)


@frozen
class Locations:
    """Locations of chunks: container ids uint64[n] and ordinals uint32[n]."""

    containers: U64
    ordinals: U32

    def __len__(self) -> int:
        return len(self.ordinals)

    def take(self, index: NDArray[np.intp] | Bools | slice) -> Locations:
        """Return the chosen rows."""
        return Locations(self.containers[index], self.ordinals[index])

    def distinct(self) -> Locations:
        """Return each location once, ascending by container, then ordinal."""
        order = np.lexsort((self.ordinals, self.containers))
        sorted_rows = self.take(order)
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (sorted_rows.containers[1:] != sorted_rows.containers[:-1]) | (
            sorted_rows.ordinals[1:] != sorted_rows.ordinals[:-1]
        )
        return sorted_rows.take(is_first)

    def mentions(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the first row of each distinct location, and for each row its location's number.

        Distinct locations are numbered in the order of their first row.
        """
        order = np.lexsort((self.ordinals, self.containers))
        sorted_rows = self.take(order)
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (sorted_rows.containers[1:] != sorted_rows.containers[:-1]) | (
            sorted_rows.ordinals[1:] != sorted_rows.ordinals[:-1]
        )
        firsts = order[is_first]  # lexsort is stable: each group starts with its first row
        by_mention = np.argsort(firsts)
        number_by_group = np.empty(len(firsts), np.intp)
        number_by_group[by_mention] = np.arange(len(firsts))
        which = np.empty(len(order), np.intp)
        which[order] = number_by_group[np.cumsum(is_first) - 1]
        return firsts[by_mention], which

    def is_in(self, others: Locations) -> Bools:
        """Return bool[n]: which of these locations are also in `others`."""
        found = np.zeros(len(self), np.bool_)
        others_rows = dict(group_by_container(others.containers))
        for container, rows in group_by_container(self.containers):
            if container in others_rows:
                found[rows] = np.isin(self.ordinals[rows], others.ordinals[others_rows[container]])
        return found

    @staticmethod
    def empty(count: int = 0) -> Locations:
        """Return `count` rows of zeros."""
        return Locations(np.zeros(count, np.uint64), np.zeros(count, np.uint32))

    @staticmethod
    def join(parts: list[Locations]) -> Locations:
        """Return all rows of `parts` in order."""
        if not parts:
            return Locations.empty()
        return Locations(np.concatenate([p.containers for p in parts]), np.concatenate([p.ordinals for p in parts]))


def distinct(values: NDArray[IntegerT]) -> NDArray[IntegerT]:
    """Return the distinct values, ascending.

    np.unique would import numpy.ma: 15 ms of a command's start.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def bounds_of(counts: NDArray[np.integer] | Bools) -> U32:
    """Return uint32[n + 1]: run i has the rows bounds[i] to bounds[i + 1]."""
    bounds = np.zeros(len(counts) + 1, np.uint32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def offsets_of(lengths: U32) -> U64:
    """Return the start of each of consecutive pieces, bytes."""
    wide = lengths.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


def group_by_container(containers: U64) -> list[tuple[int, NDArray[np.intp]]]:
    """Return (container, its rows ascending) for each container.

    np.unique would import numpy.ma.
    """
    if not len(containers):
        return []
    if (containers[1:] == containers[0]).all():
        return [(int(containers[0]), np.arange(len(containers)))]
    order = np.argsort(containers, kind="stable")
    changes = np.flatnonzero(np.diff(containers[order])) + 1
    return [(int(containers[rows[0]]), rows) for rows in np.split(order, changes)]


@frozen
class Pieces:
    """Bytes of n chunks in several buffers.

    Chunk i is buffers[which[i]][offsets[i] : offsets[i] + lengths[i]]; `which` int32[n], `offsets` uint64[n] and
    `lengths`
    uint32[n], bytes. An empty chunk names a buffer too.
    """

    buffers: tuple[U8, ...]
    which: I32
    offsets: U64
    lengths: U32

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(payload: U8, offsets: U64, lengths: U32) -> Pieces:
        """Return chunks that are all in one buffer."""
        return Pieces((payload,), np.zeros(len(lengths), np.int32), offsets, lengths)

    def take(self, rows: NDArray[np.intp]) -> Pieces:
        """Return some chunks, in the order of `rows`."""
        return Pieces(self.buffers, self.which[rows], self.offsets[rows], self.lengths[rows])

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """Return all chunks of `parts` in order, without a copy of their bytes."""
        rows, count = list[tuple[slice, Pieces]](), 0
        for part in parts:
            rows.append((slice(count, count + len(part)), part))
            count += len(part)
        return Pieces.place(count, rows)

    @staticmethod
    def place(count: int, parts: Sequence[tuple[NDArray[np.intp] | slice, Pieces]]) -> Pieces:
        """Return `count` chunks with each part at its rows; all other chunks are empty."""
        buffers = list[U8]()
        which, offsets, lengths = np.zeros(count, np.int32), np.zeros(count, np.uint64), np.zeros(count, np.uint32)
        for rows, part in parts:
            which[rows] = part.which + np.int32(len(buffers))
            offsets[rows], lengths[rows] = part.offsets, part.lengths
            buffers += part.buffers
        return Pieces(tuple(buffers) or (np.zeros(0, np.uint8),), which, offsets, lengths)


@frozen
class StoredChunks:
    """Consecutive chunks of a stored version, without their bytes.

    `names` uint8[n, 32]; `lengths` uint32[n], bytes; none of them is a built-in zero chunk.
    """

    names: U8
    lengths: U32
    locations: Locations

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, which: slice) -> StoredChunks:
        """Return some of the chunks."""
        return StoredChunks(self.names[which], self.lengths[which], self.locations.take(which))

    @staticmethod
    def join(parts: Sequence[StoredChunks]) -> StoredChunks:
        """Return the chunks of one or more parts, in order."""
        return StoredChunks(
            np.concatenate([part.names for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            Locations.join([part.locations for part in parts]),
        )


@frozen
class ClaimedRows:
    """Rows of a batch whose chunks a source took over from a stored version.

    The payload has no bytes of them. `rows` intp[n], ascending.
    """

    rows: NDArray[np.intp]
    locations: Locations

    def within(self, chunks: slice) -> ClaimedRows:
        """Return those of consecutive chunks, counted from the first of these."""
        first, last = np.searchsorted(self.rows, (chunks.start, chunks.stop)).tolist()
        return ClaimedRows(self.rows[first:last] - chunks.start, self.locations.take(slice(first, last)))


@frozen
class SegmentBatch:
    """Segments of one or more blobs in stream order: the chunker's output.

    `blobs` uint32[s]: the blob of the writer's session that each segment belongs to.
    """

    payload: U8
    offsets: U64
    lengths: U32
    names: U8
    zero: Bools
    chunk_bounds: U32
    blobs: U32
    segment_ids: U8
    claimed: ClaimedRows | None = None

    @property
    def segments(self) -> int:
        """Number of segments of the batch."""
        return len(self.blobs)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.lengths.sum(dtype=np.uint64))

    @property
    def segment_lengths(self) -> U32:
        """Bytes of each segment, uint32[s]; every segment has chunks."""
        return np.add.reduceat(self.lengths, self.chunk_bounds[:-1].astype(np.intp), dtype=np.uint32)

    def cut(self, segments: slice, chunks: slice, payload: U8) -> SegmentBatch:
        """Return consecutive segments with their chunks; offsets are relative to `payload`."""
        return SegmentBatch(
            payload=payload,
            offsets=self.offsets[chunks],
            lengths=self.lengths[chunks],
            names=self.names[chunks],
            zero=self.zero[chunks],
            chunk_bounds=self.chunk_bounds[segments.start : segments.stop + 1] - np.uint32(chunks.start),
            blobs=self.blobs[segments],
            segment_ids=self.segment_ids[segments],
            claimed=None if self.claimed is None else self.claimed.within(chunks),
        )


@frozen
class FreshBatch:
    """The output of dedup: a batch with what the index knows of it.

    `segment_known` bool[s]; `segment_locations` of known segments (container, segment ordinal), zeros elsewhere.
    `chunk_known` bool[n]; `chunk_locations` of known chunks; `first` int64[n]: for a fresh chunk the row of its first
    copy in this batch (itself when it is the first). Chunks of known segments count as known without a location.
    """

    batch: SegmentBatch
    segment_known: Bools
    segment_locations: Locations
    chunk_known: Bools
    chunk_locations: Locations
    first: NDArray[np.int64]
    fresh: NDArray[np.intp]
    """Rows of the chunks to store: not known, and the first copy in the batch."""

    @staticmethod
    def empty() -> FreshBatch:
        """Return a batch without segments."""
        none, no_names = np.zeros(0, np.uint32), np.zeros((0, NAME_BYTES), np.uint8)
        flags, ids = np.zeros(0, np.bool_), np.zeros((0, SEGMENT_ID_BYTES), np.uint8)
        return FreshBatch(
            batch=SegmentBatch(
                payload=np.zeros(0, np.uint8),
                offsets=np.zeros(0, np.uint64),
                lengths=none,
                names=no_names,
                zero=flags,
                chunk_bounds=np.zeros(1, np.uint32),
                blobs=none,
                segment_ids=ids,
            ),
            segment_known=flags,
            segment_locations=Locations.empty(),
            chunk_known=flags,
            chunk_locations=Locations.empty(),
            first=np.zeros(0, np.int64),
            fresh=np.zeros(0, np.intp),
        )


@frozen
class PairedBatch:
    """The output of resemblance: `fresh` chunks with their sketches and base candidates.

    `super_features` uint64[f, k], 0 where there is none; `sketch` names the algorithm with its parameters.
    `base_found` bool[f]; `bases` the candidate's location; `base_rank` uint8[f] which SF matched.
    """

    fresh: FreshBatch
    sketch: str
    super_features: U64
    base_found: Bools
    bases: Locations
    base_rank: U8
