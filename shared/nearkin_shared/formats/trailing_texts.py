"""Texts at the end of marks and retention records, one after the other; the fixed part has their lengths in bytes.

Invariant: every byte behind the fixed part belongs to a text, and every text is valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearkin_shared.errors import BadInput, Corrupt


def encode_texts(tenant: str, key: str, who: str, reason: str) -> list[bytes]:
    """Return the texts as UTF-8. Raises BadInput for one that has none."""
    try:
        return [text.encode() for text in (tenant, key, who, reason)]
    except UnicodeEncodeError as err:
        raise BadInput(f"key, who or reason {err.object!r:.100}: not valid UTF-8 (position {err.start})") from err


def decode_texts(data: memoryview, lengths: Sequence[int], what: str) -> list[str]:
    """Return the texts of `lengths` bytes each, which are all of `data`. Raises Corrupt, naming `what`."""
    if sum(lengths) != len(data):
        raise Corrupt(f"{what}: {len(data) - sum(lengths)} bytes left over")
    texts, position = list[str](), 0
    for length in lengths:
        try:
            texts.append(str(data[position : position + length], "utf-8"))
        except UnicodeDecodeError as err:
            raise Corrupt(f"{what}: does not parse: {err}") from err
        position += length
    return texts
