"""`--quiet`: nothing is printed about success; failures and what was asked for are."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, drawn_on_terminal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", create=True) as store:
        store.put("old", b"old")
    return tmp_path / "store"


@pytest.mark.parametrize(
    "arguments",
    [
        ["put", "new", "FILE"],
        ["backup", "home", "FOLDER"],
        ["rm", "old"],
        ["forget", "--keep-last", "1"],
        ["gc"],
        ["rebuild-index"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_command_prints_nothing_on_success(
    root: Path, tmp_path: Path, call: InProcess, arguments: list[str], flag: str
) -> None:
    """With --quiet a command that changes something prints nothing when it succeeds."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"content")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))  # skipped with a notice otherwise
    listener.close()
    named = {"FILE": str(folder / "file"), "FOLDER": str(folder)}
    done = call("--store", root, *(named.get(argument, argument) for argument in arguments), flag)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_quiet_still_prints_requested_output(root: Path, call: InProcess) -> None:
    """--quiet keeps listings, JSON answers and errors."""
    assert call("--store", root, "-q", "ls").stdout.endswith(b"old\n")
    assert b"no damage" in call("--store", root, "-q", "verify").stdout
    assert b"would forget" in call("--store", root, "-q", "forget", "--keep-last", "1", "--dry-run").stdout
    assert json.loads(call("--store", root, "-q", "--json", "rm", "old").stdout)["deleted"] == 1
    missing = call("--store", root, "-q", "info", "nothing")
    assert missing.returncode != 0
    assert missing.stderr.startswith(b"nearkin: ")


@pytest.mark.parametrize(("flags", "drawn"), [([], True), (["--quiet"], False)])
def test_quiet_draws_no_progress_on_a_terminal(root: Path, tmp_path: Path, flags: list[str], drawn: bool) -> None:
    """On a terminal a put draws a progress bar, with --quiet none."""
    (tmp_path / "data").write_bytes(os.urandom(3_000_000))
    assert (b"put" in drawn_on_terminal("--store", root, *flags, "put", "data", tmp_path / "data")) == drawn
