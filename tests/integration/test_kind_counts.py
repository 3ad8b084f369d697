"""Test counts by kind of content: of blobs, of trees with and without rules, and by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli import main
from nearkin.kind_counts import count_kinds, sum_kinds
from nearkin.lab.generated_data import text_like
from tests.support.data import content_samples as samples
from tests.support.data.stores import settings

PHOTO = samples.jpeg(700_000, 3)
TEXT = text_like(300_000, 4)


@pytest.fixture(params=["none", "all"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a store with a tree of four files and with a blob of two versions."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in {"a": PHOTO, "b": TEXT, "c": b"tiny", "d": samples.postgres_file(40)}.items():
        (folder / name).write_bytes(content)
    chosen = settings({"chunker": {"rules": request.param}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.backup("tree", [folder])
        for _ in range(2):
            store.put("photo", PHOTO)
    return tmp_path / "s"


def test_kinds_of_a_tree_are_those_of_its_files(root: Path) -> None:
    """Files end where their entries say, whatever rules the store has."""
    with open_store(root) as store:
        found, size_bytes = count_kinds(store, "tree"), store.info("tree").size_bytes
    assert {kind: each.logical_bytes for kind, each in found.items() if kind != "other"} == {
        "media": len(PHOTO),
        "database": 40 * 8192,
    }
    assert sum(each.logical_bytes for each in found.values()) == size_bytes


def test_kinds_of_a_store_are_summed_over_versions(root: Path) -> None:
    """Duplicates are logical bytes, and take no stored bytes; the stored bytes are those of the blocks."""
    with open_store(root) as store:
        found, ledger, tree = sum_kinds(store), store.stats().ledger, count_kinds(store, "tree")
    assert found["media"].logical_bytes == 3 * len(PHOTO)
    assert found["media"].stored_estimate_bytes == tree["media"].stored_estimate_bytes
    assert sum(each.stored_estimate_bytes for each in found.values()) == pytest.approx(ledger.block_bytes, rel=0.01)
    assert sum(each.logical_bytes for each in found.values()) == ledger.logical_bytes
    assert sum(each.chunks for each in found.values()) == ledger.chunks


def test_kinds_are_shown_by_commands(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", str(root), "--json", "explain", "photo", "--kinds"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["media"]["logical_bytes"] == len(PHOTO)
    assert main(["--store", str(root), "stats", "--by", "kind"]) == 0
    shown = capsys.readouterr().out
    assert "media" in shown
    assert "database" in shown
    assert main(["--store", str(root), "explain", "photo", "--kinds", "--segments"]) == 2
    assert "not with --segments" in capsys.readouterr().err
