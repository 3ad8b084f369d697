"""`nearkin put`: files, folders, pipes, checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

import nearkin
from nearkin_shared.limits import MIB
from tests.support.checks.commands import FIRST, SECOND, InProcess, assert_refused, command, environment, new_store

LEDGER = {
    "logical_bytes", "stored_bytes", "reduction_ratio", "chunks", "duplicate_chunks", "delta_chunks", "raw_chunks",
    "dedup_saved_bytes", "delta_saved_bytes", "compression_saved_bytes", "dcr", "dce", "seconds",
}  # fmt: skip


def test_put_answers_with_the_version_and_a_ledger_that_adds_up(puts: tuple[Path, list[dict[str, Any]]]) -> None:
    for put, content in zip(puts[1], (FIRST, SECOND), strict=True):
        assert put.keys() >= LEDGER | {"key", "version", "digest", "size_bytes"}
        assert put["size_bytes"] == put["logical_bytes"] == len(content)
        assert put["digest"] == f"blake3:{blake3(content).hexdigest()}"
        kinds = ("duplicate_chunks", "delta_chunks", "raw_chunks", "zero_chunks")
        assert put["chunks"] == sum(put[kind] for kind in kinds)
        saved = put["dedup_saved_bytes"] + put["delta_saved_bytes"] + put["compression_saved_bytes"]
        assert put["logical_bytes"] - saved == put["block_bytes"]
    assert [put["version"] for put in puts[1]] == [1, 2]
    assert puts[1][1]["duplicate_chunks"] > 0


def test_put_shows_people_every_step_of_the_savings(tmp_path: Path, call: InProcess) -> None:
    new_store(tmp_path / "store")
    done = call("put", "key", "-", "--store", tmp_path / "store", stdin=FIRST)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert "key version 1" in lines[0]
    steps = ("logical", "after dedup", "after delta", "after compression", "stored, with everything")
    assert [step for line in lines for step in steps if line.strip().startswith(step)] == list(steps)
    assert "MB/s" in done.stdout.decode()


def test_put_checks_the_given_sha256(tmp_path: Path, call: InProcess) -> None:
    new_store(tmp_path)
    wrong = call("put", "key", "-", "--sha256", "0" * 64, stdin=FIRST, env={"NEARKIN_STORE": str(tmp_path)})
    assert_refused(wrong, 2, hashlib.sha256(FIRST).hexdigest())
    assert call.answer("ls", env={"NEARKIN_STORE": str(tmp_path)}) == []
    right = hashlib.sha256(FIRST).hexdigest()
    put = call.answer("put", "key", "-", "--sha256", right.upper(), stdin=FIRST, env={"NEARKIN_STORE": str(tmp_path)})
    assert put["version"] == 1


def test_put_content_type_is_kept_and_shown(tmp_path: Path, call: InProcess) -> None:
    """--content-type is the metadata that a gateway answers with; info and get --json show it."""
    new_store(tmp_path / "store")
    store = ("--store", tmp_path / "store")
    put = call.answer(
        *store, "put", "k", "-", "--content-type", "text/csv; charset=utf-8", "--meta", "a=b", stdin=b"1,2"
    )
    assert put["metadata"] == {"a": "b", "content-type": "text/csv; charset=utf-8"}
    assert b"content-type=text/csv; charset=utf-8" in call(*store, "info", "k").stdout
    got = call.answer(*store, "get", "k", "-o", tmp_path / "out")
    assert got["metadata"]["content-type"] == "text/csv; charset=utf-8"
    for refused in (
        ("--content-type", "csv"),
        ("--content-type", "text/csv\nX: y"),
        ("--content-type", "text/" + "x" * 300),
        ("--content-type", "text/csv", "--meta", "content-type=text/plain"),
    ):
        assert_refused(call(*store, "put", "k", "-", *refused, stdin=b"x"), 2, "content-type")
    assert len(call.answer(*store, "ls", "--versions")) == 1


def test_put_of_named_pipe_stores_the_stream(tmp_path: Path, call: InProcess) -> None:
    new_store(tmp_path / "store")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(SECOND,))
    writer.start()
    put = call.answer("put", "key", tmp_path / "pipe", "--store", tmp_path / "store")
    writer.join()
    assert put["digest"] == f"blake3:{blake3(SECOND).hexdigest()}"


def test_put_of_named_pipe_with_closed_stdin(tmp_path: Path) -> None:
    new_store(tmp_path / "store")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(SECOND,))
    writer.start()
    put = command("put", "key", tmp_path / "pipe", "--store", tmp_path / "store")
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" <&-', "sh", *put], capture_output=True, env=environment(), timeout=60, check=False
    )
    writer.join(30)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "a.txt").write_bytes(b"aaaa")
    (tree / "sub/naïve [b].bin").write_bytes(FIRST)
    (tree / "link").symlink_to("a.txt")
    (tree / "sub/loop").symlink_to(tree)
    os.mkfifo(tree / "pipe")
    return tree


def test_put_folder_makes_a_key_per_file(tmp_path: Path, tree: Path, call: InProcess) -> None:
    """Make a key per file; report links and pipes."""
    new_store(tmp_path / "store")
    done = call("--json", "put", "home/", "-r", tree, env={"NEARKIN_STORE": str(tmp_path / "store")})
    put = json.loads(done.stdout)
    assert done.returncode == 0
    assert [(blob["key"], blob["size_bytes"]) for blob in put["blobs"]] == [
        ("home/a.txt", 4),
        ("home/sub/naïve [b].bin", len(FIRST)),
    ]
    assert put.keys() >= LEDGER
    for name in ("logical_bytes", "stored_bytes", "chunks", "raw_chunks", "dedup_saved_bytes"):
        assert put[name] == sum(blob[name] for blob in put["blobs"])
    assert [Path(skipped["path"]).name for skipped in put["skipped"]] == ["link", "pipe", "loop"]
    assert done.stderr == b""


def test_put_folder_without_prefix_uses_paths(tmp_path: Path, tree: Path, call: InProcess) -> None:
    """Use relative paths as keys without a prefix."""
    new_store(tmp_path / "store")
    done = call("put", "-r", tree, "--meta", "host=db1", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert done.returncode == 0
    assert b"2 files below" in done.stdout
    notices = done.stderr.decode().splitlines()
    assert [Path(notice.rpartition(": ")[2]).name for notice in notices] == ["link", "pipe", "loop"]
    assert all(notice.startswith("nearkin: skipped, ") for notice in notices)
    found = call.answer("ls", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert {info["key"]: info["metadata"] for info in found} == {
        "a.txt": {"host": "db1"},
        "sub/naïve [b].bin": {"host": "db1"},
    }
    assert call("get", "sub/naïve [b].bin", env={"NEARKIN_STORE": str(tmp_path / "store")}).stdout == FIRST


def test_put_folder_names_unreadable_files(tmp_path: Path, tree: Path) -> None:
    """Name files that cannot be read and store all others."""
    (tree / "secret").write_bytes(b"readable by root alone")
    (tree / "sub/closed").mkdir()
    (tree / "sub/closed/b").write_bytes(b"bbbb")
    for path in (tree / "secret", tree / "sub/closed"):
        path.chmod(0)
    command = [
        sys.executable,
        "-m",
        "nearkin.cli",
        "--store",
        str(tmp_path / "store"),
        "--json",
        "put",
        "-r",
        str(tree),
    ]
    init = [*command[:5], "init"]
    try:
        subprocess.run([*unprivileged_words(), *init], capture_output=True, timeout=60, check=True)
        done = subprocess.run([*unprivileged_words(), *command], capture_output=True, timeout=60, check=False)
        process = subprocess.run(
            [*unprivileged_words(), *(part for part in command if part != "--json")],
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        (tree / "sub/closed").chmod(0o700)
    put = json.loads(done.stdout)
    assert done.returncode == process.returncode == 3
    assert [blob["key"] for blob in put["blobs"]] == ["a.txt", "sub/naïve [b].bin"]
    assert put["unread"] == [
        {"path": str(tree / "secret"), "why": "permission denied"},
        {"path": str(tree / "sub/closed"), "why": "permission denied"},
    ]
    notices = process.stderr.decode().splitlines()
    assert f"nearkin: cannot be read, permission denied: {tree / 'secret'}" in notices
    assert len([notice for notice in notices if "cannot be read" in notice]) == 2, "one notice for each file"
    assert notices[-1] == "nearkin: 2 could not be read and are not stored: run this again as a user who may read them"


def unprivileged_words() -> list[str]:
    """Return the words that start a command without root's right to read every file."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root reads all, and setpriv is not there")
    dropped = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]


@pytest.mark.parametrize("arguments", [("put", "-r", ""), ("put", "home", "", "-r"), ("put", "k", "")])
def test_put_empty_name_is_not_current_folder(tmp_path: Path, call: InProcess, arguments: tuple[str, ...]) -> None:
    assert_refused(call(*arguments, "--store", tmp_path / "store"), 2, 'source ""')
    assert not (tmp_path / "store").exists()


def test_put_of_shrinking_file_is_refused(tmp_path: Path) -> None:
    """Refuse a file that shrinks.

    The bytes read before and after never were its content together.
    """
    path = tmp_path / "log"
    path.write_bytes(FIRST * (1 + 40 * MIB // len(FIRST)))

    def shrink(_: int) -> None:
        os.truncate(path, 1000)

    with nearkin.open_store(tmp_path / "store", create=True) as store:
        with pytest.raises(nearkin.SourceFailed, match="changed while it was read"):
            store.put("k", path, progress=shrink)
        assert store.versions("k") == []
        path.write_bytes(FIRST)
        assert store.put("k", path).info.size_bytes == len(FIRST)


def test_put_folder_skips_the_store_below_it(tmp_path: Path, tree: Path, call: InProcess) -> None:
    """Do not put a store below the folder into itself."""
    new_store(tree / "store")
    call("put", "-r", tree, "--store", tree / "store")
    put = call.answer("put", "-r", tree, "--store", tree / "store")
    assert [blob["key"] for blob in put["blobs"]] == ["a.txt", "sub/naïve [b].bin"]
    assert {"path": str(tree / "store"), "why": "the store itself"} in put["skipped"]
    assert_refused(call("put", "-r", tree / "store", "--store", tree / "store"), 2, "is the store itself")


def test_store_path_may_be_no_utf8(tmp_path: Path, call: InProcess) -> None:
    store = os.fsencode(tmp_path) + b"/st\xff"
    assert call("init", store).returncode == 0
    assert call.answer("--store", store, "put", "key", "-", stdin=FIRST)["version"] == 1
    assert call("--store", store, "get", "key").stdout == FIRST
    assert call.answer("--store", store, "verify")["damage"] == []


def test_put_folder_with_non_utf8_name_is_refused(tmp_path: Path, call: InProcess) -> None:
    """Refuse the folder before anything is put if a file name is not UTF-8."""
    new_store(tmp_path / "store")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_bytes(b"fine")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/tree/caf\xe9")).write_bytes(b"not")
    assert_refused(call("put", "-r", tmp_path / "tree", "--store", tmp_path / "store"), 2, r"caf\udce9")
    with nearkin.open_store(tmp_path / "store", create=True) as store:
        assert store.versions() == []
    assert_refused(call("put", "-r", tmp_path / "tree", "--store", tmp_path / "store"), 2, "rename it first")
    assert b"stops the command before anything is stored" in call("put", "--help").stdout


def test_put_with_a_condition_that_fails_exits_1(tmp_path: Path, call: InProcess) -> None:
    """`put --if-none-match` and `--if-match` refuse with exit code 1 and store nothing."""
    file, store = tmp_path / "file", ("--store", tmp_path / "s")
    file.write_bytes(b"one")
    new_store(tmp_path / "s")
    digest = call.answer(*store, "put", "k", file, "--if-none-match", "*")["digest"]
    assert_refused(call(*store, "put", "k", file, "--if-none-match", "*"), 7, "precondition failed")
    assert call(*store, "put", "k", file, "--if-match", digest).returncode == 0
    assert_refused(call(*store, "put", "k", file, "--if-match", "nonsense"), 2, "if_match 'nonsense'")
    assert_refused(call(*store, "put", "-r", tmp_path, "--if-match", "*"), 2, "not with --recursive")
