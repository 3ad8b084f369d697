"""Entries of an LMDB index: how what is asked for by a name becomes keys and values, and these what is told again.

Invariant: a value that is not what was written under its key is told as damage, never as something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.lmdb.environments import damaged
from nearkin_shared.index.lmdb.sorted_run_table import PLACE, places_of
from nearkin_shared.results import Ledger
from nearkin_shared.types import U8, ContainerId

MARK_HEAD = b"mark"
MARKED = Struct("<IQ")
"""What is noted of a version's marks: the highest, and the bytes of all."""
KEY_HEAD_BYTES = 400
"""LMDB keys end at 511 bytes: longer blob keys are told apart by their digest, and sorted after reading."""


def encode_fields(table: str, key: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the value of a key of a table: fields that JSON has, behind a check of all three."""
    said = json.dumps(fields).encode()
    return check_bytes(table.encode(), key, said) + said


def decode_fields(table: str, key: bytes, value: bytes) -> dict[str, Any]:
    """Return the fields that were written under a key of a table. Raises IndexDamaged where these are others by now."""
    check, said = value[:CHECK_BYTES], value[CHECK_BYTES:]
    if check_bytes(table.encode(), key, said) != check:
        raise damaged(f"{table} at {key.hex()} are not what was written there")
    fields: dict[str, Any] = json.loads(said)
    return fields


def fields_of(entry: CatalogEntry) -> dict[str, Any]:
    """Return what is written of a version: all but its marks."""
    fields = asdict(entry)
    del fields["sequence"], fields["marks_bytes"]  # kept apart: a mark may be noted before its version is
    fields["listed"] = entry.listed.hex()
    return fields


def entry_from(fields: Mapping[str, Any], marks: tuple[int, int]) -> CatalogEntry:
    """Return the version that `fields_of` wrote, with (sequence, bytes) of its marks."""
    known = {name: value for name, value in fields.items() if name not in ("tenant", "ledger", "listed")}
    return CatalogEntry(
        **known,
        ledger=Ledger(**fields["ledger"]),
        sequence=marks[0],
        marks_bytes=marks[1],
        listed=bytes.fromhex(fields.get("listed", "")),
    )


def marks_under(txn: Any, meta: Any, head: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key in `versions`, packed marks) of all keys that start with `head`."""
    cursor = txn.cursor(meta)
    if cursor.set_range(MARK_HEAD + head):
        for key, value in cursor:
            if not key.startswith(MARK_HEAD + head):
                return
            yield key[len(MARK_HEAD) :], value


def drop_under(txn: Any, db: Any, head: bytes) -> None:
    """Delete all keys that start with `head`."""
    cursor = txn.cursor(db)
    there = cursor.set_range(head)
    while there and bytes(cursor.key()).startswith(head):
        there = cursor.delete()


def held_segments(manifest: Manifest) -> list[bytes]:
    """Return the keys in `counts` of the segments that a version holds, each once."""
    rows = places_of(manifest.segments.containers, manifest.segments.ordinals)
    # with return_index, or np.unique imports numpy.ma: 15 ms of a put's start
    distinct, _ = np.unique(rows, return_index=True)
    return rows_of(distinct.view(np.uint8), PLACE.itemsize)


class KeyedPlaces:
    """Keys of one width and the locations that they name, in the order in which they come."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._keys = [np.zeros((0, width), np.uint8)]
        self._locations = [np.zeros(0, PLACE)]

    def add(self, keys: U8, container: ContainerId, ordinals: Any) -> None:
        """Take uint8[n, width] keys and the ordinals that they name."""
        self._keys.append(keys)
        self._locations.append(places_of(container, ordinals))

    @property
    def joined(self) -> tuple[U8, NDArray[np.void]]:
        """Return (keys, locations)."""
        return np.concatenate(self._keys), np.concatenate(self._locations)


def rows_of(array: U8, width: int) -> list[bytes]:
    """Return the rows of uint8[n, width], in whatever shape they come."""
    rows: list[bytes] = np.ascontiguousarray(array).reshape(-1, width).view(f"V{width}").ravel().tolist()
    return rows
