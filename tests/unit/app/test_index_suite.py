"""Test `nearkin bench index`: every kind answers right, and arguments are refused first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearkin.cli.commands import nearkin
from nearkin.lab.suites import index_loss, index_suite
from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.index.tablets import hook_levels
from nearkin_shared.index.tablets.tablet_index import TabletIndex
from tests.support.data.samples import noise


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


def test_loss_of_a_sampled_index_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stored bytes, with every kind; versions are read back."""
    monkeypatch.setattr(index_loss, "LEVELS", (6,))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(2):
        (corpus / str(number)).write_bytes(noise(2_000_000, "content").tobytes() + bytes([number]))
    ran = CliRunner().invoke(nearkin, ["bench", "index", "--corpus", str(corpus), "--work", str(tmp_path), "--json"])
    assert ran.exit_code == 0, ran.output
    exact, full, sampled = (json.loads(line) for line in ran.output.splitlines())
    assert [row["hooks_one_in"] for row in (exact, full, sampled)] == [1, 1, 64]
    assert (exact["kind"], full["kind"], sampled["kind"]) == ("exact", "sampled", "sampled")
    assert exact["chunks"] == full["chunks"] == sampled["chunks"] > 200
    assert abs(full["more_stored_percent"]) < 0.1
    assert exact["index_reads"] == exact["names_asked"] == full["names_asked"] == sampled["names_asked"] > 10
    assert 0 < full["index_reads"] < full["names_asked"] / 2
    assert 0 < sampled["index_reads"] < full["names_asked"] / 2
    assert exact["memory_bytes_a_chunk"] is None
    assert sampled["memory_bytes_a_chunk"] < full["memory_bytes_a_chunk"]
    assert hook_levels.LEVEL_FIRST == 0


def test_wrong_answer_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that loses names is not measured."""
    monkeypatch.setattr(TabletIndex, "publish_many", lambda *_: None)
    with pytest.raises(PermanentError, match="answers are wrong"):
        list(index_suite.run([20_000], ["tablets"], None, tmp_path))
