"""Records: what travels between stages. Invariant: values never change after they are made.

Chunks travel as arrays beside one payload, never as objects:

    payload   | chunk 0 | chunk 1 | chunk 2 | ...      uint8
    offsets   uint64[n] bytes from the payload's start
    lengths   uint32[n] bytes
    names     uint8[n, 32]: fingerprint 20, check tag 8, length 4
    segments  chunk_bounds uint32[s + 1]: segment j is chunks chunk_bounds[j] .. chunk_bounds[j + 1]

Stored ones, which lie in many decoded blocks, as `Pieces` of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.utils.frozen import frozen

ContainerId = NewType("ContainerId", int)
"""64 bits: creation in ms since 1970 << 20, plus 20 random bits. Sorting by it gives stream order."""

SELF = ContainerId(0)
"""In a recipe: the container that holds the recipe."""
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
    """Where chunks lie: container ids uint64[n] and ordinals uint32[n] in that container's directory."""

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
        new = np.ones(len(order), np.bool_)
        new[1:] = (sorted_rows.containers[1:] != sorted_rows.containers[:-1]) | (
            sorted_rows.ordinals[1:] != sorted_rows.ordinals[:-1]
        )
        return sorted_rows.take(new)

    def mentions(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return (a row of each location, in the order of its first mention; which of these each row is)."""
        order = np.lexsort((self.ordinals, self.containers))
        sorted_rows = self.take(order)
        new = np.ones(len(order), np.bool_)
        new[1:] = (sorted_rows.containers[1:] != sorted_rows.containers[:-1]) | (
            sorted_rows.ordinals[1:] != sorted_rows.ordinals[:-1]
        )
        firsts = order[new]  # lexsort is stable: each group starts with its first mention
        by_mention = np.argsort(firsts)
        place = np.empty(len(firsts), np.intp)
        place[by_mention] = np.arange(len(firsts))
        which = np.empty(len(order), np.intp)
        which[order] = place[np.cumsum(new) - 1]
        return firsts[by_mention], which

    def is_in(self, others: Locations) -> Bools:
        """Return bool[n]: which of these are also in `others`."""
        found = np.zeros(len(self), np.bool_)
        mine = dict(group_by_container(others.containers))
        for container, rows in group_by_container(self.containers):
            if container in mine:
                found[rows] = np.isin(self.ordinals[rows], others.ordinals[mine[container]])
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
    """Return the distinct values, ascending. A plain np.unique imports numpy.ma: 15 ms of a command's start."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def bounds_of(counts: NDArray[np.integer] | Bools) -> U32:
    """Return uint32[n + 1]: run i of so many rows is rows bounds[i] to bounds[i + 1]."""
    bounds = np.zeros(len(counts) + 1, np.uint32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def offsets_of(lengths: U32) -> U64:
    """Return where each of the consecutive pieces starts, bytes."""
    wide = lengths.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


def group_by_container(containers: U64) -> list[tuple[int, NDArray[np.intp]]]:
    """Return (container, its rows) for each container, rows ascending. Unlike np.unique it does not import numpy.ma."""
    if not len(containers):
        return []
    if (containers[1:] == containers[0]).all():
        return [(int(containers[0]), np.arange(len(containers)))]
    order = np.argsort(containers, kind="stable")
    changes = np.flatnonzero(np.diff(containers[order])) + 1
    return [(int(containers[rows[0]]), rows) for rows in np.split(order, changes)]


@frozen
class Pieces:
    """Bytes of n chunks, wherever they lie: of chunk i lengths[i] bytes of buffers[which[i]] from offsets[i] on.

    `which` int32[n], `offsets` uint64[n] and `lengths` uint32[n], bytes. A chunk of no bytes names a buffer too.
    """

    buffers: tuple[U8, ...]
    which: I32
    offsets: U64
    lengths: U32

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(payload: U8, offsets: U64, lengths: U32) -> Pieces:
        """Return chunks that all lie in one buffer."""
        return Pieces((payload,), np.zeros(len(lengths), np.int32), offsets, lengths)

    def take(self, rows: NDArray[np.intp]) -> Pieces:
        """Return some of them, in this order."""
        return Pieces(self.buffers, self.which[rows], self.offsets[rows], self.lengths[rows])

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """Return all chunks of `parts` in order. No byte is copied."""
        rows, count = list[tuple[slice, Pieces]](), 0
        for part in parts:
            rows.append((slice(count, count + len(part)), part))
            count += len(part)
        return Pieces.place(count, rows)

    @staticmethod
    def place(count: int, parts: Sequence[tuple[NDArray[np.intp] | slice, Pieces]]) -> Pieces:
        """Return `count` chunks: of each part those that become these rows; all others have no bytes."""
        buffers = list[U8]()
        which, offsets, lengths = np.zeros(count, np.int32), np.zeros(count, np.uint64), np.zeros(count, np.uint32)
        for rows, part in parts:
            which[rows] = part.which + np.int32(len(buffers))
            offsets[rows], lengths[rows] = part.offsets, part.lengths
            buffers += part.buffers
        return Pieces(tuple(buffers) or (np.zeros(0, np.uint8),), which, offsets, lengths)


@frozen
class SegmentBatch:
    """Segments of one or more blobs, in stream order: the chunker's output, the dedup stage's input.

    `blobs` uint32[s] says to which blob of the writer's session each segment belongs.
    """

    payload: U8
    offsets: U64
    lengths: U32
    names: U8
    zero: Bools
    chunk_bounds: U32
    blobs: U32
    segment_ids: U8

    @property
    def segments(self) -> int:
        """Return how many segments the batch holds."""
        return len(self.blobs)

    @property
    def logical_bytes(self) -> int:
        """Return the bytes of all chunks."""
        return int(self.lengths.sum(dtype=np.uint64))

    @property
    def segment_lengths(self) -> U32:
        """Return uint32[s], the bytes of each segment; none is without chunks."""
        return np.add.reduceat(self.lengths, self.chunk_bounds[:-1].astype(np.intp), dtype=np.uint32)

    def cut(self, segments: slice, chunks: slice, payload: U8) -> SegmentBatch:
        """Return some segments, one behind the other, that have these chunks; their offsets are into `payload`."""
        return SegmentBatch(
            payload=payload,
            offsets=self.offsets[chunks],
            lengths=self.lengths[chunks],
            names=self.names[chunks],
            zero=self.zero[chunks],
            chunk_bounds=self.chunk_bounds[segments.start : segments.stop + 1] - np.uint32(chunks.start),
            blobs=self.blobs[segments],
            segment_ids=self.segment_ids[segments],
        )


@frozen
class FreshBatch:
    """After dedup: `batch` with what is known of it.

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
    """Rows of the chunks that must be stored: not known, first of their kind in the batch."""


@frozen
class PairedBatch:
    """After resemblance: `fresh` chunks with their sketches and base candidates.

    `super_features` uint64[f, k], 0 where there is none; `sketch` names the algorithm with its parameters.
    `base_found` bool[f]; `bases` the candidate's location; `base_rank` uint8[f] which SF matched.
    """

    fresh: FreshBatch
    sketch: str
    super_features: U64
    base_found: Bools
    bases: Locations
    base_rank: U8
