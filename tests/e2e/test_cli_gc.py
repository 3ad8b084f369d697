"""Test `nearkin gc` as a command: its effects and its output as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nearkin.cli.gc import freed_bytes_net
from tests.support.checks.commands import environment, new_store

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = {
        "NEARKIN_STORE": str(tmp_path / "s"),
        "NEARKIN_DELETION__UNDELETE_SECONDS": "0",
        "NEARKIN_GC__GRACE_SECONDS": "0",
    }

    new_store(tmp_path / "s")

    def command(*arguments: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nearkin.cli", *arguments],
            env=environment({**settings, **(more or {})}),
            capture_output=True,
            text=True,
            check=False,
        )

    return command


def test_gc_run_frees_no_negative_bytes() -> None:
    assert freed_bytes_net("freed", 1234) == "freed 1,234 bytes"
    assert freed_bytes_net("would free", -207) == "would free nothing yet, and takes 207 bytes"


def test_gc_frees_what_dry_run_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(100_000))
    for arguments in (("put", "k", str(tmp_path / "f")), ("rm", "k")):
        assert run(*arguments).returncode == 0
    preview = json.loads(run("gc", "--dry-run", "--json").stdout)
    assert (preview["dry_run"], preview["versions"], preview["pending_delete_containers"]) == (True, 1, 1)
    assert preview["held"]["pending_delete"] > 100_000
    first = json.loads(run("gc", "--json").stdout)
    assert "pending      1 container, due for deletion from " in run("gc", "--status").stdout
    assert first["freed_bytes"] == preview["freed_bytes"]
    assert first["held"] is None
    text = run("gc", "--dry-run").stdout
    assert f"would free {first['pending_delete_bytes']:,} bytes: 0 versions for good, 1 container" in text
    assert json.loads(run("gc", "--json").stdout)["freed_bytes"] == preview["pending_delete_bytes"]
    assert run("gc").stdout.startswith("freed 0 bytes")


def test_gc_pause_owner_is_escaped_on_terminal(run: Run, tmp_path: Path) -> None:
    """Escape the name of the pausing user: it cannot control another user's terminal."""
    (tmp_path / "f").write_bytes(b"x")
    assert run("put", "k", str(tmp_path / "f")).returncode == 0
    paused = run("gc", "--pause", more={"LOGNAME": "kim\x1b[31m\nrunning"})
    for shown in (paused, run("gc", "--status")):
        assert (shown.returncode, shown.stdout.count("\n")) == (0, 1)
        assert r"by kim\x1b[31m\nrunning@" in shown.stdout


def test_gc_server_unreachable_is_named(run: Run) -> None:
    refused = run("--server", "http://127.0.0.1:9", "gc")
    assert refused.returncode == 1
    assert refused.stderr.startswith("nearkin: POST http://127.0.0.1:9/v1/gc: ")
    assert refused.stderr.count("\n") == 1


def test_gc_that_frees_nothing_names_the_reason(run: Run, tmp_path: Path) -> None:
    """Distinguish no deletion, the undelete window and the grace."""
    (tmp_path / "f").write_bytes(os.urandom(1000))
    assert run("put", "k", str(tmp_path / "f")).returncode == 0
    for arguments in (("gc",), ("gc", "--dry-run"), ("gc", "--now", "--yes")):
        assert "nothing to free: no version is deleted" in run(*arguments).stdout, arguments
    window = {"NEARKIN_DELETION__UNDELETE_SECONDS": "3600"}
    assert run("rm", "k", more=window).returncode == 0
    text = run("gc").stdout
    assert "kept         1 deleted version in the undelete window or retained, with checkpoints of backups: " in text
    assert "nothing to free" not in text
    assert "nothing to free" not in run("gc", "--now", "--yes").stdout
    assert "nothing to free" in run("gc", "--now", "--yes").stdout
