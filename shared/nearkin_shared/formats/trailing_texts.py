# size: shared by the formats of tombstones and retention records
"""Encode and decode the texts at the end of tombstones and retention records.

The fixed part of a record has their lengths in bytes.

Invariant: every byte after the fixed part belongs to a text, and every text is valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearkin_shared.errors import BadInput, Corrupt


def encode_texts(tenant: str, key: str, who: str, reason: str) -> list[bytes]:
    """Encode the texts as UTF-8. Raises BadInput for one that is not encodable."""
    try:
        return [text.encode() for text in (tenant, key, who, reason)]
    except UnicodeEncodeError as err:
        raise BadInput(f"key, who or reason {err.object!r:.100}: not valid UTF-8 (position {err.start})") from err


def decode_texts(data: memoryview, lengths: Sequence[int], what: str) -> list[str]:
    """Decode texts of `lengths` bytes, which are all of `data`. Raises Corrupt."""
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
