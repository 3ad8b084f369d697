"""Run the chart's pods as processes against real servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearkin_gateway.auth import tokens
from tests.support.checks.waiting import until
from tests.support.servers.server import free_port, log_end
from tests.support.servers.servers import S3, Redis

LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/metrics")
STOP_SECONDS_MAX = 60.0
Render = Callable[..., list[dict[str, Any]]]


@dataclass
class Node:
    """Node that runs pods as processes.

    Files that Kubernetes mounts are written to a folder of their own.
    """

    folder: Path
    secrets: dict[str, dict[str, str]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def mount(self, data: dict[str, str], revision: int) -> None:
        """Mount a ConfigMap, or swap what is mounted, as the kubelet does."""
        mount = self.folder / "config"
        fresh = mount / f"..{revision}"
        fresh.mkdir(parents=True)
        for name, text in data.items():
            (fresh / name).write_text(text)
            if not (mount / name).is_symlink():
                (mount / name).symlink_to(Path("..data", name))
        (mount / "..data_tmp").symlink_to(fresh.name)
        (mount / "..data_tmp").rename(mount / "..data")

    def start(self, name: str, spec: dict[str, Any], *arguments: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a pod's container; `arguments` and `more` variables are added by the test."""
        (container,) = spec["containers"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
        for one in container["env"]:
            secret = one.get("valueFrom", {}).get("secretKeyRef")
            value = self.secrets[secret["name"]][secret["key"]] if secret else one["value"]
            environment.setdefault(one["name"], self.local(value))
        command = [sys.executable, *map(self.local, container["command"][1:]), *arguments]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        self.processes[name] = process
        return process

    def local(self, text: str) -> str:
        """Return a text in which the paths of pods are replaced by local ones."""
        return text.replace("/etc/nearkin/", f"{self.folder}/")

    def log(self, name: str) -> Path:
        """Return the path of a pod's output."""
        return self.folder / f"{name}.log"

    def stop(self) -> dict[str, int]:
        """End all pods; return their exit codes."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        return codes


@pytest.fixture
def node(tmp_path: Path, s3: S3) -> Iterator[Node]:
    (tmp_path / "tokens").mkdir()
    text, _ = tokens.create(tmp_path / "tokens/tokens.json", "default", ["read", "write", "admin", "operator"])
    keys = {"access_key_id": s3.access_key_id, "secret_access_key": s3.secret_access_key}
    made = Node(tmp_path, {"s3": keys, "operator": {"token": text}})
    yield made
    made.stop()


@pytest.mark.soak
@pytest.mark.parametrize(("stages", "deployed"), [("fused", 3), ("split", 6)])
def test_pods_are_ready_store_blobs_and_reload_settings(
    rendered: Render,
    node: Node,
    kafka: Any,
    redis: Redis,
    s3: S3,
    bucket: str,
    topic_prefix: str,
    key_prefix: str,
    stages: str,
    deployed: int,
) -> None:
    """The chart's pods run as processes; a hot setting changes without a restart."""
    port = free_port()

    def values(algorithm: str) -> dict[str, Any]:
        return {
            "config": {
                "kafka": {
                    "bootstrap_servers": kafka.bootstrap,
                    "topic_prefix": topic_prefix,
                    "partitions": 2,
                    "replication": 1,
                },
                "redis": {"url": redis.url, "prefix": key_prefix},
                "object_store": {"url": f"s3://{bucket}", "endpoint": s3.endpoint, "allow_http": True},
                "gateway": {"host": "127.0.0.1", "port": port},
                "features": {"algorithm": algorithm},
                "pipeline": {"stages": stages},
            },
            "secrets": {"objectStore": {"name": "s3"}},
            "test": {"token": {"name": "operator"}},
        }

    def objects(algorithm: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {(one["kind"], one["metadata"]["name"]): one for one in rendered(values(algorithm))}

    release = objects("finesse")
    node.mount(release["ConfigMap", "store-nearkin-topics"]["data"], 1)
    job = node.start("topics", release["Job", "store-nearkin-topics"]["spec"]["template"]["spec"])
    assert job.wait(60) == 0, log_end(node.log("topics"))
    assert f"made {topic_prefix}frames" in node.log("topics").read_text()

    node.mount(release["ConfigMap", "store-nearkin"]["data"], 2)
    deployments = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"]["spec"]
        for (kind, _), one in release.items()
        if kind == "Deployment"
    }
    assert len(deployments) == deployed
    for name, spec in deployments.items():
        # Each pod has its own address; these processes share one, so each listens on its own port and reports it.
        verbose = () if name == "gateway" else ("--verbose",)
        node.start(name, spec, *verbose, NEARKIN_MONITOR__HOST="127.0.0.1", NEARKIN_MONITOR__PORT="0")
    ports = {}
    for name, spec in deployments.items():
        (container,) = spec["containers"]
        state_of = lambda name=name: f"{name}: {log_end(node.log(name))}"  # noqa: E731
        listens = lambda name=name: LISTENS.search(node.log(name).read_text())  # noqa: E731
        found = until(listens, state_of)
        assert found is not None
        ports[name] = {"monitor": int(found[1]), "http": port}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            request = container[probe]["httpGet"]
            url = f"http://127.0.0.1:{ports[name][request['port']]}{request['path']}"
            until(lambda: _status(url) == 200, state_of)  # noqa: B023

    test = release["Pod", "store-nearkin-test"]["spec"]
    smoke = node.start("test", test, NEARKIN_SERVER=f"http://127.0.0.1:{port}")
    assert smoke.wait(90) == 0, log_end(node.log("test"))
    assert "100000 bytes put and got back" in node.log("test").read_text()

    pids = {name: process.pid for name, process in node.processes.items() if process.poll() is None}
    assert set(pids) == set(deployments)
    toggled = objects("ntransform")
    assert [key for key in release if release[key] != toggled[key]] == [("ConfigMap", "store-nearkin")]
    node.mount(toggled["ConfigMap", "store-nearkin"]["data"], 3)
    headers = {"Authorization": f"Bearer {node.secrets['operator']['token']}"}

    def revisions() -> dict[str, str]:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/workers", headers=headers, timeout=10).json()
        return {worker["service"]: worker["revision"] for worker in answer["workers"]}

    def config() -> dict[str, Any]:
        return dict(httpx.get(f"http://127.0.0.1:{port}/v1/config", headers=headers, timeout=10).json())

    until(lambda: config()["settings"]["features"]["algorithm"] == "ntransform", lambda: log_end(node.log("gateway")))
    expected = {name: config()["revision"] for name in deployments if name != "gateway"}
    until(lambda: revisions() == expected, lambda: str(revisions()))
    assert {name: process.pid for name, process in node.processes.items() if process.poll() is None} == pids
    del node.processes["topics"], node.processes["test"]
    assert set(node.stop().values()) == {0}


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.HTTPError:
        return 0
