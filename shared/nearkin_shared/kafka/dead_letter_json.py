"""Describe dead letters as JSON, for the command and the gateway alike."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # brings Kafka's client, which an embedded gateway does without
    from nearkin_shared.kafka.dead_letter_replay import DeadLetter

NAME_PATTERN = "^[0-9]{1,18}:[0-9]{1,18}$"
"""Names of letters: the format that `parse_place` accepts."""
PREVIEW_BYTES = 4096
"""Bytes of a key, a header or, by default, a value that are displayed."""
PREVIEW_BYTES_MAX = 1024 * 1024
"""The most that is shown of a value."""


def letter_json(letter: DeadLetter) -> dict[str, Any]:
    """Return where a letter came from and why it is one, without key, headers and value."""
    _, partition, offset = letter.source or (None, None, None)
    time = datetime.fromtimestamp(max(0, letter.timestamp_ms) / 1000, UTC)
    return {
        "letter": f"{letter.partition}:{letter.offset}",
        "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "topic": letter.source_topic,
        "partition": partition,
        "offset": offset,
        "stage": letter.stage,
        "error": letter.error,
        "message": letter.message,
        "value_bytes": letter.value_bytes,
        "is_untruncated": not letter.omitted,
        "replayed": letter.replayed,
        "dropped": letter.dropped,
    }


def content_json(letter: DeadLetter, value_bytes_max: int = PREVIEW_BYTES) -> dict[str, Any]:
    """Return a letter with key, headers, and `value_bytes_max` bytes of its value."""
    return {
        **letter_json(letter),
        "key": preview_json(letter.key),
        "headers": [{"name": name, "value": preview_json(value)} for name, value in letter.headers],
        "value": preview_json(letter.value, value_bytes_max),
    }


def preview_json(value: bytes | None, bytes_max: int = PREVIEW_BYTES) -> dict[str, Any] | None:
    """Return the first bytes as text if they are UTF-8, as base64 if not; null for None."""
    if value is None:
        return None
    part = value[:bytes_max]
    cut = len(part) < len(value)
    try:
        return {"encoding": "utf-8", "data": part.decode(), "cut": cut}
    except UnicodeDecodeError as err:
        if cut and err.start > len(part) - 4 and err.end == len(part):  # cut within a character
            return {"encoding": "utf-8", "data": part[: err.start].decode(), "cut": True}
        return {"encoding": "base64", "data": base64.b64encode(part).decode(), "cut": cut}
