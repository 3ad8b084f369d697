"""Topics keep what Kafka acknowledged: how they are made, and what workers refuse."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from nearkin_ingest import __main__ as ingest_main
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.kafka.clients import (
    check_durability,
    connection,
    create_topics,
    durability,
    durability_problem,
    topic,
)
from nearkin_shared.kafka.consumer_loop import patiently
from nearkin_shared.kafka.fleet_store import connect_fleet
from nearkin_shared.kafka.topics import prepare_topics
from tests.support.checks.waiting import until


@pytest.fixture
def topic_settings(kafka: Any, topic_prefix: str) -> Settings:
    settings = load(None, {"kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix}})[0]
    create_topics(settings)
    patiently(lambda: check_durability(settings))  # a broker may not know yet what was just made
    return settings


def alter(settings: Settings, name: str, **values: str) -> None:
    entries = [
        ConfigEntry(one.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for one, value in values.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic(settings, name), incremental_configs=entries)
    admin = AdminClient(connection(settings, "test"))
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)


def is_durable(settings: Settings) -> bool:
    """Return whether `check_durability` accepts the topics."""
    try:
        check_durability(settings)
    except ConfigError:
        return False
    return True


def test_unclean_election_is_refused_then_fixed(topic_settings: Settings) -> None:
    """Refuse to start on a topic that may lose acknowledged messages.

    The topics' Job corrects it.
    """
    check_durability(topic_settings)
    alter(topic_settings, "placed", unclean_leader_election_enable="true")
    until(lambda: not is_durable(topic_settings))  # a busy broker still reports the former value
    with pytest.raises(ConfigError, match=r"placed: unclean\.leader"):
        check_durability(topic_settings)
    assert prepare_topics(topic_settings)[1] == [topic(topic_settings, "placed")]
    until(lambda: is_durable(topic_settings))  # a busy broker still reports the former value


def test_services_refuse_unclean_election_at_start(
    topic_settings: Settings, redis: Any, key_prefix: str, tmp_path: Path
) -> None:
    """Check topics in stages, gateways and the ingest consumer before any other connection."""
    alter(topic_settings, "frames", unclean_leader_election_enable="true")
    changes = {"object_store": {"url": str(tmp_path)}, "redis": {"url": redis.url, "prefix": key_prefix.rstrip(":")}}
    settings = with_changes(topic_settings, {**changes, "storage": {"create": True}})
    with pytest.raises(ConfigError, match=r"frames: unclean\.leader"):
        connect_fleet(settings)
    with pytest.raises(ConfigError, match=r"frames: unclean\.leader"):
        ingest_main._connect(settings, threading.Event())
    assert list(tmp_path.iterdir()) == []


def test_stricter_topics_are_kept(topic_settings: Settings) -> None:
    """Keep an operator's settings that are stricter than Nearkin's own."""
    alter(topic_settings, "frames", min_insync_replicas="2")
    assert prepare_topics(topic_settings)[1] == []
    check_durability(topic_settings)


def test_topics_of_older_versions_are_warned_of_and_changed(
    topic_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn of a missing codec of `committed` and compaction of `config`; the Job alters them."""
    alter(topic_settings, "committed", compression_type="producer")
    alter(topic_settings, "config", segment_ms="604800000", min_cleanable_dirty_ratio="0.5")
    alter(topic_settings, "workers", cleanup_policy="delete")
    with caplog.at_level(logging.WARNING, "nearkin.kafka"):
        check_durability(topic_settings)
    warnings = " ".join(record.getMessage() for record in caplog.records)
    for text in ("compression.type is producer, want gzip", "segment.ms is 604800000", "cleanup.policy is delete"):
        assert text in warnings
    changed = ("committed", "config", "workers")
    assert prepare_topics(topic_settings)[1] == sorted(topic(topic_settings, name) for name in changed)

    def is_durable() -> bool:
        caplog.clear()
        patiently(lambda: check_durability(topic_settings))
        return not caplog.records

    with caplog.at_level(logging.WARNING, "nearkin.kafka"):
        until(is_durable)
    alter(topic_settings, "config", segment_ms="600000")
    assert prepare_topics(topic_settings)[1] == []


def test_compacted_stage_topic_is_refused_fixed(topic_settings: Settings) -> None:
    """Refuse compaction between stages.

    It removes acknowledged records that are not processed.
    """
    alter(topic_settings, "segments", cleanup_policy="compact,delete")
    with pytest.raises(ConfigError, match=r"segments: cleanup\.policy"):
        check_durability(topic_settings)
    assert prepare_topics(topic_settings)[1] == [topic(topic_settings, "segments")]
    check_durability(topic_settings)


@pytest.mark.parametrize(("replication", "in_sync"), [(1, "1"), (2, "1"), (3, "2"), (5, "2")])
def test_durability_needs_two_of_three_replicas(replication: int, in_sync: str) -> None:
    """With three replicas two acknowledge; with fewer one broker may still restart."""
    wanted = durability(load(None, {"kafka": {"replication": replication}})[0])
    assert wanted == {"min.insync.replicas": in_sync, "unclean.leader.election.enable": "false"}
    problem = durability_problem({**wanted, "min.insync.replicas": "1"}, wanted)
    assert (problem is None) == (in_sync == "1")
