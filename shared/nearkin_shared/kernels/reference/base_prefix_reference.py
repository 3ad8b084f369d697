"""Prefixes of patch blocks, as they are defined. The compiled kernel does the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.scatter_copy_reference import check_array, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


def check_bounds(bytes_max: int, bases_max: int) -> None:
    """Raise BadInput for bounds that would hold nothing."""
    if bytes_max < 1 or bases_max < 1:
        raise BadInput(f"bytes_max {bytes_max}, bases_max {bases_max}: want at least 1 of each")


def check_bases(
    bounds: NDArray[np.uint32],
    containers: NDArray[np.uint64],
    ordinals: NDArray[np.uint32],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
) -> None:
    """Raise BadInput for arrays of other types or lengths, and for bounds that leave them."""
    check_array("bounds", bounds, np.uint32)
    check_array("containers", containers, np.uint64)
    check_array("ordinals", ordinals, np.uint32)
    check_array("which", which, np.int32)
    check_array("offsets", offsets, np.uint64)
    check_array("lengths", lengths, np.uint32)
    count = len(containers)
    if not len(ordinals) == len(which) == len(offsets) == len(lengths) == count:
        found = f"{len(ordinals)} ordinals, {len(which)} of which, {len(offsets)} offsets, {len(lengths)} lengths"
        raise BadInput(f"{count} containers, {found}: want as many of each")
    if len(bounds) and (int(bounds[-1]) > count or np.any(bounds[1:] < bounds[:-1])):
        raise BadInput(f"bounds up to {int(bounds[-1])}: want them to ascend to {count} at most")


def check_rows(rows: NDArray[np.intp], chunks: int) -> None:
    """Raise BadInput for rows of another type or beyond the number of chunks."""
    check_array("rows", rows, np.intp)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= chunks):
        raise BadInput(f"rows up to {int(rows.max())}, from {int(rows.min())}: there are {chunks} chunks")


class BaseRows:
    """The bases of a batch's chunks, checked once.

    Chunk i has rows bounds[i] to bounds[i + 1], the best one first. The bytes of row r are lengths[r] bytes of
    buffers[which[r]] from offsets[r] on; all are unchanged meanwhile.
    """

    def __init__(
        self,
        bounds: NDArray[np.uint32],
        containers: NDArray[np.uint64],
        ordinals: NDArray[np.uint32],
        buffers: Sequence[Buffer],
        which: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> None:
        check_bases(bounds, containers, ordinals, which, offsets, lengths)
        self.bounds, self.containers, self.ordinals = bounds, containers, ordinals
        self.pieces = pieces_of(buffers, which, offsets, lengths)

    def __len__(self) -> int:
        return max(0, len(self.bounds) - 1)


class BasePrefix:
    """Bytes of bases, one behind the other, each base once."""

    def __init__(self, bytes_max: int, bases_max: int) -> None:
        check_bounds(bytes_max, bases_max)
        self._bytes_max, self._bases_max = bytes_max, bases_max
        self._places: dict[tuple[int, int], int] = {}
        self._content = bytearray()
        self._room_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def content(self) -> memoryview:
        return memoryview(self._content).toreadonly()

    @property
    def room_bytes(self) -> int:
        return self._room_bytes

    def add(self, rows: NDArray[np.intp], bases: BaseRows) -> int:
        check_rows(rows, len(bases))
        for taken, row in enumerate(rows.tolist()):
            new: dict[tuple[int, int], int] = {}
            for i in range(int(bases.bounds[row]), int(bases.bounds[row + 1])):
                key = int(bases.containers[i]), int(bases.ordinals[i])
                if key not in self._places:
                    new.setdefault(key, i)
            added = sum(len(bases.pieces[i]) for i in new.values())
            too_much = len(self._content) + added > self._bytes_max or len(self) + len(new) > self._bases_max
            if too_much and self._places:
                return taken
            for key, i in new.items():
                start = len(self._content)
                self._content += bases.pieces[i]  # BufferError while seen
                self._room_bytes = max(self._room_bytes, len(self._content))
                self._places[key] = start
        return len(rows)

    def bases(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64]]:
        keys = list(self._places)
        return (
            np.array([container for container, _ in keys], np.uint64),
            np.array([ordinal for _, ordinal in keys], np.uint32),
            np.array(list(self._places.values()), np.uint64),
        )

    def clear(self) -> None:
        self._content.clear()
        self._places.clear()
