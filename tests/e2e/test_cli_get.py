"""`nearkin get`: versions, ranges, outputs, damage."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.checks.commands import FIRST, SECOND, InProcess, assert_refused, damage, new_store, run


def test_get_each_version_is_byte_identical(store: Path, tmp_path: Path, call: InProcess) -> None:
    assert run("--store", store, "get", "db/dump").stdout == SECOND
    assert call("--store", f"file://{store}", "get", "db/dump", "--version", "1").stdout == FIRST
    done = call("--store", store, "get", "db/dump", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "out").read_bytes() == SECOND
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("text", "piece"), [("5-9", slice(5, 10)), ("-100000", slice(-100000, None)), ("570000-", slice(570000, None))]
)
def test_get_range_is_that_slice(store: Path, text: str, piece: slice, call: InProcess) -> None:
    assert call("--store", store, "get", "db/dump", "--range", text).stdout == SECOND[piece]


def test_get_explain_reports_reads(store: Path, tmp_path: Path, call: InProcess) -> None:
    """Report in `get --explain` what was read."""
    done = call("--store", store, "get", "db/dump", "--range", "0-99", "--explain", "-o", tmp_path / "out")
    assert done.returncode == 0
    directories = rb"(1 directory|\d+ directories)"
    assert re.fullmatch(rb"read [\d.]+ \w+ of \d+ containers?: " + directories + rb", \d+ blocks?\n", done.stderr)
    done = call("--store", store, "get", "notes", "--explain", "-o", tmp_path / "out")
    assert done.stderr.endswith(b" of 1 container: 1 directory, 1 block\n")
    reads = call.answer("--store", store, "get", "db/dump", "--explain", "-o", tmp_path / "out")["reads"]
    assert reads["blocks_decoded"] == reads["block_reads"] > 0
    assert 0 < reads["containers"] <= reads["directory_reads"]
    assert reads["bytes"] > 1000


def test_get_range_past_the_end_is_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    new_store(tmp_path / "s")
    assert_refused(call("--store", store, "get", "notes", "--range", "5-"), 2, "the blob has 5 bytes")
    call("--store", tmp_path / "s", "put", "one", "-", stdin=b"1")
    assert_refused(call("--store", tmp_path / "s", "get", "one", "--range", "1-"), 2, "the blob has 1 byte\n")


def test_get_with_json_describes_the_file_it_wrote(store: Path, tmp_path: Path, call: InProcess) -> None:
    got = call.answer("--store", store, "get", "notes", "--range", "1-3", "-o", tmp_path / "out")
    assert (got["key"], got["size_bytes"], got["written_bytes"]) == ("notes", 5, 3)
    assert (tmp_path / "out").read_bytes() == b"ell"


def test_get_output_replaced_keeps_mode_and_links(store: Path, tmp_path: Path, call: InProcess) -> None:
    """Replace an output, keep its mode and follow links."""
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "link").symlink_to("old")
    assert call("--store", store, "get", "notes", "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_bytes() == b"hello"
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o640


def test_get_unwritable_output_is_wrong_usage(store: Path, tmp_path: Path, call: InProcess) -> None:
    assert_refused(call("--store", store, "get", "notes", "-o", tmp_path), 2, "is a folder")
    assert_refused(call("--store", store, "get", "notes", "-o", tmp_path / "no/out"), 2, "no such file or directory")
    assert call("--store", store, "get", "notes", "-o", "/dev/null").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "db/nothing", "-o", "/dev/null"],
        ["get", "notes", "--version", "2", "-o", "/dev/null"],
        ["info", "no"],
        ["explain", "no"],
    ],
)
def test_get_missing_key_or_version_exits_1(store: Path, call: InProcess, arguments: list[str]) -> None:
    assert_refused(call("--store", store, *arguments), 4, arguments[1])
    done = call("--store", store, "--json", *arguments)
    assert json.loads(done.stderr)["error"]["kind"] == "NotFound"


def test_damaged_store_fails_get_and_verify(store_copy: Path, tmp_path: Path, call: InProcess) -> None:
    """Fail get and verify of a damaged store; leave the output file unchanged."""
    damage(store_copy)
    (tmp_path / "out").write_bytes(b"precious")
    done = call("--store", store_copy, "--json", "get", "db/dump", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (5, b"")
    error = json.loads(done.stderr)["error"]
    assert error["kind"] == "Corrupt"
    assert error["message"].endswith("`nearkin verify` lists the damage and the versions that it affects")
    assert (tmp_path / "out").read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["copied", "out"]
    verified = call("--store", store_copy, "--json", "verify")
    report = json.loads(verified.stdout)
    assert (verified.returncode, report["ok"]) == (5, False)
    assert all(item["object_name"] and item["problem"] for item in report["damage"])
    touched = {(v["key"], v["version"]) for item in report["damage"] for v in item["versions"]}
    assert ("db/dump", 1) in touched
    outcome = call("--store", store_copy, "verify")
    assert outcome.returncode == 5
    assert b"touches db/dump version 1" in outcome.stdout

    assert b"put the same data again" in outcome.stdout
    assert call.answer("--store", store_copy, "put", "db/dump", "-", stdin=FIRST)["duplicate_chunks"] == 0
    assert call("--store", store_copy, "get", "db/dump").stdout == FIRST


def test_get_on_full_disk_names_the_file(store: Path) -> None:
    done = run("--store", store, "get", "db/dump", "-o", "/dev/full")
    assert_refused(
        done, 6, "No space left on device: '/dev/full'; free space on that filesystem, or write to another one"
    )
