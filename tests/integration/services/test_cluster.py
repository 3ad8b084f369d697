"""Test the local cluster of `make up`: `make down` ends it and no other process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient

from nearkin_shared.config.loader import load
from nearkin_shared.errors import RetryableError
from nearkin_shared.kafka.clients import TOPICS, topic
from nearkin_shared.objectstore.factory import open_objects
from tests.support.checks.waiting import until
from tests.support.servers import processes, programs
from tests.support.servers.cluster import Cluster, NotUp, Service, main
from tests.support.servers.processes import Member
from tests.support.servers.server import accepts

GOOD = Service("good", "standing_service", ("fine",), ready_line=": ready")
ROOT = Path(__file__).parents[3]
BAD = Service("bad", "standing_service", ("broken",), ready_line=": ready")

STANDING = """
import signal, sys, time
if sys.argv[3] == "broken":
    sys.exit("no such thing as a good start")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("standing: ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, need: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a cluster, which is ended whatever the test does."""
    need(programs.java)
    (tmp_path / "standing_service.py").write_text(STANDING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    yield tmp_path / "cluster"
    Cluster(tmp_path / "cluster", [GOOD, BAD]).down()


def pids(cluster: Cluster) -> dict[str, int]:
    notes = {name: cluster.member(name) for name in cluster.names}
    return {name: note.pid for name, note in notes.items() if note is not None}


def test_cluster_up_is_usable_and_ends_alone(folder: Path) -> None:
    """Keep a usable cluster up; end it and nothing else."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        cluster = Cluster(folder, [GOOD])
        lines: list[str] = []
        assert cluster.up(lines.append) == ["redis", "kafka", "good"]
        for line, seconds in zip(lines[::2], lines[1::2], strict=True):
            assert line.endswith(" ...")
            assert re.fullmatch(r"  \d+\.\d s", seconds)
        settings = load(cluster.config_file)[0]
        assert cluster.config_file.stat().st_mode & 0o777 == 0o600
        admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
        wanted = {topic(settings, name) for name in TOPICS}
        until(lambda: wanted <= set(admin.list_topics(timeout=10).topics))  # a broker learns of the last one later
        open_objects(settings).put_new("a", b"kept")
        before = pids(cluster)

        assert Cluster(folder, [GOOD]).up() == []  # up already
        assert pids(cluster) == before

        os.kill(before["good"], signal.SIGKILL)
        os.kill(before["redis"], signal.SIGKILL)
        until(lambda: not cluster.alive("good") and not cluster.alive("redis"))
        assert cluster.up() == ["redis", "good"]  # what had crashed, and only that
        assert pids(cluster)["kafka"] == before["kafka"]

        running = pids(cluster)
        assert cluster.down() == ["good", "kafka", "redis"]
        left = [psutil.Process(pid).status() for pid in running.values() if psutil.pid_exists(pid)]
        assert set(left) <= {psutil.STATUS_ZOMBIE}  # of this process, which started them and does not wait
        assert pids(cluster) == {}
        assert cluster.down() == []
        assert stranger.poll() is None

        cluster.up()
        assert open_objects(load(cluster.config_file)[0]).get("a") == b"kept"
    finally:
        stranger.kill()
        stranger.wait()


def test_part_failing_to_start_names_its_log(folder: Path) -> None:
    cluster = Cluster(folder, [GOOD, BAD])
    with pytest.raises(NotUp, match=r"(?s)bad ended while it started; the end of .*bad\.log:.*no such thing as a good"):
        cluster.up()
    assert cluster.alive("good")
    assert cluster.down() == ["good", "kafka", "redis"]


def test_cluster_with_s3_keeps_it(folder: Path) -> None:
    """A cluster keeps the kind of object store of its first `up`; its file of variables names it."""
    assert Cluster(folder, [GOOD], with_s3=True).up() == ["redis", "s3", "kafka", "good"]
    cluster = Cluster(folder, [GOOD])
    settings = load(cluster.config_file)[0]
    variables = sourced(cluster)
    assert variables["S3"] == settings.object_store.endpoint
    assert variables["AWS_ACCESS_KEY_ID"] == settings.object_store.access_key_id
    assert variables["KAFKA"] == settings.kafka.bootstrap_servers
    assert cluster.down() == ["good", "kafka", "s3", "redis"]


def sourced(cluster: Cluster) -> dict[str, str]:
    """Return the variables that a shell has after `source .cluster/env`."""
    assert cluster.env_file.stat().st_mode & 0o777 == 0o600
    command = ["bash", "-c", 'source "$1" && env -0', "bash", str(cluster.env_file)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout
    return dict(line.split("=", 1) for line in output.split("\0") if line)


@pytest.mark.soak
def test_lines_of_the_docs_work_after_source(folder: Path, tmp_path: Path) -> None:
    """Run the lines of docs/how-to/run-services.md with the variables of `.cluster/env`."""
    cluster = Cluster(folder)
    try:
        cluster.up()
        block = (ROOT / "docs/how-to/run-services.md").read_text().split("    source .cluster/env")[1].split("\n\n")[0]
        lines = [line.strip().split(" #")[0] for line in block.splitlines()[1:]]
        commands = [line for line in lines if not line.startswith(("make ", "echo hello | kcat"))]
        assert len(commands) == 5
        (tmp_path / "db.dump").write_bytes(b"dump" * 1000)
        script = "\n".join(["set -e", f"source {cluster.env_file}", 'cd "$1"', *commands])
        script = script.replace(".venv/bin/nearkin", f"{sys.executable} -m nearkin").replace("curl ", "curl -sSf ")
        done = subprocess.run(
            ["bash", "-c", script, "bash", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "nearkin_trim_timestamp_seconds" in done.stdout
    finally:
        cluster.down()


def test_status_shows_crashes_and_runs_exclude(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Show crashed parts; two runs at a time exclude each other."""

    def status() -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["--folder", str(folder), "status"])
        return ended.value.code, capsys.readouterr().out

    folder.mkdir()
    assert status()[0] == 3
    assert "gateway      not started" in status()[1]
    chunker = processes.launch(
        "pipeline", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "l", folder
    )
    code, output = status()
    assert (code, f"pipeline     up, pid {chunker.pid}" in output) == (0, True)
    (folder / "pipeline.log").write_text("what went wrong\n")
    os.kill(chunker.pid, signal.SIGKILL)
    until(lambda: not chunker.alive)
    code, output = status()
    assert code == 1
    assert "pipeline     ENDED BY ITSELF" in output
    assert "what went wrong" in output
    cluster = Cluster(folder)
    with cluster._locked(), pytest.raises(RetryableError, match="another `make up` or `make down` is at work"):
        Cluster(folder).down()


def test_reused_pid_is_left_alone(tmp_path: Path) -> None:
    """Leave a process alone that has reused the recorded pid."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        note = Member.of("chunker", stranger.pid)
        earlier = Member("chunker", stranger.pid, f"1 {note.started.split()[1]}")
        assert note.alive
        assert not earlier.alive
        assert earlier.end()
        assert stranger.poll() is None
        stranger.kill()


def test_gateway_listens_only_once_up(folder: Path) -> None:
    port = int(Cluster(folder).url.rpartition(":")[2]) if folder.mkdir() is None else 0
    assert not accepts(port)
    assert Cluster(folder).url.endswith(f":{port}")  # drawn once
