"""What Kafka's clients say of themselves: once for people, not once a try and client."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError

from nearkin.runners.kafka import clients

REFUSED = KafkaError(KafkaError._TRANSPORT, "127.0.0.1:1: connection refused")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(clients, "_said", {})
    caplog.set_level(logging.WARNING, "nearkin.kafka")
    return caplog


def test_the_same_is_said_once_in_a_while(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(clients.time, "monotonic", lambda: now)
    for _ in range(50):
        clients._on_error(REFUSED)
    clients._on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert [record.getMessage() for record in said.records] == [
        "kafka: 127.0.0.1:1: connection refused",
        "kafka: 1/1 brokers are down",
    ]
    now += clients.REPEAT_SECONDS
    clients._on_error(REFUSED)
    assert len(said.records) == 3


def test_what_was_said_is_remembered_within_bounds(said: pytest.LogCaptureFixture) -> None:
    for number in range(3 * clients.SAID_MAX):
        clients._on_error(KafkaError(KafkaError._TRANSPORT, f"after {number} ms"))
    assert len(said.records) == 3 * clients.SAID_MAX
    assert len(clients._said) <= clients.SAID_MAX
