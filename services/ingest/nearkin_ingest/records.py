"""Convert a user's record to a blob.

key        header `ingest.key_header`, else the record's key               UTF-8
tenant     header `ingest.tenant_header`, else the topic's, else `tenant`
content    the value, or the object that header `dataref` names (CloudEvents' claim check; `ce_dataref` is the same)
metadata   CloudEvents attributes in binary mode (`ce_id`, `ce_source`, ...), `content-type`, and `kafka`: its position

Invariant: the result depends on the record and the settings only; every refusal states its reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from blake3 import blake3

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import STORE_FOLDERS
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.message import BLOB_BYTES
from nearkin_shared.limits import MIB
from nearkin_shared.tenant_names import tenant_problem
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import check_metadata, check_user_key

DATAREF_HEADERS = ("dataref", "ce_dataref")
CONTENT_TYPE_HEADERS = ("content-type", "ce_datacontenttype")
"""CloudEvents' Kafka binding specifies `content-type`; many producers send `ce_datacontenttype` nevertheless."""
NOT_METADATA = frozenset({"ce_specversion", *DATAREF_HEADERS, *CONTENT_TYPE_HEADERS})
DATAREF_CHARACTERS_MAX = 1024
VALUE_BYTES_MAX = 64 * MIB
"""A record with a larger value becomes a dead letter: values are held in memory, up to a batch of them."""
_OBJECT_PART = re.compile(r"[A-Za-z0-9 !$&'()*+,=@:._-]+", re.ASCII)
"""Characters that every object store accepts in a name unchanged."""
_TENANT_PART = re.compile(r"[A-Za-z0-9._=-]+", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?", re.ASCII)


@frozen
class UserRecord:
    """A record as received. `timestamp_ms` since 1970, None if it has none."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    all_headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    unreadable: str | None = None
    """Why a part of it could not be decoded."""
    leader_epoch: int | None = None
    """Leader epoch in which the broker appended it; None if unknown."""

    @property
    def label(self) -> str:
        """Return the record's position, for messages to people."""
        return f"{self.topic}[{self.partition}] offset {self.offset}"

    def header(self, name: str) -> bytes | None:
        """Return a header's value; of a repeated header the last, as Kafka's own clients do."""
        return next((value for found, value in reversed(self.all_headers) if found == name), None)


@frozen
class Intake:
    """A blob to store. Exactly one of `value` and `dataref`, an object's name, is set."""

    tenant: str
    key: str
    metadata: Mapping[str, str]
    value: bytes | None
    dataref: str | None
    began_us: int
    traceparent: bytes | None


def tenants_of(settings: Settings) -> dict[str, str]:
    """Return the tenant of each topic."""
    pairs = [entry.partition("=") for entry in settings.ingest.topics]
    return {topic: tenant or settings.tenant for topic, _, tenant in pairs}


def origin_of(cluster: str, topic_id: str, record: UserRecord) -> bytes:
    """Return the origin that all deliveries of one record share, 16 bytes.

    `topic_id` distinguishes a topic from a later one of the same name, whose offsets start again. The leader epoch
    distinguishes a record from the one that had its offset before the log was truncated.
    """
    hasher = blake3(derive_key_context="nearkin 2026 origin of an ingested record")
    epoch = [] if record.leader_epoch is None else [str(record.leader_epoch)]
    for part in (cluster, record.topic, topic_id, str(record.partition), str(record.offset), *epoch):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(4, "big") + encoded)
    return hasher.digest(length=BLOB_BYTES)


def intake_of(record: UserRecord, tenant: str, settings: Settings) -> Intake | None:
    """Return the blob of a record, or None for a record to skip. Raises BadInput."""
    ingest = settings.ingest
    if record.unreadable is not None:
        raise BadInput(record.unreadable)
    reference = next((found for name in DATAREF_HEADERS if (found := record.header(name)) is not None), None)
    if record.value is None and reference is None:
        if ingest.null_values == "skip":
            return None
        raise BadInput('no value: a blob has bytes, even if zero; ingest.null_values = "skip" skips such records')
    if record.value is not None and len(record.value) > VALUE_BYTES_MAX:
        raise BadInput(
            f"value of {len(record.value)} bytes: want at most {VALUE_BYTES_MAX}; send an object's name (dataref)"
        )
    tenant = _tenant(record, tenant, ingest.tenant_header)
    key = _key(record, ingest.key_header)
    metadata = _metadata(record)
    check_metadata(metadata)
    return Intake(
        tenant=tenant,
        key=key,
        metadata=metadata,
        value=record.value if reference is None else None,
        dataref=None if reference is None else object_named(reference, tenant, settings),
        began_us=_began_us(record),
        traceparent=_traceparent(record),
    )


def object_named(reference: bytes, tenant: str, settings: Settings) -> str:
    """Return the object that a claim check names, as `PREFIX/...` or as its URL.

    Raises: BadInput.
    """
    text = _text(reference, "dataref")
    prefix = settings.ingest.dataref_prefix
    if prefix is None:
        raise BadInput("dataref: records may not name objects here; set ingest.dataref_prefix to allow it")
    if "{tenant}" in prefix and (not _TENANT_PART.fullmatch(tenant) or tenant in (".", "..")):
        raise BadInput(f"dataref: tenant {tenant!r:.80} cannot be part of an object's name")
    allowed = prefix.replace("{tenant}", tenant)
    root = settings.object_store.url
    name = text.removeprefix(f"{root.rstrip('/')}/") if root is not None and "://" in root else text
    parts = name.split("/")
    if parts[0] in STORE_FOLDERS:  # possible if the prefix begins with the tenant
        raise BadInput(f"dataref {text!r:.200}: {parts[0]}/ is the store's own")
    if (
        len(name) > DATAREF_CHARACTERS_MAX
        or not name.startswith(allowed)
        or not all(_OBJECT_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    ):
        raise BadInput(f"dataref {text!r:.200}: want an object below {allowed}, named by letters, digits and - _ . /")
    return name


def _key(record: UserRecord, header: str | None) -> str:
    named = record.header(header) if header is not None else None
    found = named if named is not None else record.key
    if found is None:
        more = f" and no header {header!r}" if header is not None else ""
        raise BadInput(f"no key{more}: set one, since a blob is stored under its key")
    key = _text(found, "key")
    check_user_key(key)
    return key


def _tenant(record: UserRecord, tenant: str, header: str | None) -> str:
    found = record.header(header) if header is not None else None
    if found is None:
        return tenant
    named = _text(found, "tenant")
    problem = tenant_problem(named)
    if problem is not None:
        raise BadInput(f"tenant {named!r:.200}: {problem}")
    return named


def _metadata(record: UserRecord) -> dict[str, str]:
    found = {
        name: _text(value, f"header {name!r:.80}")
        for name, value in record.all_headers
        if name.startswith("ce_") and name not in NOT_METADATA and value is not None
    }
    for name in CONTENT_TYPE_HEADERS:
        value = record.header(name)
        if value is not None and "content-type" not in found:
            found["content-type"] = _text(value, f"header {name}")
    found["kafka"] = f"{record.topic}[{record.partition}]@{record.offset}"
    return found


def _began_us(record: UserRecord) -> int:
    """Return the record's time, since which the committer looks for its origin."""
    now_us = time.time_ns() // 1000
    return now_us if record.timestamp_ms is None else min(max(1, record.timestamp_ms * 1000), now_us)


def _traceparent(record: UserRecord) -> bytes | None:
    found = record.header("traceparent")
    return found if found is not None and _TRACEPARENT.fullmatch(found.decode("latin-1")) else None


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as err:
        raise BadInput(f"{what}: is not UTF-8 (byte {err.start})") from err
