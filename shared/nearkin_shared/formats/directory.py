"""Define the decoded directory of a container: blocks, chunks, recipes, bases."""

from __future__ import annotations

import sys
from dataclasses import field
from itertools import starmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats import location_runs
from nearkin_shared.formats.container_layout import BLOCK
from nearkin_shared.types import NAME_BYTES, U8, U32, U64, Bools, ContainerId, Locations, distinct
from nearkin_shared.utils.frozen import frozen

BLOCK_ROW_BYTES = 320
"""Memory for each block: 32 bytes in arrays, the rest for a BlockRow."""
DIRECTORY_BYTES = 6 * 1024
"""Memory for an empty directory: its Python objects."""


@frozen
class ChunkTable:
    """The chunks of one container; all arrays have one row a chunk, in stream order.

    `blocks` is the block of the encoding, `positions` and `encoded` its bytes in the decoded block. `bases` is (0, 0)
    for a
    chunk at depth 0; for a chunk in a patch block it is the base that shares most bytes with it. `ranks` is the
    super-feature that found the base, or LOCALITY_RANK. A chunk of length 0 was removed: its whole row is zero.
    """

    names: U8
    lengths: U32
    blocks: U32
    positions: U32
    encoded: U32
    depths: U8
    bases: Locations
    ranks: U8

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def there(self) -> Bools:
        """Mask of the chunks that were not removed."""
        present: Bools = self.lengths > 0
        return present


@frozen
class BlockTable:
    """The blocks of one container.

    `offsets` uint64 and `stored` uint32: bytes of the payload, `raw`: bytes decoded. A block of no bytes was removed;
    its
    number is not reused.
    """

    offsets: U64
    stored: U32
    raw: U32
    codecs: U8
    kinds: U8
    depths: U8
    roles: U8 | None = None
    """None in a format without roles."""

    def __len__(self) -> int:
        return len(self.stored)


class BlockRow(NamedTuple):
    """One block as Python integers, because a lookup in an array takes 0.1 us.

    Header and payload are bytes start to stop of the container; the bases are rows of the prefix table.
    """

    start: int
    stop: int
    raw_bytes: int
    kind: int
    depth: int
    first_base: int
    last_base: int

    @property
    def place(self) -> slice:
        """Byte range in the container."""
        return slice(self.start, self.stop)


@frozen
class PrefixTable:
    """The bases of patch blocks in the order of their bytes in the prefix.

    Block b has rows bounds[b] to bounds[b + 1] of `bases`, none if it is of another kind.
    """

    bounds: U32
    bases: Locations

    @staticmethod
    def empty(blocks: int) -> PrefixTable:
        """Return the table of `blocks` blocks without bases."""
        return PrefixTable(np.zeros(blocks + 1, np.uint32), Locations.empty())

    def of(self, block: int) -> Locations:
        """Return the bases of one block."""
        return self.bases.take(slice(int(self.bounds[block]), int(self.bounds[block + 1])))


@frozen
class SegmentTable:
    """Segment recipes: segment j has rows bounds[j] to bounds[j + 1] of `chunks`.

    `sketches` is the number of each segment's sketch name.
    """

    bounds: U32
    sketches: U8
    chunks: Locations

    def __len__(self) -> int:
        return len(self.sketches)


CHUNK_ROW = np.dtype(
    [
        ("names", "u1", NAME_BYTES),
        ("base_containers", "<u8"),
        ("base_ordinals", "<u4"),
        ("lengths", "<u4"),
        ("encoded", "<u4"),
        ("blocks", "<u4"),
        ("positions", "<u4"),
        ("depths", "u1"),
        ("ranks", "u1"),
        ("kinds", "u1"),
    ]
)
"""All values of one chunk in one row: readers access rows at random, and a row is one cache line."""


@frozen
class Directory:
    """The decoded directory of a container."""

    container: ContainerId
    domain: bytes
    depth_max: int
    sketch_names: tuple[str, ...]
    blocks: BlockTable
    chunks: ChunkTable
    segments: SegmentTable
    prefixes: PrefixTable
    container_bytes: int
    directory_bytes: int
    recipe_bytes: int
    _rows: list[NDArray[np.void]] = field(default_factory=list, repr=False, compare=False)
    _block_rows: list[list[BlockRow]] = field(default_factory=list, repr=False, compare=False)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of the decoded tables and of the caches below."""
        rows = len(self.segments.chunks) + len(self.prefixes.bases)
        chunk_bytes = NAME_BYTES + 30 + CHUNK_ROW.itemsize
        segment_bytes = self.segments.bounds.nbytes + self.segments.sketches.nbytes
        name_bytes = sum(map(sys.getsizeof, self.sketch_names))
        tables_bytes = len(self.chunks) * chunk_bytes + rows * 12 + len(self.blocks) * BLOCK_ROW_BYTES
        return tables_bytes + segment_bytes + name_bytes + DIRECTORY_BYTES

    @property
    def own_rows(self) -> int | None:
        """Number of rows up to the last chunk that the container's own recipes name.

        A GC run appended the rows after it. None if some recipes were removed, because the number is unknown then.
        """
        segments = self.segments
        if not len(segments) or np.any(segments.bounds[1:] == segments.bounds[:-1]):
            return None
        own = segments.chunks.ordinals[segments.chunks.containers == np.uint64(self.container)]
        return int(own.max()) + 1 if len(own) else 0

    @property
    def rows(self) -> NDArray[np.void]:
        """CHUNK_ROW[chunks]: the chunk table, and the kind of each chunk's block."""
        if not self._rows:
            chunks, rows = self.chunks, np.empty(len(self.chunks), CHUNK_ROW)
            rows["names"] = chunks.names
            rows["base_containers"], rows["base_ordinals"] = chunks.bases.containers, chunks.bases.ordinals
            for name in ("lengths", "encoded", "blocks", "positions", "depths", "ranks"):
                rows[name] = getattr(chunks, name)
            rows["kinds"] = self.blocks.kinds[chunks.blocks]
            self._rows.append(rows)
        return self._rows[0]

    @property
    def block_rows(self) -> list[BlockRow]:
        """The block table row by row, with the bases of each block."""
        if not self._block_rows:
            blocks, bounds = self.blocks, self.prefixes.bounds
            starts = blocks.offsets - np.uint64(BLOCK.size)
            columns = starts, blocks.offsets + blocks.stored, blocks.raw, blocks.kinds, blocks.depths
            rows = zip(*(column.tolist() for column in (*columns, bounds[:-1], bounds[1:])), strict=True)
            self._block_rows.append(list(starmap(BlockRow, rows)))
        return self._block_rows[0]

    def base_containers(self) -> list[int]:
        """Return the other containers that contain bases of this one, ascending."""
        bases = np.concatenate([self.chunks.bases.containers, self.prefixes.bases.containers])
        return [int(base) for base in distinct(bases) if base not in (0, self.container)]


def positions_in_blocks(blocks: U32, encoded: U32) -> U32:
    """Return the start of each chunk's encoding in its decoded block, bytes.

    The chunks of a block are in stream order.
    """
    return location_runs.group_totals(blocks, encoded.astype(np.int64)).astype(np.uint32)
