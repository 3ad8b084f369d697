"""Test the table of Kafka ACLs in docs/how-to/operate-services.md: complete and minimal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from nearkin_gateway.auth import tokens
from nearkin_shared.formats.message import End, Envelope, encode
from nearkin_shared.kafka.clients import STAGE_TOPICS, Outbox
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.kafka_server import Kafka, users_producer
from tests.support.servers.pipeline import SPLIT, Pipeline, store_authenticator, uploading
from tests.support.servers.server import LOOPBACK, free_port

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "operate-services.md"
HEADER = "| user | operations | topics | groups | transactional ids |"
PREFIX = "acl."
SOURCE = "acl-source"
"""A user's topic: its name does not begin with PREFIX."""
PASSWORD = "secret"
USERS = {"gateway": "gateway", "ingest": "ingest", **{service: service for service in SPLIT}}
"""The user of each process of the pipeline."""
AUDIT = re.compile(
    r"Principal = User:(\S+) is (\w+) operation = (\w+) .* on resource = (\S+) for .* based on rule (.*)"
)
RULE = re.compile(r"resourceType=(\w+), resourceName=([^,]+), patternType=(\w+),.* operation=(\w+)")


class Acl(NamedTuple):
    """One ACL of a user, in Kafka's enumerations."""

    user: str
    operation: str
    resource_type: str
    name: str
    pattern: str

    def binding(self) -> AclBinding:
        """Return the ACL for an administration client."""
        kind, pattern = ResourceType[self.resource_type], ResourcePatternType[self.pattern]
        operation, allow = AclOperation[self.operation], AclPermissionType.ALLOW
        return AclBinding(kind, self.name, pattern, f"User:{self.user}", "*", operation, allow)


def documented_acls() -> set[Acl]:
    """Return the ACLs of the table in docs/how-to/operate-services.md."""
    lines = PAGE.read_text().partition(HEADER)[2].splitlines()[2:]
    found = set()
    for line in lines:
        if not line.startswith("|"):
            break
        (user,), operations, *resources = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1])
        for kind, names in zip(("TOPIC", "GROUP", "TRANSACTIONAL_ID"), resources, strict=True):
            for name in names:
                place = (PREFIX, "PREFIXED") if name == "*" else (_full_name(name), "LITERAL")
                found |= {Acl(user, _enumerated(operation), kind, *place) for operation in operations}
    return found


def _full_name(name: str) -> str:
    return SOURCE if name == "SOURCE" else PREFIX + name


def _enumerated(operation: str) -> str:
    """Return `DescribeConfigs` as DESCRIBE_CONFIGS."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation).upper()


class Audit:
    """The decisions of the broker's authorizer, from its log."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def decisions(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield (user, Allowed or AccessDenied, operation, resource, rule)."""
        for line in self._log.read_text().splitlines():
            if (match := AUDIT.search(line)) is not None:
                yield match[1], match[2], match[3], match[4], match[5]

    def used(self) -> set[Acl]:
        """Return the ACLs by which something was allowed."""
        found = set()
        for user, decision, _, _, rule in self.decisions():
            if decision == "Allowed" and (match := RULE.search(rule)) is not None:
                found.add(Acl(user, match[4], match[1], match[2], match[3]))
        return found

    def denied(self) -> set[tuple[str, str, str]]:
        """Return (user, operation, resource) of all that was denied."""
        return {
            (user, resource, where)
            for user, decision, resource, where, _ in self.decisions()
            if decision == "AccessDenied"
        }


@pytest.fixture(scope="module")
def guarded_kafka(
    need: Callable[[Callable[[], Any]], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kafka, str]]:
    """Yield a broker with an authorizer and the address of user logins.

    Anonymous clients may do all.
    """
    port, clients, controller = free_port(), free_port(), free_port()
    accounts = " ".join(f'user_{user}="{PASSWORD}"' for user in {acl.user for acl in documented_acls()} | {"admin"})
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
    properties = {
        "listeners": f"PLAINTEXT://{LOOPBACK}:{port},CLIENTS://{LOOPBACK}:{clients},CONTROLLER://{LOOPBACK}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port},CLIENTS://{LOOPBACK}:{clients}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
        "listener.name.clients.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.clients.plain.sasl.jaas.config": f"{plain} required {accounts};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
    }
    folder = tmp_path_factory.mktemp("guarded")
    server = Kafka(
        folder,
        port=port,
        controller_port=controller,
        properties=properties,
        log_levels={"kafka.authorizer.logger": "DEBUG"},
    )
    with need(lambda: server.start()):
        yield server, f"{LOOPBACK}:{clients}"


@pytest.fixture
def pipeline(guarded_kafka: tuple[Kafka, str], redis: Any, key_prefix: str, tmp_path: Path) -> Pipeline:
    """Return a stopped pipeline whose processes log in as the users of the table."""
    tokens.create(tmp_path / "tokens.json", "other-tenant", ["read"])
    config: dict[str, dict[str, object]] = {
        "kafka": {
            "bootstrap_servers": guarded_kafka[1],
            "topic_prefix": PREFIX,
            "partitions": 1,
            "security_protocol": "sasl_plaintext",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "admin",
            "sasl_password": PASSWORD,
            "upload_idle_seconds": 2,
        },
        "redis": {"url": redis.url, "prefix": key_prefix.rstrip(":")},
        "object_store": {"url": str(tmp_path / "objects")},
        "ingest": {"topics": [f"{SOURCE}=default"]},
        "gateway": {"port": free_port()},
        "auth": {"tokens_file": str(tmp_path / "tokens.json")},
        "monitor": {"port": 0},
    }
    environments = {service: {"NEARKIN_KAFKA__SASL_USERNAME": user} for service, user in USERS.items()}
    return Pipeline(tmp_path / "pipeline", config, environments)


@pytest.mark.soak
def test_pipeline_runs_under_the_documented_acls(guarded_kafka: tuple[Kafka, str], pipeline: Pipeline) -> None:
    """Run all services under the table of ACLs: nothing is denied, and every entry is used."""
    server, _ = guarded_kafka
    documented, audit = documented_acls(), Audit(server.log)
    _prepare(server, documented)
    _run_topics_job(pipeline)
    with pipeline:
        pipeline.start("gateway")
        pipeline.start("ingest")
        text = tokens.create(pipeline.folder.parent / "tokens.json", "default", tokens.SCOPES)[0]
        url = f"http://{LOOPBACK}:{pipeline.config['gateway']['port']}"
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {text}"}, timeout=60) as client:
            until(lambda: _is_ready(client), pipeline.logs)
            _put_and_get(client, server.bootstrap)
            _replay_dead_letters(client, server.bootstrap, pipeline)
            _await_no_lag(client)
        _await_use(audit, {acl for acl in documented if acl.user == "maintenance"})
        _abandon_uploads(pipeline)
        _await_use(audit, documented)
    assert audit.denied() == set()
    assert "uthorization failed" not in pipeline.logs()
    assert "not checked for durability" not in pipeline.logs()
    _check_write_denied(pipeline, "chunker", "placed")


def _prepare(server: Kafka, acls: set[Acl]) -> None:
    """Create the ACLs, a user's topic, and a topic that the Job has to alter."""
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    for answer in admin.create_acls([acl.binding() for acl in acls]).values():
        answer.result(30)
    topics = [NewTopic(SOURCE, 1, 1), NewTopic(f"{PREFIX}frames", 1, 1, config={"retention.ms": "1000000"})]
    for made in admin.create_topics(topics).values():
        made.result(30)


def _run_topics_job(pipeline: Pipeline) -> None:
    """Let the Job create and alter the topics, as its own user."""
    command = [sys.executable, "-m", "nearkin_shared.kafka.topics", "--config", str(pipeline.config_file)]
    environment = {**os.environ, "NEARKIN_KAFKA__SASL_USERNAME": "topics-job"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert f"settings changed of {PREFIX}frames" in done.stdout


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200 and client.get("/v1/status/x").status_code != 401
    except httpx.HTTPError:
        return False


def _put_and_get(client: httpx.Client, bootstrap: str) -> None:
    """Store a blob by gateway and one by topic; change a setting of the running services."""
    data = noise(1_500_000, "acls").tobytes()
    answer = client.put("/v1/blobs/put", params={"wait": 60}, content=data)
    assert answer.status_code == 201, answer.text
    assert client.get("/v1/blobs/put").content == data
    assert client.patch("/v1/config", json={"block": {"level": 7}}).status_code == 200
    source = users_producer(bootstrap)
    source.produce(SOURCE, data[:1000], b"ingested")
    assert source.flush(30) == 0
    until(lambda: client.get("/v1/blobs/ingested").status_code == 200)


def _replay_dead_letters(client: httpx.Client, bootstrap: str, pipeline: Pipeline) -> None:
    """Make each stage and the ingest consumer dead-letter a record; replay all by the gateway."""
    forger = users_producer(bootstrap)
    for name in STAGE_TOPICS:
        forger.produce(PREFIX + name, b"no message", b"k" * 16)
    forger.produce(SOURCE, b"a record without key")
    assert forger.flush(30) == 0

    def waiting() -> list[str]:
        letters = client.get("/v1/dead").json()["letters"]
        return [letter["letter"] for letter in letters if not letter["replayed"]]

    until(lambda: len(waiting()) == len(STAGE_TOPICS) + 1, pipeline.logs, poll_seconds=0.5)
    letters = waiting()
    assert client.get(f"/v1/dead/letters/{letters[0]}").status_code == 200
    assert client.post("/v1/dead/replay", json={"letters": letters}).status_code == 200
    # Each becomes a dead letter again: every replayed record has reached its topic.
    until(lambda: len(waiting()) == len(letters) and not set(waiting()) & set(letters), pipeline.logs, poll_seconds=0.5)


def _await_no_lag(client: httpx.Client) -> None:
    """Wait until no group is behind; a replay's markers, which are no records, do not count."""

    def lagging_stages() -> list[dict[str, Any]]:
        return [stage for stage in client.get("/v1/pipeline").json()["stages"] if stage["lag_records"]]

    until(lambda: not lagging_stages(), lagging_stages, poll_seconds=0.5)


def _await_use(audit: Audit, acls: set[Acl]) -> None:
    """Wait until each of the ACLs was needed; the maintenance service reads lag every 15 s."""
    until(lambda: acls <= audit.used(), lambda: f"not needed: {sorted(acls - audit.used())}", 60, poll_seconds=1)


def _abandon_uploads(pipeline: Pipeline) -> None:
    """End an upload without segments and one without frames: both services query group lag."""
    settings, blob = pipeline.settings, os.urandom(16)
    with uploading(settings) as uploader:
        outbox = Outbox(settings, "test", store_authenticator(settings))
        end = End(Envelope(blob, "default", "lost"), time.time_ns() // 1000, blob, 5, b"b" * 32, segments=1)
        outbox.send("placed", blob, encode(end), {})
        outbox.flush()
        outbox.close()
        assert uploader.wait(blob.hex(), 60)["state"] == "failed"
        assert uploader.wait(uploader.put("cut", [b"beginning"], cut=True), 60)["state"] == "failed"


def _check_write_denied(pipeline: Pipeline, user: str, name: str) -> None:
    """Show that the broker enforces the ACLs."""
    kafka = pipeline.settings.kafka
    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORD,
        }
    )
    refused: list[KafkaException] = []
    producer.produce(PREFIX + name, b"x", on_delivery=lambda err, _: refused.append(KafkaException(err)))
    producer.flush(30)
    assert "uthorization failed" in str(refused[0])
