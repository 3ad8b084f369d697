"""Test MACs of records.

A record that no process of the store sent is a dead letter and has no effect.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotAuthentic
from nearkin_shared.formats.message import End, Envelope, encode
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.kafka.clients import signed_headers
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.kafka.tenant_context import tenant_contexts
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.fakes.committers import EmptyBacklog, RecordingOutbox

SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
BLOB = b"0123456789abcdef"
SETTINGS = Settings()


class Signing(RecordingOutbox):
    """An outbox of a worker, with the authenticator of its store."""

    def __init__(self, _settings: Settings, _client_id: str, authenticator: EnvelopeAuthenticator | None) -> None:
        super().__init__()
        self.authenticator: Any = authenticator


@pytest.fixture
def manifests() -> ManifestStore:
    return ManifestStore(memory_objects())


def committer(
    tmp_path: Path, manifests: ManifestStore, monkeypatch: pytest.MonkeyPatch, *, required: bool = True
) -> CommitterHandler:
    monkeypatch.setattr(committer_handler, "Outbox", Signing)
    of_all = tenant_contexts(
        SETTINGS, memory_objects(), SECRET, 160, lambda domain: LmdbIndex(tmp_path / "i", domain, 1 << 24)
    )
    authenticator = EnvelopeAuthenticator(SECRET, required=required)
    handler = CommitterHandler(SETTINGS, manifests, of_all, "w", EmptyBacklog(), authenticator)
    handler.on_assigned(0, "")
    return handler


def empty_blob(tenant: str) -> bytes:
    """Return the end of an empty blob, which commits a version by itself."""
    return encode(End(Envelope(BLOB, tenant, "key"), time.time_ns() // 1000, BLOB, 0, b"b" * 32, segments=0))


def record(value: bytes, mac: bytes | None, topic: str = "nearkin.placed") -> Record:
    headers = {} if mac is None else {MAC_HEADER: mac}
    return Record(topic, 0, 0, BLOB, value, headers, tuple(headers.items()))


def refused_count() -> float:
    return REGISTRY.get_sample_value("nearkin_unauthenticated_total", {"stage": "committer"}) or 0.0


@pytest.mark.parametrize("forged", ["missing", "another store's", "another topic's", "another value's"])
def test_committer_refuses_forged_records(
    tmp_path: Path, manifests: ManifestStore, monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    """F.31: a record that no process of the store sent commits nothing and is a dead letter."""
    handler, value = committer(tmp_path, manifests, monkeypatch), empty_blob("victim")
    ours = EnvelopeAuthenticator(SECRET)
    mac = {
        "missing": None,
        "another store's": EnvelopeAuthenticator(OTHER_SECRET).mac_of("nearkin.placed", BLOB, value),
        "another topic's": ours.mac_of("nearkin.paired", BLOB, value),
        "another value's": ours.mac_of("nearkin.placed", BLOB, empty_blob("mine")),
    }[forged]
    before = refused_count()
    handler.handle([record(value, mac)])
    outbox: Any = handler._outbox
    assert list(manifests.names()) == []
    assert outbox.events == []
    (letter,) = outbox.letters
    assert b"not authenticated" in letter["__connect.errors.exception.message"]
    assert refused_count() == before + 1
    assert list(handler.committable()) == [(0, 1, "")], "the partition must continue behind it"


def test_committer_accepts_signed_records(
    tmp_path: Path, manifests: ManifestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F.31: a record that a process of the store signed is committed."""
    handler, value = committer(tmp_path, manifests, monkeypatch), empty_blob("t")
    handler.handle([record(value, EnvelopeAuthenticator(SECRET).mac_of("nearkin.placed", BLOB, value))])
    outbox: Any = handler._outbox
    assert outbox.letters == []
    assert [event["state"] for event in outbox.events] == ["committed"]


@pytest.mark.parametrize("wrong", [False, True])
def test_accept_takes_unsigned_records_only(
    tmp_path: Path, manifests: ManifestStore, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """F.31: `accept` lets records without a MAC pass, but none with a wrong one."""
    handler = committer(tmp_path, manifests, monkeypatch, required=False)
    handler.handle([record(empty_blob("t"), b"x" * 16 if wrong else None)])
    assert len(list(manifests.names())) == (0 if wrong else 1)


def test_mac_differs_by_each_part_of_a_record() -> None:
    """F.31: no byte can move between topic, key and value."""
    ours = EnvelopeAuthenticator(SECRET)
    parts = [("t", b"k", b"v"), ("tk", b"", b"v"), ("t", b"kv", b""), ("t", b"", b"kv"), ("T", b"k", b"v")]
    assert len({ours.mac_of(*one) for one in parts}) == len(parts)


def test_signing_replaces_an_existing_mac() -> None:
    """F.31: a received MAC header is not copied when the record is sent on."""
    ours = EnvelopeAuthenticator(SECRET)
    found = signed_headers(ours, "t", b"k", b"v", {MAC_HEADER: b"forged", "ce_id": b"1"})
    assert found == [("ce_id", b"1"), (MAC_HEADER, ours.mac_of("t", b"k", b"v"))]


class Message:
    """A message as a consumer returns it."""

    def __init__(self, value: bytes, headers: list[tuple[str, bytes]]) -> None:
        self._value, self._headers = value, headers

    def topic(self) -> str:
        return "nearkin.config"

    def key(self) -> bytes:
        return b"settings"

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers


def test_forged_config_changes_are_refused() -> None:
    """F.31: a writer to the topic `config` without the key changes no setting."""
    ours = EnvelopeAuthenticator(SECRET)
    hot, value = LiveConfig(SETTINGS, None, ours), b'{"changes": {"service": {"read_only": true}}}'
    made: Any = Message
    assert not hot._is_authentic(made(value, []), "forged")
    assert not hot._is_authentic(made(value, [(MAC_HEADER, b"x" * 16)]), "forged")
    assert hot._is_authentic(made(value, [(MAC_HEADER, ours.mac_of("nearkin.config", b"settings", value))]), "ours")


def test_check_raises_for_a_changed_key() -> None:
    """F.31: the record's key, which chooses its partition, is authenticated too."""
    ours = EnvelopeAuthenticator(SECRET)
    mac = ours.mac_of("t", b"key", b"value")
    ours.check("test", "t", b"key", b"value", mac)
    with pytest.raises(NotAuthentic, match="not made with this store's key"):
        ours.check("test", "t", b"other", b"value", mac)
