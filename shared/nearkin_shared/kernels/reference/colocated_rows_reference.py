"""Define the search for co-located rows in plain Python; the compiled kernel equals it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.scatter_copy_reference import check_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

FIELDS = {"lengths": np.uint32, "blocks": np.uint32, "depths": np.uint8, "kinds": np.uint8}


def rows_beside(
    tables: Sequence[NDArray[Any] | None],
    which: NDArray[np.int32],
    ordinals: NDArray[np.uint32],
    moved: NDArray[np.bool_],
    bounds: NDArray[np.uint32],
    depth_below: int,
    bytes_max: int,
    kind_left_out: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.uint32], NDArray[np.intp]]:
    """Find the rows stored next to those that were moved: see `_colocated_rows.pyi`."""
    check_beside(tables, which, ordinals, moved, bounds)
    places = list(zip(which.tolist(), ordinals.tolist(), strict=True))
    read = {(table, int(row["blocks"])) for table, ordinal in places if (row := _row(tables[table], ordinal))}
    found = list[tuple[int, int, int]]()
    for group in range(len(bounds) - 1):
        mine = range(int(bounds[group]), int(bounds[group + 1]))
        has = {places[row] for row in mine}
        beside = {(places[row][0], places[row][1] + side) for row in mine if moved[row] for side in (-1, 1)}
        for table, ordinal in sorted(beside - has):
            row = _row(tables[table], ordinal)
            if (
                row
                and 0 < row["lengths"] <= bytes_max
                and row["depths"] < depth_below
                and row["kinds"] != kind_left_out
                and (table, int(row["blocks"])) in read
            ):
                found.append((table, ordinal, group))
    columns = zip(*found, strict=True) if found else ([], [], [])
    of, at, groups = (
        np.array(column, dtype) for column, dtype in zip(columns, (np.int32, np.uint32, np.intp), strict=True)
    )
    return of, at, groups


def _row(table: NDArray[Any] | None, ordinal: int) -> Any:
    return None if table is None or not 0 <= ordinal < len(table) else table[ordinal]


def check_beside(
    tables: Sequence[NDArray[Any] | None],
    which: NDArray[np.int32],
    ordinals: NDArray[np.uint32],
    moved: NDArray[np.bool_],
    bounds: NDArray[np.uint32],
) -> np.dtype[Any] | None:
    """Return the dtype of the tables, None without any. Raises BadInput if they differ."""
    check_array("which", which, np.int32)
    check_array("ordinals", ordinals, np.uint32)
    check_array("moved", moved, np.bool_)
    check_array("bounds", bounds, np.uint32)
    rows = len(which)
    if not len(ordinals) == len(moved) == rows:
        raise BadInput(f"which has {rows} entries, ordinals {len(ordinals)}, moved {len(moved)}: want as many of each")
    if not len(bounds) or bounds[0] or int(bounds[-1]) != rows or np.any(bounds[1:] < bounds[:-1]):
        raise BadInput(f"bounds {bounds.tolist()[:4]} ...: want them ascending from 0 to {rows}")
    if rows and not 0 <= int(which.min()) <= int(which.max()) < len(tables):
        raise BadInput(f"which {int(which.min())} to {int(which.max())}: there are {len(tables)} tables")
    dtype = next((table.dtype for table in tables if table is not None), None)
    for i, table in enumerate(tables):
        if table is None:
            continue
        if table.dtype != dtype or table.ndim != 1 or not table.flags.c_contiguous:
            raise BadInput(f"tables[{i}] {table.dtype}{list(table.shape)}: want contiguous rows of {dtype}")
    fields: Mapping[str, Any] = {} if dtype is None else dtype.fields or {}
    missing = [name for name, kind in FIELDS.items() if name not in fields or fields[name][0] != kind]
    if dtype is not None and missing:
        raise BadInput(f"tables of {dtype}: want fields {', '.join(FIELDS)}, of which {', '.join(missing)} are not so")
    return dtype
