# size: one file format
"""Read the headers of tar members: where their contents start and end.

| name 100 | ... | size 12, octal or base 256 | ... | type 1 | link name 100 | ustar 6 | ... |      512 bytes

Invariant: a header that is not understood ends the walk; it never moves it by a size that is not plausible.
"""

from __future__ import annotations

from nearkin_shared.limits import KIB

BLOCK_BYTES = 512
MEMBER_BYTES_MIN = 16 * KIB
"""Smaller members share chunks with their headers and neighbours: one chunk each would cost more than it saves."""
_SIZE = slice(124, 136)
_TYPE = 156
_MAGIC = slice(257, 262)
_WITHOUT_CONTENT = b"123456"
"""Hard link, symlink, devices, folder, FIFO."""
_NOT_WALKED = b"SM"
"""Sparse members and parts of multi-volume archives: their contents have headers of their own."""
_SIZE_MAX = 1 << 62


def is_header(block: bytes) -> bool:
    """Return whether a block is a tar header with a correct checksum."""
    if len(block) < BLOCK_BYTES or block[_MAGIC] != b"ustar":
        return False
    try:
        stated = int(block[148:156].strip(b"\0 ") or b"x", 8)
    except ValueError:
        return False
    return stated == sum(block[:148]) + 8 * ord(" ") + sum(block[156:BLOCK_BYTES])


def content_bytes(block: bytes) -> int | None:
    """Return the size of the content behind a header; None for a block of another kind."""
    if block[_MAGIC] != b"ustar" or block[_TYPE] in _NOT_WALKED:
        return None
    if block[_TYPE] in _WITHOUT_CONTENT:
        return 0
    field = block[_SIZE]
    if field[0] == 0x80:
        size = int.from_bytes(field[1:], "big")
    else:
        try:
            size = int(field.strip(b"\0 ") or b"0", 8)
        except ValueError:
            return None
    return size if 0 <= size <= _SIZE_MAX else None


def padding_bytes(size: int) -> int:
    """Return the bytes that fill the last block of a content of `size` bytes."""
    return -size % BLOCK_BYTES
