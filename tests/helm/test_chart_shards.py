"""Check the index shards of the chart: their addresses, pods, policies and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nearkin.workers import index_shard
from tests.support.checks.rendered_chart import Render, changed, of_kind, settings_of

CHART = Path(__file__).parents[2] / "deploy/helm/nearkin"
SHARDS = "store-nearkin-index-shard"


def test_each_process_has_the_addresses_of_all_shards(rendered: Render, tmp_path: Path) -> None:
    """The number of shards alone is set; a shard's address is the stable one of its pod."""
    objects = rendered({"indexShards": {"replicas": 3}, "config": {"index": {"memory": "1GiB"}}})
    found = settings_of(objects, tmp_path).index
    urls = tuple(f"http://{SHARDS}-{number}.{SHARDS}.backups.svc:7420" for number in range(3))
    assert (found.backend, found.shards, found.memory) == ("shards", urls, 1 << 30)
    service, (container,) = of_kind(objects, "Service")[SHARDS]["spec"], shard_pod(objects)["containers"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert of_kind(objects, "StatefulSet")[SHARDS]["spec"]["serviceName"] == SHARDS
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (service["ports"][0]["port"], ports[service["ports"][0]["targetPort"]]) == (7420, 7420)


def shard_pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of the shards' pods."""
    spec: dict[str, Any] = of_kind(objects, "StatefulSet")[SHARDS]["spec"]["template"]["spec"]
    return spec


def test_shard_takes_its_number_from_its_pod(rendered: Render) -> None:
    """Its command is one that the program takes; its folder is on its volume."""
    objects = rendered({"indexShards": {"replicas": 3}})
    (container,) = shard_pod(objects)["containers"]
    number = container["env"][0]
    assert number["name"] == "SHARD"
    assert number["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    module, *arguments = [text.replace("$(SHARD)", "2") for text in container["command"][2:]]
    assert module == index_shard.__name__
    given = index_shard.main.make_context("shard", arguments).params
    assert (given["number"], given["count"], given["port"], given["host"]) == (2, 3, 7420, "0.0.0.0")
    (claim,) = of_kind(objects, "StatefulSet")[SHARDS]["spec"]["volumeClaimTemplates"]
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == claim["metadata"]["name"])
    assert given["folder"].is_relative_to(mount["mountPath"])


def test_shards_are_reached_by_the_release_alone(rendered: Render) -> None:
    policies = of_kind(rendered({"indexShards": {"replicas": 2}}), "NetworkPolicy")
    release = {"app.kubernetes.io/name": "nearkin", "app.kubernetes.io/instance": "store"}
    (rule,) = policies[SHARDS]["spec"]["ingress"]
    ports = [{"port": "calls", "protocol": "TCP"}]
    assert rule == {"from": [{"podSelector": {"matchLabels": release}}], "ports": ports}
    shard = {**release, "app.kubernetes.io/component": "index-shard"}
    outgoing = policies["store-nearkin"]["spec"]["egress"]
    assert {"to": [{"podSelector": {"matchLabels": shard}}], "ports": ports} in outgoing


def test_shards_have_a_disruption_budget(rendered: Render) -> None:
    budgets = of_kind(rendered({"indexShards": {"replicas": 2}}), "PodDisruptionBudget")
    assert budgets[SHARDS]["spec"]["maxUnavailable"] == 1
    assert SHARDS not in of_kind(rendered({"indexShards": {"replicas": 1}}), "PodDisruptionBudget")


def test_another_number_of_shards_restarts_all(rendered: Render) -> None:
    before, after = (rendered({"indexShards": {"replicas": count}}) for count in (2, 3))
    services = {
        (one["kind"], one["metadata"]["name"]) for one in before if one["kind"] in ("Deployment", "StatefulSet")
    }
    assert changed(before, after) == services | {("ConfigMap", "store-nearkin")}


def test_redis_is_the_default_and_runs_no_shard(rendered: Render) -> None:
    objects = rendered()
    assert not of_kind(objects, "StatefulSet")
    assert "index-shard" not in yaml.safe_dump_all(objects)
    hot = {"features": {"algorithm": "odess"}}
    before, after = (rendered({"indexShards": {"replicas": 2}, "config": config}) for config in ({}, hot))
    assert changed(before, after) == {("ConfigMap", "store-nearkin")}


def test_values_of_an_older_release_have_no_shards(rendered: Render) -> None:
    """`--reuse-values` leaves the chart's new defaults out; null does the same."""
    assert not changed(rendered(), rendered({"indexShards": None}))


def test_names_of_shards_fit_labels_with_a_long_release(helm: Callable[..., str]) -> None:
    """Kubernetes labels pods by their name, and by the StatefulSet's with a hash of eleven."""
    text = helm("template", "r" * 53, str(CHART), values={"indexShards": {"replicas": 64}})
    (name,) = (one["metadata"]["name"] for one in yaml.safe_load_all(text) if one and one["kind"] == "StatefulSet")
    assert len(f"{name}-63") <= 63
    assert len(name) + 11 <= 63


def test_notes_say_to_stop_all_before_another_number(helm: Callable[..., str]) -> None:
    """Services of two numbers of shards at a time would miss entries."""
    values = {"indexShards": {"replicas": 2}}
    notes = helm("install", "store", str(CHART), "--dry-run=client", "--namespace", "backups", values=values)
    assert "Before you change indexShards.replicas, also to 0, stop all services" in notes
    assert "scale deployment,statefulset -l app.kubernetes.io/instance=store --replicas=0" in notes
