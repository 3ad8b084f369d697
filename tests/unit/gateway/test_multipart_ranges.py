"""Test several ranges of one request: which bytes they name, and how they are framed (RFC 9110, 14)."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, datetime
from email import policy
from email.parser import BytesParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from nearkin_gateway.http.multipart_ranges import MultipartRanges
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.ranges import RANGES_MAX, wanted_ranges
from nearkin_shared.results import VersionInfo

DATA = bytes(range(50))


def ranges_of(text: str, size_bytes: int = len(DATA)) -> list[tuple[int, int]] | None:
    """Return what a `Range` header asks for."""
    info = VersionInfo("k", 1, size_bytes, datetime.now(UTC), "blake3:00", None, 0, 0, {})
    return wanted_ranges(Headers({"range": text}), info)


def read(start: int, stop: int) -> Generator[memoryview, None, None]:
    """Yield bytes of DATA in pieces of at most 7."""
    for at in range(start, stop, 7):
        yield memoryview(DATA[at : min(at + 7, stop)])


def parts_of(content_type: str, body: bytes) -> list[tuple[str, Any, Any]]:
    """Return (Content-Type, Content-Range, bytes) of each part, by Python's own parser."""
    message = BytesParser(policy=policy.HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    return [
        (part.get_content_type(), part["content-range"], part.get_payload(decode=True)) for part in message.iter_parts()
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bytes=0-1,3-4", [(0, 2), (3, 5)]),
        ("bytes=40-, 5-5 ,-3", [(40, 50), (5, 6)]),
        ("bytes=30-39,0-9,20-25", [(30, 40), (0, 10), (20, 26)]),
        ("bytes=20-29,0-9,10-15", [(20, 30), (0, 16)]),
        ("bytes=5-9,0-9,7-12", [(0, 13)]),
        ("bytes=0-0,,60-70", [(0, 1)]),
        ("bytes=0-1,5-2", None),
        ("bytes=0-1,x", None),
        ("bytes=0-1;3-4", None),
        ("lines=0-1,3-4", None),
        ("bytes=,", None),
    ],
)
def test_ranges_join_where_they_overlap_or_touch(text: str, found: list[tuple[int, int]] | None) -> None:
    """No byte is sent twice; ranges keep their order, unsatisfiable ones are left out, invalid ones ignored."""
    assert ranges_of(text) == found


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=RANGES_MAX))
def test_ranges_name_each_wanted_byte_once(pairs: list[tuple[int, int]]) -> None:
    """The joined ranges have exactly the bytes that were asked for and exist, each once."""
    pairs = [(min(pair), max(pair)) for pair in pairs]
    wanted = {at for first, last in pairs for at in range(first, last + 1) if at < len(DATA)}
    text = "bytes=" + ",".join(f"{first}-{last}" for first, last in pairs)
    if not wanted:
        with pytest.raises(Problem):
            ranges_of(text)
        return
    named = [at for start, stop in ranges_of(text) or [] for at in range(start, stop)]
    assert len(named) == len(wanted)
    assert set(named) == wanted


def test_ranges_beyond_their_bound_are_refused() -> None:
    """A request for more ranges than RANGES_MAX is 416 with the bound, however small they are."""
    members = [f"{at}-{at}" for at in range(0, 2 * (RANGES_MAX + 1), 2)]
    assert len(ranges_of("bytes=" + ",".join(members[:-1]), 1000) or []) == RANGES_MAX
    with pytest.raises(Problem) as refused:
        ranges_of("bytes=" + ",".join(members), 1000)
    assert refused.value.status == 416
    assert f"want at most {RANGES_MAX}" in refused.value.detail


def test_multipart_body_has_its_declared_length() -> None:
    """The framed body is what a MIME parser takes apart into the ranges, of the length that is announced."""
    body = MultipartRanges([(40, 50), (0, 1), (10, 30)], "text/plain", len(DATA))
    content = b"".join(body.pieces(read))
    assert len(content) == body.size_bytes
    assert parts_of(body.content_type, content) == [
        ("text/plain", "bytes 40-49/50", DATA[40:50]),
        ("text/plain", "bytes 0-0/50", DATA[:1]),
        ("text/plain", "bytes 10-29/50", DATA[10:30]),
    ]


def test_multipart_closes_the_range_being_read() -> None:
    """A client that leaves ends the read of the range that was being sent."""
    closed = []

    def watched(start: int, stop: int) -> Generator[memoryview, None, None]:
        try:
            yield from read(start, stop)
        finally:
            closed.append(start)

    pieces = MultipartRanges([(0, 20), (30, 40)], "text/plain", len(DATA)).pieces(watched)
    next(pieces), next(pieces)
    pieces.close()
    assert closed == [0]
