"""Exit codes of real commands, and --wait for the store's lock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.exit_codes import ExitCode
from nearkin.testing.commands import InProcess, command, environment, new_store

HOLD = (
    "import sys, nearkin\n"
    "with nearkin.open_store(sys.argv[1]) as store:\n"
    "    store.put('held', b'x')\n"
    "    print('holds', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


def hold(root: Path) -> subprocess.Popen[bytes]:
    """Start a process that holds the store's lock until its stdin is closed."""
    words = [sys.executable, "-c", HOLD, str(root)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == b"holds\n"
    return process


def test_exit_codes_tell_failures_apart(call: InProcess, root: Path, tmp_path: Path) -> None:
    """F.10: done, failed, usage and no store have codes of their own, as the help lists them."""
    assert call("--store", root, "ls").returncode == ExitCode.DONE == 0
    assert call("--store", root, "get", "none").returncode == ExitCode.FAILED == 1
    assert call("--store", root, "put").returncode == ExitCode.USAGE == 2
    assert call("--store", tmp_path / "none", "ls").returncode == ExitCode.NO_STORE == 10
    help_text = " ".join(call("--help").stdout.decode().split())
    for code in ExitCode:
        assert f"{code.value} " in help_text[help_text.index("Exit codes:") :]


def test_locked_store_has_its_own_exit_code(call: InProcess, root: Path) -> None:
    """F.10: a store that another process writes to is refused with 11; --wait SECONDS waits that long."""
    with hold(root) as holder:
        assert call("--store", root, "put", "k", "-", stdin=b"x").returncode == ExitCode.LOCKED == 11
        assert call("--store", root, "gc").returncode == ExitCode.LOCKED
        began = time.monotonic()
        assert call("--store", root, "put", "k", "-", "--wait", "0.3", stdin=b"x").returncode == ExitCode.LOCKED
        assert time.monotonic() - began >= 0.3
        assert holder.stdin is not None
        holder.stdin.close()


@pytest.mark.parametrize("words", [("put", "k", "/etc/hostname"), ("rm", "held"), ("gc",), ("rebuild-index",)])
def test_wait_outlasts_another_writer(root: Path, words: tuple[str, ...]) -> None:
    """F.10: with --wait a command does its work once the other process has closed the store."""
    with hold(root) as holder:
        waiting = subprocess.Popen(command("--store", root, "--wait", "60", *words), env=environment())
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)
        assert holder.stdin is not None
        holder.stdin.close()
        assert waiting.wait(60) == 0
    with open_store(root) as store:
        assert not store.verify().damage
