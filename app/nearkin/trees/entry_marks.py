# size: a set with its own tests; tree_restore would exceed its limit with it
"""Mark entries of a tree by their ordinals, one bit for each entry.

    add(ordinal) -> bit        has_any(first, stop) -> whether a group of entries is read again

A restore sets attributes of folders after everything in them was written. It reads their entries again then: half a
million entries in memory took 180 MB, and their bits take 64 KB.
"""

from __future__ import annotations


class EntryMarks:
    """A set of ordinals that takes one bit for each entry up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, ordinal: int) -> bool:
        """Return whether the entry is marked."""
        byte = ordinal >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (ordinal & 7) & 1)

    def add(self, ordinal: int) -> None:
        """Mark an entry."""
        byte = ordinal >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (ordinal & 7)

    def has_any(self, first: int, stop: int) -> bool:
        """Return whether any entry of [first, stop) is marked."""
        start, end = (first + 7) >> 3, stop >> 3
        if start <= end and any(memoryview(self._bits)[start:end]):
            return True
        edges = (*range(first, min(start << 3, stop)), *range(max(end << 3, first), stop))
        return any(ordinal in self for ordinal in edges)
