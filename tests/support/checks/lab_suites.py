"""Run suites of the lab as commands.

Invariant: a suite receives none of the settings of this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like

VERSIONS = 3


def tiny_corpus(folder: Path) -> Path:
    """Return a folder with VERSIONS files of 300 kB, one a version."""
    folder.mkdir()
    data = text_like(150_000, 1) + records_like(100_000, 2) + random_bytes(50_000, 3)
    for number in range(VERSIONS):
        (folder / f"{number}.bin").write_bytes(data)
        data = mutate(data, number, edits=8)
    return folder


def command(*arguments: str | Path) -> list[str]:
    """Return the command of `nearkin bench` with these arguments."""
    return [sys.executable, "-P", "-m", "nearkin.cli", "bench", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    kernels = {name: os.environ[name] for name in ("NEARKIN_KERNELS", "NEARKIN_CPU") if name in os.environ}
    return {**kept, **kernels, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a suite. Raises TimeoutExpired."""
    words = command(*arguments)
    return subprocess.run(words, capture_output=True, text=True, env=environment(**more), timeout=240, check=False)


def run_and_read_record(out: Path, room: str, *arguments: str | Path, **more: str) -> dict[str, Any]:
    """Run a suite, and return its record; the output of `--json` equals the file.

    Raises AssertionError.
    """
    done = run(room, "--out", out, "--json", *arguments, **more)
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    in_file = json.loads((out / f"{room}.json").read_text())
    assert {**in_file, "time": None} == {**record, "time": None}
    return record
