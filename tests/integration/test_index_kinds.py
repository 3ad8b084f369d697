"""Test the kinds of a local store's index: which one a store has, and its report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearkin.cli.commands import nearkin
from nearkin.local import index_files
from nearkin.store import Store, open_store
from nearkin_shared.index.tablets import hook_levels, tablet_search
from tests.support.data.samples import noise
from tests.support.data.stores import ENCRYPTED, settings

CONTENT = noise(3_000_000, "content").tobytes()


def opened(root: Path, **index: object) -> Store:
    return open_store(root, settings=settings({"index": index}), create=True)


def kind_of(store: Store) -> str:
    report = store.stats().index
    assert report is not None
    return report.kind


def outgrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "EXACT_SHARE", 1e-4)


def test_small_store_has_an_exact_index(tmp_path: Path) -> None:
    """The kind is chosen by what the store has."""
    with opened(tmp_path) as store:
        store.put("k", CONTENT)
        report = store.stats().index
        assert report is not None
        assert (report.kind, report.memory_bytes, report.missed_share) == ("exact", None, 0.0)


def test_index_that_outgrows_its_memory_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next opening for writing, once; nothing is lost, and readers use what is there."""
    with opened(tmp_path) as store:
        store.put("k", CONTENT)
    outgrow(monkeypatch)
    with opened(tmp_path) as store:
        assert kind_of(store) == "exact"  # a reader changes nothing
        assert store.put("k", CONTENT).ledger.raw_chunks == 0
    assert "takes more than index.memory" in caplog.text
    caplog.clear()
    with opened(tmp_path) as store:
        result = store.put("k", CONTENT)
        assert result.ledger.duplicate_chunks == result.ledger.chunks > 100
        assert kind_of(store) == "sampled"
        store.rebuild_index()
        assert kind_of(store) == "sampled"
        assert [store.get("k", version).read() for version in (1, 2, 3)] == [CONTENT] * 3
        assert store.verify().damage == ()
    assert "rebuilding" not in caplog.text


def test_missing_index_of_a_large_store_is_made_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of its containers."""
    with opened(tmp_path) as store:
        store.put("k", CONTENT)
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    outgrow(monkeypatch)
    with opened(tmp_path) as store:
        result = store.put("k", CONTENT)
        assert result.ledger.duplicate_chunks == result.ledger.chunks
        assert kind_of(store) == "sampled"


def test_kind_that_is_set_replaces_the_present_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between `tablets` and `sampled` without a rebuild, which share their tables; `auto` keeps them."""
    for kind, is_rebuilt in (("exact", False), ("tablets", True), ("sampled", False), ("auto", False), ("exact", True)):
        caplog.clear()
        with opened(tmp_path, kind=kind) as store:
            store.put("k", CONTENT)
            assert kind_of(store) == ("sampled" if kind == "auto" else kind)
        assert ("rebuilding" in caplog.text) == is_rebuilt


def test_missed_duplicates_are_stored_as_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scattered part of an old version has no hook in any batch: its chunks are found by resemblance."""
    monkeypatch.setattr(hook_levels, "LEVEL_FIRST", 15)
    monkeypatch.setattr(tablet_search, "RECENT_MAX", 2)
    for attempt in range(3):  # by the secret of the store one content in 90 has a hook, and nothing is missed
        folder = tmp_path / str(attempt)
        with opened(folder, kind="sampled") as store:
            for number in range(12):
                store.put("filler", noise(5_000_000, f"filler {number}").tobytes())
                if number == 0:
                    store.put("k", CONTENT)
        with opened(folder, kind="sampled") as store:
            result = store.put("k", CONTENT)
        if result.ledger.duplicate_chunks < result.ledger.chunks:
            break
    assert result.ledger.duplicate_chunks < result.ledger.chunks
    assert result.ledger.stored_bytes < len(CONTENT) / 10
    with opened(folder, kind="sampled") as store:
        assert [store.get("k", version).read() for version in (1, 2)] == [CONTENT] * 2
        assert store.verify().damage == ()


@pytest.mark.parametrize("kind", ["tablets", "sampled"])
def test_encrypted_store_uses_and_rebuilds_tablets(tmp_path: Path, kind: str) -> None:
    """Directories are decrypted; the files of the index have no key names."""
    chosen = settings(ENCRYPTED, {"index": {"kind": kind}})
    with open_store(tmp_path, settings=chosen, create=True) as store:
        store.put("payroll", CONTENT)
    written = b"".join(path.read_bytes() for path in (tmp_path / "index").rglob("*") if path.is_file())
    assert b"payroll" not in written
    for is_lost in (False, True):
        if is_lost:
            shutil.rmtree(tmp_path / "index")
        with open_store(tmp_path, settings=chosen) as store:
            result = store.put("payroll", CONTENT)
            assert result.ledger.duplicate_chunks == result.ledger.chunks > 100
            assert kind_of(store) == kind
            assert store.verify().damage == ()


@pytest.mark.parametrize("command", [["stats"], ["config", "index"]])
def test_commands_state_kind_memory_and_loss(tmp_path: Path, command: list[str]) -> None:
    """`nearkin stats` and `nearkin config index`."""
    with opened(tmp_path, kind="sampled") as store:
        store.put("k", CONTENT)
    ran = CliRunner().invoke(nearkin, ["--store", str(tmp_path), *command])
    assert ran.exit_code == 0, ran.output
    assert "sampled: " in ran.output
    assert " of memory, expected loss 0.00%" in ran.output
