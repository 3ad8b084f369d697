"""Backups through a real gateway send changes alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.client.streaming import PartsUpload
from nearkin.client.sync import RemoteStore
from nearkin.trees import remote_trees, tree_sinks
from nearkin.trees.backup import TreeBackup
from nearkin.trees.backup_walk import BackupOptions, ComparisonOptions
from nearkin.trees.store_backup import BackupResult
from nearkin_shared.formats import upload_parts
from nearkin_shared.formats.upload_parts import PartsEncoder
from tests.support.servers.gateways import RunningGateway, embedded, running

FILES, FILE_BYTES = 300, 3_000
LARGE_BYTES = 3_000_000


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running(embedded(tmp_path / "store")) as found:
        yield found


@pytest.fixture
def server(gateway: RunningGateway) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that was written more than a second ago: nothing in it is too recent to be compared."""
    folder = tmp_path / "source"
    for number in range(FILES):
        path = folder / f"{number % 9}" / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    (folder / "large").write_bytes(os.urandom(LARGE_BYTES))
    os.link(folder / "0" / "000", folder / "link")
    (folder / "empty").touch()
    time.sleep(1.1)
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies of parts that a client sent."""
    bodies: list[bytes] = []
    pieces = PartsUpload.pieces

    def recorded(upload: PartsUpload) -> Iterator[bytes]:
        bodies.append(b"")
        for piece in pieces(upload):
            bodies[-1] += piece
            yield piece

    monkeypatch.setattr(PartsUpload, "pieces", recorded)
    return bodies


def change(source: Path) -> None:
    """Change one file, add one, remove one."""
    (source / "3" / "003").write_bytes(b"changed" * 500)
    (source / "4" / "added").write_bytes(os.urandom(5_000))
    (source / "5" / "005").unlink()


def check_restored(server: RemoteStore, source: Path, target: Path, version: int | None = None) -> None:
    assert server.restore("home", target, version=version).is_complete
    subprocess.run(["diff", "-r", source, target], check=True)
    whole = server.get("home", version).read()  # the gateway verifies each file of it
    assert len(whole) == server.info("home", version).size_bytes
    shutil.rmtree(target)


def opened_files(
    server: RemoteStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[bytes], BackupResult]:
    """Return the names of the files that a backup opens, and its result."""
    names: list[bytes] = []
    read = TreeBackup._read_file

    def recorded(backup: TreeBackup, listed: Any, name: bytes, found: Any) -> None:
        names.append(name)
        read(backup, listed, name, found)

    with monkeypatch.context() as patch:
        patch.setattr(TreeBackup, "_read_file", recorded)
        return names, server.backup("home", [source])


def test_changed_files_alone_are_opened_and_sent(
    server: RemoteStore, source: Path, tmp_path: Path, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 302 files two are read; all are restored equal, from both versions."""
    server.backup("home", [source])
    check_restored(server, source, tmp_path / "first")
    shutil.copytree(source, tmp_path / "before", symlinks=True)
    change(source)
    names, result = opened_files(server, source, monkeypatch)
    assert names == [b"003", b"added"]
    assert (result.counts.read_bytes, result.counts.unchanged_files) == (3_500 + 5_000, FILES)
    assert result.counts.reused_bytes == (FILES - 2) * FILE_BYTES + LARGE_BYTES
    assert len(sent) == 1
    assert len(sent[0]) < 70_000  # 8,500 new bytes, and the entries of 312 files
    check_restored(server, source, tmp_path / "second")
    check_restored(server, tmp_path / "before", tmp_path / "again", version=1)


def test_unchanged_tree_opens_no_file(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third version copies ranges of the second, which copied them itself."""
    server.backup("home", [source])
    for number in (2, 3):
        names, result = opened_files(server, source, monkeypatch)
        assert names == []
        assert result.put is not None
        assert (result.put.info.version, result.counts.read_bytes) == (number, 0)
        check_restored(server, source, tmp_path / "target", number)


def test_forced_backup_reads_every_file(server: RemoteStore, source: Path, sent: list[bytes]) -> None:
    """`--force-rescan` sends all bytes."""
    server.backup("home", [source])
    result = server.backup("home", [source], options=BackupOptions(comparison=ComparisonOptions(force_rescan=True)))
    assert (len(sent), result.counts.read_bytes) == (0, FILES * FILE_BYTES + LARGE_BYTES)


def test_tree_of_many_changes_is_streamed(
    server: RemoteStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that is not held whole is sent while it is made; idle records and read ranges change no byte."""
    monkeypatch.setattr(remote_trees, "AHEAD_BYTES_MAX", 1000)
    monkeypatch.setattr(tree_sinks, "IDLE_SECONDS", 0)
    monkeypatch.setattr(tree_sinks, "COPIED_RECORDS_MAX", 5)
    server.backup("home", [source])
    for number in range(0, FILES, 7):
        (source / f"{number % 9}" / f"{number:03}").write_bytes(os.urandom(100 + number))
    result = server.backup("home", [source])
    assert result.counts.unchanged_files == FILES + 2 - 43
    check_restored(server, source, tmp_path / "target")


@pytest.mark.parametrize("kind", ["none", "deleted", "blob"])
def test_backup_without_base_sends_all_bytes(
    kind: str, server: RemoteStore, source: Path, tmp_path: Path, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that is deleted once its entries are read, or is no tree, is no error."""
    if kind == "blob":
        server.put("home", b"no tree")
    elif kind == "deleted":
        server.backup("home", [source])
        put_parts = RemoteStore.put_parts

        def put_late(store: RemoteStore, *arguments: Any) -> Any:
            store.delete("home")
            return put_parts(store, *arguments)

        monkeypatch.setattr(RemoteStore, "put_parts", put_late)
    result = server.backup("home", [source])
    assert result.counts.read_bytes == FILES * FILE_BYTES + LARGE_BYTES
    assert result.counts.files == FILES + 2
    check_restored(server, source, tmp_path / "target")


def put_parts(gateway: RunningGateway, body: bytes, key: str = "home", **headers: str) -> tuple[int, str, str]:
    """Put a body of parts; return status, problem and its detail."""
    sent = {"Content-Type": upload_parts.PARTS_MEDIA_TYPE, "Nearkin-Base": "1", **headers}
    with gateway.client() as client:
        answer = client.put(f"/v1/blobs/{key}", content=body, headers=sent)
    found = answer.json()
    return answer.status_code, str(found.get("type", "")).rpartition(":")[2], str(found.get("detail", ""))


def parts(*ranges: tuple[int, int], size_bytes: int) -> bytes:
    body = bytearray()
    encoder = PartsEncoder(body.extend)
    for copied in ranges:
        encoder.add_copy(*copied)
    encoder.end(size_bytes, bytes(32))
    return bytes(body)


def test_wrong_bodies_are_refused(gateway: RunningGateway, server: RemoteStore, source: Path) -> None:
    """Each refusal names what is wrong, and nothing is stored."""
    size = server.backup("home", [source]).put.info.size_bytes  # type: ignore[union-attr]
    server.put("other", b"no tree")
    whole = parts((0, size), size_bytes=size)
    for body, key, headers, status, name, detail in [
        (b"no parts at all", "home", {}, 400, "bad-input", "begins with"),
        (parts((0, 5), size_bytes=5), "home", {}, 400, "bad-input", "is not a tree"),
        (parts((0, size + 1), size_bytes=size + 1), "home", {}, 400, "bad-input", "copies bytes 0 to"),
        (whole[:-1], "home", {}, 400, "bad-input", "ends within record 2"),
        (whole, "home", {"Nearkin-Base": "2"}, 409, "base-unusable", "Nearkin-Base 2: key 'home' has no such tree"),
        (whole, "absent", {}, 409, "base-unusable", "key 'absent'"),
        (whole, "other", {}, 409, "base-unusable", "is no tree"),
        (whole, "home", {"Nearkin-Base": "newest"}, 400, "bad-base", "Nearkin-Base newest"),
        (whole, "home", {"Content-Type": "text/plain"}, 400, "bad-base", "want it with Content-Type"),
        (whole, "home", {"X-Content-SHA256": "0" * 64}, 400, "bad-digest", "ends with its own digest"),
    ]:
        found = put_parts(gateway, body, key, **headers)
        assert found[:2] == (status, name), found
        assert detail in found[2]
    assert [info.version for info in server.versions("", all_versions=True)] == [1, 1]
