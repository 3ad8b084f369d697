"""State of a content-aware cut between two batches.

| kind u8 | page size u8 | left u64 | plain bytes left u32 | to the tar header u32 | next stretch u64 |      26 bytes

Invariant: a cut that resumes from the state at a chunk's start gives the chunks that it would have given.
"""

from __future__ import annotations

from struct import Struct

from nearkin_shared.config.reduction import KINDS
from nearkin_shared.utils.frozen import frozen

_ENCODED = Struct("<BBQIIQ")
ENCODED_BYTES = _ENCODED.size
assert ENCODED_BYTES == 26
_UNDECIDED = 0xFF
_NONE64, _NONE32 = (1 << 64) - 1, (1 << 32) - 1


@frozen
class CutState:
    """How the next bytes are cut. The numbers are bytes from here."""

    kind: str | None = None
    """Kind of the region; None: not decided yet."""
    page_bytes: int = 0
    left: int | None = None
    """Up to the region's end; None: not known, or the end of the item."""
    plain_left: int = 0
    """Bytes to cut like other content before density is checked again, or up to the end of a tar."""
    header_left: int | None = None
    """In a tar, up to the next header, from the region's end if that is known; None: in no tar."""
    borders: tuple[int, ...] = ()
    """Sizes of the stretches that follow the region; in a tar, of the member whose header ends the region."""

    def encode(self) -> bytes | None:
        """Return the state as ENCODED_BYTES; None if its borders do not fit."""
        if len(self.borders) > 1:
            return None
        return _ENCODED.pack(
            _UNDECIDED if self.kind is None else KINDS.index(self.kind),
            self.page_bytes.bit_length(),
            _NONE64 if self.left is None else self.left,
            self.plain_left,
            _NONE32 if self.header_left is None else self.header_left,
            self.borders[0] if self.borders else _NONE64,
        )


START = CutState()
"""State at the start of an item."""


def decode_state(data: bytes) -> CutState:
    """Decode a state. Raises ValueError."""
    if len(data) != ENCODED_BYTES:
        raise ValueError(f"{len(data)} bytes: want {ENCODED_BYTES}")
    kind, page_bits, left, plain_left, header_left, border = _ENCODED.unpack(data)
    if (kind != _UNDECIDED and kind >= len(KINDS)) or page_bits > 17:
        raise ValueError(f"kind {kind}, {page_bits} bits of a page size: want below {len(KINDS)}, and at most 17 bits")
    return CutState(
        None if kind == _UNDECIDED else KINDS[kind],
        1 << (page_bits - 1) if page_bits else 0,
        None if left == _NONE64 else left,
        plain_left,
        None if header_left == _NONE32 else header_left,
        () if border == _NONE64 else (border,),
    )
