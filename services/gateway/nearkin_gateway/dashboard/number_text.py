"""Format numbers and times for pages, as the command line formats them."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlencode

from markupsafe import Markup

from nearkin_shared.savings_table import human_bytes

__all__ = ["count", "human_bytes", "moment", "page_url", "per_second", "ratio", "seconds", "time_tag"]

RATIO_SHOWN_MIN = 0.95
"""Below this a ratio would be shown as 0.9 or less: words say that the store is larger than its content."""


def ratio(value: float) -> str:
    """Return a reduction such as `12.4×`; words if nothing or more than the input is stored."""
    if value <= 0:
        return "nothing yet"
    if value < RATIO_SHOWN_MIN:
        larger = 1 / value
        return f"{larger:,.1f}× larger" if larger < 1000 else f"{larger:,.0f}× larger"
    return f"{value:,.1f}×" if value < 1000 else f"{value:,.0f}×"


def count(value: int) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,}"


def moment(value: datetime | str) -> str:
    """Return a time in UTC to the second."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return f"{found.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def time_tag(value: datetime | str) -> Markup:
    """Return a time in UTC as an HTML element, which no line break divides."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return Markup('<time datetime="{}">{}</time>').format(found.astimezone(UTC).isoformat(), moment(found))


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
    """Return the URL of a page; parameters with the value None are omitted."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
