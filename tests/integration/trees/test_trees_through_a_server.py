"""Trees through a gateway, and copies of trees between stores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.client.sync import RemoteStore
from nearkin.store import open_store
from nearkin.store_copy import Copier, plan_key
from nearkin.trees.backup_walk import BackupCounts, BackupOptions, ComparisonOptions
from nearkin.trees.exclusions import ExclusionOptions
from nearkin.trees.tree_comparison import TreeComparison
from nearkin_shared.errors import BadInput, SourceFailed
from nearkin_shared.reading.tree_reader import TreeReader
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemoteStore]:
    with ScriptedGateway(tmp_path / "served") as gateway, nearkin.connect(gateway.url, TOKEN) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for number in range(50):
        path = folder / f"{number % 7}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(20_000))
    os.link(folder / "0" / "0", folder / "link")
    return folder


def test_tree_is_stored_and_restored_through_a_server(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    result = server.backup("home", [source], options=BackupOptions(tags=["daily"]))
    assert result.put is not None
    assert result.put.info.metadata["tags"] == "daily"
    assert [placed.entry.name for placed in server.tree("home").children(b"0")][:2] == [b"0", b"14"]
    counts = server.restore("home", tmp_path / "target")
    assert counts.is_complete
    part = server.restore("home", tmp_path / "part", path=b"3")
    assert part.files == 7
    subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
    subprocess.run(["diff", "-r", source / "3", tmp_path / "part"], check=True)


def _change(kind: str, source: Path) -> None:
    match kind:
        case "content":
            (source / "0" / "7").write_bytes(b"other")
        case "mode":
            (source / "1").chmod(0o700)
        case "attribute":
            os.setxattr(source / "2" / "2", "user.note", b"x")
        case "added":
            (source / "9").mkdir()
        case "removed":
            (source / "link").unlink()
        case "replaced":
            (source / "symlink").unlink()
            (source / "symlink").symlink_to("elsewhere")


@pytest.mark.parametrize("kind", ["content", "mode", "attribute", "added", "removed", "replaced"])
def test_unchanged_tree_is_not_sent_to_a_server(kind: str, server: RemoteStore, source: Path) -> None:
    """The entries of the newest version are compared with the folders; only after a change everything is read."""
    (source / "symlink").symlink_to("link")
    os.mkfifo(source / "fifo")
    options = BackupOptions(skip_if_unchanged=True, exclusions=ExclusionOptions(patterns=["*.tpm"]))
    assert server.backup("home", [source], options=options).put is not None
    while server.backup("home", [source], options=options).put is not None:
        pass  # entries that changed less than a second before are stored again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteStore, "put", None)  # nothing is sent
        result = server.backup("home", [source], options=options)
    assert (result.put, result.is_complete) == (None, True)
    counts = result.counts
    assert (counts.files, counts.folders, counts.others, counts.unchanged_files) == (50, 7, 3, 50)
    assert (counts.read_bytes, counts.reused_bytes) == (0, 50 * 20_000)
    assert [one.text for one in counts.unmatched_patterns] == ["*.tpm"]
    rescan = replace(options, comparison=ComparisonOptions(force_rescan=True))
    assert server.backup("home", [source], options=rescan).put is not None
    _change(kind, source)
    assert server.backup("home", [source], options=options).put is not None


def _store_until_settled(server: RemoteStore, source: Path, options: BackupOptions) -> None:
    """Entries that changed less than a second before are stored again."""
    while server.backup("home", [source], options=options).put is not None:
        pass


@pytest.mark.parametrize("kind", ["stored", "deleted"])
def test_backup_is_stored_if_the_newest_version_changes(
    kind: str, server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that equals the folders is no longer the newest one once they are compared."""
    options = BackupOptions(skip_if_unchanged=True)
    _store_until_settled(server, source, options)
    compare = TreeComparison.is_unchanged

    def is_unchanged(comparison: TreeComparison, newest: TreeReader) -> bool:
        found = compare(comparison, newest)
        if kind == "stored":
            server.put("home", b"of another program")
        else:
            server.delete("home")
        return found

    monkeypatch.setattr(TreeComparison, "is_unchanged", is_unchanged)
    assert server.backup("home", [source], options=options).put is not None
    assert server.info("home").is_tree


def test_restore_takes_entries_and_content_of_one_version(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that is stored while a restore of the newest one begins has no part in it."""
    server.backup("home", [source])
    opened = TreeReader.open

    def open_late(*arguments: Any) -> TreeReader:
        tree = opened(*arguments)
        if server.info("home").version == 1:
            server.put("home", os.urandom(2_000_000))
        return tree

    monkeypatch.setattr(TreeReader, "open", open_late)
    assert server.restore("home", tmp_path / "target").is_complete


def test_symlink_that_cannot_be_read_has_changed(
    server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symlink that is deleted between its status and its target ends no comparison with an error."""
    (source / "symlink").symlink_to("link")
    options = BackupOptions(skip_if_unchanged=True)
    _store_until_settled(server, source, options)
    tree, readlink = server.tree("home"), os.readlink

    def read_late(path: bytes, *, dir_fd: int | None = None) -> bytes:
        if path == b"symlink":
            (source / "symlink").unlink()
        return readlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "readlink", read_late)
    assert not TreeComparison([source], options, BackupCounts()).is_unchanged(tree)


def test_backup_of_a_path_that_is_absent_stores_nothing(server: RemoteStore) -> None:
    with pytest.raises((BadInput, SourceFailed), match="no/such"):
        server.backup("home", ["/no/such/path"])
    assert server.versions() == []


def test_copied_tree_keeps_its_digest_between_stores(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    """Folder to server to folder: each copy restores, and a second run copies nothing."""
    with open_store(tmp_path / "a", create=True) as first, open_store(tmp_path / "b", create=True) as last:
        first.backup("home", [source])
        for origin, target in ((first, server), (server, last), (first, last)):
            plan = plan_key("home", "home", origin.versions(all_versions=True), target.versions(all_versions=True), {})
            copied = list(Copier(origin, target).run([plan]))
            assert len(copied) == (0 if origin is first and target is last else 1)
            again = plan_key("home", "home", origin.versions(all_versions=True), target.versions(all_versions=True), {})
            assert again.pending == ()
        assert last.info("home").digest == first.info("home").digest
        assert last.restore("home", tmp_path / "target").is_complete
        assert last.verify().damage == ()
    subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)


def test_archive_is_imported_through_a_server(server: RemoteStore, source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "t.tar"
    subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)
    result = server.import_tar("home", archive)
    assert result.is_complete
    assert result.counts.files == 50
    assert server.restore("home", tmp_path / "target").is_complete
    subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
    archive.write_bytes(archive.read_bytes()[:100_000])
    with pytest.raises(BadInput, match="nothing was stored"):
        server.import_tar("cut", archive)
    assert [info.key for info in server.versions()] == ["home"]
