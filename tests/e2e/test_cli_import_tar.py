"""`nearkin import-tar`: files, stdin, reports and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.checks.commands import InProcess, assert_refused, command, environment


@pytest.fixture
def store(tmp_path: Path, call: InProcess) -> Path:
    assert call("init", tmp_path / "store").returncode == 0
    return tmp_path / "store"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return an archive of a folder with a file and a symlink, whose names begin with the folder's."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "a.txt").write_bytes(b"content")
    (home / "link").symlink_to("a.txt")
    path = tmp_path / "home.tar"
    subprocess.run(["tar", "-cf", path, "-C", tmp_path, "home"], check=True)
    return path


def test_archive_becomes_a_version(store: Path, archive: Path, tmp_path: Path, call: InProcess) -> None:
    done = call("--store", store, "import-tar", "home", archive, "--tag", "tape", "--meta", "by=kim")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"home version 1: 1 file, 1 folder, 1 other, 7 B in ")
    listed = json.loads(call("--store", store, "--json", "ls", "home:/home").stdout)
    assert [entry["path"] for entry in listed] == ["/home/a.txt", "/home/link"]
    restored = call("--store", store, "restore", "home:/home", "-o", tmp_path / "target")
    assert restored.returncode == 0
    subprocess.run(["diff", "-r", "--no-dereference", tmp_path / "home", tmp_path / "target"], check=True)
    exported = call("--store", store, "export", "home:/home", "-o", tmp_path / "again.tar")
    assert exported.returncode == 0
    again = call("--store", store, "--json", "import-tar", "again", tmp_path / "again.tar")
    assert {name: json.loads(again.stdout)[name] for name in ("version", "files", "folders", "others", "left_out")} == {
        "version": 1,
        "files": 1,
        "folders": 0,
        "others": 1,
        "left_out": 0,
    }


def test_compressed_archive_is_read_from_stdin(store: Path, archive: Path, tmp_path: Path) -> None:
    subprocess.run(["gzip", archive], check=True)
    with Path(f"{archive}.gz").open("rb") as file:
        line = command("--store", store, "import-tar", "home", "-", "--temporary", tmp_path)
        done = subprocess.run(line, stdin=file, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(os.listdir(tmp_path)) == ["home", "home.tar.gz", "store"], "no temporary file is left"


def test_member_that_is_left_out_is_named(store: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "file").write_bytes(b"1")
    path = tmp_path / "t.tar"
    renamed: list[str | Path] = ["tar", "-cPf", path, "-C", tmp_path, "--transform=s,file,../up,", "file"]
    subprocess.run(renamed, check=True)
    subprocess.run(["tar", "-rf", path, "-C", tmp_path, "file"], check=True)
    done = call("--store", store, "import-tar", "key", path)
    assert done.returncode == 3
    assert b"../up: left out: its name has .." in done.stderr
    assert b"incomplete: 1 member left out" in done.stderr
    assert b"1 file, 0 folders" in done.stdout


def test_wrong_archive_and_options_are_refused(store: Path, archive: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "text").write_bytes(b"text" * 1000)
    (tmp_path / "cut").write_bytes(archive.read_bytes()[:700])
    for name, reason in (("text", "is no tar archive"), ("cut", "nothing was stored"), ("missing", "No such file")):
        assert_refused(call("--store", store, "import-tar", "key", tmp_path / name), 2, reason)
    refused = call("--store", store, "import-tar", "key", archive, "--meta", "content-type=x")
    assert_refused(refused, 2, "a tree has its own")
    assert_refused(call("--store", store, "import-tar", "key", archive, "--tag", ""), 2, "must not be empty")
    assert call("--store", store, "ls").stdout == b""
