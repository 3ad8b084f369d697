"""Sources that are read once. Invariant: they give what they were made of, in order, and never go back."""

from __future__ import annotations

import io


class Unseekable(io.RawIOBase):
    """A file with a pipe's manners."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, up to `size`."""
        return self._data.read(size)
