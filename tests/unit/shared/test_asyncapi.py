"""Test the AsyncAPI document.

It describes real messages, and conforms to AsyncAPI's own models.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import (
    Batch,
    BatchEnd,
    End,
    Frame,
    Fresh,
    Message,
    MessageKind,
    Paired,
    Placed,
    Segments,
    Sparse,
    StagedFrame,
    encode,
)
from nearkin_shared.formats.message_layout import COLUMNS
from nearkin_shared.kafka import asyncapi
from nearkin_shared.kafka.clients import TOPICS, signed_headers
from nearkin_shared.kafka.dead_letters import send_dead_letter
from nearkin_shared.kafka.heartbeat import STATES, word
from nearkin_shared.kafka.lag import WAITS
from nearkin_shared.kafka.live_config import config_message
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.record_guard import headers_of
from nearkin_shared.results import Ledger, PutResult
from nearkin_shared.types import Locations
from tests.support.data.messages import BLOB, mark_known, mixed_content, pair, segment

DOCUMENT = asyncapi.document()
MESSAGES: dict[str, Any] = DOCUMENT["components"]["messages"]
WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
SEGMENTED = segment(mixed_content())
FRESH = mark_known(SEGMENTED)
IN_BATCH = BatchedBlob("k", 10, bytes(32), bytes(16), 1)
SAMPLES: dict[MessageKind, Message] = {
    MessageKind.FRAME: Frame(BLOB, np.frombuffer(b"some bytes", np.uint8)),
    MessageKind.SEGMENTS: Segments(BLOB, SEGMENTED),
    MessageKind.FRESH: Fresh(BLOB, FRESH),
    MessageKind.PAIRED: Paired(BLOB, pair(FRESH)),
    MessageKind.PLACED: Placed(
        BLOB, Locations(np.array([5, 6], np.uint64), np.array([1, 2], np.uint32)), np.array([True, False]),
        np.array([10, 20], np.uint32), Ledger(*range(12)),
    ),
    MessageKind.END: End(BLOB, 1, bytes(16), 10, bytes(32), bytes(32), 3, None, {"host": "db1"}),
    MessageKind.STAGED: StagedFrame(BLOB, bytes(16), 1, 2, 10, bytes(32)),
    MessageKind.SPARSE: Sparse(BLOB, FRESH),
    MessageKind.STAGED_SPARSE: StagedFrame(BLOB, bytes(16), 1, 2, 10, bytes(32), True),
    MessageKind.BATCH: Batch(replace(BLOB, blobs=1), (IN_BATCH,), np.frombuffer(b"some bytes", np.uint8)),
    MessageKind.BATCH_END: BatchEnd(replace(BLOB, blobs=1), (replace(IN_BATCH, segments=1),)),
}  # fmt: skip


def valid(value: object, schema: Any) -> None:
    jsonschema.Draft7Validator(schema).validate(value)


def test_document_conforms_to_asyncapi_3() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models redefine names of pydantic
        from asyncapi3.models.asyncapi import AsyncAPI3

        assert AsyncAPI3.model_validate(DOCUMENT).asyncapi == "3.0.0"
        with pytest.raises(ValueError, match="channels"):
            AsyncAPI3.model_validate({**DOCUMENT, "channels": {"x": {"adress": "y"}}})


def test_each_topic_is_a_channel_and_references_resolve() -> None:
    assert set(DOCUMENT["channels"]) == set(TOPICS)
    referred = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)))
    for reference in referred:
        found = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found
    assert {f"#/components/messages/{name}" for name in MESSAGES} == {name for name in referred if "messages" in name}
    prefixed = asyncapi.document(with_changes(Settings(), {"kafka": {"topic_prefix": "shop."}}))
    assert {channel["address"] for channel in prefixed["channels"].values()} == {f"shop.{name}" for name in TOPICS}


def test_consumers_of_topics_are_those_of_the_lag_watch() -> None:
    receives = {
        (operation["summary"].split("`")[1], operation["channel"]["$ref"].rpartition("/")[2])
        for operation in DOCUMENT["operations"].values()
        if operation["action"] == "receive" and "`" in operation["summary"]
    }
    assert receives == set(WAITS.items())


@pytest.mark.parametrize("kind", list(MessageKind), ids=lambda kind: kind.name.lower())
def test_message_is_readable_by_the_document_alone(kind: MessageKind) -> None:
    data = encode(SAMPLES[kind])
    documented = MESSAGES[kind.name.lower()]
    assert len(data) <= documented["payload"]["maxLength"]
    layout = documented["payload"]["x-nearkin-layout"]
    header: dict[str, Any] = {}
    for field in layout["header"]:
        part = data[field["offset"] : field["offset"] + field["bytes"]]
        header[field["name"]] = part if field["type"] == "bytes" else int.from_bytes(part, "little")
    version = {MessageKind.STAGED: 3, MessageKind.SPARSE: 4, MessageKind.STAGED_SPARSE: 4}.get(kind, 1)
    version = 5 if kind in (MessageKind.BATCH, MessageKind.BATCH_END) else version
    assert (header["magic"], header["version"], header["kind"]) == (b"NKS1", version, int(kind))
    assert (header["blob"], header["position"], header["sequence"]) == (BLOB.blob, BLOB.position, BLOB.sequence)
    at = 64
    names = dict.fromkeys(layout["names"], "")
    for name in names:
        names[name] = data[at : at + header[f"{name}_bytes"]].decode()
        at += header[f"{name}_bytes"]
    assert (names["tenant"], names["key"], bool(names["sketch"])) == (BLOB.tenant, BLOB.key, kind is MessageKind.PAIRED)
    counts = {name: header[name] for name in ("segments", "chunks", "super_features")} | {
        "fresh": header["fresh_chunks"]
    }
    columns = {}
    for column in layout["columns"]:
        rows = _rows(column["rows"], counts)
        columns[column["name"]] = data[at : at + rows * WIDTHS[column["type"]]]
        at += rows * WIDTHS[column["type"]]
    assert len(data) - at == header["payload_bytes"]
    if kind is MessageKind.PLACED:
        assert [int.from_bytes(data[at + 8 * n : at + 8 * n + 8], "little") for n in range(12)] == list(range(12))
        assert len(layout["ledger"]) == 12
        assert columns["lengths"] == np.array([10, 20], "<u4").tobytes()
    if kind is MessageKind.END:
        valid(json.loads(data[at:]), layout["payload_schema"])
    if "names" in columns:
        assert columns["names"] == SEGMENTED.names.tobytes()


def _rows(text: str, counts: dict[str, int]) -> int:
    rows = 1
    for part in text.replace("+1", "").split(" * "):
        rows *= counts[part] if part in counts else int(part)
    return rows + ("+1" in text)


def test_header_is_that_of_the_format_page() -> None:
    page = (Path(__file__).parents[3] / "docs/internals/formats/message.md").read_text()
    rows = re.findall(r"^\| ([0-9]+) \| ([0-9]+) \|", page, re.MULTILINE)
    documented = [(str(field["offset"]), str(field["bytes"])) for field in asyncapi.header_layout()]
    assert [row for row in rows if row not in (("51", "1"), ("56", "8"))] == documented  # these two are zeros


def test_columns_are_in_the_order_of_the_format_page() -> None:
    page = (Path(__file__).parents[3] / "docs/internals/formats/message.md").read_text()
    rows = re.findall(r"^\| ([a-z_, ]+) \| [^|]*\b(?:u8|u16|u32|u64|bytes), [^|]*\| ([2-8 ]+) \|", page, re.MULTILINE)
    for kind, columns in COLUMNS.items():
        documented = [name for names, kinds in rows if str(int(kind)) in kinds.split() for name in names.split(", ")]
        assert documented == [name for name, _, _ in columns], kind


def test_message_headers_are_those_sent() -> None:
    for name in (*(kind.name.lower() for kind in MessageKind), "committed", "failed"):
        headers = headers_of("chunker", name, BLOB, b"00-0-0-01")
        sent = dict(signed_headers(EnvelopeAuthenticator(b"s" * 32), "nearkin.frames", b"k", b"v", headers))
        schema = MESSAGES[name]["headers"]
        valid({header: (value or b"").decode("latin-1") for header, value in sent.items()}, schema)
        assert set(sent) == set(schema["properties"])


def test_events_are_those_sent() -> None:
    from nearkin_gateway.backends.ingest_backend import UploadRequest, committed_event
    from tests.support.data.samples import small_manifest

    info = small_manifest().info
    intent = UploadRequest("tenant", info.key, bytes(16), bytes(16), 1)
    event = committed_event(intent, "2026-11-21T23:00:00.000Z", PutResult(info, Ledger(*range(12)), 1.5))
    valid(json.loads(json.dumps(event)), MESSAGES["committed"]["payload"])
    assert set(event) == set(MESSAGES["committed"]["payload"]["properties"])
    assert set(event["ledger"]) == set(MESSAGES["committed"]["payload"]["properties"]["ledger"]["properties"])
    for missing in ("id", "ledger", "digest"):
        with pytest.raises(jsonschema.ValidationError):
            valid({name: value for name, value in event.items() if name != missing}, MESSAGES["committed"]["payload"])


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"features": {"algorithm": "ntransform"}, "base": {"policy": "locality"}, "block": {"level": 9}}, True),
        ({"service": {"paused": True}}, True),
        ({"features": {"algorithm": "fineese"}}, False),
        ({"block": {"level": 99}}, False),
        ({"kafka": {"partitions": 9}}, False),
    ],
)
def test_invalid_config_changes_are_refused(changes: dict[str, Any], fits: bool) -> None:
    message = json.loads(config_message(changes, "7f3a9c0e", "2026-11-21T23:00:00.000Z", {}, "51d0", ""))
    schema = MESSAGES["changes"]["payload"]
    if fits:
        valid(message, schema)
        with_changes(Settings(), changes)
    else:
        with pytest.raises(jsonschema.ValidationError):
            valid(message, schema)


def test_heartbeats_are_those_sent() -> None:
    for state in STATES:
        valid(word("delta", "delta-0", "0123456789ab", "2026-11-21T23:00:00+00:00", state), MESSAGES["word"]["payload"])


class _Outbox:
    """Outbox that keeps its messages."""

    headers: dict[str, str]

    def send_to(self, full: str, key: bytes | None, value: bytes | None, headers: Any) -> None:
        assert full == DOCUMENT["channels"]["dead"]["address"]
        self.headers = {name: (text or b"").decode() for name, text in headers}


@pytest.mark.parametrize("value_bytes", [10, 2_000_000])
def test_dead_letter_headers_are_those_sent(value_bytes: int) -> None:
    class Record:
        topic, partition, offset = "nearkin.frames", 1, 17
        key, value = b"key", bytes(value_bytes)
        all_headers = (("own", b"1"),)

    outbox = _Outbox()
    send_dead_letter(Settings(), outbox, Record(), "chunker", Corrupt("frames[1]@17: is not a message"))
    valid(outbox.headers, MESSAGES["letter"]["headers"])
    assert set(outbox.headers) - set(MESSAGES["letter"]["headers"]["properties"]) == {"own"}


@pytest.mark.parametrize("command", ["openapi", "asyncapi"])
def test_nearkin_docs_writes_the_document(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nearkin.cli import main

    assert main(["docs", command]) == 0
    documented = json.loads(capsys.readouterr().out)
    if command == "asyncapi":
        assert documented == json.loads(json.dumps(DOCUMENT))
    else:
        operations = [entry for path in documented["paths"].values() for entry in path.values()]
        assert {"putBlob", "replayDead"} <= {entry["operationId"] for entry in operations}
