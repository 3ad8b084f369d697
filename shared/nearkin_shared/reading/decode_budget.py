"""What one read decodes. Invariant: no more than a bound, and no more is held, whatever containers say: it ends.

A block that is walked to is decoded by itself, and what it leans on may be walked to in turn. Of W blocks a level that
lean on all W below, what is held nowhere is decoded W^depth times.
"""

from __future__ import annotations

from collections import OrderedDict

from nearkin_shared.errors import Corrupt
from nearkin_shared.limits import GIB, MIB
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import object_name
from nearkin_shared.types import U8

DECODED_BYTES_MAX = 64 * GIB
"""For one read, each time counted that a block is decoded. A restore's 4 MiB, in chunks of 2 KiB of which each lies in
a raw block of its own, come to 8; those of `archive`, chunks of 8 KiB in 30 MiB, to 15."""
RETAINED_BYTES_MAX = 512 * MIB
"""Of what blocks that are being walked lean on: writers close one at 2 MiB of bases, and no chain has more than 64."""
KEPT_BYTES_MAX = 48 * MIB
"""Of blocks that were walked to, whatever their cache lets go of: the blocks beside one lean on much the same."""
ROW_BYTES = 64
"""To plan a row takes as long as to decode about so much."""


def block_label(name: BlockName) -> str:
    """Return how errors name a block."""
    return f"{object_name(name[0])} block {name[1]}"


class DecodeBudget:
    """What one read has decoded and kept so far."""

    def __init__(self) -> None:
        self.at: BlockName | None = None
        """What errors name: the first block that is being walked to, or else one that was asked for last."""
        self._decoded_bytes = 0
        self._kept: OrderedDict[BlockName, U8] = OrderedDict()
        self._kept_bytes = 0

    def spend(self, size_bytes: int, rows: int = 0) -> None:
        """Count what is decoded, and rows that are planned. Raises Corrupt beyond DECODED_BYTES_MAX."""
        self._decoded_bytes += size_bytes + rows * ROW_BYTES
        if self._decoded_bytes > DECODED_BYTES_MAX:
            raise self._budget_exceeded(f"more than {DECODED_BYTES_MAX >> 30} GiB decoded")

    def hold(self, size_bytes: int) -> None:
        """Take note of what all blocks that are being walked hold. Raises Corrupt beyond HELD_BYTES_MAX."""
        if size_bytes > RETAINED_BYTES_MAX:
            raise self._budget_exceeded(f"more than {RETAINED_BYTES_MAX >> 20} MiB held")

    def _budget_exceeded(self, what: str) -> Corrupt:
        where = "" if self.at is None else f"{block_label(self.at)}: "
        return Corrupt(f"{where}{what} for one read, in chains that no writer makes: run `nearkin verify`")

    def retain(self, name: BlockName, content: U8) -> None:
        """Keep a block that was walked to, and let go of those used longest ago."""
        self._kept[name] = content
        self._kept_bytes += content.nbytes
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def retained(self, name: BlockName) -> U8 | None:
        """Return a block that was walked to, None where it is not kept any more."""
        content = self._kept.get(name)
        if content is not None:
            self._kept.move_to_end(name)
        return content
