"""Test the log lines of Kafka's clients.

Once for an operator, not once for each try and client.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.cimpl import NewTopic

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NearkinError, PermanentError, StoreUnavailable
from nearkin_shared.kafka import clients
from tests.support.servers.certificates import self_signed

REFUSED = KafkaError(KafkaError._TRANSPORT, "127.0.0.1:1: connection refused")


@pytest.fixture
def client_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(clients, "_said", {})
    caplog.set_level(logging.WARNING, "nearkin.kafka")
    return caplog


def test_equal_lines_are_logged_once_in_a_while(
    client_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(50):
        clients._on_error(REFUSED)
    clients._on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert [record.getMessage() for record in client_log.records] == [
        "kafka: 127.0.0.1:1: connection refused",
        "kafka: 1/1 brokers are down",
    ]
    now += clients.REPEAT_SECONDS
    clients._on_error(REFUSED)
    assert len(client_log.records) == 3


def test_remembered_lines_are_bounded(client_log: pytest.LogCaptureFixture) -> None:
    for number in range(3 * clients.REPORTED_MAX):
        clients._on_error(KafkaError(KafkaError._TRANSPORT, f"after {number} ms"))
    assert len(client_log.records) == 3 * clients.REPORTED_MAX
    assert len(clients._said) <= clients.REPORTED_MAX


def kafka(**values: object) -> Settings:
    return with_changes(Settings(), {"kafka": values})


def test_invalid_certificate_file_is_reported_as_the_setting(tmp_path: Path) -> None:
    """librdkafka's own message is `error:05880020:x509 certificate routines::BIO lib`."""
    ca_path = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=rf'^kafka\.ca_file "{ca_path}": No such file'):
        clients.connection(kafka(security_protocol="ssl", ca_file=str(ca_path)), "test")
    ca_path.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^kafka\.ca_file .*: contains no certificates in PEM"):
        clients.connection(kafka(security_protocol="ssl", ca_file=str(ca_path)), "test")
    self_signed(tmp_path)
    found = clients.connection(kafka(security_protocol="ssl", ca_file=str(tmp_path / "cert.pem")), "test")
    Producer(found)


@pytest.mark.parametrize("protocol", ["sasl_plaintext", "sasl_ssl"])
def test_user_without_password_is_reported_as_the_setting(protocol: str) -> None:
    with pytest.raises(ConfigError, match=r"^kafka\.sasl_username: not set"):
        clients.connection(kafka(security_protocol=protocol), "test")
    with pytest.raises(ConfigError, match=r"^kafka\.sasl_password: not set.*NEARKIN_KAFKA__SASL_PASSWORD"):
        clients.connection(kafka(security_protocol=protocol, sasl_username="nearkin"), "test")
    Producer(
        clients.connection(kafka(security_protocol=protocol, sasl_username="nearkin", sasl_password="s3same"), "test")
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (KafkaError.INVALID_REPLICATION_FACTOR, StoreUnavailable),
        (KafkaError.NOT_CONTROLLER, StoreUnavailable),
        (KafkaError._TIMED_OUT, StoreUnavailable),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, PermanentError),
        (KafkaError.TOPIC_ALREADY_EXISTS, None),
    ],
)
def test_topics_are_awaited_while_brokers_start(
    code: int, error: type[NearkinError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three brokers answers and cannot replicate yet.

    A worker must wait for the others.
    """

    class Admin:
        def __init__(self, _: object) -> None:
            self.topics: dict[str, object] = {}

        def list_topics(self, timeout: float) -> Admin:
            return self

        def create_topics(self, new_topics: list[NewTopic]) -> dict[str, Future[None]]:
            refused: Future[None] = Future()
            refused.set_exception(KafkaException(KafkaError(code, "it failed.")))
            return {new_topics[0].topic: refused}

    monkeypatch.setattr(clients, "AdminClient", Admin)
    if error is None:
        assert clients.create_topics(Settings()) == []
        return
    with pytest.raises(error, match=r"^topic nearkin\.frames: it failed\.") as raised:
        clients.create_topics(Settings())
    assert ("kafka.replication" in str(raised.value)) == (code == KafkaError.INVALID_REPLICATION_FACTOR)
