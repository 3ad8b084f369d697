# size: one function, used by errors and the command
"""Escape text for terminals.

Invariant: the result is one line without terminal control.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with everything a terminal might act on written as an escape."""
    if text.isprintable():  # most are: a listing of 10,000 keys
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
