"""Check alerts and dashboard: each series exists, and each alert has a page with a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY

from nearkin_shared.observability import counters, metrics

for _declares_levels in (
    *(
        "nearkin_shared.index.lmdb.environments",
        "nearkin_shared.pipeline.worker_thread",
        "nearkin_shared.storage.containers",
        "nearkin.embedded.gateway_backend",
    ),
):
    import_module(_declares_levels)
ROOT = Path(__file__).parents[2]
GIVEN_LABELS = {"namespace", "job", "pod", "component", "le"}
"""Labels that scraping adds."""
MONITORED = {
    "monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}, "podMonitor": {"enabled": True}}
}
TRIALS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "alerts.test.yaml").read_text())
Render = Callable[..., list[dict[str, Any]]]


def series() -> dict[str, set[str]]:
    """Return the labels of every series that a Nearkin process can have, by name."""
    found: dict[str, set[str]] = {
        "up": set(),
        "process_resident_memory_bytes": set(),
        "process_cpu_seconds_total": set(),
    }
    for count in counters.COUNTS:
        found[f"{count.name}_total"] = set(count.labels)
    for spread in counters.SPREADS:
        found |= {spread.name + suffix: set(spread.labels) for suffix in ("_bucket", "_sum", "_count")}
    for level in counters.LEVELS:
        found[level.name] = set(level.labels)
    for collector in vars(metrics).values():
        if hasattr(collector, "_labelnames"):
            labels = set(collector._labelnames)
            name, kind = collector._name, collector._type
            for suffix in {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}.get(
                kind, [""]
            ):
                found[name + suffix] = labels | ({"revision"} if kind == "info" else set())
    return found


def of_kind(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)


@pytest.fixture
def alerts(rendered: Render) -> list[dict[str, Any]]:
    (group,) = of_kind(rendered(MONITORED), "PrometheusRule", "store-nearkin")["spec"]["groups"]
    return list(group["rules"])


@pytest.fixture
def panels(rendered: Render) -> list[dict[str, Any]]:
    data = of_kind(rendered(MONITORED), "ConfigMap", "store-nearkin-dashboard")["data"]
    return list(json.loads(data["nearkin.json"])["panels"])


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (name, its matchers) of every series that an expression reads.

    Raises ValueError if it cannot be parsed.
    """
    promql_parser.parse(expression)
    for name, inside in re.findall(r"\b(up|nearkin_\w+|process_\w+)\s*\{([^}]*)\}", expression):
        yield name, dict(re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', inside))


def grouped(expression: str) -> set[str]:
    return {
        label.strip() for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in inside.split(",")
    }


def test_series_of_the_code_are_found() -> None:
    known = series()
    assert {
        "nearkin_bytes_total",
        "nearkin_step_seconds_bucket",
        "nearkin_config_info",
        "nearkin_index_complete",
    } <= set(known)
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("nearkin_")}
    assert all(any(name.startswith(family) for name in known) for family in exposed)


def test_alerts_and_panels_read_existing_series(alerts: list[dict[str, Any]], panels: list[dict[str, Any]]) -> None:
    known = series()
    expressions = [alert["expr"] for alert in alerts]
    expressions += [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(expressions) > 65
    for expression in expressions:
        found = list(selectors(expression))
        assert found, expression
        may_group = GIVEN_LABELS | {"stage"} | set().union(*(known[name] for name, _ in found))
        assert grouped(expression) <= may_group, expression
        for name, matchers in found:
            assert name in known, f"no process has the series {name}"
            assert set(matchers) <= known[name] | GIVEN_LABELS, expression
            assert {"namespace", "job"} <= set(matchers), f"{expression}: matches the series of other releases"


def test_matched_label_values_exist(alerts: list[dict[str, Any]], panels: list[dict[str, Any]]) -> None:
    source = "\n".join(
        path.read_text() for folder in ("app", "shared", "services") for path in (ROOT / folder).rglob("*.py")
    )
    expressions = [alert["expr"] for alert in alerts]
    expressions += [target["expr"] for panel in panels for target in panel.get("targets", [])]
    values = {
        value
        for expression in expressions
        for _, matchers in selectors(expression)
        for label, value in matchers.items()
        if label in ("after", "state", "outcome")
    }
    assert values >= {"in", "stored", "failed"}
    for value in values:
        assert f'"{value}"' in source, value


def test_alert_has_severity_and_runbook(alerts: list[dict[str, Any]]) -> None:
    pages = re.findall(r"^### (\w+)$", (ROOT / "docs/how-to/operate-services.md").read_text(), re.MULTILINE)
    assert [alert["alert"] for alert in alerts] == pages
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        labels = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        assert labels <= grouped(alert["expr"]), alert["alert"]


def test_alert_links_to_its_page(alerts: list[dict[str, Any]], rendered: Render) -> None:
    url = "https://git.example.org/nearkin/docs/how-to/operate-services.md"
    (group,) = of_kind(
        rendered({"monitoring": {"rules": {"enabled": True, "runbooks": url}}}), "PrometheusRule", "store-nearkin"
    )["spec"]["groups"]
    for base, found in (("docs/how-to/operate-services.md", alerts), (url, group["rules"])):
        for alert in found:  # a heading's anchor is its text in small letters
            assert alert["annotations"]["runbook_url"] == f"{base}#{alert['alert'].lower()}"


def test_alert_has_rule_tests_around_its_fault(alerts: list[dict[str, Any]]) -> None:
    known = series()
    tried: dict[str, list[bool]] = {}
    for test in TRIALS["tests"]:
        for given in test["input_series"]:
            ((name, matchers),) = selectors(given["series"])
            assert set(matchers) <= known[name] | GIVEN_LABELS, given["series"]
        for expected in sorted(test["alert_rule_test"], key=lambda one: int(one["eval_time"].rstrip("m"))):
            tried.setdefault(expected["alertname"], []).append(bool(expected["exp_alerts"]))
    assert set(tried) == {alert["alert"] for alert in alerts}
    for name, fires in tried.items():
        assert fires[:3] == [False, True, False], name


def test_alert_fires_by_its_fault_and_clears(
    alerts: list[dict[str, Any]], promtool: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "nearkin", "rules": alerts}]}))
    (tmp_path / "alerts.test.yaml").write_text(yaml.safe_dump(TRIALS))
    assert f"{len(alerts)} rules found" in promtool("check", "rules", "--lint=all", str(tmp_path / "rules.yaml"))
    promtool("test", "rules", str(tmp_path / "alerts.test.yaml"))


def test_thresholds_and_names_follow_the_values(rendered: Render) -> None:
    values = {
        "monitoring": {
            "rules": {
                "enabled": True,
                "selector": 'namespace="x",job="y"',
                "thresholds": {"lagRecords": 77, "errorPercent": 3},
            }
        },
        "config": {"kafka": {"topic_prefix": "a.b."}},
    }
    (group,) = of_kind(rendered(values), "PrometheusRule", "store-nearkin")["spec"]["groups"]
    text = {alert["alert"]: alert["expr"] for alert in group["rules"]}
    assert text["NearkinBehind"].endswith("> 77")
    assert "> 3 / 100 *" in text["NearkinGatewayErrors"]
    assert 'nearkin_lag_records{namespace="x",job="y",group=~"a\\\\.b\\\\.(.*)"}' in text["NearkinStuck"]


def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not taken & cells, panel["title"]
        assert position["x"] + position["w"] <= 24
        taken |= cells
