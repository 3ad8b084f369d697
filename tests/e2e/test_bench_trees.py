"""Test `nearkin bench trees` over small folders, with the tools that are installed."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from nearkin.cli import main
from nearkin.lab import tree_corpora
from nearkin.lab.suites.trees_suite import MEASURED, first_difference, update_tree
from nearkin.lab.tree_corpora import RELEASES, WEEKS, home, releases_of, small
from tests.support.checks.lab_suites import run_and_read_record

SCALE = 200
"""A home folder of some twenty files."""


@pytest.fixture
def weeks(tmp_path: Path) -> Path:
    """Return a folder with three states of a home folder."""
    home(3, tmp_path / "cache", SCALE)
    return tmp_path / "cache" / f"trees-home-{SCALE}"


def test_every_tool_that_is_installed_backs_up_and_restores(weeks: Path, tmp_path: Path) -> None:
    tools = [name for name in ("restic", "borg", "kopia") if shutil.which(name)]
    peers = ",".join(tools) or "none"
    record = run_and_read_record(tmp_path, "trees", "--corpus", weeks, "--runs", "1", "--peers", peers)
    assert record["left_out"] == []
    rows = {row["tool"]: row["figures"] for row in record["rows"]}
    assert set(rows) >= {"nearkin", *tools}
    for tool, figures in rows.items():
        assert set(figures) == set(MEASURED), tool
        assert all(figure is not None for figure in figures.values()), tool
        assert figures["first_bytes"]["median"] > 0
        assert figures["file_seconds"]["median"] > 0
    assert rows["nearkin"]["growth_bytes"]["median"] > rows["nearkin"]["again_bytes"]["median"]
    assert "| **nearkin** |" in (tmp_path / "trees.md").read_text()


def test_generated_home_changes_from_week_to_week_as_before(weeks: Path, tmp_path: Path) -> None:
    states = sorted(weeks.iterdir())
    assert [state.name for state in states] == ["week-00", "week-01", "week-02"]
    assert all(first_difference(one, other) for one, other in pairwise(states))
    again = home(3, tmp_path / "other", SCALE)
    assert [first_difference(one, other) for one, other in zip(states, again, strict=True)] == [None] * 3


def test_small_files_change_one_in_a_hundred_each_week(tmp_path: Path) -> None:
    first, second = small(400, 2, tmp_path)
    changed = [
        path for path in first.rglob("*.txt") if path.read_bytes() != (second / path.relative_to(first)).read_bytes()
    ]
    assert len(list(second.rglob("*.txt"))) == 400
    assert len(changed) == 4
    assert all(1024 <= path.stat().st_size <= 8 * 1024 for path in first.rglob("*.txt"))


def test_live_tree_keeps_files_that_did_not_change(tmp_path: Path) -> None:
    live, old, new = tmp_path / "live", tmp_path / "old", tmp_path / "new"
    for folder, files in (
        (old, {"a": "1", "b/c": "2", "gone": "3", "x": "4"}),
        (new, {"a": "1", "b/c": "5", "x/y": ""}),
    ):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    update_tree(live, old)
    kept = (live / "a").stat()
    update_tree(live, new)
    assert first_difference(live, new) is None
    assert (live / "a").stat().st_mtime_ns == kept.st_mtime_ns
    (live / "b" / "c").write_text("6")
    assert first_difference(live, new) == str(live / "b" / "c")


def test_releases_advance_within_their_lists() -> None:
    weeks = [releases_of(week) for week in range(WEEKS)]
    for name, versions in RELEASES.items():
        places = [versions.index(week[name]) for week in weeks]
        assert places == sorted(places)
    assert all(before != after for before, after in pairwise(weeks))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--corpus", "botocore"], 'corpus "botocore": choose packages, home'),
        (["--corpus", "home", "--versions", "11"], "home has at most 10"),
        (["--peers", "tar"], 'peer "tar": choose among restic'),
        (["--chart", "svg"], "draws no chart"),
    ],
)
def test_wrong_usage_is_refused_before_a_corpus_is_made(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], reason: str
) -> None:
    monkeypatch.setattr(tree_corpora, "TREES", dict.fromkeys(tree_corpora.TREES, lambda _: pytest.fail("was made")))
    assert main(["bench", "trees", "--out", str(tmp_path), *words]) == 2
    assert reason in capfd.readouterr().err
