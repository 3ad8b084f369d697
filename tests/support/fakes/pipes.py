"""Provide sources that can be read once only.

Invariant: they return their content in order, and cannot seek.
"""

from __future__ import annotations

import io


class Unseekable(io.RawIOBase):
    """A file that behaves like a pipe."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, up to `size`."""
        return self._data.read(size)
