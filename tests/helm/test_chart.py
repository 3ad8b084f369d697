"""Check that the chart renders, that Kubernetes accepts it, and the pods' rights."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nearkin_shared.config.settings import HOT_FIELDS
from nearkin_shared.kafka.lag import WAITS
from tests.support.checks import helm_chart
from tests.support.checks.rendered_chart import Render, changed, of_kind, settings_of
from tests.support.servers import cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/nearkin"
GOLDEN = Path(__file__).with_name("golden.yaml")
KUBERNETES = ("1.33", "1.35", "1.37")
NOT_KUBERNETES_OWN = {"monitoring.coreos.com/v1", "keda.sh/v1alpha1", "gateway.networking.k8s.io/v1"}
WORKERS = ("chunker", "dedup", "resemblance", "delta", "maintenance")

SCALED = {
    name: {"autoscaling": {"enabled": True}}
    for name in ("gateway", "pipeline", "chunker", "dedup", "resemblance", "delta")
}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "image": {"digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "commonLabels": {"team": "storage"},
        "podAnnotations": {"example.org/a": "1"},
        "podLabels": {"sidecar": "no"},
        "config": {
            "kafka": {
                "bootstrap_servers": "a:9093,b:9093",
                "security_protocol": "sasl_ssl",
                "ca_file": "/etc/nearkin/certificates/kafka.pem",
            },
            "redis": {"url": "rediss+cluster://redis:6379", "ca_file": "/etc/nearkin/certificates/redis.pem"},
            "ingest": {"topics": {"dumps": "team-a", "backups": "team-b"}},
            "features": {"algorithm": "odess"},
            "pipeline": {"stages": "split"},
            "gateway": {"body_bytes_max": "64GiB", "port": 8443},
        },
        "secrets": {
            "kafka": {"name": "kafka"},
            "redis": {"name": "redis", "usernameKey": "user"},
            "objectStore": {"name": "s3"},
            "certificates": {"name": "certificates"},
        },
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
        "defaults": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "storage", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "high",
            "env": [{"name": "NEARKIN_BLOCK__LEVEL", "value": "5"}],
        },
        "delta": {"replicas": 5, "podAnnotations": {"example.org/b": "2"}},
        "service": {"type": "LoadBalancer", "annotations": {"example.org/c": "3"}},
        "ingress": {"enabled": True, "className": "nginx", "host": "nearkin.example.org", "tlsSecret": "tls"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["nearkin.example.org"]},
        "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {"matchLabels": {"edge": "yes"}}}]},
        "monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}},
        "test": {"token": {"name": "operator"}},
    },
    "encrypted": {
        "config": {"storage": {"encryption": "aes-256-gcm"}},
        "secrets": {"encryption": {"name": "keys"}},
    },
    "shards": {"indexShards": {"replicas": 3, "volume": {"storageClass": "ssd"}}},
    "hpa": SCALED,
    "keda": {
        **SCALED,
        "keda": {"enabled": True},
        "secrets": {"kafka": {"name": "kafka"}},
        "config": {"kafka": {"security_protocol": "sasl_ssl", "topic_prefix": "store."}, "ingest": {"topics": ["b=t"]}},
        "ingest": {"autoscaling": {"enabled": True, "maxReplicas": 4}},
    },
    "least": {
        "defaults": {"replicas": 1},
        "networkPolicy": {"enabled": False},
        "topics": {"job": False},
        "serviceAccount": {"create": False},
        "config": {"kafka": {"partitions": 1, "replication": 1}, "profile": "archive"},
    },
    **{path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))},
    "no-gateway": {"gateway": {"enabled": False}, "fullnameOverride": "kin", "config": {"ingest": {"topics": ["b"]}}},
}


def split(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of a chart that runs a Deployment for each stage."""
    return values | {"config": values.get("config", {}) | {"pipeline": {"stages": "split"}}}


MATRIX |= {"split": split({}), "keda-split": split(MATRIX["keda"])}


def is_split(values: dict[str, Any]) -> bool:
    """Return whether a chart with these values runs a Deployment for each stage."""
    return bool(values.get("config", {}).get("pipeline", {}).get("stages") == "split")


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (kind and name, metadata, spec) of everything that becomes a pod."""
    for one in objects:
        name = f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, one["spec"]["template"]["metadata"], one["spec"]["template"]["spec"]
        elif one["kind"] == "Pod":
            yield name, one["metadata"], one["spec"]


@cache
def taken(text: str) -> None:
    """Validate an object; many are the same in all cases."""
    for version in KUBERNETES:
        kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.fixture(params=sorted(MATRIX))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MATRIX[request.param]


# --- it is a chart, and Kubernetes accepts it ------------------------------------------------------------------------


def test_helm_lint_reports_nothing(helm: Callable[..., str], case: dict[str, Any]) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=case)


def test_three_versions_of_kubernetes_accept_the_objects(rendered: Render, case: dict[str, Any]) -> None:
    objects = rendered(case)
    assert {one["apiVersion"] for one in objects} <= NOT_KUBERNETES_OWN | {
        *("v1", "apps/v1", "batch/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")
    }
    for one in objects:
        if one["apiVersion"] not in NOT_KUBERNETES_OWN:
            taken(json.dumps(one))


def test_rendered_chart_equals_golden_file(rendered: Render) -> None:
    """A change of the chart shows its effect in golden.yaml; review it and commit both."""
    expected = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(GOLDEN.read_text())}
    without_dashboard = MATRIX["aws"] | {"monitoring": MATRIX["aws"]["monitoring"] | {"dashboard": {"enabled": False}}}
    found = {(one["kind"], one["metadata"]["name"]): one for one in rendered(without_dashboard)}
    command = (
        "helm template store deploy/helm/nearkin -n backups -f deploy/helm/nearkin/examples/aws.yaml "
        "--set monitoring.dashboard.enabled=false"
    )
    assert found == expected, f"review the difference, then run: {command} > tests/helm/golden.yaml"


def test_names_are_unique_in_one_namespace(rendered: Render, case: dict[str, Any]) -> None:
    named = [(one["kind"], one["metadata"]["name"]) for one in rendered(case)]
    assert len(set(named)) == len(named)
    assert all(len(name) <= 63 for _, name in named)
    assert not any("namespace" in one["metadata"] for one in rendered(case))


# --- pods ------------------------------------------------------------------------------------------------------------


def test_pods_have_least_privilege(rendered: Render, case: dict[str, Any]) -> None:
    seen = 0
    for name, _, spec in pods(rendered(case)):
        seen += 1
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name  # else NEARKIN_PORT=tcp://... would be refused as a setting
        assert not any(spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC")), name
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] == security["runAsGroup"] == 10001, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} <= {"configMap", "emptyDir", "secret"}
        assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume), name
        assert len(spec["containers"]) == 1, name
        for container in spec["containers"]:
            inside = container["securityContext"]
            assert inside["allowPrivilegeEscalation"] is False, name
            assert inside["readOnlyRootFilesystem"] is True, name
            assert inside["runAsNonRoot"] is True, name
            assert inside["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert ":latest" not in container["image"], name
            written = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert written == ({"/tmp", "/var/lib/nearkin"} if name.startswith("StatefulSet") else {"/tmp"}), name
    assert seen >= (6 if is_split(case) else 3)


def test_services_have_probes(rendered: Render, case: dict[str, Any]) -> None:
    for name, deployment in of_kind(rendered(case), "Deployment", "StatefulSet").items():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["monitor"] == 9090
        for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            get = container[probe]["httpGet"]
            assert (get["path"], get["port"]) == (
                path,
                "http" if name.endswith("-gateway") else "monitor",
            )
        patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        assert patience > 120  # how long a service waits for servers before it reports which one is missing
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_secrets_are_referenced_and_never_rendered(rendered: Render) -> None:
    objects = rendered(MATRIX["everything"])
    assert not of_kind(objects, "Secret")
    for name, _, spec in pods(objects):
        for variable in spec["containers"][0].get("env", []):
            if any(word in variable["name"] for word in ("PASSWORD", "SECRET", "TOKEN", "ACCESS_KEY")):
                given = variable.get("valueFrom", {}).get("secretKeyRef")
                assert given or variable["name"] == "NEARKIN_AUTH__TOKENS_FILE", (name, variable)
    (container,) = of_kind(objects, "Deployment")["store-nearkin-delta"]["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    assert variables == {
        "NEARKIN_KAFKA__SASL_USERNAME": {"name": "kafka", "key": "username"},
        "NEARKIN_KAFKA__SASL_PASSWORD": {"name": "kafka", "key": "password"},
        "NEARKIN_REDIS__USERNAME": {"name": "redis", "key": "user"},
        "NEARKIN_REDIS__PASSWORD": {"name": "redis", "key": "password"},
        "NEARKIN_OBJECT_STORE__ACCESS_KEY_ID": {"name": "s3", "key": "access_key_id"},
        "NEARKIN_OBJECT_STORE__SECRET_ACCESS_KEY": {"name": "s3", "key": "secret_access_key"},
    }


def test_services_have_the_store_key_and_the_job_has_not(rendered: Render) -> None:
    """Only services of an encrypted store read its key."""
    objects = rendered(MATRIX["encrypted"] | {"indexShards": {"replicas": 2}})
    for name, _, spec in pods(objects):
        given = [one for one in spec["containers"][0].get("env", []) if one["name"] == "NEARKIN_STORAGE__KEY"]
        is_service = name.startswith(("Deployment", "StatefulSet"))
        expected = [{"secretKeyRef": {"name": "keys", "key": "store.key"}}] if is_service else []
        assert [one["valueFrom"] for one in given] == expected, name


def test_chart_runs_the_services_of_make_up(rendered: Render) -> None:
    objects = rendered({"config": {"ingest": {"topics": ["blobs"]}}})
    ran = {
        deployment["metadata"]["labels"]["app.kubernetes.io/component"]: deployment["spec"]["template"]["spec"][
            "containers"
        ][0]["command"][2]
        for deployment in of_kind(objects, "Deployment").values()
    }
    assert ran == {service.name: service.module for service in cluster.SERVICES}
    assert "ingest" not in {name.rpartition("-")[2] for name in of_kind(rendered(), "Deployment")}
    for _, _, spec in pods(objects):
        module = spec["containers"][0]["command"][2]
        assert importlib.util.find_spec(module), module


def test_selectors_match_the_intended_pods(rendered: Render) -> None:
    for values in MATRIX.values():
        objects = rendered(values)
        labels = [metadata["labels"] for _, metadata, _ in pods(objects)]

        def selected(selector: dict[str, str]) -> int:
            return sum(selector.items() <= one.items() for one in labels)  # noqa: B023

        for one in objects:
            match one["kind"]:
                case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                    assert selected(one["spec"]["selector"]["matchLabels"]) == 1
                case "Service":
                    assert selected(one["spec"]["selector"]) == 1
                case "PodMonitor":
                    assert selected(one["spec"]["selector"]["matchLabels"]) >= len(of_kind(objects, "Deployment"))
                case "NetworkPolicy":
                    assert selected(one["spec"]["podSelector"]["matchLabels"]) >= 1


def test_network_policies_allow_listed_ports_only(rendered: Render) -> None:
    policies = of_kind(rendered(MATRIX["everything"]), "NetworkPolicy")
    whole = policies["store-nearkin"]["spec"]
    assert set(whole["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in whole
    assert [[port["port"] for port in rule["ports"]] for rule in whole["egress"]] == [[53, 53], [9092], [6379], [443]]
    assert set(whole["podSelector"]["matchLabels"]) == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    opened = {
        name: (policy["spec"]["ingress"][0]["ports"][0]["port"], len(policy["spec"]["ingress"][0]["from"]))
        for name, policy in policies.items()
        if "ingress" in policy["spec"]
    }
    assert opened == {"store-nearkin-gateway": ("http", 2), "store-nearkin-monitor": ("monitor", 1)}


# --- scaling ---------------------------------------------------------------------------------------------------------


def test_workers_have_at_most_one_replica_a_partition(rendered: Render, helm: Callable[..., str]) -> None:
    for values, shown in (
        ({"delta": {"replicas": 13}}, "delta.replicas 13: want at most config.kafka.partitions (12)"),
        ({"config": {"kafka": {"partitions": 1}}}, "chunker.replicas 2: want at most config.kafka.partitions (1)"),
        (
            {"dedup": {"autoscaling": {"enabled": True, "maxReplicas": 20}}},
            "dedup.autoscaling.maxReplicas 20: want at most config.kafka.partitions (12)",
        ),
        (
            {"ingest": {"replicas": 5, "partitions": 4}, "config": {"ingest": {"topics": ["b"]}}},
            "ingest.replicas 5: want at most ingest.partitions (4)",
        ),
    ):
        with pytest.raises(Exception, match=r"want at most") as refused:
            rendered(split(values))
        assert shown in str(refused.value)
    with pytest.raises(Exception, match=r"pipeline.replicas 13: want at most config.kafka.partitions \(12\)"):
        rendered({"pipeline": {"replicas": 13}})
    rendered(split({"gateway": {"replicas": 40}, "delta": {"replicas": 12}}))


@pytest.mark.parametrize("chosen", ["keda", "keda-split"])
def test_keda_scales_each_worker_by_its_lag(rendered: Render, chosen: str) -> None:
    objects = rendered(MATRIX[chosen])
    scaled = of_kind(objects, "ScaledObject")
    waits: dict[str, str] = {}
    for name, one in scaled.items():
        assert one["spec"]["scaleTargetRef"]["name"] in of_kind(objects, "Deployment")
        for trigger in one["spec"]["triggers"]:
            shown = trigger["metadata"]
            waits[shown["consumerGroup"]] = shown["topic"]
            assert (shown["sasl"], shown["tls"], shown["allowIdleConsumers"]) == ("scram_sha512", "enable", "false")
            assert trigger["authenticationRef"]["name"] in of_kind(objects, "TriggerAuthentication")
        if name.endswith("-ingest"):
            assert one["spec"]["maxReplicaCount"] == 4
    assert waits == {f"store.{group}": f"store.{topic}" for group, topic in WAITS.items()} | {"store.ingest": "b"}
    assert set(of_kind(objects, "HorizontalPodAutoscaler")) == {"store-nearkin-gateway"}
    assert len(of_kind(rendered(split(MATRIX["hpa"])), "HorizontalPodAutoscaler")) == 5
    for deployment in of_kind(objects, "Deployment").values():
        fixed = deployment["metadata"]["name"] == "store-nearkin-maintenance"
        assert ("replicas" in deployment["spec"]) == fixed


@pytest.mark.parametrize("chosen", ["keda", "keda-split"])
def test_keda_with_prometheus_scales_by_seconds_of_lag(rendered: Render, chosen: str) -> None:
    """Ask for the oldest record's age of each group that a Deployment reads, with `fused` and `split` stages."""
    values = MATRIX[chosen] | {"keda": {"enabled": True, "prometheus": "http://prometheus:9090"}}
    scaled = of_kind(rendered(values), "ScaledObject")
    asked = {}
    for name, one in scaled.items():
        (trigger,) = one["spec"]["triggers"]
        shown = trigger["metadata"]
        assert (trigger["type"], shown["serverAddress"]) == ("prometheus", "http://prometheus:9090")
        assert (shown["threshold"], shown["ignoreNullValues"]) == ("30", "false")
        query = re.fullmatch(r'max\(nearkin_lag_seconds\{namespace="\w+",job="store",group=~"(.+)"\}\)', shown["query"])
        assert query is not None, shown["query"]
        asked[name.removeprefix("store-nearkin-")] = query[1].replace("\\\\", "\\").replace("\\", "").split("|")
    assert sorted(group for groups in asked.values() for group in groups) == sorted(
        [f"store.{group}" for group in WAITS] + ["store.ingest"]
    )
    assert set(asked) == ({"ingest", "pipeline"} if chosen == "keda" else {"ingest", *WAITS} - {"committer"})
    assert sorted(asked["pipeline" if chosen == "keda" else "delta"]) == (
        sorted(f"store.{group}" for group in WAITS) if chosen == "keda" else ["store.committer", "store.delta"]
    )


def test_single_replica_has_no_disruption_budget(rendered: Render) -> None:
    """A budget of one replica would block a drain."""
    assert not of_kind(rendered(MATRIX["least"]), "PodDisruptionBudget").keys() - {"store-nearkin-gateway"}
    assert set(of_kind(rendered(), "PodDisruptionBudget")) == {"store-nearkin-gateway", "store-nearkin-pipeline"}
    assert set(of_kind(rendered(split({})), "PodDisruptionBudget")) == {
        f"store-nearkin-{name}" for name in ("gateway", *WORKERS) if name != "maintenance"
    }


# --- settings --------------------------------------------------------------------------------------------------------


def test_job_and_test_pod_use_the_nodes_of_services(rendered: Render) -> None:
    objects = rendered(MATRIX["everything"])
    deployment = of_kind(objects, "Deployment")["store-nearkin-delta"]["spec"]["template"]["spec"]
    job = of_kind(objects, "Job")["store-nearkin-topics"]["spec"]["template"]["spec"]
    for pod in (job, of_kind(objects, "Pod")["store-nearkin-test"]["spec"]):
        for what in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert pod[what] == deployment[what]
    assert MATRIX["everything"]["defaults"]["env"][0] in job["containers"][0]["env"]


def test_maintenance_is_not_scaled(rendered: Render) -> None:
    scaled = {"defaults": {"autoscaling": {"enabled": True}}}
    assert "store-nearkin-gateway" in of_kind(rendered(scaled), "HorizontalPodAutoscaler")
    assert "store-nearkin-maintenance" not in of_kind(rendered(scaled), "HorizontalPodAutoscaler")


def test_value_that_excludes_a_default_replaces_it(rendered: Render) -> None:
    objects = rendered({"defaults": {"strategy": {"type": "Recreate"}, "disruption": {"minAvailable": 1}}})
    for deployment in of_kind(objects, "Deployment").values():
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        assert budget["spec"]["minAvailable"] == 1
        assert "maxUnavailable" not in budget["spec"]


def test_settings_file_has_the_values(rendered: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEARKIN_KERNELS",):
        monkeypatch.setenv(name, "cython")
    settings = settings_of(rendered(MATRIX["everything"]), tmp_path)
    assert settings.ingest.topics == ("backups=team-b", "dumps=team-a")
    assert settings.kafka.bootstrap_servers == "a:9093,b:9093"
    assert (settings.kafka.partitions, settings.features.algorithm) == (12, "odess")
    assert (settings.gateway.body_bytes_max, settings.gateway.port) == (64 << 30, 8443)
    assert (settings.gateway.host, settings.monitor.port) == ("0.0.0.0", 9090)
    assert settings_of(rendered(MATRIX["least"]), tmp_path).block.level == 9
    large = rendered({"config": {"gateway": {"body_bytes_max": 1 << 41}, "redis": {"prefix": 'a"b\\'}}})
    assert settings_of(large, tmp_path).gateway.body_bytes_max == 1 << 41
    assert settings_of(large, tmp_path).redis.prefix == 'a"b\\'
    policies = [{"prefix": 'db/"1"', "keep_daily": 7}, {"keep_last": 3}]
    parts = {"gc": {"compact_below": 0.25}, "tracing": {"endpoint": "http://otel:4318", "ratio": 0.00001}}
    found = settings_of(rendered({"config": {**parts, "retention": {"policies": policies}}}), tmp_path)
    assert (found.gc.compact_below, found.tracing.ratio) == (0.25, 0.00001)
    assert [(policy.prefix, policy.keep_daily, policy.keep_last) for policy in found.retention.policies] == [
        ('db/"1"', 7, 0),
        ("", 0, 3),
    ]
    topics = of_kind(rendered(MATRIX["everything"]), "ConfigMap")["store-nearkin-topics"]["data"]["nearkin.toml"]
    assert set(tomllib.loads(topics)) == {"profile", "kafka"}


def test_hot_setting_changes_the_config_map_alone(rendered: Render) -> None:
    only = {("ConfigMap", "store-nearkin")}
    before = rendered()
    assert changed(before, rendered({"config": {"features": {"algorithm": "ntransform"}}})) == only
    one, other = ({"config": {"features": {"algorithm": name}}} for name in ("odess", "finesse"))
    assert changed(rendered(one), rendered(other)) == only
    all_hot: dict[str, dict[str, Any]] = {
        "features": {"algorithm": "odess"},
        "base": {"policy": "first-fit"},
        "delta": {"codec": "none", "max_depth": 2},
        "block": {"level": 4},
        "service": {"read_only": True, "paused": True},
    }
    assert {f"{section}.{field}" for section, fields in all_hot.items() for field in fields} == HOT_FIELDS
    assert changed(before, rendered({"config": all_hot})) == only


def test_cold_setting_restarts_each_service(rendered: Render) -> None:
    before = rendered()
    deployments = {("Deployment", name) for name in of_kind(before, "Deployment")}
    after = rendered({"config": {"base": {"cache_bytes": "200MiB"}}})
    assert changed(before, after) == deployments | {("ConfigMap", "store-nearkin")}


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"config": {"features": {"algorithm": "fineese"}}}, "config/features/algorithm"),
        ({"config": {"features": {"algoritm": "odess"}}}, "algoritm"),
        ({"config": {"kafka": {"sasl_password": "x"}}}, "sasl_password"),
        ({"config": {"redis": {"url": "redis://:word@redis:6379"}}}, "config/redis/url"),
        ({"config": {"kafka": {"partitions": 0}}}, "config/kafka/partitions"),
        ({"config": {"block": {"level": "high"}}}, "config/block/level"),
        ({"config": {"token": "nk_x"}}, "token"),
        ({"config": {"gateway": {"uploads_max": 9}}}, "config.gateway.uploads_max: no longer a setting, but"),
        ({"config": {"runner": {"batch_bytes": "1MiB"}}}, "constant (16MiB; 8MiB in the profile archive); remove it"),
        ({"config": {"audit": {"reads": True}}}, "config.audit.reads: no longer a setting; set audit.records ="),
        ({"config": {"runner": {"batch": 1}}}, "batch"),
        ({"chunker": {"replica": 3}}, "replica"),
        ({"gatway": {}}, "gatway"),
        ({"defaults": {"terminationGracePeriodSeconds": 30}}, "terminationGracePeriodSeconds"),
        ({"ingress": {"enabled": True}}, "ingress.host: want the name that clients use"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: want the Gateway"),
        ({"secrets": {"tokens": {"name": ""}}}, "secrets.tokens.name: want a Secret"),
        ({"secrets": {"encryption": {"name": "keys"}}}, "secrets.encryption.name: is set, and config.storage"),
        ({"config": {"storage": {"encryption": "aes-256-gcm"}}}, "secrets.encryption.name: want a Secret"),
        ({"config": {"storage": {"key_file": "/k"}}}, "config.storage.key_file: no pod has that file"),
        ({"config": {"gateway": {"ingest": "embedded"}}}, "config.gateway.ingest embedded"),
        ({"indexShards": {"replicas": 65}}, "indexShards/replicas"),
        (
            {"indexShards": {"replicas": 2}, "config": {"index": {"shards": ["http://a"]}}},
            "config.index.shards: indexSh",
        ),
        ({"indexShards": {"replicas": 2}, "config": {"index": {"backend": "redis"}}}, "config.index.backend: indexSh"),
        ({"indexShards": {"replicas": 2}, "config": {"monitor": {"port": 7420}}}, "config.monitor.port 7420: index"),
        ({"config": {"gateway": {"shutdown_seconds": 80}}}, "config.gateway.shutdown_seconds 80: want"),
        ({"config": {"gateway": {"port": 9090}}}, "config.gateway.port 9090, config.monitor.port 9090: want two"),
        ({"config": {"monitor": {"port": 0}}}, "config.monitor.port 0: want two ports, 1 at least"),
        (
            {"config": {"pipeline": {"stages": "chunker,dedup"}}},
            "config.pipeline.stages chunker,dedup: the chart knows",
        ),
        ({"config": {"object_store": {"url": "/data"}}}, "config.object_store.url /data: want a bucket"),
        ({"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels app.kubernetes.io/component: selectors"),
        ({"commonLabels": {"app.kubernetes.io/instance": "x"}}, "commonLabels app.kubernetes.io/instance: selectors"),
        (
            split({"delta": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}}}),
            "delta.autoscaling.minReplicas 5: want at most maxReplicas (3)",
        ),
    ],
)
def test_invalid_value_is_refused_by_name(rendered: Render, values: dict[str, Any], shown: str) -> None:
    with pytest.raises(Exception, match=r"Error: ") as refused:
        rendered(values)
    assert shown in str(refused.value)


# --- documentation ---------------------------------------------------------------------------------------------------


def test_readme_and_schema_follow_values_and_settings() -> None:
    values = (CHART / "values.yaml").read_text()
    assert helm_chart.undocumented_values(values) == []
    remedy = "run python -m tests.support.checks.helm_chart"
    readme, schema = ((CHART / name).read_text() for name in ("README.md", "values.schema.json"))
    assert helm_chart.with_values(readme, values) == readme, remedy
    assert helm_chart.with_config(schema) == schema, remedy
    removed = json.loads((CHART / "files/removed_settings.json").read_text())
    assert removed == helm_chart.removed_settings(), remedy


def test_chart_version_is_the_package_version() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    shown = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (shown["version"], shown["appVersion"]) == (package, package)


def test_notes_begin_with_a_working_curl(helm: Callable[..., str]) -> None:
    notes = helm("install", "store", str(CHART), "--dry-run=client", "--namespace", "backups", values={})
    assert 'curl -sS -H "Authorization: Bearer $NEARKIN_TOKEN" --data-binary @- "$URL/v1/blobs/greeting' in notes
    assert "port-forward svc/store-nearkin 8080:80" in notes
    assert "Index shards" not in notes
