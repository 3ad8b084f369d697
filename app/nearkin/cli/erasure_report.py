"""Print the copies that an erasure does not reach, from the JSON form of the list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def remaining_lines(copies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the copies, one a line."""
    if copies:
        yield "out of the reach of the erasure:"
    for one in copies:
        ends = f", until {one['until']} at the latest" if one["until"] else ""
        yield f"  {one['place']:<16} {one['holds']}{ends}: {one['remedy']}"
