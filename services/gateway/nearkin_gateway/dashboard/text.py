"""Numbers and times as pages show them. Invariant: a page and the command line say the same thing in the same words."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlencode

from nearkin.cli.ledger import human_bytes

__all__ = ["count", "human_bytes", "moment", "page_url", "per_second", "ratio", "seconds"]


def ratio(value: float) -> str:
    """Return a reduction, such as `12.4×`."""
    return f"{value:,.1f}×" if value < 1000 else f"{value:,.0f}×"


def count(value: int) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,}"


def moment(value: datetime | str) -> str:
    """Return a time in UTC to the second."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return f"{found.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def seconds(value: float | None) -> str:
    """Return a stretch of time by its two largest units."""
    if value is None:
        return "unknown"
    whole = int(value)
    for unit, size, below, small in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit} {rest} {below}" if rest else f"{whole // size} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{whole} s"


def per_second(value: float | None) -> str:
    """Return a rate of records."""
    return "not known yet" if value is None else f"{value:,.1f}/s"


def page_url(path: str, **query: object) -> str:
    """Return a page's address; what is None is left out."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
