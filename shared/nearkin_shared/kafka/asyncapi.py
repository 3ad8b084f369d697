"""Describe the topics as an AsyncAPI 3.0 document.

A test encodes every kind of message and compares it with this description. Binary messages have no JSON schema: their
fields and columns are under `x-nearkin-layout`, as in docs/internals/formats/message.md.

Invariant: the document is derived from the definitions that the services use.
"""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from struct import Struct, calcsize
from typing import Any

from nearkin_shared.config.runtime import changes_schema
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import FAILURE_CHARACTERS_MAX, End
from nearkin_shared.formats.message_layout import (
    BLOB_BYTES,
    CHUNKS_MAX,
    COLUMNS,
    HEADER,
    MESSAGE_BYTES_MAX,
    SEGMENTS_MAX,
    SUPER_FEATURES_MAX,
    MessageKind,
)
from nearkin_shared.kafka import dead_letters
from nearkin_shared.kafka.clients import COMPACTED, TOPICS, topic
from nearkin_shared.kafka.dead_letter_replay import DROPPED_HEADER, MARK_HEADER
from nearkin_shared.kafka.heartbeat import STATES
from nearkin_shared.kafka.lag import WAITS
from nearkin_shared.kafka.message_authentication import MAC_HEADER
from nearkin_shared.preconditions import DIGESTS_MAX, PRECONDITION
from nearkin_shared.results import LEDGER_FIELDS, Ledger, VersionInfo
from nearkin_shared.results_json import info_json, ledger_json

Json = dict[str, Any]

BINARY = "application/vnd.nearkin.message"
HEADER_FIELDS = (
    *("magic", "version", "kind", "fresh_chunks", "blob", "position", "sequence", "payload_bytes", "segments"),
    *("chunks", "super_features", "tenant_bytes", "sketch_bytes", "key_bytes", "blobs"),
)
KINDS_OF: dict[str, tuple[MessageKind, ...]] = {
    "frames": (
        MessageKind.FRAME,
        MessageKind.STAGED,
        MessageKind.SPARSE,
        MessageKind.STAGED_SPARSE,
        MessageKind.BATCH,
        MessageKind.END,
    ),
    "segments": (MessageKind.SEGMENTS, MessageKind.SPARSE, MessageKind.BATCH_END, MessageKind.END),
    "fresh": (MessageKind.FRESH, MessageKind.BATCH_END, MessageKind.END),
    "paired": (MessageKind.PAIRED, MessageKind.BATCH_END, MessageKind.END),
    "placed": (MessageKind.PLACED, MessageKind.BATCH_END, MessageKind.END),
}
"""Which kinds of message a topic between stages carries."""
SENDS = {"chunker": "segments", "dedup": "fresh", "resemblance": "paired", "delta": "placed", "committer": "committed"}
"""Which topic each group that takes from one (WAITS) hands on to."""
_SUMMARY = {
    MessageKind.FRAME: "A slice of a blob as it was received, at most 900 KiB.",
    MessageKind.SEGMENTS: "Segments of chunks with their names; the bytes of all chunks that are not all zero.",
    MessageKind.FRESH: "After dedup: the bytes of fresh chunks, and where all others lie.",
    MessageKind.PAIRED: "After resemblance: super-features of fresh chunks, and candidates for their bases.",
    MessageKind.PLACED: "Durable: where the segments lie, and what they cost.",
    MessageKind.END: "The blob has ended: whole, or with a failure.",
    MessageKind.STAGED: "A reference to a slice of a blob in the object store, at most 64 MiB.",
    MessageKind.SPARSE: "Cut by a gateway: the bytes of chunks that it did not find, and claims where others lie.",
    MessageKind.STAGED_SPARSE: "A reference to a pack of sparse messages in the object store, at most 64 MiB.",
    MessageKind.BATCH: "Whole small blobs of one tenant; later stages have their segments as those of one blob.",
    MessageKind.BATCH_END: "The segments of all blobs of a batch were sent.",
}
_PAYLOAD = {
    MessageKind.FRAME: "the slice",
    MessageKind.SEGMENTS: "the chunks that are not all zero, in order",
    MessageKind.FRESH: "the fresh chunks, in order",
    MessageKind.PAIRED: "the fresh chunks, in order",
    MessageKind.PLACED: "the ledger: u64 each",
    MessageKind.END: "JSON",
    MessageKind.SPARSE: "the chunks that the gateway did not find, in order",
    MessageKind.STAGED_SPARSE: "as of `staged`, of the pack",
    MessageKind.STAGED: "of the slice u64 bytes and u64 ms, of the upload u64 us (start) and origin (16), BLAKE3 (32)",
    MessageKind.BATCH: "u32 bytes of the table, the table as JSON, the bytes of all blobs one behind the other",
    MessageKind.BATCH_END: "the table as JSON",
}
_TOPIC_TEXT = {
    "frames": "Uploads as they come in. Keyed by blob id.",
    "segments": "Chunked. Keyed by blob id.",
    "fresh": "After dedup. Keyed by blob id.",
    "paired": "After resemblance. Keyed by blob id.",
    "placed": "Durable in containers. Keyed by 16 bytes of BLAKE3 over tenant, a zero byte, and key.",
    "committed": "The result of each upload, once. Keyed by blob id.",
    "dead": "Records that could not be processed, with where and why. Keyed as the record was.",
    "config": "Compacted, key `settings`: all changes of hot settings over the file, and which of them are new.",
    "workers": "Compacted, key SERVICE/WORKER: the newest word of each worker.",
}
_TYPES = {
    "s": "bytes",
    "B": "u8",
    "H": "u16",
    "I": "u32",
    "Q": "u64",
    "<u2": "u16",
    "<u4": "u32",
    "<u8": "u64",
    "u1": "u8",
}
_TEXT: Json = {"type": "string"}
_MOMENT: Json = {"type": "string", "format": "date-time"}
_HEX_BLOB: Json = {"type": "string", "pattern": f"^[0-9a-f]{{{2 * BLOB_BYTES}}}$"}
_COUNT: Json = {"type": "integer", "minimum": 0}


def document(settings: Settings | None = None) -> Json:
    """Return the document, with the topics' names as `settings` has them."""
    chosen = settings or Settings()
    try:
        number = version("nearkin")
    except PackageNotFoundError:  # run from a source tree
        number = "0"
    messages = {**{kind.name.lower(): _binary(kind) for kind in MessageKind}, **_others()}
    carried = {name: [kind.name.lower() for kind in kinds] for name, kinds in KINDS_OF.items()}
    carried |= {"committed": ["committed", "failed"], "dead": ["letter", "replayed"], "config": ["changes"]}
    carried |= {"workers": ["word"]}
    assert set(carried) == set(TOPICS) == set(_TOPIC_TEXT)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Nearkin's topics",
            "version": number,
            "description": "Messages between services on Kafka; other programs may read `committed`.",
        },
        "defaultContentType": "application/json",
        "servers": {
            "kafka": {
                "host": "{bootstrap}",
                "protocol": "kafka",
                "variables": {"bootstrap": {"default": "kafka:9092", "description": "kafka.bootstrap_servers"}},
            }
        },
        "channels": {
            name: {
                "address": topic(chosen, name),
                "description": _TOPIC_TEXT[name],
                "messages": {message: {"$ref": f"#/components/messages/{message}"} for message in carried[name]},
                "bindings": {
                    "kafka": {
                        "partitions": 1 if name in COMPACTED else chosen.kafka.partitions,
                        "replicas": chosen.kafka.replication,
                        "topicConfiguration": {"cleanup.policy": ["compact" if name in COMPACTED else "delete"]},
                        "bindingVersion": "0.5.0",
                    }
                },
            }
            for name in TOPICS
        },
        "operations": _operations(),
        "components": {"messages": messages},
    }


def _operations() -> Json:
    found = {"gatewaySendsFrames": _operation("send", "frames", "A body, frame by frame, and its end.")}
    for service, name in WAITS.items():
        found[f"{service}Receives{name.title()}"] = _operation("receive", name, f"The group `{service}`.")
        sent = SENDS[service]
        found[f"{service}Sends{sent.title()}"] = _operation("send", sent, f"The result of `{service}`.")
    found |= {
        "gatewayReceivesCommitted": _operation("receive", "committed", "Each gateway for itself, without a group."),
        "stageSendsDead": _operation("send", "dead", "Any stage, and the ingest."),
        "gatewaySendsConfig": _operation("send", "config", "PATCH /v1/config."),
        "processReceivesConfig": _operation("receive", "config", "Every process, from the start, without a group."),
        "workerSendsWorkers": _operation("send", "workers", "Every 5 seconds."),
        "gatewayReceivesWorkers": _operation("receive", "workers", "GET /v1/workers."),
    }
    return found


def _operation(action: str, name: str, summary: str) -> Json:
    return {"action": action, "channel": {"$ref": f"#/channels/{name}"}, "summary": summary}


# --- binary messages -------------------------------------------------------------------------------------------------


def _binary(kind: MessageKind) -> Json:
    layout: Json = {
        "header": header_layout(),
        "names": ["tenant", "key", "sketch"],
        "columns": [
            {"name": name, "type": _TYPES[dtype], "rows": items.replace("*", " * ")}
            for name, dtype, items in COLUMNS[kind]
        ],
        "payload": _PAYLOAD[kind],
        "bounds": {"chunks": CHUNKS_MAX, "segments": SEGMENTS_MAX, "super_features": SUPER_FEATURES_MAX},
    }
    if kind is MessageKind.PLACED:
        layout["ledger"] = list(LEDGER_FIELDS)
    if kind is MessageKind.END:
        layout["payload_schema"] = end_schema()
    if kind in (MessageKind.BATCH, MessageKind.BATCH_END):
        layout["table_columns"] = [one.name for one in fields(BatchedBlob)]
    return {
        "name": kind.name.lower(),
        "summary": _SUMMARY[kind],
        "contentType": BINARY,
        "headers": _headers(kind.name.lower()),
        "payload": {
            "type": "string",
            "format": "binary",
            "maxLength": MESSAGE_BYTES_MAX,
            "description": f"docs/internals/formats/message.md, kind {int(kind)}",
            "x-nearkin-layout": layout,
        },
        "bindings": {"kafka": {"key": {"type": "string", "format": "binary"}, "bindingVersion": "0.5.0"}},
    }


def header_layout() -> list[Json]:
    """Return each field of the header: offset, bytes, type, name."""
    text = HEADER.format
    names, at, found = iter(HEADER_FIELDS), 0, []
    for repeat, code in re.findall(r"([0-9]*)([a-zA-Z])", text):
        size_bytes = calcsize(f"<{repeat}{code}")
        if code != "x":
            found.append({"name": next(names), "offset": at, "bytes": size_bytes, "type": _TYPES[code]})
        at += size_bytes
    assert at == Struct(text).size
    assert next(names, None) is None
    return found


def end_schema() -> Json:
    """Return the schema of an end's payload."""
    digest: Json = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
    properties: Json = {
        "began_us": _COUNT | {"description": "Microseconds since 1970."},
        "origin": _HEX_BLOB | {"description": "Two attempts to store the same thing share it: committed once."},
        "size_bytes": _COUNT,
        "blake3": digest,
        "sha256": {"type": ["string", "null"], "pattern": "^[0-9a-f]{64}$"},
        "segments": {"type": ["integer", "null"], "minimum": 0, "description": "null before the chunker."},
        "failure": {
            "type": ["string", "null"],
            "maxLength": FAILURE_CHARACTERS_MAX,
            "description": "null: it is whole.",
        },
        "metadata": {"type": "object", "additionalProperties": _TEXT},
    }
    assert set(properties) == {field.name for field in fields(End)} - {"envelope", "precondition", "first_attempt_us"}
    tags: Json = {"type": ["array", "null"], "items": _TEXT, "maxItems": DIGESTS_MAX}
    conditions: Json = {
        "if_match": tags | {"description": "Only over a newest version with one of these digests; `*`: any."},
        "if_none_match": tags | {"description": "Only where the newest version has none of these digests."},
    }
    first: Json = {"description": "Earliest time of another attempt with this origin; absent: none was before."}
    found = _object(properties)
    return {**found, "properties": {**properties, **conditions, "first_attempt_us": _COUNT | first}}


def _headers(kind: str, more: Json | None = None) -> Json:
    """Return CloudEvents attributes in binary mode, as `headers_of` makes them."""
    properties: Json = {
        "ce_specversion": {"type": "string", "const": "1.0"},
        "ce_type": {"type": "string", "const": f"io.nearkin.{kind}.v1"},
        "ce_source": {"type": "string", "pattern": "^/nearkin/[a-z]+$"},
        "ce_id": {"type": "string", "description": "BLOB/KIND/SEQUENCE/POSITION: equal for a repeat."},
        "traceparent": {"type": "string", "description": "W3C trace context, where the caller gave one."},
        MAC_HEADER: {"type": "string", "format": "binary", "description": "Authenticates topic, key and value."},
        **(more or {}),
    }
    return {"type": "object", "properties": properties, "required": [name for name in properties if name[:3] == "ce_"]}


# --- messages in JSON, and dead letters ------------------------------------------------------------------------------


def _others() -> Json:
    common: Json = {"id": _HEX_BLOB, "origin": _HEX_BLOB, "tenant": _TEXT, "key": _TEXT}
    ledger = {name: _shape(value) for name, value in ledger_json(Ledger(), 0.0).items() if name != "seconds"}
    for name in set(ledger) - set(LEDGER_FIELDS):
        ledger[name].pop("minimum", None)  # what follows from the counts: compression may add to what does not compress
    committed = _object(
        {
            **common,
            "state": {"type": "string", "const": "committed"},
            "failure": {"type": "null"},
            "began": _MOMENT,
            **_info(),
            "seconds": {"type": "number", "minimum": 0},
            "ledger": {"type": "object", "properties": ledger, "required": list(ledger)},
        },
        further=True,
    )
    failed = _object(
        {
            **common,
            "state": {"type": "string", "const": "failed"},
            "failure": _TEXT,
            "began": {"type": ["string", "null"], "format": "date-time"},
            "reason": {"type": ["string", "null"], "enum": [PRECONDITION, None]},
        },
        further=True,
    )
    word = {"worker": _TEXT, "service": _TEXT, "revision": _TEXT, "started": _MOMENT, "seen": _MOMENT}
    changes = {"changes": changes_schema(), "by": _TEXT, "at": _MOMENT}
    patch = {"type": "object", "description": "What this message changes: a merge patch (RFC 7396) of `changes`."}
    over = {**_TEXT, "description": "`id` of the message before; where that is another, `patch` alone counts."}
    changes |= {"patch": patch, "id": _TEXT, "over": over}
    return {
        "committed": _json("committed", "An upload is committed.", committed, _headers("committed")),
        "failed": _json("failed", "An upload has failed; nothing of it is committed.", failed, _headers("failed")),
        "changes": _json("changes", "All changes of hot settings over the file.", _object(changes)),
        "word": _json(
            "word", "Settings in use by a worker.", _object({**word, "state": {"type": "string", "enum": [*STATES]}})
        ),
        "letter": _dead("letter", "A record as it was, unless it was too large to be kept.", dead_headers()),
        "replayed": _dead(
            "replayed",
            f"A mark: the letter that it names was sent back, or dropped where {DROPPED_HEADER} is present.",
            {MARK_HEADER: _TEXT, DROPPED_HEADER: _TEXT},
        ),
    }


def dead_headers() -> Json:
    """Return the headers of a dead letter: its origin and its reason.

    The record's own headers are kept next to them.
    """
    whole: Json = {"type": "string", "pattern": "^[0-9]+$"}
    numbers = {dead_letters.PARTITION_HEADER, dead_letters.OFFSET_HEADER}
    return {
        name: whole if name in numbers or name not in dead_letters.CONNECT_HEADERS else _TEXT
        for name in sorted(dead_letters.OUR_HEADERS)
    }


def _dead(name: str, summary: str, headers: Json) -> Json:
    required = sorted(set(headers) & {*dead_letters.CONNECT_HEADERS, MARK_HEADER})
    return {
        "name": name,
        "summary": summary,
        "contentType": "application/octet-stream",
        "headers": {"type": "object", "properties": headers, "required": required},
        "payload": {"type": ["string", "null"], "format": "binary"},
    }


def _json(name: str, summary: str, payload: Json, headers: Json | None = None) -> Json:
    found: Json = {"name": name, "summary": summary, "contentType": "application/json", "payload": payload}
    return found if headers is None else {**found, "headers": headers}


def _info() -> Json:
    """Return the fields of a version as in `info_json`."""
    sample = VersionInfo("key", 1, 0, datetime(2026, 1, 1, tzinfo=UTC), "blake3:", None, 0, 0, {})
    found = {name: _shape(value) for name, value in info_json(sample).items()}
    return found | {
        "created": _MOMENT,
        "digest": {"type": "string", "pattern": "^blake3:[0-9a-f]{64}$"},
        "sha256": {"type": ["string", "null"], "pattern": "^[0-9a-f]{64}$"},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
        "retain_until": _MOMENT | {"type": ["string", "null"]},
        "source_changed": {"type": "boolean"},
    }


def _shape(value: object) -> Json:
    if isinstance(value, float):
        return {"type": "number"}
    return dict(_COUNT) if isinstance(value, int) else {"type": "string"}


def _object(properties: Json, *, further: bool = False) -> Json:
    """Return the schema of an object; `further`: readers ignore unknown names."""
    found = {"type": "object", "properties": properties, "required": list(properties)}
    return found if further else {**found, "additionalProperties": False}
