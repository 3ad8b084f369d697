"""Test retention: rules, the policy of a key, and refused deletions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from nearkin.cli.forget import parse_duration, parse_policy
from nearkin_shared.config.storage import RetentionPolicy, RetentionSettings
from nearkin_shared.errors import BadInput, ConfigError, NotFound, RetentionActive
from nearkin_shared.results import Damage, VersionInfo
from nearkin_shared.retention import Decision, check_age, decide, forget, min_age_seconds, policy_of

START = datetime(2026, 11, 21, 12, tzinfo=UTC)


def info(version: int, created: datetime, key: str = "k") -> VersionInfo:
    return VersionInfo(key, version, 1, created, "blake3:", None, 1, 1, {})


def kept(created: list[datetime], **rules: Any) -> list[int]:
    versions = [info(number, when) for number, when in enumerate(created, 1)]
    found = decide(versions, RetentionPolicy(**rules), START.timestamp())
    return sorted(decision.info.version for decision in found if decision.kept)


def days(*numbers: float) -> list[datetime]:
    return [START + timedelta(days=number) for number in numbers]


def test_keep_last_keeps_the_newest_by_time() -> None:
    assert kept(days(0, 1, 2, 3), keep_last=2) == [3, 4]
    assert kept(days(0, 1, 2, 3), keep_last=-1) == [1, 2, 3, 4]
    assert kept(days(3, 2, 1, 0), keep_last=2) == [1, 2, 4]  # by time, not by number; the current version stays


def test_version_with_a_wrong_time_removes_no_other() -> None:
    lost, ahead = datetime(1970, 1, 1, tzinfo=UTC), datetime(2036, 1, 1, tzinfo=UTC)
    assert kept([*days(0, 1, 2), lost], keep_last=2) == [2, 3, 4]
    assert kept([*days(0, 1), ahead, *days(2, 3)], keep_within_seconds=30 * 86_400) == [1, 2, 3, 4, 5]
    assert kept([*days(0, 1), ahead, *days(2, 3)], keep_last=1) == [3, 5]
    assert kept([*days(0, 1), lost], keep_within_seconds=30 * 86_400) == [1, 2, 3]
    versions = [info(number, when) for number, when in enumerate([*days(0, 1), lost], 1)]
    found = decide(versions, RetentionPolicy(keep_daily=1), START.timestamp())
    assert [(d.info.version, d.reasons) for d in found] == [(2, ("daily",)), (1, ()), (3, ("newest",))]


def test_keep_daily_keeps_the_newest_of_days_with_versions() -> None:
    assert kept(days(0, 0.1, 5, 5.2, 9), keep_daily=2) == [4, 5]


def test_oldest_is_kept_for_rules_not_yet_full() -> None:
    assert kept(days(0, 0.1, 0.2), keep_daily=7) == [1, 3]
    assert kept(days(0, 0.1, 0.2), keep_daily=1) == [3]


def test_weeks_begin_on_monday_in_the_year_of_thursday() -> None:
    sunday, monday = datetime(2027, 1, 3, 12, tzinfo=UTC), datetime(2027, 1, 4, 12, tzinfo=UTC)
    december = datetime(2026, 12, 29, 12, tzinfo=UTC)
    earlier = datetime(2026, 11, 1, tzinfo=UTC)
    assert kept([earlier, december, sunday, monday], keep_weekly=2) == [3, 4]


def test_keep_monthly_and_yearly_keep_one_each() -> None:
    created = [datetime(year, month, 15, tzinfo=UTC) for year in (2024, 2025, 2026) for month in (1, 1, 7)]
    assert kept(created, keep_yearly=2) == [6, 9]
    assert kept(created, keep_monthly=3) == [6, 8, 9]


def test_within_counts_from_the_newest_version() -> None:
    assert kept(days(-400, -390, -365, -364), keep_within_seconds=86_400 * 2) == [3, 4]


def test_keep_hourly_keeps_the_newest_of_hours_with_versions() -> None:
    created = [START + timedelta(minutes=minutes) for minutes in (0, 10, 59, 60, 200, 201)]
    assert kept(created, keep_hourly=2) == [4, 6]
    assert kept(created, keep_hourly=9) == [1, 3, 4, 6]  # the oldest too, while the rule could keep more


@pytest.mark.parametrize(
    ("rule", "expected"), [("hourly", [4, 5, 6]), ("daily", [4, 6]), ("weekly", [4, 6]), ("monthly", [6])]
)
def test_within_a_period_keeps_one_version_of_each(rule: str, expected: list[int]) -> None:
    """Keep nothing outside the time, whatever its period."""
    created = days(-60, -40, -39.9, -8, -0.1, 0)
    assert kept(created, **{f"keep_within_{rule}_seconds": 9 * 86_400}) == expected


def test_within_daily_keeps_the_oldest_version_in_its_time() -> None:
    assert kept(days(0, 0.1, 0.2, 1), keep_within_daily_seconds=86_400 * 2) == [1, 3, 4]
    assert kept(days(-0.5, 0.1, 0.2, 1), keep_within_yearly_seconds=86_400) == [4]


@given(
    hours=st.lists(st.integers(0, 24 * 900), max_size=40),
    count=st.integers(-1, 5),
    within_hours=st.integers(1, 24 * 500),
    period=st.sampled_from(["hourly", "daily", "weekly", "monthly", "yearly"]),
)
@runs(deadline=None, max_examples=100)
def test_within_rules_equal_their_plain_restatement(
    hours: list[int], count: int, within_hours: int, period: str
) -> None:
    created = [START + timedelta(hours=hour) for hour in hours]
    period_of: dict[str, Callable[[datetime], object]] = {
        "hourly": lambda when: when.strftime("%Y-%m-%d %H"),
        "daily": lambda when: when.strftime("%Y-%m-%d"),
        "weekly": lambda when: when.strftime("%G %V"),
        "monthly": lambda when: when.strftime("%Y-%m"),
        "yearly": lambda when: when.strftime("%Y"),
    }
    versions = sorted(enumerate(created, 1), key=lambda v: (v[1], v[0]), reverse=True)
    expected: set[int] = set()
    if versions:
        earliest = created[-1] - timedelta(hours=within_hours)
        newest: dict[object, int] = {}
        for number, when in versions:
            newest.setdefault(period_of[period](when), number)
            if when >= earliest and (newest[period_of[period](when)] == number or number == versions[-1][0]):
                expected.add(number)
        chosen = list(newest.values()) if count < 0 else list(newest.values())[:count]
        expected |= {*chosen, len(hours)}
        if count < 0 or len(chosen) < count:
            expected.add(versions[-1][0])
    rules = {f"keep_within_{period}_seconds": within_hours * 3600, f"keep_{period}": count}
    assert set(kept(created, **rules)) == expected


def test_keep_tag_keeps_versions_with_all_tags_of_one_rule() -> None:
    tags = ["a", "a,b", "b, c", "", "ab"]
    versions = [replace(info(number, START), metadata={"tags": text}) for number, text in enumerate(tags, 1)]
    versions += [info(6, START)]

    def reasons(*rules: str) -> dict[int, tuple[str, ...]]:
        found = decide(versions, RetentionPolicy(keep_tags=rules), START.timestamp())
        return {decision.info.version: decision.reasons for decision in found if decision.kept}

    assert reasons("a") == {1: ("tag a",), 2: ("tag a",), 6: ("newest",)}
    assert reasons("a,b", "c") == {2: ("tag a,b",), 3: ("tag c",), 6: ("newest",)}
    assert reasons("none") == {6: ("newest",)}


def test_options_of_the_command_make_a_policy() -> None:
    rules = {"keep_last": 0, "keep_hourly": 5, "keep_within": None, "keep_within_daily": "2w", "keep_tag": ("x,y", "z")}
    assert parse_policy(rules) == RetentionPolicy(
        keep_hourly=5, keep_within_daily_seconds=14 * 86_400, keep_tags=("x,y", "z")
    )
    with pytest.raises(BadInput, match=r"--keep-within-monthly '6m': 360 s, shorter than .* m is minutes"):
        parse_policy({"keep_within_monthly": "6m"})
    with pytest.raises(BadInput, match="want a tag"):
        parse_policy({"keep_tag": ("x,",)})


def test_rules_add_up_and_no_rule_keeps_all() -> None:
    assert kept(days(0, 1, 2, 3, 4), keep_last=1, keep_within_seconds=86_400 * 1) == [4, 5]
    assert kept(days(0, 1, 2)) == [1, 2, 3]


def test_version_below_min_age_is_kept() -> None:
    versions = [info(1, START - timedelta(days=3)), info(2, START - timedelta(days=1)), info(3, START)]
    found = decide(versions, RetentionPolicy(keep_last=1), START.timestamp(), min_age=2 * 86_400)
    assert [(d.info.version, d.reasons) for d in found] == [(3, ("last", "min-age")), (2, ("min-age",)), (1, ())]


@given(
    hours=st.lists(st.integers(0, 24 * 900), max_size=40),
    last=st.integers(0, 5),
    daily=st.integers(-1, 5),
    yearly=st.integers(0, 3),
)
@runs(deadline=None, max_examples=100)
def test_rules_equal_their_plain_restatement(hours: list[int], last: int, daily: int, yearly: int) -> None:
    created = [START + timedelta(hours=hour) for hour in hours]
    versions = sorted(enumerate(created, 1), key=lambda v: (v[1], v[0]), reverse=True)
    expected = {number for number, _ in versions[:last]}
    for count, period in ((daily, lambda when: when.date()), (yearly, lambda when: when.year)):
        newest: dict[object, int] = {}
        for number, when in versions:
            newest.setdefault(period(when), number)
        chosen = list(newest.values()) if count < 0 else list(newest.values())[:count]
        expected |= set(chosen)
        if versions and (count < 0 or len(chosen) < count):
            expected.add(versions[-1][0])
    expected |= {len(hours)} - {0}  # the current version, at any time
    if not (last or daily or yearly):
        expected = {number for number, _ in versions}
    assert set(kept(created, keep_last=last, keep_daily=daily, keep_yearly=yearly)) == expected


POLICIES = RetentionSettings(
    min_age_seconds=10,
    policies=(
        RetentionPolicy(keep_last=1),
        RetentionPolicy(prefix="db/", keep_last=2),
        RetentionPolicy(prefix="db/", tenant="t", keep_last=3),
        RetentionPolicy(prefix="db/legal/", min_age_seconds=1000),
    ),
)


def test_policy_of_the_longest_prefix_and_age_applies() -> None:
    def last_of(tenant: str, key: str) -> int:
        policy = policy_of(POLICIES, tenant, key)
        assert policy is not None
        return policy.keep_last

    assert [last_of("t", "x"), last_of("u", "db/x"), last_of("t", "db/x"), last_of("t", "db/legal/x")] == [1, 2, 3, 3]
    assert policy_of(RetentionSettings(), "t", "x") is None
    assert [min_age_seconds(POLICIES, "t", key) for key in ("x", "db/legal/x")] == [10, 1000]


def test_version_below_min_age_is_refused_with_its_time() -> None:
    recent = info(3, START, "db/legal/x")
    check_age(POLICIES, "t", recent, START.timestamp() + 1000)
    with pytest.raises(RetentionActive, match=r"'db/legal/x' version 3: is kept until 2026-11-21T12:16:40Z"):
        check_age(POLICIES, "t", recent, START.timestamp() + 999)
    with pytest.raises(RetentionActive, match="is kept until after the year 9999"):
        check_age(POLICIES, "t", info(3, datetime.max.replace(tzinfo=UTC), "db/legal/x"), START.timestamp())


def test_forget_continues_after_a_concurrent_deletion() -> None:
    class Racing:
        """A store in which another process deletes the first version meanwhile."""

        def __init__(self) -> None:
            self.deleted: list[int | None] = []

        def versions(
            self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
        ) -> list[VersionInfo]:
            return [info(1, START), info(2, START)]

        def delete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
            if version == 1:
                raise NotFound("gone")
            self.deleted.append(version)
            return 1

    store = Racing()
    done = forget(store.delete, [Decision(found, ()) for found in store.versions()])
    assert store.deleted == [2]
    assert [decision.kept for decision in done] == [False, False]


@pytest.mark.parametrize(("text", "seconds"), [("36h", 129_600), ("1y6w", 35_164_800), ("90s", 90), ("2m", 120)])
def test_durations_are_parsed(text: str, seconds: int) -> None:
    assert parse_duration("keep-within", text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1.5d", "0s", "101y", "1d 2h", "1D"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="want a time"):
        parse_duration("keep-within", text)


def test_policies_of_a_file_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    from nearkin_shared.config.loader import load

    file = tmp_path / "n.toml"
    file.write_text('[retention]\nmin_age_seconds = 5\n[[retention.policies]]\nprefix = "db/"\nkeep_daily = 7\n')
    settings, _ = load(file)
    assert settings.retention.policies == (RetentionPolicy(prefix="db/", keep_daily=7),)
    file.write_text(
        "[[retention.policies]]\nkeep_hourly = 3\nkeep_within_weekly_seconds = 9\nkeep_tags = ['a,b', 'c']\n"
    )
    (policy,) = load(file)[0].retention.policies
    assert policy == RetentionPolicy(keep_hourly=3, keep_within_weekly_seconds=9, keep_tags=("a,b", "c"))
    file.write_text("[[retention.policies]]\nkeep_tags = ['a,']\n")
    with pytest.raises(ConfigError, match="want a tag"):
        load(file)
    file.write_text("[[retention.policies]]\nkeep_daily = -2\n")
    with pytest.raises(ConfigError, match="want -1 to 1000000"):
        load(file)
