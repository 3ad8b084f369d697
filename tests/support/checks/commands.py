"""Run the command as a user or a script does: a process with arguments, pipes and an exit code."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nearkin.cli import main
from nearkin.store import create_store
from nearkin_shared.config.settings import Settings

KERNEL_VARIABLES = ("KERNELS", "CPU")

FIRST = random.Random(1).randbytes(300_000) + b"a line that compresses well\n" * 10_000
SECOND = FIRST[:150_000] + b"an insertion" + FIRST[150_000:290_000] + FIRST[290_100:]


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment without the variables that Nearkin reads, except those of its kernels, plus `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NEARKIN_") or name[8:] in KERNEL_VARIABLES
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **(more or {})}


def command(*arguments: str | bytes | Path) -> list[str | bytes | Path]:
    """Return the arguments that start the command in a process of its own."""
    return [sys.executable, "-m", "nearkin.cli", *arguments]


def drawn_on_terminal(*arguments: str | bytes | Path) -> bytes:
    """Run the command with a terminal as stderr, to its success; return what it drew there."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(command(*arguments), stderr=terminal, stdout=subprocess.DEVNULL, env=environment()) as child:
        os.close(terminal)
        drawn = b""
        try:
            while piece := os.read(controller, 4096):
                drawn += piece
        except OSError:  # Linux reports the closed terminal as EIO
            pass
        assert child.wait(60) == 0
    os.close(controller)
    return drawn


def run(
    *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end, a minute at most."""
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, env=environment(env), timeout=60, check=False
    )


def answer(*arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Any:
    """Return the JSON value that the command answers with."""
    return parse_answer(run("--json", *arguments, stdin=stdin, env=env))


def parse_answer(done: subprocess.CompletedProcess[bytes]) -> Any:
    """Return the one JSON value of a command that succeeded."""
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


class InProcess:
    """Runner of the command's entry point in this process.

    A process start takes most of the time of a test. A test of each command runs it as a process, too.
    """

    def __init__(self, capture: pytest.CaptureFixture[bytes], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch
        for name in [name for name in os.environ if name.startswith("NEARKIN_") and name[8:] not in KERNEL_VARIABLES]:
            patch.delenv(name)

    def __call__(
        self, *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the command to its end."""
        for name, value in (env or {}).items():
            self._patch.setenv(name, value)
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([os.fsdecode(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    def answer(self, *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Any:
        """Return the JSON value that the command answers with."""
        return parse_answer(self("--json", *arguments, stdin=stdin, env=env))


def assert_refused(done: subprocess.CompletedProcess[bytes], code: int, message: str) -> None:
    """Expect one line on stderr, nothing on stdout."""
    line = done.stderr.decode()
    assert done.returncode == code, line
    assert done.stdout == b""
    assert line.startswith("nearkin: ")
    assert line.count("\n") == 1
    assert line[:-1].isprintable()
    assert message in line


def new_store(folder: Path) -> Path:
    """Create an empty store in this process, which is faster than `nearkin init`, and return its folder."""
    create_store(folder, settings=Settings()).close()
    return folder


def damage(store: Path) -> None:
    """Flip one byte in the middle of every container."""
    containers = [path for path in store.rglob("*") if path.is_file() and "containers" in path.parts]
    assert containers
    for path in containers:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
