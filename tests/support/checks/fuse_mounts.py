"""Mount a file system of FUSE for a test, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.checks.commands import environment

MOUNT_PROBLEM = (
    "there is no /dev/fuse"
    if not Path("/dev/fuse").exists()
    else "fusermount is not installed (package fuse3)"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None
    else "mfusepy is not installed (extra mount)"
    if find_spec("mfusepy") is None
    else None
)
"""Why this machine cannot mount; a CI machine with the device must have the package."""
needs_fuse = pytest.mark.skipif(
    MOUNT_PROBLEM is not None and not (os.environ.get("CI") and Path("/dev/fuse").exists()), reason=str(MOUNT_PROBLEM)
)


@contextmanager
def mounted_by(
    line: Sequence[str | bytes | Path], folder: Path, *, end: int | None = None, cwd: Path | None = None
) -> Iterator[Path]:
    """Run a command that mounts a folder, and prints it as JSON once it is mounted, for a block.

    Then unmount it, or end the command by the signal `end`; its exit code must be 0.
    """
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first, process.stderr and process.stderr.read()
        assert json.loads(first) == {"folder": str(folder)}
        yield folder
        if end is None:
            subprocess.run([shutil.which("fusermount3") or "fusermount", "-u", folder], check=True)
        else:
            process.send_signal(end)
        assert process.wait(60) == 0
        assert not os.path.ismount(folder)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        process.communicate()
