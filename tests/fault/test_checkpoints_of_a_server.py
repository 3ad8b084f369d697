"""Kill a backup and its server: the next run continues behind the checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nearkin
from tests.support.checks.waiting import until
from tests.support.servers.gateways import process

FILES, FILE_BYTES = 2_400, 100_000
KILL_BYTES = 150_000_000
"""Of checkpoints, of 240 MB."""


def command(url: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "nearkin.cli", "--server", url, *words]


def last_status(output: Path) -> dict[str, Any]:
    lines = [line for line in output.read_text().splitlines() if line.endswith("}")]
    return [json.loads(line) for line in lines if '"status"' in line][-1]


def test_killed_backup_sends_a_tenth_again(tmp_path: Path) -> None:
    """Backup and server get SIGKILL; the next run sends the rest and less than a tenth of what was sent before."""
    source, output = tmp_path / "source", tmp_path / "output"
    for number in range(FILES):
        path = source / f"{number % 40:02}" / f"{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    time.sleep(1.1)
    environment = {"NEARKIN_STORE": str(tmp_path / "store"), "NEARKIN_GATEWAY__INGEST": "embedded"}
    with process(environment, tmp_path) as (gateway, url), nearkin.connect(url) as server, output.open("wb") as file:
        with subprocess.Popen(
            command(url, "backup", "--json", "--progress", "home", str(source)), stdout=file
        ) as child:
            until(lambda: sum(one.size_bytes for one in server.checkpoints("home")) > KILL_BYTES)
            child.kill()
        assert server.versions(all_versions=True) == []
        gateway.kill()
    sent_before = last_status(output)["bytes_done"]
    with process(environment, tmp_path) as (_, url), nearkin.connect(url) as server:
        assert server.versions(all_versions=True) == []
        assert sum(one.size_bytes for one in server.checkpoints("home")) > KILL_BYTES
        result = server.backup("home", [source])
        assert result.is_complete
        sent_again = result.counts.read_bytes - (FILES * FILE_BYTES - sent_before)
        assert sent_again < sent_before / 10
        assert result.counts.read_bytes + result.counts.reused_bytes == FILES * FILE_BYTES
        assert server.restore("home", tmp_path / "target").is_complete
        subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
        assert server.checkpoints("home") == []
        assert [info.version for info in server.versions(all_versions=True)] == [1]


def test_backup_without_its_server_names_how_to_continue(tmp_path: Path) -> None:
    """The server gets SIGKILL after checkpoints: the error of the backup names what the next run does."""
    source = tmp_path / "source"
    for number in range(120):
        path = source / f"{number % 40:02}" / f"{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1_000_000))
    environment = {"NEARKIN_STORE": str(tmp_path / "store"), "NEARKIN_GATEWAY__INGEST": "embedded"}
    with (
        process(environment, tmp_path) as (gateway, url),
        nearkin.connect(url) as server,
        subprocess.Popen(command(url, "backup", "home", str(source)), stderr=subprocess.PIPE) as child,
    ):
        until(lambda: len(server.checkpoints("home")) >= 3)  # of the first one the client has the answer
        gateway.kill()
        _, error = child.communicate(timeout=300)
    assert child.returncode == 1
    assert error.endswith(b"; run the same command again: it continues behind what is stored\n")
