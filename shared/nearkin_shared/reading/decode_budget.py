"""Budget of one read.

Invariant: one read decodes and holds a bounded number of bytes, whatever the containers contain, so it ends.

A block decoded by itself may have bases that are decoded one by one in turn. If each of W blocks of a level has all W
blocks below as bases, blocks that are not cached are decoded W^depth times.
"""

from __future__ import annotations

from collections import OrderedDict

from nearkin_shared.errors import Corrupt
from nearkin_shared.limits import GIB, MIB
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import object_name
from nearkin_shared.types import U8

DECODED_BYTES_MAX = 64 * GIB
"""Bound on bytes decoded by one read, each time a block is decoded.

A restore's 4 MiB of 2 KiB chunks, each in a raw block of its own, decode 8 GiB; with `archive`, 8 KiB chunks in 30 MiB,
15 GiB.
"""
RETAINED_BYTES_MAX = 512 * MIB
"""Bound on the bases of blocks being decoded: writers close a block at 2 MiB of bases, and no chain exceeds 64."""
KEPT_BYTES_MAX = 48 * MIB
"""Bound on retained blocks, independent of the cache: neighbouring blocks share most bases."""
ROW_BYTES = 64
"""Decoded bytes that take as long as planning one row."""


def block_label(name: BlockName) -> str:
    """Return the label of a block in errors."""
    return f"{object_name(name[0])} block {name[1]}"


class DecodeBudget:
    """Bytes that one read has decoded and retained so far."""

    def __init__(self) -> None:
        self.at: BlockName | None = None
        """Block named in errors: the first one being decoded by itself, or the last requested one."""
        self._decoded_bytes = 0
        self._kept: OrderedDict[BlockName, U8] = OrderedDict()
        self._kept_bytes = 0

    def spend(self, size_bytes: int, rows: int = 0) -> None:
        """Count decoded bytes and planned rows. Raises Corrupt beyond DECODED_BYTES_MAX."""
        self._decoded_bytes += size_bytes + rows * ROW_BYTES
        if self._decoded_bytes > DECODED_BYTES_MAX:
            raise self._budget_exceeded(f"more than {DECODED_BYTES_MAX >> 30} GiB decoded")

    def hold(self, size_bytes: int) -> None:
        """Check the bytes held by all blocks being decoded.

        Raises: Corrupt, beyond RETAINED_BYTES_MAX.
        """
        if size_bytes > RETAINED_BYTES_MAX:
            raise self._budget_exceeded(f"more than {RETAINED_BYTES_MAX >> 20} MiB held")

    def _budget_exceeded(self, what: str) -> Corrupt:
        where = "" if self.at is None else f"{block_label(self.at)}: "
        return Corrupt(f"{where}{what} for one read, in base chains that no writer makes; run `nearkin verify`")

    def retain(self, name: BlockName, content: U8) -> None:
        """Retain a decoded block; evict the least recently used ones."""
        self._kept[name] = content
        self._kept_bytes += content.nbytes
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def retained(self, name: BlockName) -> U8 | None:
        """Return a retained block, or None."""
        content = self._kept.get(name)
        if content is not None:
            self._kept.move_to_end(name)
        return content
