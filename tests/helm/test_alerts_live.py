"""Run real services under faults, and evaluate the alerts on their series.

Series are read from the processes before, during and after the faults, and given to promtool: half an hour of each of
the first two phases, then two hours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from nearkin_gateway.auth import tokens
from nearkin_shared.kafka.clients import Outbox, create_named
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.pipeline import SPLIT, Pipeline, store_authenticator, uploading
from tests.support.servers.server import free_port

FAULTS = {
    ("NearkinDown", 1),
    ("NearkinBehind", 1),
    ("NearkinStuck", 1),
    ("NearkinDeadLetters", 1),
    ("NearkinCorruption", 2),
}
"""Alerts that fire, with their counts: scrub and dedup each detect corrupt bytes."""
Render = Callable[..., list[dict[str, Any]]]
Shown = dict[str, dict[str, float]]
"""By process: value of each series, written with its labels."""
LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/metrics")
PROCESSES = (*SPLIT, "gateway", "ingest")
PHASE_MINUTES = 30
AFTER_MINUTES = 120
GIVEN = 'namespace="backups",job="store",component="{0}",pod="{0}-1"'


@pytest.fixture
def pipeline(kafka: Any, redis: Any, topic_prefix: str, key_prefix: str, tmp_path: Path) -> Iterator[Pipeline]:
    text, _ = tokens.create(tmp_path / "tokens.json", "default", tokens.SCOPES)
    (tmp_path / "token").write_text(text)
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 1},
        "redis": {"url": redis.url, "prefix": key_prefix},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": free_port()},
        "auth": {"tokens_file": str(tmp_path / "tokens.json")},
        "ingest": {"topics": [f"users-{topic_prefix}x"]},
        "monitor": {"port": 0},
        "deletion": {"undelete_seconds": 0},
        "gc": {"interval_seconds": 1, "grace_seconds": 4},
        "scrub": {"every_days": 0},
    }
    made = Pipeline(tmp_path / "pipeline", config)
    with made:
        create_named(made.settings, [f"users-{topic_prefix}x"])
        made.start("gateway")
        made.start("ingest")
        yield made


def address(pipeline: Pipeline, name: str) -> str:
    """Return the monitoring address of a running process; of the last one if it was restarted."""
    log = pipeline.folder / f"{name}.log"
    return f"http://127.0.0.1:{until(lambda: LISTENS.findall(log.read_text()), pipeline.logs)[-1]}"


def asked(pipeline: Pipeline, name: str, path: str) -> int:
    try:
        return httpx.get(address(pipeline, name) + path, timeout=20).status_code
    except httpx.HTTPError:
        return 0


def shown(pipeline: Pipeline) -> Shown:
    """Return the series of each process that answers."""
    found: Shown = {}
    for name in PROCESSES:
        try:
            text = httpx.get(f"{address(pipeline, name)}/metrics", timeout=20).text
        except httpx.HTTPError:
            continue
        families = text_string_to_metric_families(text)
        found[name] = {
            f"{sample.name}{{{','.join(f'{label}={value!r}' for label, value in sorted(sample.labels.items()))}}}": (
                sample.value
            )
            for family in families
            for sample in family.samples
        }
    return found


def total(by_process: Shown, name: str, **labels: str) -> float:
    selected = {f"{label}={value!r}" for label, value in labels.items()}
    return sum(
        value
        for series in by_process.values()
        for one, value in series.items()
        if one.partition("{")[0] == name and selected <= set(one.partition("{")[2].rstrip("}").split(","))
    )


def knows_its_tokens(client: httpx.Client) -> bool:
    try:
        return client.get("/v1/status/x").status_code != 401
    except httpx.ConnectError:  # the monitor answers a moment before the gateway does
        return False


@pytest.mark.soak
def test_faults_raise_their_alerts_alone_and_these_clear(
    rendered: Render, promtool: Callable[..., str], pipeline: Pipeline, tmp_path: Path
) -> None:
    """Faults of real services raise no other alert than their own."""
    url = f"http://127.0.0.1:{pipeline.config['gateway']['port']}"
    headers = {"Authorization": f"Bearer {(tmp_path / 'token').read_text()}"}
    for name in PROCESSES:
        for path in ("/livez", "/readyz", "/metrics"):
            until(lambda: asked(pipeline, name, path) == 200, lambda: f"{name}{path}\n{pipeline.logs()}")  # noqa: B023

    # Before: blobs are put and deleted, garbage is collected.
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        until(lambda: knows_its_tokens(client), pipeline.logs)
        for number in range(3):
            data = noise(300_000, f"kept {number}").tobytes()
            assert client.put(f"/v1/blobs/k{number}", params={"wait": 60}, content=data).status_code == 201
            doomed = noise(300_000, f"gone {number}").tobytes()
            assert client.put(f"/v1/blobs/gone{number}", params={"wait": 60}, content=doomed).status_code == 201
            assert client.delete(f"/v1/blobs/gone{number}").status_code in (200, 204)
    until(lambda: total(shown(pipeline), "nearkin_gc_freed_bytes_total") > 500_000, pipeline.logs)
    calm = shown(pipeline)
    assert total(calm, "nearkin_gc_runs_total", outcome="done") > 0
    assert total(calm, "nearkin_gc_containers_total") > 0
    assert total(calm, "nearkin_gc_run_seconds_count") == total(calm, "nearkin_gc_runs_total", outcome="done")
    assert total(calm, "nearkin_gc_last_success_timestamp_seconds") > time.time() - 600
    assert total(calm, "nearkin_index_complete") == 1

    # Faults: delta is stopped, a message is garbage, a container is damaged.
    pipeline.kill("delta")
    with uploading(pipeline.settings) as uploader:
        for number in range(8):
            uploader.put(f"late{number}", [noise(50_000, f"late {number}").tobytes()])
    outbox = Outbox(pipeline.settings, "test", store_authenticator(pipeline.settings))
    outbox.send("segments", b"x" * 16, b"no message of ours", {})
    outbox.flush()
    outbox.close()
    pipeline.processes["maintenance"].terminate()
    pipeline.processes["maintenance"].wait(60)
    container = max((tmp_path / "objects/containers").rglob("*.nkc"), key=lambda path: path.stat().st_size)
    container.chmod(0o644)
    damaged = bytearray(container.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    container.write_bytes(damaged)
    pipeline.write_config(scrub={"every_days": 1, "rate_bytes": "1GiB"}, gc={"interval_seconds": 0})
    pipeline.start("maintenance")
    until(lambda: total(shown(pipeline), "nearkin_scrub_damaged_total") == 1, pipeline.logs)
    delta = f"{pipeline.settings.kafka.topic_prefix}delta"
    until(lambda: total(shown(pipeline), "nearkin_lag_records", group=delta) >= 8, pipeline.logs)
    until(lambda: total(shown(pipeline), "nearkin_dead_letters_total", stage="dedup") == 1, pipeline.logs)
    bad = shown(pipeline)
    assert set(PROCESSES) - set(bad) == {"delta"}
    assert total(bad, "nearkin_corrupt_total", where="scrub") == 1
    assert total(bad, "nearkin_scrub_bytes_total") > container.stat().st_size
    assert total(bad, "nearkin_lag_bytes", group=delta) > 8 * 50_000
    assert asked(pipeline, "maintenance", "/readyz") == 200

    # After: delta runs again and reads its backlog.
    pipeline.start("delta")
    until(lambda: total(shown(pipeline), "nearkin_lag_records") == 0, pipeline.logs, seconds=120)
    good = shown(pipeline)
    assert set(good) == set(PROCESSES)

    values = {
        "config": {"kafka": {"topic_prefix": pipeline.settings.kafka.topic_prefix}},
        "monitoring": {"rules": {"enabled": True, "thresholds": {"lagRecords": 5}}},
    }
    (rules,) = [one["spec"] for one in rendered(values) if one["kind"] == "PrometheusRule"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    expected: dict[int, set[tuple[str, int]]] = {
        PHASE_MINUTES - 1: set(),
        PHASE_MINUTES * 2 - 1: FAULTS,
        PHASE_MINUTES * 2 + AFTER_MINUTES - 1: set(),
    }
    test = {
        "rule_files": ["rules.yaml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": list(as_series(calm, bad, good)),
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[29m]))',
                        "eval_time": f"{minute}m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{name}"}}', "value": times} for name, times in sorted(names)
                        ],
                    }
                    for minute, names in expected.items()
                ],
            }
        ],
    }
    (tmp_path / "live.test.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(tmp_path / "live.test.yaml"))

    # A counter that first shows as 1 is no increase: each counter of an alert exists before its fault.
    for alert in rules["groups"][0]["rules"]:
        for name, inside in re.findall(r"increase\((\w+)\{([^}]*)\}", alert["expr"]):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', inside))
            del labels["namespace"], labels["job"]
            selected = {f"{label}={value!r}" for label, value in labels.items()}
            found = [one for series in calm.values() for one in series if one.startswith(f"{name}{{")]
            assert any(selected <= set(one.partition("{")[2].rstrip("}").split(",")) for one in found), alert["alert"]


def as_series(calm: Shown, bad: Shown, good: Shown) -> Iterator[dict[str, str]]:
    """Yield the series as Prometheus stores them.

    One value a phase, counters that keep growing, gaps as gaps.
    """
    phases = ((calm, PHASE_MINUTES), (bad, PHASE_MINUTES), (good, AFTER_MINUTES))
    for process in PROCESSES:
        given = GIVEN.format(process)
        up = " ".join(f"{int(process in values)}x{minutes - 1}" for values, minutes in phases)
        yield {"series": f"up{{{given}}}", "values": up}
        names = sorted(set().union(*(by_process.get(process, {}) for by_process, _ in phases)))
        for name in names:
            if not name.startswith("nearkin_") or name.partition("{")[0].endswith(("_created", "_bucket")):
                continue
            parts = []
            for number, (by_process, minutes) in enumerate(phases):
                value = by_process.get(process, {}).get(name)
                if value is None:
                    parts.append(f"_x{minutes}")
                elif name.startswith("nearkin_lag_seen") and value:
                    parts.append(f"{60 * sum(length for _, length in phases[:number])}+60x{minutes - 1}")
                elif name.startswith("nearkin_records_total"):  # some records of a phase arrived in its last minutes
                    parts.append(f"{value}+1x{minutes - 1}")
                else:
                    parts.append(f"{value}x{minutes - 1}")
            metric, _, labels = name.partition("{")
            own = labels.rstrip("}").replace("'", '"')
            yield {"series": f"{metric}{{{','.join(filter(None, (given, own)))}}}", "values": " ".join(parts)}
