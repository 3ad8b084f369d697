# size: escapes of errors and of the command
r"""Escape text for terminals.

Bytes of the command line or of a path that are not UTF-8 are lone surrogates in Python; they are written as `\xe9`.

Invariant: the result of `printable` is one line without terminal control.
"""

from __future__ import annotations

import re

_BYTE = re.compile(r"(?<!\\)((?:\\\\)*)(?<!\\ud[89ab][0-9a-f]{2})\\udc([89a-f][0-9a-f])")
"""A lone surrogate as `repr` and JSON write it; neither a pair nor text after an escaped backslash."""


def printable(text: str) -> str:
    """Return `text` with everything a terminal might act on written as an escape."""
    if text.isprintable():  # most are: a listing of 10,000 keys
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()


def with_bytes_shown(text: str) -> str:
    r"""Return text with bytes that are not UTF-8 as `\xe9`, not as the `\udce9` of `repr`."""
    escaped = "".join(_escape(c) if "\udc80" <= c <= "\udcff" else c for c in text) if not text.isascii() else text
    return _BYTE.sub(r"\1\\x\2", escaped) if "\\udc" in escaped else escaped


def json_with_bytes_shown(text: str) -> str:
    r"""Return ASCII JSON with bytes that are not UTF-8 as the text `\xe9`.

    Most readers refuse a lone surrogate.
    """
    return _BYTE.sub(r"\1\\\\x\2", text) if "\\udc" in text else text
