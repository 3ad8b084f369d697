"""Run the commands on the pages for users of one machine, in their order, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checks.commands import environment
from tests.support.data.samples import noise

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
VERSIONS = 4
ENDLESS = ("nearkin serve", "nearkin bench", "nearkin mount", "nearkin webdav")
"""Commands that run until they are stopped, or for many minutes; test_serve.py, test_bench_cli.py, test_cli_mount.py
and test_cli_webdav.py of this folder run them.
"""


def shown_commands(page: str) -> Iterator[str]:
    """Yield the commands of a page: code blocks, and the first command of each table row with its options."""
    for line in (HOW_TO / page).read_text().splitlines():
        if block := re.fullmatch(r"    +((?:nearkin|export|[A-Z_]+=\S+ nearkin) .*)", line):
            yield block[1].partition(" #")[0].strip()
        elif line.startswith("| ") and "nearkin " in line:
            last = ""
            cell = re.split(r"(?<!\\)\|", line)[-2].replace("\\|", "|")
            for code in re.findall(r"`([^`]+)`", cell):
                if "nearkin " in code:
                    last = code
                    yield code
                elif code.startswith("--") and last:
                    yield f"{last} {code}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files and programs that the pages mention."""
    for name in ("db.dump", "home/ana/one.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(noise(50_000, name).tobytes())
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "pg_dump"
    program.write_text("#!/bin/sh\necho dump of $1\n")
    program.chmod(0o755)
    return tmp_path


def run_all(folder: Path, commands: list[str]) -> None:
    """Run commands in one shell; each must succeed."""
    confirmed = [f"{line} --yes" if line.endswith(" --now") else line for line in commands]
    lines = [line for line in confirmed if not line.startswith(ENDLESS)]
    for shown, ours in {"/var/backups/": "", " /home/": " home/", " /tmp/": " restored-"}.items():
        lines = [line.replace(shown, ours) for line in lines]
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment({"PATH": path}),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def put_versions(key: str) -> list[str]:
    """Return commands that put VERSIONS versions of a key."""
    return [f"echo {number} | nearkin put {key} -" for number in range(1, VERSIONS + 1)]


def test_commands_of_the_command_page_run(folder: Path) -> None:
    """G.7: each command of the page on the command runs on a store of its own."""
    commands = list(shown_commands("use-the-command.md"))
    assert len(commands) > 20
    assert commands[:2] == ["nearkin init backups", "export NEARKIN_STORE=backups"]
    run_all(folder, [*commands[:2], *put_versions("db.dump")[1:], *commands[2:]])


def test_commands_of_the_full_disk_page_run(folder: Path) -> None:
    """G.7: each command of the page on a full disk runs on a store with the keys that it names."""
    commands = list(shown_commands("free-a-full-disk.md"))
    assert [line.split()[1] for line in commands] == ["rm", "forget", "gc", "gc", "rm"]
    before = ["nearkin init backups", "export NEARKIN_STORE=backups"]
    run_all(folder, [*before, *put_versions("db/dump"), *put_versions("config/backup"), *commands])
