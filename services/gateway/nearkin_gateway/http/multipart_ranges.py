# size: one framing
"""Frame several ranges of a blob as one multipart/byteranges body (RFC 9110, 14.6).

    --BOUNDARY CRLF Content-Type CRLF Content-Range CRLF CRLF bytes CRLF    of each range
    --BOUNDARY-- CRLF                                                      once

Invariant (I8): the head of a part is yielded after its first bytes were verified.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from nearkin_shared.reading.restore import VerifiedPieces

BOUNDARY_BYTES = 16
"""Random bytes of a boundary: no stored blob contains a text that its writer could not know."""


class MultipartRanges:
    """The body of a response with several ranges: its type, its size, its pieces."""

    def __init__(self, ranges: Sequence[tuple[int, int]], content_type: str, size_bytes: int) -> None:
        """Frame (start, stop) of each range of a blob of `size_bytes`."""
        self._ranges = ranges
        boundary = secrets.token_hex(BOUNDARY_BYTES)
        self._heads = [
            f"--{boundary}\r\nContent-Type: {content_type}\r\n"
            f"Content-Range: bytes {start}-{stop - 1}/{size_bytes}\r\n\r\n".encode("latin-1")
            for start, stop in ranges
        ]
        self._end = f"--{boundary}--\r\n".encode()
        self.content_type: str = f"multipart/byteranges; boundary={boundary}"

    @property
    def size_bytes(self) -> int:
        """Return the length of the body."""
        content_bytes = sum(stop - start + len(b"\r\n") for start, stop in self._ranges)
        return content_bytes + sum(map(len, self._heads)) + len(self._end)

    def pieces(self, read: Callable[[int, int], VerifiedPieces]) -> Generator[memoryview, None, None]:
        """Yield the body; `read` returns the verified pieces of a range.

        Raises Corrupt, StoreUnavailable.
        """
        for head, (start, stop) in zip(self._heads, self._ranges, strict=True):
            is_begun = False
            with closing(read(start, stop)) as pieces:
                for piece in pieces:
                    if not is_begun:
                        yield memoryview(head)
                        is_begun = True
                    yield piece
            yield memoryview(b"\r\n")
        yield memoryview(self._end)
