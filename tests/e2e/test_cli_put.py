"""`nearkin put`: files, folders, pipes, checksums."""

from __future__ import annotations

import hashlib
import os
import subprocess
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


def test_put_of_a_folder_names_backup(tmp_path: Path, call: InProcess) -> None:
    """Refuse --recursive and a folder with a pointer to `nearkin backup`; open no store."""
    for arguments in (("put", "-r", "home", tmp_path), ("put", "-r", tmp_path), ("put", "home", tmp_path)):
        assert_refused(call(*arguments, "--store", tmp_path / "store"), 2, "`nearkin backup")
    assert b"recursive" not in call("put", "--help").stdout


@pytest.mark.parametrize("arguments", [("put", "k", "")])
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


def test_store_path_may_be_no_utf8(tmp_path: Path, call: InProcess) -> None:
    store = os.fsencode(tmp_path) + b"/st\xff"
    assert call("init", store).returncode == 0
    assert call.answer("--store", store, "put", "key", "-", stdin=FIRST)["version"] == 1
    assert call("--store", store, "get", "key").stdout == FIRST
    assert call.answer("--store", store, "verify")["damage"] == []


def test_put_with_a_condition_that_fails_exits_1(tmp_path: Path, call: InProcess) -> None:
    """`put --if-none-match` and `--if-match` refuse with exit code 1 and store nothing."""
    file, store = tmp_path / "file", ("--store", tmp_path / "s")
    file.write_bytes(b"one")
    new_store(tmp_path / "s")
    digest = call.answer(*store, "put", "k", file, "--if-none-match", "*")["digest"]
    assert_refused(call(*store, "put", "k", file, "--if-none-match", "*"), 7, "precondition failed")
    assert call(*store, "put", "k", file, "--if-match", digest).returncode == 0
    assert_refused(call(*store, "put", "k", file, "--if-match", "nonsense"), 2, "if_match 'nonsense'")
