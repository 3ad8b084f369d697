"""Test backups that send changes through a real pipeline: Kafka, Redis, one worker with all stages."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import nearkin
from nearkin.client.streaming import PartsUpload
from nearkin.trees import checkpoint_schedule, checkpointed_tree
from nearkin.trees.backup import TreeBackup
from nearkin.trees.backup_walk import BackupCounts
from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import load
from nearkin_shared.errors import BaseUnusable
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.pipeline import FUSED, Pipeline


@pytest.fixture
def pipeline(kafka: Any, redis: Any, tmp_path: Path) -> Iterator[Pipeline]:
    unique = os.urandom(6).hex()
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"g{unique}.", "partitions": 2},
        "redis": {"url": redis.url, "prefix": f"g{unique}"},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": 0},
        "auth": {"tokens_file": str(tmp_path / "tokens.json")},
    }
    tokens.create(tmp_path / "tokens.json", "default", ["read"])
    with Pipeline(tmp_path / "pipeline", config, services=FUSED) as made:
        yield made
        assert set(made.stop().values()) == {0}, made.logs()


class Died(Exception):
    """Ends a run."""


@pytest.fixture
def gateway(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    with running(load(pipeline.config_file)[0]) as found:
        yield found


def test_backup_sends_changes_through_the_pipeline(gateway: RunningGateway, tmp_path: Path) -> None:
    """Ranges are read from the base by the gateway; a version of another tenant is no base."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02}").write_bytes(np.random.default_rng(number).bytes(100_000))
    time.sleep(1.1)  # or entries are too recent to be compared
    token, other = (
        tokens.create(tmp_path / "tokens.json", tenant, ["read", "write"])[0] for tenant in ("default", "other")
    )
    with nearkin.connect(gateway.url, token) as server, nearkin.connect(gateway.url, other) as foreign:
        server.backup("tree", [source])
        (source / "07").write_bytes(b"changed" * 7_000)
        result = server.backup("tree", [source])
        assert result.put is not None
        assert (result.put.info.version, result.counts.read_bytes) == (2, 49_000)
        assert server.restore("tree", tmp_path / "target").is_complete
        subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
        assert blake3(server.get("tree").read()).hexdigest() == result.put.info.digest.removeprefix("blake3:")
        foreign.put("tree", b"of another tenant")
        with pytest.raises(BaseUnusable, match="key 'tree' has no such tree"):
            foreign.put_parts("tree", PartsUpload(b"", 2, 0), {})


def test_backup_continues_behind_checkpoints_of_the_pipeline(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends early leaves durable checkpoints, which the next one copies and deletes."""
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 2_000_000)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1_500_000)
    monkeypatch.setattr(checkpointed_tree, "HELD_BYTES_MAX", 100_000)
    source, size_bytes = tmp_path / "source", 100_000
    source.mkdir()
    for number in range(120):
        (source / f"{number:03}").write_bytes(np.random.default_rng(number).bytes(size_bytes))
    time.sleep(1.1)
    token, other = (
        tokens.create(tmp_path / "tokens.json", tenant, ["read", "write"])[0] for tenant in ("default", "other")
    )
    counts, read = BackupCounts(), TreeBackup._read_file

    def failing(backup: TreeBackup, *arguments: Any) -> None:
        if counts.read_bytes >= 100 * size_bytes:
            raise Died
        read(backup, *arguments)

    with nearkin.connect(gateway.url, token) as server, nearkin.connect(gateway.url, other) as foreign:
        with monkeypatch.context() as patch:
            patch.setattr(TreeBackup, "_read_file", failing)
            with pytest.raises(Died):
                server.backup("tree", [source], counts=counts)
        until(lambda: sum(info.size_bytes for info in server.checkpoints("tree")) >= 80 * size_bytes)
        assert server.versions(all_versions=True) == []
        assert foreign.checkpoints("tree") == []
        result = server.backup("tree", [source])
        assert result.counts.reused_bytes >= 80 * size_bytes
        assert result.counts.read_bytes + result.counts.reused_bytes == 120 * size_bytes
        assert server.restore("tree", tmp_path / "target").is_complete
        subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)
        assert server.checkpoints("tree") == []
        assert [info.version for info in server.versions(all_versions=True)] == [1]
