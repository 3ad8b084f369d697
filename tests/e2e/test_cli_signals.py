"""Pipes, terminals and signals around a command."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.checks.commands import FIRST, InProcess, command, environment, new_store, run
from tests.support.checks.waiting import until


@pytest.fixture(autouse=True)
def _hang_ups_end_commands() -> Iterator[None]:
    """Reset SIGHUP to its default.

    Under nohup it is ignored, and a command leaves that as it is.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}])
def test_pipe_gets_no_progress_bar(tmp_path: Path, env: dict[str, str]) -> None:
    new_store(tmp_path)
    assert run("put", "key", "-", "--store", tmp_path, stdin=FIRST, env=env).stderr == b""
    assert run("get", "key", "-o", tmp_path / "out", "--store", tmp_path, env=env).stderr == b""


@pytest.mark.parametrize(("options", "drawn"), [([], True), (["--json"], False)])
@pytest.mark.parametrize("words", [("put", "key", "-"), ("verify",), ("repair",), ("gc",), ("gc", "--dry-run")])
def test_terminal_gets_progress_bar_without_json(
    tmp_path: Path, words: tuple[str, ...], options: list[str], drawn: bool
) -> None:
    """Draw a progress bar on a terminal unless JSON is requested."""
    new_store(tmp_path)
    run("put", "key", "-", "--store", tmp_path, stdin=FIRST)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        command(*words, "--store", tmp_path, *options),
        input=FIRST, stdout=subprocess.PIPE, stderr=theirs, env=environment({"TERM": "xterm"}), timeout=60, check=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = os.read(ours, 65536)
    except OSError:  # Linux says so when the other end is closed and nothing is left
        seen = b""
    os.close(ours)
    assert done.stdout
    assert (words[0].encode() in seen) is drawn


@pytest.mark.parametrize("env", [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}])
def test_reader_closing_the_pipe_is_no_error(store: Path, env: dict[str, str]) -> None:
    with subprocess.Popen(
        command("--store", store, "get", "db/dump"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(env),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("words", [["explain", "db/dump"], ["config"], ["stats"], ["ls"]])
def test_table_without_a_reader_exits_141(store: Path, words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as closed_pipe:
        done = subprocess.run(
            command("--store", store, *words), stdout=closed_pipe, stderr=subprocess.PIPE, env=environment(),
            timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_stdout_is_refused_in_one_line(store: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&-', "sh", *command("--store", store, "get", "notes")],
        stderr=subprocess.PIPE, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"nearkin: stdout is closed: name a file with -o\n")


@pytest.mark.parametrize("words", [["put", "key", "-"], ["--json", "put", "key", "-"], ["stats"], ["config"]])
def test_closed_stdout_completes_without_output(tmp_path: Path, words: list[str]) -> None:
    """Complete the command with a closed stdout; only its output is lost."""
    new_store(tmp_path)
    run("--store", tmp_path, "put", "key", "-", stdin=FIRST)
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&-', "sh", *command("--store", tmp_path, *words)],
        input=FIRST, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_stderr_drops_its_messages(tmp_path: Path) -> None:
    """Write messages nowhere if stderr is closed."""
    new_store(tmp_path / "store")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"content")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "tree" / "socket"))
    words = "--store", tmp_path / "store", "backup", "tree", tmp_path / "tree"
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" 2>&-', "sh", *command(*words)],
        stdout=subprocess.PIPE, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"socket" not in done.stdout
    assert done.stdout.startswith(b"tree version 1: 1 file, ")


def test_full_disk_is_one_line(store: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("--store", store, "get", "notes"),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert done.returncode == 6
    remedy = b"; free space on that filesystem, or write to another one"
    assert done.stderr == b"nearkin: [Errno 28] No space left on device: 'standard output'" + remedy + b"\n"


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A put that has opened its store and waits for the rest of stdin."""
    new_store(tmp_path / "store")
    with subprocess.Popen(
        command("put", "key", "-", "--store", tmp_path / "store"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    ) as process:  # fmt: skip
        give(process, b"the first of it")
        yield process
        process.kill()


def give(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to a command's stdin, and wait until it has read that."""
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()
    pipe = process.stdin.fileno()
    until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)) == bytes(4))  # so many bytes are in it


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated"), (signal.SIGHUP, 129, b"hung up")],
)
def test_interrupted_put_is_one_line_no_version(
    reading: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, code: int, line: bytes, call: InProcess
) -> None:
    """Report an interrupted put in one line and store no version."""
    reading.send_signal(number)
    assert reading.wait(60) == code
    assert reading.stderr is not None
    assert reading.stderr.read() == b"nearkin: " + line + b"\n"
    assert call.answer("--store", tmp_path / "store", "ls") == []


def test_nohup_command_survives_the_terminal(tmp_path: Path) -> None:
    new_store(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with subprocess.Popen(
        command("--store", tmp_path, "put", "key", "-"),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment(),
    ) as process:  # fmt: skip
        process.send_signal(signal.SIGHUP)
        give(process, FIRST)
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert run("get", "key", "--store", tmp_path).stdout == FIRST


def test_second_writer_gets_store_locked(reading: subprocess.Popen[bytes], tmp_path: Path) -> None:
    done = run("--json", "--store", tmp_path / "store", "put", "other", "-", stdin=b"other")
    assert done.returncode == 11
    assert json.loads(done.stderr)["error"]["kind"] == "StoreLocked"
    assert reading.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_get_leaves_no_partial_file(tmp_path: Path, number: signal.Signals) -> None:
    new_store(tmp_path / "store")
    run("put", "key", "-", "--store", tmp_path / "store", stdin=os.urandom(1 << 20) * 200)
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(10):  # on a busy machine it may have come to its end before it is met
        (out / "key").unlink(missing_ok=True)
        with subprocess.Popen(
            command("get", "key", "-o", out / "key", "--store", tmp_path / "store"), env=environment()
        ) as process:
            until(lambda: list(out.iterdir()), poll_seconds=0.001)
            process.send_signal(signal.SIGSTOP)
            until(lambda: psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
            met = not (out / "key").exists()
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            code = process.wait(60)
        if met:
            break
    assert met
    assert code == 128 + number
    assert not list(out.iterdir())
