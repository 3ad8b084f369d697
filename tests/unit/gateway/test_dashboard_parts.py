"""Test the dashboard's functions without a socket.

Charts, rolling statistics, shares, host names.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import HTTPConnection

from nearkin_gateway.auth.sessions import check_loopback_host, check_same_origin
from nearkin_gateway.dashboard import charts, display_names, number_text, setting_forms
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.monitoring import usage
from nearkin_gateway.monitoring.rolling_stats import FAILURES_MAX, MINUTES_MAX, RollingStats
from nearkin_gateway.monitoring.usage import POINTS_MAX, count_versions, points_of
from nearkin_shared.config.settings import HOT_FIELDS, Settings
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.results import ChunkExplained, Explanation, Ledger, SegmentExplained, Stats, VersionInfo

KINDS = st.sampled_from(charts.KINDS)


def explained(chunks: list[tuple[str, int]]) -> Explanation:
    made, offset = [], 0
    for kind, length_bytes in chunks:
        made.append(ChunkExplained(offset, length_bytes, kind, "", 0, 0))
        offset += length_bytes
    info = VersionInfo("key", 1, offset, datetime.now(UTC), "", None, 1, len(made), {})
    return Explanation(info, (SegmentExplained(0, 0, offset, False, tuple(made)),), 0, 0, 0, 0)


# --- charts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(KINDS, st.integers(1, 65_536)), min_size=1, max_size=600))
@settings(max_examples=60, deadline=None)
def test_strip_shows_every_byte_once_and_fills_its_width(chunks: list[tuple[str, int]]) -> None:
    strip = charts.strip(explained(chunks))
    for kind, count, size_bytes, _ in strip.totals:
        assert count == sum(entry[0] == kind for entry in chunks)
        assert size_bytes == sum(length for entry, length in chunks if entry == kind)
    assert 1 <= len(strip.columns) <= charts.STRIP_BINS_MAX
    width = charts.STRIP_WIDTH / len(strip.columns)
    for number, column in enumerate(strip.columns):
        assert sum(piece.height for piece in column.pieces) == pytest.approx(100, abs=0.1)
        assert all(piece.at == pytest.approx(number * width, abs=0.01) for piece in column.pieces)


def test_strip_of_empty_blob_is_empty() -> None:
    strip = charts.strip(explained([]))
    assert [column.pieces for column in strip.columns] == [[]]


def test_waterfall_begins_with_all_and_its_steps_add_up() -> None:
    ledger = Ledger(
        logical_bytes=1000, unique_bytes=400, delta_chunk_bytes=200, delta_bytes=50, block_bytes=150, stored_bytes=170
    )
    steps = charts.waterfall(ledger)
    assert [step.left_bytes for step in steps] == [1000, 400, 250, 150, 170]
    assert [step.saved_bytes for step in steps] == [0, 600, 150, 100, -20]
    assert [step.width for step in steps] == [1000, 400, 250, 150, 170]
    assert [step.width for step in charts.waterfall(Ledger())] == [0] * 5


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**15), st.integers(0, 10**13)), max_size=50))
def test_curve_stays_inside_its_panel(found: list[tuple[int, int, int]]) -> None:
    curve = charts.curve([(float(when), logical, stored) for when, logical, stored in sorted(found)])
    if not any(logical for _, logical, _ in found):
        assert curve is None
        return
    assert curve is not None
    for x, y in re.findall(r"(-?[0-9.]+) (-?[0-9.]+)", curve.logical + curve.stored):
        assert charts.LEFT <= float(x) <= charts.WIDTH - charts.RIGHT + 0.1
        assert charts.TOP - 0.1 <= float(y) <= charts.HEIGHT - charts.BOTTOM + 0.1
    assert 2 <= len(curve.upwards) <= charts.TICKS_MAX + 2
    assert len({tick.label for tick in curve.upwards}) == len(curve.upwards)


def test_bars_have_the_height_of_their_values() -> None:
    drawn, grid = charts.bars([("00:00", 0), ("00:01", 500), ("00:02", 1000)])
    assert [bar.height for bar in drawn] == pytest.approx([drawn[1].height / 2, drawn[1].height], abs=0.1)
    assert [tick.label for tick in grid] == ["0 B", "500 B", "1,000 B"]
    assert charts.bars([("00:00", 0)])[0] == []


def test_durations_are_shown_in_their_two_largest_units() -> None:
    result = [number_text.seconds(value) for value in (0.04, 59, 60, 3_599, 86_400, 90_000, None)]
    assert result == ["0.0 s", "59 s", "1 min", "59 min 59 s", "1 d", "1 d 1 h", "unknown"]


# --- the last hour ---------------------------------------------------------------------------------------------------


def event(when: datetime, state: str = "committed", **more: Any) -> dict[str, Any]:
    ledger = {"logical_bytes": 100, "stored_bytes": 10}
    return {"state": state, "created" if state == "committed" else "began": when.isoformat(), "ledger": ledger, **more}


def test_rolling_stats_are_bounded() -> None:
    minutes, now = RollingStats(), datetime.now(UTC)
    for ago in range(200):
        minutes.add(event(now - timedelta(minutes=ago)))
    for number in range(300):
        minutes.add(event(now, "failed", tenant="t", key=str(number), failure="x" * 10_000))
    result = minutes.last_hour()
    assert len(result) == MINUTES_MAX
    assert MINUTES_MAX - 1 <= sum(int(str(minute["committed"])) for minute in result) <= MINUTES_MAX
    assert sum(int(str(minute["logical_bytes"])) for minute in result) <= 100 * MINUTES_MAX
    failures = minutes.failures()
    assert (len(failures), failures[0]["key"]) == (FAILURES_MAX, "299")
    assert len(failures[0]["failure"]) <= 500


@pytest.mark.parametrize(
    "broken", [{}, {"state": "failed"}, {"state": "committed", "created": "x", "ledger": {"logical_bytes": -1}}]
)
def test_event_without_a_field_is_accepted(broken: dict[str, Any]) -> None:
    minutes = RollingStats()
    minutes.add(broken)
    assert len(minutes.last_hour()) == MINUTES_MAX


# --- shares ----------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 5)), min_size=1, max_size=40)


def stored(stored_bytes: int) -> Stats:
    return Stats(Ledger(stored_bytes=stored_bytes), 0, 0, 0, 0, {}, 0, {}, {}, 0, 0, 0.0)


def entries(sizes: list[tuple[int, int, int]]) -> list[CatalogEntry]:
    return [
        CatalogEntry(f"{folder}/k", number, 100, 0.0, Ledger(logical_bytes=logical, unique_bytes=unique))
        for number, (logical, unique, folder) in enumerate(sizes, 1)
    ]


@given(SIZES, st.integers(0, 10**11))
def test_shares_add_up_to_stored_bytes(sizes: list[tuple[int, int, int]], rest: int) -> None:
    stored_bytes = 100 * len(sizes) + rest
    counted = count_versions(stored(stored_bytes), entries(sizes))
    assert sum(share.stored_bytes for share in counted.prefixes) == pytest.approx(stored_bytes)
    assert counted.total.stored_bytes == pytest.approx(stored_bytes)
    assert counted.rows is not None
    assert sum(counted.stored_bytes(own, left, 1) for *_, own, left in counted.rows) == pytest.approx(stored_bytes)
    assert {share.prefix for share in counted.prefixes} == {f"{folder}/" for *_, folder in sizes}


def test_shares_of_versions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PREFIXES_KEPT_MAX", 6)
    monkeypatch.setattr(usage, "PREFIXES_MAX", 4)
    monkeypatch.setattr(usage, "ENTRIES_MAX", 30)
    monkeypatch.setattr(usage, "GROWTH_VERSIONS_MAX", 20)
    made = entries([(100 - folder, 1, folder) for folder in range(10) for _ in range(2)])
    counted = count_versions(stored(10_000), made)
    assert [share.prefix for share in counted.prefixes] == ["0/", "1/", "2/", "3/", None]
    assert (counted.prefixes[-1].versions, counted.total.versions, counted.whole) == (12, 20, True)
    assert counted.rows is not None
    many = count_versions(stored(10_000), made + made)
    assert (many.rows, many.whole, many.versions) == (None, False, 30)
    assert sum(share.stored_bytes for share in many.prefixes) == pytest.approx(10_000)


def test_tenant_list_reads_each_index_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    now = 1000.0

    class Catalogue:
        is_complete = True

        def stats(self, _tenant: str) -> Stats:
            return stored(10_000)

        def entries(self, tenant: str) -> list[CatalogEntry]:
            read.append(tenant)
            return entries([(100, 1, 1)])

    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: now))
    found = usage.UsageStats(Catalogue())  # type: ignore[arg-type]
    names = [f"t{number}" for number in range(50)]
    for _ in range(3):
        assert [found.total(name).total.versions for name in names] == [1] * 50
    assert sorted(read) == sorted(names)
    now += usage.TOTAL_SECONDS
    found.total("t7")
    assert read[50:] == ["t7"]
    for number in range(usage.TOTALS_MAX + 10):
        found.total(f"other{number}")
    assert len(found._totals) == usage.TOTALS_MAX


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=1000))
@settings(max_examples=40, deadline=None)
def test_curve_of_many_versions_has_few_points(times: list[int]) -> None:
    """It ends with the total."""
    points = points_of([(when, 2, 1.0) for when in sorted(times)])
    assert 1 <= len(points) <= POINTS_MAX
    assert (points[-1].logical_bytes, points[-1].stored_bytes) == (2 * len(times), len(times))
    assert [point.logical_bytes for point in points] == sorted(point.logical_bytes for point in points)


# --- forms and hosts -------------------------------------------------------------------------------------------------


def test_each_hot_setting_is_a_field_with_its_range() -> None:
    fields = [field for _, some in setting_forms.hot_fields(Settings(), {"block": {"level": 3}}) for field in some]
    assert {field.name for field in fields} == HOT_FIELDS
    for field in fields:
        bounded = field.least is not None and field.most is not None and field.least <= field.value <= field.most
        assert bounded or field.value in field.choices or isinstance(field.value, bool), field
    assert [field.name for field in fields if field.changed] == ["block.level"]


def connection(**headers: str) -> HTTPConnection:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw})


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8080", "127.9.9.9", "localhost:1", "[::1]", "[::1]:80", "LocalHost"]
)
def test_loopback_host_names_are_accepted(host: str) -> None:
    check_loopback_host(connection(host=host))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "[::2]:80", ":80", ""]
)
def test_foreign_host_names_are_refused(host: str) -> None:
    with pytest.raises(Problem, match="localhost alone"):
        check_loopback_host(connection(host=host))


@pytest.mark.parametrize(
    ("headers", "fits"),
    [
        ({"origin": "http://a:1", "host": "a:1"}, True),
        ({"origin": "https://A", "host": "a", "sec_fetch_site": "same-origin"}, True),
        ({"origin": "http://a", "host": "a:1"}, False),
        ({"origin": "http://a@b", "host": "b"}, False),
        ({"origin": "null", "host": "a"}, False),
        ({"origin": "null", "host": ""}, False),
        ({"origin": "http://[::1", "host": "[::1"}, False),
        ({"origin": "http://[x]", "host": "a"}, False),
        ({"origin": "http://a", "host": "a", "sec_fetch_site": "cross-site"}, False),
        ({"host": "a"}, False),
    ],
)
def test_origin_of_the_requested_host_is_own(headers: dict[str, str], fits: bool) -> None:
    if fits:
        check_same_origin(connection(**headers), must_say=True)
    else:
        with pytest.raises(Problem):
            check_same_origin(connection(**headers), must_say=True)


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wording"),
    [
        (12.44, "12.4×"),
        (1.0, "1.0×"),
        (0.96, "1.0×"),
        (0.5, "2.0× larger"),
        (0.0001, "10,000× larger"),
        (0, "nothing yet"),
    ],
)
def test_ratio_below_one_is_shown_in_words(value: float, wording: str) -> None:
    """F.21: a ratio below 1 is shown as how much larger the store is, never as `0.0×`."""
    assert number_text.ratio(value) == wording


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("db/dump", "db/dump"),
        ("shop ümläut 日本", "shop ümläut 日本"),
        ("a\u200bb\u202ec\u00a0d", r"a\u200bb\u202ec\xa0d"),
        ("\ttab\n", r"\ttab\n"),
        ("  ends ", r"\x20\x20ends\x20"),
        (" ", r"\x20"),
        ("\u3164\ufe0f\U000e0101", r"\u3164\ufe0f\U000e0101"),
        ("", ""),
    ],
)
def test_visible_writes_invisible_characters_as_escapes(given: str, shown: str) -> None:
    """F.21: two keys that differ in invisible characters never look the same."""
    assert display_names.visible(given) == shown


def test_short_key_keeps_both_ends_and_escapes_html() -> None:
    """F.21: the middle of a long key is left out; the tooltip has all of it, as text."""
    key = '<b title="x">/' + "y" * 100 + "/end.tar"
    short = str(display_names.short(key))
    assert short.startswith('<span title="&lt;b title=&#34;x&#34;&gt;/yyy')
    assert short.endswith("/end.tar</span>")
    assert "<b" not in short
    assert str(display_names.short("a&b")) == "a&amp;b"
