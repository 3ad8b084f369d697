# size: escapes of errors and of the command
r"""Escape text for terminals.

Bytes of the command line or of a path that are not UTF-8 are lone surrogates in Python; they are written as `\xe9`.

Invariant: the result of `printable` is one line without terminal control.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_RAW = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, in a text of Python."""
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


def to_json(value: object, indent: int | None = None) -> str:
    r"""Return a value as ASCII JSON; bytes that are not UTF-8 are the text `\xe9`.

    Most readers refuse a lone surrogate. A field NAME with such bytes is followed by NAME_hex: the same text, list of
    texts or names of an object, each as all its bytes in hexadecimal (docs/reference/stability.md).
    """
    import json  # 2 ms, and most commands print none

    text = json.dumps(value, indent=indent)
    if "\\udc" not in text:
        return text
    return _BYTE.sub(r"\1\\\\x\2", json.dumps(_with_hexadecimal(value), indent=indent))


def _with_hexadecimal(value: object) -> object:
    """Add a field NAME_hex after each field NAME whose bytes are not UTF-8."""
    if isinstance(value, Mapping):
        fields: dict[str, object] = {}
        for name, field in value.items():
            fields[name] = _with_hexadecimal(field)
            texts = [field] if isinstance(field, str) else [*field] if isinstance(field, list | tuple | Mapping) else []
            if any(isinstance(text, str) and _RAW.search(text) for text in texts):
                fields[f"{name}_hex"] = _hexadecimal(field)
        return fields
    return [_with_hexadecimal(each) for each in value] if isinstance(value, list | tuple) else value


def _hexadecimal(field: object) -> object:
    """Return a text, each text of a list, or each name of an object in hexadecimal."""
    if isinstance(field, str):
        try:
            return field.encode("utf-8", "surrogateescape").hex()
        except UnicodeEncodeError:  # other lone surrogates: a text of a server's JSON, no name of this system
            return field.encode("utf-8", "surrogatepass").hex()
    if isinstance(field, Mapping):
        return {_hexadecimal(name): each for name, each in field.items()}
    return [_hexadecimal(each) for each in field] if isinstance(field, list | tuple) else field
