"""Test `nearkin bench index`: every kind answers right, and arguments are refused first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearkin.cli.commands import nearkin
from nearkin.lab.suites import index_suite
from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.index.tablets.tablet_index import TabletIndex


def test_index_suite_measures_every_kind(tmp_path: Path) -> None:
    """Memory and disk of tags stay below those of the exact index; a known stream reads its directories."""
    arguments = [
        "bench",
        "index",
        "--chunks",
        "2e4",
        "--kinds",
        "exact,tablets,sampled,tags",
        "--work",
        str(tmp_path),
        "--json",
    ]
    ran = CliRunner().invoke(nearkin, arguments)
    assert ran.exit_code == 0, ran.output
    exact, tablets, sampled, tags = (json.loads(line) for line in ran.output.splitlines())
    assert [row["kind"] for row in (exact, tablets, sampled, tags)] == ["exact", "tablets", "sampled", "tags"]
    assert {row["chunks"] for row in (exact, tablets, sampled, tags)} == {20480}
    assert exact["memory_bytes_a_chunk"] is None
    assert 5 < tags["memory_bytes_a_chunk"] < tablets["memory_bytes_a_chunk"] < 10
    assert tags["disk_bytes_a_chunk"] < tablets["disk_bytes_a_chunk"] < exact["disk_bytes_a_chunk"] / 4
    assert tablets["directories_a_1000_known"] < 4
    assert sampled["memory_bytes_a_chunk"] < 1
    assert sampled["disk_bytes_a_chunk"] < tablets["disk_bytes_a_chunk"]
    assert sampled["missed_percent"] < 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kinds", "exakt"], 'kind "exakt": choose exact, tablets, sampled, tags'),
        (["--chunks", "9"], "chunks 9: want 10000 to 2000000000"),
        (["--chunks", "many"], '--chunks "many"'),
    ],
)
def test_wrong_arguments_of_bench_index_are_named(arguments: list[str], complaint: str) -> None:
    ran = CliRunner().invoke(nearkin, ["bench", "index", *arguments])
    assert ran.exit_code != 0
    assert isinstance(ran.exception, BadInput | SystemExit)
    assert complaint in ran.output + str(ran.exception)


def test_wrong_answer_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that loses names is not measured."""
    monkeypatch.setattr(TabletIndex, "publish_many", lambda *_: None)
    with pytest.raises(PermanentError, match="answers are wrong"):
        list(index_suite.run([20_000], ["tablets"], None, tmp_path))
