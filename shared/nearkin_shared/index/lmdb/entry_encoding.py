"""Entries of an LMDB index: how what is asked for by a name becomes keys and values, and these what is told again.

Invariant: a value that is not what was written under its key is told as damage, never as something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from operator import attrgetter
from struct import Struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.index.lmdb.sorted_run_table import PLACE, places_of
from nearkin_shared.results import Ledger
from nearkin_shared.types import U8, ContainerId

MARK_HEAD = b"mark"
MARKED = Struct("<IQ")
"""What is noted of a version's marks: the highest, and the bytes of all."""
KEY_HEAD_BYTES = 400
"""LMDB keys end at 511 bytes: longer blob keys are told apart by their digest, and sorted after reading."""
_counts_of = attrgetter(*(count.name for count in fields(Ledger)))


class VersionRow(Protocol):
    """Decoded fields of a version, without its marks."""

    tenant: str
    key: str
    version: int
    manifest_bytes: int
    seconds: float
    ledger: Any
    """The fields of a `Ledger`."""
    listed: str
    """In hexadecimal digits."""


def encode_fields(table: str, key: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the value of a key of a table: fields that JSON has, behind a check of all three."""
    said = json.dumps(fields).encode()
    return check_bytes(table.encode(), key, said) + said


def decode_fields(table: str, key: bytes, value: bytes) -> dict[str, Any]:
    """Return the fields that were written under a key of a table. Raises IndexDamaged where these are others by now."""
    found: dict[str, Any] = json.loads(checked_text(table, key, value))
    return found


def checked_text(table: str, key: bytes, value: bytes) -> bytes:
    """Return the JSON text under a key of a table. Raises IndexDamaged if it fails its check."""
    check, said = value[:CHECK_BYTES], value[CHECK_BYTES:]
    if check_bytes(table.encode(), key, said) != check:
        raise damage_error(f"{table} at {key.hex()} are not what was written there")
    return said


def parse_version(key: bytes, text: bytes) -> VersionRow:
    """Return the fields of a version from their JSON text. Raises IndexDamaged for another name or type of a field."""
    try:
        return _version_decoder()(text)
    except ValueError as err:
        raise damage_error(f"versions at {key.hex()} are not the fields of a version ({err})") from err


@cache
def _version_decoder() -> Callable[[bytes], VersionRow]:
    """Return the decoder of a version's fields. It refuses unknown names and other types."""
    import msgspec  # imported here: it takes 15 ms, and a put decodes no version

    strict: Any = {"forbid_unknown_fields": True, "gc": False}
    ledger = msgspec.defstruct("LedgerRow", [(count.name, int, 0) for count in fields(Ledger)], **strict)
    columns = [("tenant", str), ("key", str), ("version", int), ("manifest_bytes", int), ("seconds", float)]
    row: Any = msgspec.defstruct("VersionRow", [*columns, ("ledger", ledger), ("listed", str, "")], **strict)
    return msgspec.json.Decoder(row).decode


def fields_of(entry: CatalogEntry) -> dict[str, Any]:
    """Return what is written of a version: all but its marks."""
    written = asdict(entry)
    del written["sequence"], written["marks_bytes"]  # kept apart: a mark may be noted before its version is
    written["listed"] = entry.listed.hex()
    return written


def entry_from(row: VersionRow, marks: tuple[int, int]) -> CatalogEntry:
    """Return the version that `fields_of` wrote, with (sequence, bytes) of its marks."""
    listed = bytes.fromhex(row.listed)
    return CatalogEntry(
        row.key, row.version, row.manifest_bytes, row.seconds, Ledger(*_counts_of(row.ledger)), *marks, listed
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


def segment_count_keys(manifest: Manifest) -> list[bytes]:
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
    def join(self) -> tuple[U8, NDArray[np.void]]:
        """Return (keys, locations)."""
        return np.concatenate(self._keys), np.concatenate(self._locations)


def rows_of(array: U8, width: int) -> list[bytes]:
    """Return the rows of uint8[n, width], in whatever shape they come."""
    rows: list[bytes] = np.ascontiguousarray(array).reshape(-1, width).view(f"V{width}").ravel().tolist()
    return rows
