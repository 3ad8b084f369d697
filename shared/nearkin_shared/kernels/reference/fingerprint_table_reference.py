"""Define the name table in plain Python, as a dict.

Invariant: the first location put for a key stays until its container is discarded.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput, RetryableError

KEY_BYTES_MIN: Final = 8
KEY_BYTES_MAX: Final = 40
ENTRIES_MAX: Final = 1 << 40


class NameTable:
    """A map from keys of one width to (container, ordinal); the stub has the details."""

    def __init__(self, key_bytes: int, max_entries: int) -> None:
        _check_bounds("key_bytes", key_bytes, KEY_BYTES_MIN, KEY_BYTES_MAX)
        _check_bounds("max_entries", max_entries, 1, ENTRIES_MAX)
        self.key_bytes: Final = key_bytes
        self.max_entries: Final = max_entries
        self._places: dict[bytes, tuple[int, int]] = {}
        self._lock = Lock()

    def get_many(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_]]:
        """Return containers, ordinals and a mask of found keys; zeros for others."""
        rows = _rows(keys, self.key_bytes)
        with self._lock:
            places = [self._places.get(row) for row in rows]
        return (
            np.array([place[0] if place else 0 for place in places], dtype=np.uint64),
            np.array([place[1] if place else 0 for place in places], dtype=np.uint32),
            np.array([place is not None for place in places], dtype=np.bool_),
        )

    def put_first_many(
        self, keys: NDArray[np.uint8], containers: NDArray[np.uint64], ordinals: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        """Insert the keys that are not there yet; return which rows were inserted."""
        rows = _rows(keys, self.key_bytes)
        _check_vector("containers", containers, np.uint64)
        _check_vector("ordinals", ordinals, np.uint32)
        if not len(rows) == len(containers) == len(ordinals):
            raise BadInput(
                f"{len(rows)} keys, {len(containers)} containers, {len(ordinals)} ordinals: needs as many of each"
            )
        with self._lock:
            entries = len(self._places) + len({row for row in rows if row not in self._places})
            if entries > self.max_entries:
                raise RetryableError(f"name table full: {entries} entries would exceed max_entries {self.max_entries}")
            inserted = np.zeros(len(rows), dtype=np.bool_)
            for i, (row, container, ordinal) in enumerate(
                zip(rows, containers.tolist(), ordinals.tolist(), strict=True)
            ):
                if row not in self._places:
                    self._places[row] = (container, ordinal)
                    inserted[i] = True
        return inserted

    def discard_containers(self, ids: NDArray[np.uint64]) -> int:
        """Remove every entry of these containers; return the number of removed entries."""
        _check_vector("ids", ids, np.uint64)
        gone = set(ids.tolist())
        with self._lock:
            before = len(self._places)
            self._places = {row: place for row, place in self._places.items() if place[0] not in gone}
            return before - len(self._places)

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._places = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the entries themselves hold."""
        return len(self._places) * (self.key_bytes + 12)


def first_occurrence(keys: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return for each row the index of the first row equal to it: int64, shape (n,)."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(row, i) for i, row in enumerate(_rows(keys, None))], dtype=np.int64)


def _check_bounds(what: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadInput(f"{what} {value!r}: needs a whole number from {lowest} to {highest}")


def _check_vector(what: str, array: object, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise BadInput(f"{what} {_found(array)}: needs a {np.dtype(dtype).name} array of shape (n,)")


def _rows(keys: object, key_bytes: int | None) -> list[bytes]:
    if (
        not isinstance(keys, np.ndarray)
        or keys.dtype != np.uint8
        or keys.ndim != 2
        or (keys.shape[1] != key_bytes if key_bytes else not 1 <= keys.shape[1] <= KEY_BYTES_MAX)
    ):
        raise BadInput(f"keys {_found(keys)}: needs a uint8 array of shape (n, {key_bytes or f'1 to {KEY_BYTES_MAX}'})")
    return [row.tobytes() for row in keys]


def _found(array: object) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
