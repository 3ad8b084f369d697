"""Rows of the GC ledger within one transaction.

The tables are described in reference_counts.py and reach_summaries.py.

Invariant: the summary of a container changes in the transaction that changes the rows which it sums up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from struct import Struct
from typing import Any

import numpy as np
from blake3 import blake3

TABLES = (
    *("versions", "open", "past", "held", "counts", "nominated", "containers", "summaries", "meta"),
    *("listed", "needs", "depends", "reach", "sums"),
)
KEY_BYTES = 16
SEGMENT = np.dtype([("container", ">u8"), ("ordinal", ">u4")])
_SUM = Struct("<QQ")
"""Number of interval rows that name segments of a container, and the sum of their digests modulo 2^64."""
_VERSION = Struct(">QQ16s")
"""Time until which the segments of a version are needed, bytes of new chunks of its put (deltas for those that are
stored as deltas, before compression), digest of its references."""


class LedgerRows:
    """Tables within a transaction, and the number of changed rows."""

    def __init__(self, txn: Any, tables: dict[str, Any]) -> None:
        self.txn = txn
        self.tables = tables
        self.touched = 0
        self.gained: set[int] = set()
        """Containers that gained a reference."""
        self.ended_bytes = 0
        """Bytes that the versions deleted in this transaction had added."""
        self._sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._reached: set[bytes] = set()

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return a row's value, or None."""
        found = self.txn.get(key, db=self.tables[table])
        return None if found is None else bytes(found)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row."""
        self.txn.put(key, value, db=self.tables[table])
        self.touched += 1

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row."""
        self.txn.delete(key, db=self.tables[table])
        self.touched += 1

    def items(self, table: str) -> list[tuple[bytes, bytes]]:
        """Return all rows of a table."""
        return [(bytes(key), bytes(value)) for key, value in self.txn.cursor(self.tables[table])]

    def rows_with_prefix(self, table: str, head: bytes) -> list[tuple[bytes, bytes]]:
        """Return the rows whose key starts with `head`.

        For one key of the store: at most 36 bytes per segment.
        """
        found = []
        cursor = self.txn.cursor(self.tables[table])
        if cursor.set_range(head):
            for key, value in cursor:
                if not key.startswith(head):
                    break
                found.append((bytes(key), bytes(value)))
        return found

    def has_from(self, table: str, head: bytes, start: bytes = b"") -> bool:
        """Return whether a row's key starts with `head`, followed by `start` or a later value."""
        cursor = self.txn.cursor(self.tables[table])
        return bool(cursor.set_range(head + start)) and bytes(cursor.key()).startswith(head)

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return int(self.txn.stat(self.tables[table])["entries"])

    def empty(self, mode: bytes) -> None:
        """Delete all rows; record the mode and format of those that follow."""
        for table in TABLES:
            self.txn.drop(self.tables[table], delete=False)
        self.txn.put(b"mode", mode, db=self.tables["meta"])

    def number(self, name: bytes) -> int:
        """Return a number of table `meta`, 0 if missing."""
        return int(self.txn.get(name, b"0", db=self.tables["meta"]))

    def set_number(self, name: bytes, value: int) -> None:
        """Write a number of table `meta`."""
        self.txn.put(name, str(value).encode(), db=self.tables["meta"])

    # --- versions -----------------------------------------------------------------------------------------------------

    def known(self) -> dict[bytes, dict[int, int]]:
        """Return the counted versions by key, each with the end of its segments' time."""
        found: dict[bytes, dict[int, int]] = {}
        for key, value in self.txn.cursor(self.tables["versions"]):
            until = int.from_bytes(value[:8])
            found.setdefault(bytes(key[:KEY_BYTES]), {})[int.from_bytes(key[KEY_BYTES:])] = until
        return found

    def known_of(self, key: bytes) -> dict[int, int]:
        """Return the counted versions of one key, as `known` does."""
        rows = self.rows_with_prefix("versions", key)
        return {int.from_bytes(row[KEY_BYTES:]): int.from_bytes(value[:8]) for row, value in rows}

    def put_version(self, key: bytes, version: int, added_bytes: int, digest: bytes) -> None:
        """Record a counted version, the bytes that its put added, its references' digest."""
        self.put("versions", key + to_bytes(version), _VERSION.pack(0, added_bytes, digest))

    def sum_added(self) -> int:
        """Return the bytes that the puts of all counted versions added."""
        return sum(
            _VERSION.unpack(value)[1]
            for _, value in self.txn.cursor(self.tables["versions"])
            if len(value) == _VERSION.size
        )

    def digests_of(self, key: bytes) -> dict[int, bytes]:
        """Return the digest of the references of each counted version of a key."""
        rows = self.rows_with_prefix("versions", key)
        return {int.from_bytes(row[KEY_BYTES:]): value[16:] for row, value in rows}

    def delete_versions(self, key: bytes, versions: Iterable[int]) -> None:
        """Delete the rows of versions."""
        for version in versions:
            found = self.get("versions", key + to_bytes(version))
            if found is not None and len(found) == _VERSION.size:
                self.ended_bytes += _VERSION.unpack(found)[1]
            self.delete("versions", key + to_bytes(version))

    # --- references ---------------------------------------------------------------------------------------------------

    def hold(self, segment: bytes, key: bytes = b"") -> None:
        """Count a reference; with `key`, one interval of that key."""
        self.put("counts", segment, to_bytes(int.from_bytes(self.get("counts", segment) or b"") + 1))
        self.gained.add(int.from_bytes(segment[:8]))
        if key:
            self._sum(segment, key, 1)
            self._reached.add(segment[:8] + key)

    def release(self, segment: bytes, key: bytes = b"") -> None:
        """Remove what `hold` counted; nominate the segment with the last reference."""
        if key:
            self._sum(segment, key, -1)
        count = int.from_bytes(self.get("counts", segment) or b"")
        if count > 1:
            self.put("counts", segment, to_bytes(count - 1))
            return
        self.delete("counts", segment)
        self.nominate(segment)

    def nominate(self, name: bytes) -> None:
        """Nominate a segment or a container."""
        self.put("nominated", name, b"")

    def expire(self, now_us: int) -> None:
        """Nominate all segments whose time is over."""
        expired = [
            bytes(segment) for segment, until in self.txn.cursor(self.tables["counts"]) if until < to_bytes(now_us)
        ]
        for segment in expired:
            self.delete("counts", segment)
            self.nominate(segment)

    # --- summaries of containers --------------------------------------------------------------------------------------

    def _sum(self, segment: bytes, key: bytes, sign: int) -> None:
        changes = self._sums[int.from_bytes(segment[:8])]
        changes[0] += sign
        changes[1] += sign * int.from_bytes(blake3(key + segment).digest(8))

    def write_summaries(self) -> None:
        """Write the summaries of all containers whose references changed in this transaction."""
        for container, (count, total) in sorted(self._sums.items()):
            name = to_bytes(container)
            before = _SUM.unpack(self.get("sums", name) or bytes(_SUM.size))
            after = _SUM.pack((before[0] + count) % (1 << 64), (before[1] + total) % (1 << 64))
            if after == bytes(_SUM.size):
                self.txn.delete(name, db=self.tables["sums"])
            else:
                self.txn.put(name, after, db=self.tables["sums"])
        for row in sorted(self._reached):
            if self.txn.put(row, row_check(row), db=self.tables["reach"], overwrite=False):
                self.touched += 1
        self._sums.clear()
        self._reached.clear()

    def is_held(self, container: int) -> bool:
        """Return whether a segment of a container is referenced."""
        return self.has_from("counts", to_bytes(container))

    def has_sum(self, container: int) -> bool:
        """Return whether the summary of a container states any reference."""
        return self.get("sums", to_bytes(container)) is not None


def to_bytes(number: int) -> bytes:
    """Return a number as 8 bytes that sort as it does."""
    return number.to_bytes(8)


def row_check(row: bytes) -> bytes:
    """Return the value of a row that only exists, from which damage of its key is seen."""
    return blake3(b"reach\0" + row).digest(8)
