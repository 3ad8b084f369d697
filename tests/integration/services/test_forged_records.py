"""Test forged records that another process writes to the topics of a running pipeline."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nearkin_gateway.backends.event_consumer import EventConsumer
from nearkin_gateway.uploads.upload_status import UploadStatuses
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.message import End, Envelope, encode
from nearkin_shared.kafka.clients import Outbox, create_topics, topic
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.dead_letter_replay import list_letters, replay
from nearkin_shared.kafka.dead_letters import send_dead_letter
from nearkin_shared.kafka.live_config import LiveConfig, config_message
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from tests.support.checks.waiting import until
from tests.support.servers.pipeline import Pipeline, store_authenticator, uploading

OURS = EnvelopeAuthenticator(b"the store's secret".ljust(32))
FORGERS = (None, EnvelopeAuthenticator(b"not the store's secret".ljust(32)))
"""Writers of internal topics that do not know the secret: one sends no MAC, one the MAC of another store."""


@pytest.fixture
def sections(kafka: Any, redis: Any, topic_prefix: str, key_prefix: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},
        "redis": {"url": redis.url, "prefix": key_prefix.rstrip(":")},
        "object_store": {"url": str(tmp_path / "objects")},
        "monitor": {"port": 0},
    }


@pytest.fixture
def settings(sections: dict[str, dict[str, Any]]) -> Settings:
    """Return settings of existing topics with one partition, so that records stay in order."""
    sections["kafka"]["partitions"] = 1
    found = load(None, sections)[0]
    create_topics(found)
    return found


def send(settings: Settings, authenticator: EnvelopeAuthenticator | None, name: str, key: bytes, value: bytes) -> None:
    outbox = Outbox(settings, "test", authenticator)
    outbox.send(name, key, value, {})
    outbox.flush()
    outbox.close()


def empty_blob(tenant: str) -> End:
    """Return the end of an empty blob, which commits a version by itself."""
    blob = os.urandom(16)
    return End(Envelope(blob, tenant, "key"), time.time_ns() // 1000, blob, 0, b"b" * 32, segments=0)


def test_forged_placed_commits_nothing(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Commit no version of another tenant for a forger who may write to `placed`.

    The pipeline continues.
    """
    with Pipeline(tmp_path, sections) as pipeline:
        settings = pipeline.settings
        with uploading(settings) as uploader:
            assert uploader.wait(uploader.put("k", [b"first"]))["state"] == "committed"
            for forger in FORGERS:
                end = empty_blob("victim")
                send(settings, forger, "placed", end.envelope.blob, encode(end))
            letters = until(lambda: found if len(found := list_letters(settings)) == 2 else None, pipeline.logs)
            assert letters
            assert {letter.stage for letter in letters} == {"committer"}
            assert all("not authenticated" in letter.message for letter in letters)
            replay(settings, [letter.place for letter in letters])
            until(lambda: len(list_letters(settings)) == 2, pipeline.logs)  # refused once more
            assert uploader.wait(uploader.put("k", [b"second"]))["state"] == "committed"
            assert {event["tenant"] for events in uploader.events().values() for event in events} == {"default"}

            end = empty_blob("default")
            _put_aside(settings, end)
            replay(settings, [next(letter.place for letter in list_letters(settings) if "for now" in letter.message)])
            assert uploader.wait(end.envelope.blob.hex())["state"] == "committed", "a replay keeps the record's MAC"


def test_unsigned_upload_commits_under_accept(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Commit records of an older release during an upgrade, but none of another store."""
    sections["kafka"]["unauthenticated"] = "accept"
    with Pipeline(tmp_path, sections) as pipeline, uploading(pipeline.settings) as uploader:
        end = empty_blob("victim")
        send(pipeline.settings, FORGERS[1], "placed", end.envelope.blob, encode(end))
        uploader.outbox.authenticator = None
        assert uploader.wait(uploader.put("k", [b"unsigned"]))["state"] == "committed"
        (letter,) = until(lambda: list_letters(pipeline.settings), pipeline.logs)
        assert "not made with this store's key" in letter.message
        assert {event["tenant"] for events in uploader.events().values() for event in events} == {"default"}


def _put_aside(settings: Settings, end: End) -> None:
    """Make a dead letter of a record of the store's own, as the committer does."""
    full, key, value = topic(settings, "placed"), end.envelope.blob, encode(end)
    headers = ((MAC_HEADER, store_authenticator(settings).mac_of(full, key, value)),)
    outbox = Outbox(settings, "test", None)
    record = Record(full, 0, 0, key, value, dict(headers), headers)
    send_dead_letter(settings, outbox, record, "committer", BadInput("refused for now"))
    outbox.flush()
    outbox.close()


@pytest.mark.parametrize("forger", FORGERS)
def test_forged_config_changes_no_setting(settings: Settings, forger: EnvelopeAuthenticator | None) -> None:
    """Change no setting for a forger who may write to `config`.

    Gateways' settings stay in force.
    """

    def change(section: str, field: str, value: object, ident: str, over: str) -> bytes:
        changes = {section: {field: value}}
        return config_message(changes, "me", "now", changes, ident, over)

    send(settings, OURS, "config", b"settings", change("block", "level", 7, "1", ""))
    send(settings, forger, "config", b"settings", change("service", "read_only", True, "2", "1"))
    hot = LiveConfig(settings, None, OURS)
    hot.start()
    try:
        assert hot.caught_up
        assert (hot.settings.block.level, hot.settings.service.read_only) == (7, False)
        send(settings, OURS, "config", b"settings", change("delta", "max_depth", 2, "3", "1"))
        until(lambda: hot.settings.delta.max_depth == 2)
    finally:
        hot.stop()


@pytest.mark.parametrize("forger", FORGERS)
def test_forged_outcomes_are_passed_over(settings: Settings, forger: EnvelopeAuthenticator | None) -> None:
    """Ignore outcomes and workers of a forger who may write to `committed` or `workers`."""
    forged, ours = os.urandom(16), os.urandom(16)

    def outcome(blob: bytes) -> bytes:
        event = {"id": blob.hex(), "origin": blob.hex(), "state": "committed", "tenant": "t", "key": "k"}
        return json.dumps(event).encode()

    for signer, blob, name in ((forger, forged, b"forged"), (OURS, ours, b"ours")):
        send(settings, signer, "workers", name, b"{}")
        send(settings, signer, "committed", blob, outcome(blob))

    async def watch() -> None:
        outcomes = UploadStatuses(1 << 20)
        found = EventConsumer(settings, outcomes, "test", OURS)
        await found.open()
        try:
            assert await outcomes.wait(ours, 30) is not None
            assert outcomes.get(forged) is None
            assert await asyncio.to_thread(until, found.workers) == [{"silent_seconds": None}]
            assert list(found._words) == ["ours"]
        finally:
            await found.close()

    asyncio.run(watch())
