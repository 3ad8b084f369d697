"""Run the scripts in examples/ as a reader would, on a folder, a gateway, or all services."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_shared.config.loader import load
from tests.support.data.samples import noise
from tests.support.servers.gateways import embedded, running
from tests.support.servers.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PYTHON_PAGE = ROOT / "docs" / "how-to" / "use-python.md"
SECONDS_MAX = 300
LINES_MIN, LINES_MAX = 30, 80
NAMES = {"compare_features", "gc_and_retention", "kafka_records", "put_and_get", "resumable_upload"}


def run_example(name: str, *arguments: object) -> str:
    """Return the output of an example. Raises AssertionError if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEARKIN_TOKEN")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def ingest_worker(pipeline: Pipeline) -> Iterator[None]:
    """Run the ingest service of a pipeline."""
    command = [sys.executable, "-m", "nearkin_ingest", "--config", str(pipeline.config_file), "--worker", "w1"]
    with (pipeline.folder / "ingest.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 0, (pipeline.folder / "ingest.log").read_text()


def test_examples_are_short_and_all_tested() -> None:
    """Each script in examples/ has a test in this file and 30 to 80 lines."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NAMES
    for path in EXAMPLES.glob("*.py"):
        assert LINES_MIN <= len(path.read_text().splitlines()) <= LINES_MAX, path.name


def test_snippets_of_python_page_run(tmp_path: Path) -> None:
    """The code on the page about the Python API runs as shown."""
    snippets = re.findall(r"(?s)```python\n(.*?)```", PYTHON_PAGE.read_text())
    assert len(snippets) == 3
    (tmp_path / "db.dump").write_bytes(noise(100_000, "snippet").tobytes())
    checks = ("assert data == open('db.dump', 'rb').read(4096)\n", "", "")
    outputs = []
    for snippet, check in zip(snippets, checks, strict=True):
        command = [sys.executable, "-c", snippet + check]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert float(outputs[0]) > 0
    assert outputs[2] == "['hosts']\n"


def test_put_and_get_example_restores_both_versions(tmp_path: Path) -> None:
    """The second version takes a fraction of the first, and both come back."""
    output = run_example("put_and_get", tmp_path / "store")
    stored = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) stored", output)]
    assert len(stored) == 2
    assert stored[1] < stored[0] / 50
    assert "versions equal what was stored: True" in output
    assert "-- one line was added" in output
    assert "error: key 'no such key'" in output
    assert "damaged objects: 0" in output


def test_resumable_upload_example_continues(tmp_path: Path) -> None:
    """The second connection begins where the first one stopped, and the blob equals the file."""
    file = tmp_path / "file"
    file.write_bytes(noise(2_500_000, "resumable").tobytes())
    with running(embedded(tmp_path / "store")) as gateway:
        output = run_example("resumable_upload", gateway.url, "uploaded", file)
    offsets = re.findall(r"the gateway has ([\d,]+) bytes", output)
    assert offsets == ["0", f"{1 << 20:,}"]
    assert "uploaded 2,500,000 bytes" in output
    assert "the blob equals the file: True" in output


def test_compare_features_example_lists_algorithms(tmp_path: Path) -> None:
    """Find bases among versions with scattered changes by each algorithm, and none by `none`."""
    data = np.array(noise(2_000_000, "features"))
    for version in range(3):
        data[np.random.default_rng(version).integers(0, len(data), 40)] ^= 1
        (tmp_path / f"v{version}").write_bytes(data.tobytes())
    rows = [line.replace(",", "").split() for line in run_example("compare_features", tmp_path).splitlines()[1:]]
    assert [row[0] for row in rows] == ["none", "finesse", "ntransform", "odess"]
    assert int(rows[0][3]) == 0
    for _, logical_bytes, stored_bytes, delta_chunks, _ in rows[1:]:
        assert int(logical_bytes) == 6_000_000
        assert int(stored_bytes) < int(rows[0][2])
        assert int(delta_chunks) > 0


def test_gc_example_frees_forgotten_versions(tmp_path: Path) -> None:
    """The second GC run deletes the data of the versions that the policy does not keep."""
    output = run_example("gc_and_retention", tmp_path / "store")
    before, after = (int(text.replace(",", "")) for text in re.findall(r"stored: ([\d,]+) bytes", output))
    assert after < before / 2
    assert "gc run 1: 0 containers deleted" in output
    assert "versions left: [5, 6]" in output
    assert "damaged objects: 0" in output


def test_kafka_example_reads_records_back(kafka: Any, redis: Any, tmp_path: Path) -> None:
    """Records of a user's topic pass through all services and come back from the gateway."""
    unique = os.urandom(6).hex()
    topic = f"users-{unique}"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"x{unique}.", "partitions": 1},
        "redis": {"url": redis.url, "prefix": f"x{unique}"},
        "object_store": {"url": str(tmp_path / "objects")},
        "ingest": {"topics": [topic]},
        "gateway": {"port": 0},
    }
    with (
        Pipeline(tmp_path, config) as pipeline,
        ingest_worker(pipeline),
        running(load(pipeline.config_file)[0]) as gateway,
    ):
        output = run_example("kafka_records", kafka.bootstrap, topic, gateway.url)
    assert re.findall(r"(?m)^(\S+): \S+, equal: (\w+)$", output) == [(f"sensor/{n}", "True") for n in (1, 2, 3)]
