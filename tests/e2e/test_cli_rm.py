"""`nearkin rm` and `nearkin undelete`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checks.commands import InProcess, assert_refused, new_store


def test_rm_and_undelete_report_their_effect(call: InProcess, tmp_path: Path) -> None:
    new_store(tmp_path / "store")
    store = {"NEARKIN_STORE": str(tmp_path / "store")}
    for content in (b"one", b"two"):
        call("put", "db/dump", "-", stdin=content, env=store)
    call("put", "db/other", "-", stdin=b"x")
    assert call.answer("rm", "db/dump", "--reason", "wrong host") == {"key": "db/dump", "version": None, "deleted": 2}
    assert_refused(call("get", "db/dump"), 4, "the store has none")
    assert_refused(call("rm", "db/dump"), 4, "does not exist")
    assert_refused(call("info", "db/dump", "--version", "1"), 4, "the store has none")
    assert [entry["key"] for entry in call.answer("ls", "--versions")] == ["db/other"]
    deleted = call.answer("ls", "--deleted", "db/")
    assert [(entry["key"], entry["version"], entry["reason"]) for entry in deleted] == [
        ("db/dump", 1, "wrong host"),
        ("db/dump", 2, "wrong host"),
    ]
    assert set(deleted[0]) == {"key", "version", "created", "deleted", "until", "who", "reason"}
    lines = call("ls", "--deleted").stdout.decode().splitlines()
    assert re.fullmatch(r"\S+Z  until \S+Z  v1     \S+@\S+  db/dump  # wrong host", lines[0])
    assert "and 2 versions deleted, 6 B" in call("stats").stdout.decode()
    assert call("undelete", "db/dump").stdout == b"undeleted 2 versions of db/dump\n"
    assert call("get", "db/dump").stdout == b"two"
    assert_refused(call("undelete", "db/dump"), 4, "not deleted, or unknown")
    assert call("rm", "db/dump", "--version", "2").stdout == b"deleted 1 version of db/dump\n"
    assert call("get", "db/dump").stdout == b"one"
    assert call.answer("stats")["deleted_versions"] == 1


def test_rm_of_key_and_version_deletes_it_alone(call: InProcess, tmp_path: Path) -> None:
    """`rm KEY@N` and `undelete KEY@N` change version N; so does `rm --now` of one that is deleted already."""
    new_store(tmp_path / "store")
    store = {"NEARKIN_STORE": str(tmp_path / "store")}
    for content in (b"one", b"two", b"three"):
        call("put", "k", "-", stdin=content, env=store)
    assert call.answer("rm", "k@2") == {"key": "k", "version": 2, "deleted": 1}
    assert call.answer("rm", "k@latest")["version"] == 3
    assert [one["version"] for one in call.answer("ls", "--versions")] == [1]
    assert call("undelete", "k@3").stdout == b"undeleted 1 version of k\n"
    assert call("get", "k").stdout == b"three"
    assert_refused(call("rm", "k@2"), 4, "version 2")
    assert_refused(call("rm", "k@1", "--version", "1"), 2, "names a version: not with --version")
    assert call.answer("rm", "k@2", "--now", "--yes")["versions"] == 1
    assert call("rm", "k").returncode == 0
    assert call.answer("undelete", "k@1") == {"key": "k", "version": 1, "undeleted": 1}
    assert call("get", "k").stdout == b"one"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("rm",), "KEY"),
        (("rm", ""), "must not be empty"),
        (("rm", "k", "--version", "0"), "version"),
        (("rm", "k", "--reason", "x" * 2000), "reason of 2000 bytes"),
        (("ls", "--deleted", "--versions"), "give one of them"),
        (("undelete", "k", "--version", "x"), "version"),
    ],
)
def test_rm_refused_changes_nothing(call: InProcess, tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    new_store(tmp_path / "store")
    call("put", "k", "-", stdin=b"x", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert_refused(call(*arguments), 2, problem)
    assert call("get", "k").stdout == b"x"


def test_rm_now_while_gc_is_paused_deletes_nothing(call: InProcess, tmp_path: Path) -> None:
    """A pause is found before the deletion, not between it and the removal of the bytes."""
    new_store(tmp_path / "store")
    call("put", "k", "-", stdin=b"x", env={"NEARKIN_STORE": str(tmp_path / "store")})
    call("gc", "--pause")
    assert_refused(call("rm", "k", "--now", "--yes"), 1, "garbage collection is paused")
    assert call("get", "k").stdout == b"x"
    call("gc", "--resume")
    assert call.answer("rm", "k", "--now", "--yes")["deleted"] == 1


def test_rm_now_names_the_reason_why_nothing_is_removed(call: InProcess, tmp_path: Path) -> None:
    """`rm --now` of a key that never existed, of a later version, and a repeat differ.

    Exit code 4.
    """
    new_store(tmp_path / "store")
    call("put", "k", "-", stdin=b"x", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert_refused(call("rm", "other", "--now", "--yes"), 4, "no blob 'other'")
    assert_refused(call("rm", "k", "--version", "9", "--now", "--yes"), 4, "no such version; the newest was 1")
    assert call.answer("rm", "k", "--now", "--yes")["versions"] == 1
    assert_refused(call("rm", "k", "--now", "--yes"), 4, "removed for good")
    assert_refused(call("rm", "other", "--now", "--yes"), 4, "no blob 'other'")
