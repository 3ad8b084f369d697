"""Test how ingest begins to read events: where none can arrive it must not wait for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from nearkin_ingest import blobs_in_flight
from nearkin_ingest.blobs_in_flight import BLOBS_MAX, BlobsInFlight
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.clients import topic


class Brokers:
    """A client to which brokers report the topic with an error, and so without partitions."""

    def __init__(self, code: int) -> None:
        self._error = KafkaError(code)

    def list_topics(self, name: str, _: float) -> Any:
        return SimpleNamespace(topics={name: SimpleNamespace(error=self._error, partitions={})})

    def assign(self, parts: object) -> None:
        pass

    def poll(self, seconds: float) -> None:
        return None

    def close(self) -> None:
        pass


def in_flight(monkeypatch: pytest.MonkeyPatch, code: int) -> BlobsInFlight:
    monkeypatch.setattr(blobs_in_flight, "consumer", lambda *_, **_more: Brokers(code))
    return BlobsInFlight(Settings(), "w")


def test_topic_that_is_hidden_bounds_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without the right to describe the topic no event arrives, and a warning says so."""
    blobs = in_flight(monkeypatch, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    blobs.open()
    assert f"{topic(Settings(), 'committed')}: " in caplog.text
    for number in range(BLOBS_MAX):
        blobs.add(b"%d" % number, 1)
    assert blobs.has_room()


def test_missing_topic_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer starts over until the topic is there."""
    with pytest.raises(StoreUnavailable, match="kafka"):
        in_flight(monkeypatch, KafkaError.UNKNOWN_TOPIC_OR_PART).open()
