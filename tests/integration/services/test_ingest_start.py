"""Test the start of the ingest consumer.

It signs frames with the secret of an existing store.
"""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nearkin_ingest import __main__ as ingest_main
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NoStore, WrongKey
from nearkin_shared.kafka.clients import create_topics
from nearkin_shared.kafka.message_authentication import authenticator_of
from nearkin_shared.objectstore.factory import open_store_of
from tests.support.checks.waiting import until

PARTS = ("topic", b"key", b"value")


@pytest.fixture
def settings(kafka: Any, topic_prefix: str, tmp_path: Path) -> Settings:
    """Settings of topics that are there and of a store that is not."""
    sections: dict[str, dict[str, Any]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 1},
        "object_store": {"url": str(tmp_path / "objects")},
        "storage": {"create": True},
    }
    found = load(None, sections)[0]
    create_topics(found)
    return found


def test_ingest_waits_until_the_store_is_created(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Create no store when started first; sign by the one that a stage created."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        try:
            connecting = executor.submit(ingest_main._connect, settings, stop)
            until(lambda: "waiting: no store" in caplog.text, lambda: caplog.text)
            assert not [path for path in tmp_path.rglob("*") if path.is_file()]
            found = open_store_of(settings)[1]
            _, authenticator = connecting.result(30)
        finally:
            stop.set()
    assert authenticator.mac_of(*PARTS) == authenticator_of(settings, found).mac_of(*PARTS)


def test_ingest_without_a_store_is_refused(settings: Settings) -> None:
    """Where no service may create a store it does not wait for one."""
    with pytest.raises(NoStore):
        ingest_main._connect(with_changes(settings, {"storage": {"create": False}}), threading.Event())


def test_ingest_without_key_of_encrypted_store_is_refused(settings: Settings) -> None:
    """The secret of an encrypted store is sealed, so the key is needed to sign frames."""
    key = base64.b64encode(b"k" * 32).decode()
    sealed = with_changes(settings, {"storage": {"encryption": "aes-256-gcm", "key": key}})
    open_store_of(sealed)
    assert ingest_main._connect(sealed, threading.Event())
    with pytest.raises(WrongKey, match="encrypted"):
        ingest_main._connect(settings, threading.Event())
