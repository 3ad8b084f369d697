"""Define the gather of table rows in plain Python; the compiled kernel equals it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.scatter_copy_reference import check_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def numbered(values: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Return each value's number, and the distinct values in the order of their numbers."""
    check_array("values", values, np.uint64)
    numbers = dict[int, int]()
    found = [numbers.setdefault(value, len(numbers)) for value in values.tolist()]
    return np.array(found, np.int32), np.array(list(numbers), np.uint64)


def rows_to_fill(rows: NDArray[np.intp], sizes: NDArray[np.uint32], room_bytes: int) -> int:
    """Return how many of the rows fill the room: see `_rows.pyi`."""
    check_array("rows", rows, np.intp)
    check_array("sizes", sizes, np.uint32)
    used = 0
    for taken, row in enumerate(rows.tolist(), 1):
        check_row(row, len(sizes))
        used += int(sizes[row])
        if used >= room_bytes:
            return taken
    return len(rows)


def check_row(row: int, count: int) -> None:
    """Raise BadInput for a row that is not one of `count`."""
    if not 0 <= row < count:
        raise BadInput(f"row {row}: there are {count}")


def take_rows(
    tables: Sequence[NDArray[Any] | None], which: NDArray[np.int32], ordinals: NDArray[np.uint32], out: NDArray[Any]
) -> int:
    """Copy row after row out of the tables: see `_rows.pyi`."""
    check_rows(tables, which, ordinals, out)
    for i, (table, ordinal) in enumerate(zip(which.tolist(), ordinals.tolist(), strict=True)):
        rows = tables[table]
        if rows is None:
            out[i : i + 1] = np.zeros(1, out.dtype)
        elif ordinal >= len(rows):
            return i
        else:
            out[i] = rows[ordinal]
    return len(which)


def check_rows(
    tables: Sequence[NDArray[Any] | None], which: NDArray[np.int32], ordinals: NDArray[np.uint32], out: NDArray[Any]
) -> None:
    """Raise BadInput for tables with other rows than `out`, and for rows outside of a table."""
    check_array("which", which, np.int32)
    check_array("ordinals", ordinals, np.uint32)
    if not len(which) == len(ordinals) == len(out):
        raise BadInput(
            f"which has {len(which)} entries, ordinals {len(ordinals)}, out {len(out)}: want as many of each"
        )
    for name, table in (("out", out), *((f"tables[{i}]", table) for i, table in enumerate(tables))):
        if table is not None and (table.dtype != out.dtype or table.ndim != 1 or not table.flags.c_contiguous):
            raise BadInput(f"{name} {table.dtype}{list(table.shape)}: want contiguous rows of {out.dtype}")
    if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(tables):
        raise BadInput(f"which {int(which.min())} to {int(which.max())}: there are {len(tables)} tables")
