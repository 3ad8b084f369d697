"""Evaluate conditions and ranges (RFC 9110, 13 and 14) from a version's info, without I/O."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime

from starlette.datastructures import Headers

from nearkin_gateway.http.problems import Problem
from nearkin_shared.preconditions import ANY, PRECONDITION, Precondition, Tags, tags_of
from nearkin_shared.results import VersionInfo

RANGES_MAX = 32
"""Ranges of one request: each is a restore of its own, and costs its first blocks."""
_UNIT = re.compile(r"bytes\s*=(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_RANGE = re.compile(r"\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.ASCII)
_TAG = re.compile(r'(W/)?"([^"]*)"')


def etag(info: VersionInfo) -> str:
    """Return a version's strong entity tag: its digest."""
    return f'"{info.digest}"'


def last_modified(info: VersionInfo) -> str:
    """Return when a version was made, as HTTP has it."""
    return format_datetime(info.created.astimezone(UTC).replace(microsecond=0), usegmt=True)


def list_header(headers: Headers, name: str) -> str | None:
    """Return a list header, joined if it has several lines (RFC 9110, 5.3)."""
    lines = headers.getlist(name)
    return ", ".join(lines) if lines else None


def precondition_of_put(headers: Headers) -> Precondition | None:
    """Return the precondition of `If-Match` and `If-None-Match`. Raises BadInput."""
    match, none_match = list_header(headers, "if-match"), list_header(headers, "if-none-match")
    if match is None and none_match is None:
        return None
    return Precondition(_tags("If-Match", match, weak=False), _tags("If-None-Match", none_match, weak=True))


def check_match(match: str, info: VersionInfo) -> None:
    """Refuse a deletion if `If-Match` is not the newest version to delete. Raises Problem 412."""
    if not _is_tag_listed(match, etag(info), weak=False):
        raise Problem(412, PRECONDITION, f"If-Match {match:.100}: version {info.version} is {info.digest}")


def not_modified(headers: Headers, info: VersionInfo, *, named: bool) -> bool:
    """Return whether 304 is the answer to a read. Raises Problem 412.

    A date counts in full only for a `named` version, which never changes. For a key's newest version it is too
    coarse: two versions of one second share it, and after a deletion the newest is older than the client's copy (RFC
    9110, 8.8.2.2).
    """
    match, none_match = list_header(headers, "if-match"), list_header(headers, "if-none-match")
    if match is not None:
        if not _is_tag_listed(match, etag(info), weak=False):
            raise Problem(412, PRECONDITION, f"If-Match {match:.100}: this version is {info.digest}")
    else:
        unmodified = _date(headers.get("if-unmodified-since"))
        if unmodified is not None and (_seconds(info) if named else info.created) > unmodified:
            raise Problem(412, PRECONDITION, f"If-Unmodified-Since: made at {last_modified(info)}; use If-Match")
    if none_match is not None:
        return _is_tag_listed(none_match, etag(info), weak=True)
    since = _date(headers.get("if-modified-since"))
    return named and since is not None and _seconds(info) <= since


def wanted_ranges(headers: Headers, info: VersionInfo) -> list[tuple[int, int]] | None:
    """Return (start, stop) of each range in the order of the request, or None for the whole.

    Raises Problem 416 if no range has bytes of the blob, or if there are more than RANGES_MAX.

    Ranges that overlap or touch become one, so that no byte is sent twice, and empty members are ignored. Other units
    and invalid ranges are ignored, as the RFC allows: the whole is sent.
    """
    text = list_header(headers, "range")
    unit = _UNIT.fullmatch(text.strip()) if text is not None else None
    if unit is None or not _if_range(headers.get("if-range"), info):
        return None
    members = [member for member in unit[1].split(",") if member.strip()]
    found = [_RANGE.fullmatch(member) for member in members[: RANGES_MAX + 1]]
    if not found or not all(match is not None and _is_valid(match) for match in found):
        return None
    if len(members) > RANGES_MAX:
        raise _unsatisfiable(text, info, f"has {len(members)} ranges, want at most {RANGES_MAX}")
    bounds = [_bounds_of(match, info.size_bytes) for match in found if match is not None]
    if not info.size_bytes and any(not match[1] and int(match[2]) for match in found if match is not None):
        return None  # the last bytes of an empty blob are the whole of it
    satisfiable = [(start, stop) for start, stop in bounds if start < stop]
    if not satisfiable:
        size_bytes = info.size_bytes
        raise _unsatisfiable(text, info, f"the blob has {size_bytes} byte{'' if size_bytes == 1 else 's'}")
    return _merge(satisfiable)


def _is_valid(match: re.Match[str]) -> bool:
    """Return whether a range has a start or a length, and does not end before it begins."""
    return bool(match[1] or match[2]) and not (match[1] and match[2] and int(match[2]) < int(match[1]))


def _bounds_of(match: re.Match[str], size_bytes: int) -> tuple[int, int]:
    """Return start and stop (the byte after the last); equal ones beyond the end of the blob."""
    if not match[1]:
        return max(0, size_bytes - int(match[2])), size_bytes
    start = min(int(match[1]), size_bytes)
    return start, size_bytes if not match[2] else min(int(match[2]) + 1, size_bytes)


def _merge(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that overlap or touch; each takes the position of the first of its ranges."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(bounds):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return sorted(joined, key=lambda whole: next(at for at, one in enumerate(bounds) if whole[0] <= one[0] < whole[1]))


def _unsatisfiable(text: str | None, info: VersionInfo, why: str) -> Problem:
    return Problem(
        416,
        "range-not-satisfiable",
        f"Range {text!s:.60}: {why}",
        headers={"Content-Range": f"bytes */{info.size_bytes}"},
    )


def _if_range(condition: str | None, info: VersionInfo) -> bool:
    if condition is None:
        return True
    # Strong comparison: a weak tag never matches, nor does a date. Two versions of one second share it, and who went
    # on after a break would join the one's beginning and the other's end (RFC 9110, 13.1.5).
    return condition.strip() == etag(info)


def _is_tag_listed(text: str, tag: str, *, weak: bool) -> bool:
    if text.strip() == "*":
        return True
    return any(f'"{found[2]}"' == tag and (weak or not found[1]) for found in _TAG.finditer(text))


def _tags(name: str, text: str | None, *, weak: bool) -> Tags | None:
    """Return the digests in a list of entity tags; weak tags count in a weak comparison only."""
    if text is None:
        return None
    found = _TAG.finditer(text)
    return tags_of(
        name, [ANY] if text.strip() == ANY else [tag[2] for tag in found if tag[2] != ANY and (weak or not tag[1])]
    )


def _seconds(info: VersionInfo) -> datetime:
    return info.created.astimezone(UTC).replace(microsecond=0)


def _date(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
