"""Check that docker-compose.yml fits the code: settings, modules and versions."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from nearkin_shared.config.loader import load
from tests.support.servers import cluster, programs

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_compose_workers_read_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("NEARKIN_"):
            monkeypatch.delenv(name)
    for name, value in SERVICES["pipeline"]["environment"].items():
        monkeypatch.setenv(name, value)
    settings, origins = load()
    assert settings.kafka.bootstrap_servers == "kafka:9092"
    assert settings.redis.url == "redis://redis:6379/0"
    assert (settings.object_store.url, settings.object_store.allow_http) == ("s3://nearkin", True)
    assert settings.object_store.secret_access_key == SERVICES["s3"]["environment"]["ROOT_SECRET_ACCESS_KEY"]
    assert settings.object_store.access_key_id == SERVICES["s3"]["environment"]["ROOT_ACCESS_KEY_ID"]
    assert settings.object_store.secret_access_key is not None
    assert settings.object_store.secret_access_key not in str(origins)
    check = SERVICES["pipeline"]["healthcheck"]["test"][-1]
    assert f"http://{settings.monitor.host}:{settings.monitor.port}/readyz" in check


def test_compose_runs_the_services_of_make_up() -> None:
    ran = {name: parts["command"][-1] for name, parts in SERVICES.items() if "-m" in parts.get("command", [])}
    assert ran == {service.name: service.module for service in cluster.SERVICES}
    assert {name: SERVICES[name]["environment"] for name in ran if name != "gateway"} == {
        name: SERVICES["pipeline"]["environment"] for name in ran if name != "gateway"
    }


def test_compose_has_the_servers_of_the_tests() -> None:
    assert SERVICES["kafka"]["image"].endswith(f":{programs.KAFKA}")
    assert SERVICES["s3"]["image"].endswith(f":{programs.VERSITYGW}")
    assert SERVICES["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert "noeviction" in SERVICES["redis"]["command"]


def test_compose_publishes_the_gateway_on_loopback_only() -> None:
    assert {name: parts["ports"] for name, parts in SERVICES.items() if "ports" in parts} == {
        "gateway": ["127.0.0.1:8080:8080"]
    }
    volumes = {volume.partition(":")[0] for parts in SERVICES.values() for volume in parts.get("volumes", [])}
    assert volumes == set(COMPOSE["volumes"])
    ast.parse(SERVICES["setup"]["command"][-1])


def test_image_is_built_from_existing_files() -> None:
    copied = [
        line.split()[1:-1]
        for line in (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
    ]
    for path in (path for paths in copied for path in paths):
        assert (ROOT / path).exists(), path
        assert f"!{Path(path).parts[0]}" in (ROOT / ".dockerignore").read_text().replace("/\n", "\n"), path


def test_image_runs_as_the_user_of_the_chart() -> None:
    lines = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    assert "USER 10001:10001" in lines  # a number: Kubernetes cannot derive from a name whether it is root
    pod = (ROOT / "deploy/helm/nearkin/templates/_pod.tpl").read_text()
    assert "runAsUser: 10001" in pod
    assert "runAsGroup: 10001" in pod
    stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert stages == ["python:${PYTHON}-slim"] * 2
    assert lines.index("USER 10001:10001") > max(number for number, line in enumerate(lines) if line.startswith("RUN "))
    installs = [line for line in lines if "pip install" in line]
    assert all("--require-hashes" in line or "--no-deps /wheel/" in line for line in installs)
    assert len(installs) == 3
