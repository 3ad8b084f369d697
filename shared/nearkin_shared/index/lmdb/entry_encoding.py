"""Encoding of catalog and summary entries of an LMDB index as keys and values.

Invariant: a value other than the one fields under its key is reported as damage, never decoded as another entry.
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
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.index.lmdb.sorted_run_table import PACKED_LOCATION, pack_locations
from nearkin_shared.results import Ledger
from nearkin_shared.types import U8, ContainerId

MARK_HEAD = b"mark"
MARKED = Struct("<IQ")
"""Entry of a version's marks: the highest sequence, and the bytes of all marks."""
KEY_HEAD_BYTES = 400
"""LMDB keys end at 511 bytes: longer blob keys are distinguished by their digest, and sorted after reading."""
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
    """Encode JSON fields as a table value, preceded by a check of table, key and fields."""
    text = json.dumps(fields).encode()
    return check_bytes(table.encode(), key, text) + text


def decode_fields(table: str, key: bytes, value: bytes) -> dict[str, Any]:
    """Decode the fields fields under a key of a table.

    Raises: IndexDamaged, if the value was fields under another key or table, or is corrupt.
    """
    found: dict[str, Any] = json.loads(checked_text(table, key, value))
    return found


def checked_text(table: str, key: bytes, value: bytes) -> bytes:
    """Return the JSON text under a key of a table.

    Raises: IndexDamaged, if the check fails.
    """
    check, text = value[:CHECK_BYTES], value[CHECK_BYTES:]
    if check_bytes(table.encode(), key, text) != check:
        raise damage_error(f"value of {table} key {key.hex()} fails its check")
    return text


def parse_version(key: bytes, text: bytes) -> VersionRow:
    """Decode the fields of a version from their JSON text.

    Raises: IndexDamaged, for an unknown field name or another type.
    """
    try:
        return _version_decoder()(text)
    except ValueError as err:
        raise damage_error(f"value of versions key {key.hex()} does not decode ({err})") from err


@cache
def _version_decoder() -> Callable[[bytes], VersionRow]:
    """Return the decoder of a version's fields, which refuses unknown names and types."""
    import msgspec  # imported here: it takes 15 ms, and a put decodes no version

    strict: Any = {"forbid_unknown_fields": True, "gc": False}
    ledger = msgspec.defstruct("LedgerRow", [(count.name, int, 0) for count in fields(Ledger)], **strict)
    columns = [("tenant", str), ("key", str), ("version", int), ("manifest_bytes", int), ("seconds", float)]
    row: Any = msgspec.defstruct("VersionRow", [*columns, ("ledger", ledger), ("listed", str, "")], **strict)
    return msgspec.json.Decoder(row).decode


def version_fields(entry: CatalogEntry) -> dict[str, Any]:
    """Return the fields fields for a version, without its marks."""
    fields = asdict(entry)
    del fields["sequence"], fields["marks_bytes"]  # stored separately: a mark may be recorded before its version
    fields["listed"] = entry.listed.hex()
    return fields


def decode_version(row: VersionRow, marks: tuple[int, int]) -> CatalogEntry:
    """Return the catalog entry that `version_fields` wrote, with its marks (sequence, bytes)."""
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


def delete_keys_under(txn: Any, db: Any, head: bytes) -> None:
    """Delete all keys that start with `head`."""
    cursor = txn.cursor(db)
    has_entry = cursor.set_range(head)
    while has_entry and bytes(cursor.key()).startswith(head):
        has_entry = cursor.delete()


class KeyedLocations:
    """Buffer of keys of one width and the locations that they name, in insertion order."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._keys = [np.zeros((0, width), np.uint8)]
        self._locations = [np.zeros(0, PACKED_LOCATION)]

    def add(self, keys: U8, container: ContainerId, ordinals: Any) -> None:
        """Add uint8[n, width] keys and the ordinals that they name."""
        self._keys.append(keys)
        self._locations.append(pack_locations(container, ordinals))

    @property
    def join(self) -> tuple[U8, NDArray[np.void]]:
        """Return (keys, locations)."""
        return np.concatenate(self._keys), np.concatenate(self._locations)


def rows_of(array: U8, width: int) -> list[bytes]:
    """Return the rows of an array of any shape as bytes of `width`."""
    rows: list[bytes] = np.ascontiguousarray(array).reshape(-1, width).view(f"V{width}").ravel().tolist()
    return rows
