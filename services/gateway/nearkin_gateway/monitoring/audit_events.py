"""Define the events of the audit log and the API operation that each belongs to.

The table in docs/reference/audit-log.md is written from EVENTS by `python -m
nearkin_gateway.monitoring.audit_events`. Every operation of the API has an event, or is listed in UNAUDITED; a test
compares both with the OpenAPI document.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from nearkin_shared.utils.frozen import frozen

PAGE = Path("docs/reference/audit-log.md")
BEGIN, END = "<!-- events: begin -->", "<!-- events: end -->"
COMMON_FIELDS = ("event", "timestamp", "request_id", "tenant", "token", "peer", "result")
REASONS = (
    *("missing", "unknown", "expired", "scope", "foreign-tenant"),
    *("session", "bad-csrf", "cross-site", "foreign-host"),
)
"""Values of `reason` of auth.failed."""


@frozen
class AuditEvent:
    """One kind of audit record."""

    name: str
    when: str
    fields: tuple[str, ...] = ()
    """Beyond COMMON_FIELDS; empty ones are left out of a record."""
    is_read: bool = False
    """Whether `audit.records` leaves it out, and AUDIT_RECORDS_PER_SECOND bounds it."""
    is_limited: bool = False
    """Whether AUDIT_RECORDS_PER_SECOND bounds it, though no setting turns it off."""
    level: int = logging.INFO
    counted: str = ""
    """The body whose bytes are the field `bytes`: "sent", "received", or neither."""


def _read(name: str, when: str, *fields: str, counted: str = "") -> AuditEvent:
    return AuditEvent(name, when, fields, is_read=True, is_limited=True, counted=counted)


_ALL = (
    AuditEvent(
        "auth.succeeded",
        "A token or a session was accepted, for the first time from its address in a window of "
        "60 s; at the window's end once more with `repeats`, if it was used again",
        ("via", "repeats"),
        is_limited=True,
    ),
    AuditEvent(
        "auth.failed",
        "A request was refused because of who sent it; one record for each reason, token and address in a window, as "
        "above. Of an unknown token nothing is recorded",
        ("reason", "via", "repeats"),
        is_limited=True,
        level=logging.WARNING,
    ),
    AuditEvent("session.login", "A session of the dashboard was opened with a token"),
    AuditEvent("session.logout", "A session of the dashboard was closed by its user"),
    AuditEvent("token.created", "A token appeared in the tokens file", ("scopes", "expires")),
    AuditEvent("token.revoked", "A token is no longer in the tokens file", ("scopes", "expires")),
    _read("blob.read", "Bytes of a version were requested", "key", "version", "range", "bytes", counted="sent"),
    _read("blob.described", "The size, digest, outcome or storage of a version was requested", "key", "version"),
    _read("blob.listed", "Keys, versions or deleted versions were listed", "prefix", "key", "entries"),
    AuditEvent(
        "blob.stored",
        "A version was stored by one request (201), or accepted (202), or handed over from a resumable upload "
        "(`upload`)",
        ("key", "version", "blob", "upload", "replay", "bytes"),
        counted="received",
    ),
    AuditEvent("blob.deleted", "Versions of a key were deleted", ("key", "version", "versions", "reason")),
    AuditEvent("blob.undeleted", "Versions of a key were restored", ("key", "version", "versions", "reason")),
    AuditEvent("blob.retained", "The retention of a version was extended", ("key", "version", "until", "reason")),
    AuditEvent(
        "checkpoint.stored",
        "A checkpoint of a backup of the key was stored or accepted by one request",
        ("key", "version", "blob", "replay", "bytes"),
        counted="received",
    ),
    _read("checkpoint.listed", "Checkpoints of a key were listed", "key", "entries"),
    _read("checkpoint.read", "Bytes of a checkpoint were requested", "key", "version", "bytes", counted="sent"),
    AuditEvent("checkpoint.deleted", "The checkpoints of a key were deleted", ("key", "versions")),
    AuditEvent("upload.created", "A resumable upload was begun", ("key", "upload", "bytes"), counted="received"),
    AuditEvent("upload.extended", "Bytes were added to a resumable upload", ("upload", "bytes"), counted="received"),
    AuditEvent("upload.deleted", "A resumable upload was deleted", ("upload",)),
    _read("upload.described", "The state of a resumable upload was requested", "upload"),
    _read("usage.read", "Sums, shares or growth of a tenant were requested", "operation"),
    _read("fleet.read", "Workers, lag, garbage collection, scrub or this table's settings were requested", "operation"),
    _read("page.viewed", "A page of the dashboard was shown", "page", "key"),
    AuditEvent("settings.changed", "Hot settings were changed, `service.read_only` too", ("changes", "revision")),
    AuditEvent("gc.requested", "A GC run was requested"),
    AuditEvent("gc.paused", "Garbage collection was paused"),
    AuditEvent("gc.resumed", "Garbage collection was resumed"),
    _read("dead.listed", "Dead letters were listed"),
    AuditEvent("dead.read", "The content of a dead letter was shown", ("letters",)),
    AuditEvent("dead.replayed", "Dead letters were sent back to their topics", ("letters", "entries")),
    AuditEvent("dead.dropped", "Dead letters were dropped", ("letters", "entries")),
    AuditEvent(
        "audit.suppressed",
        "`count` records of the event `suppressed` were left out in the last window because of the rate",
        ("suppressed", "count"),
        level=logging.WARNING,
    ),
)
EVENTS = MappingProxyType({event.name: event for event in _ALL})
assert len(EVENTS) == len(_ALL)
OPERATIONS = MappingProxyType(
    {
        **dict.fromkeys(("putBlob", "postBlob"), "blob.stored"),
        "getBlob": "blob.read",
        **dict.fromkeys(("headBlob", "getInfo", "explain", "getStatus"), "blob.described"),
        **dict.fromkeys(("listBlobs", "listVersions", "listDeleted"), "blob.listed"),
        "deleteBlob": "blob.deleted",
        "undeleteBlob": "blob.undeleted",
        "extendRetention": "blob.retained",
        "putCheckpoint": "checkpoint.stored",
        "listCheckpoints": "checkpoint.listed",
        "getCheckpoint": "checkpoint.read",
        "deleteCheckpoints": "checkpoint.deleted",
        "createUpload": "upload.created",
        "patchUpload": "upload.extended",
        "deleteUpload": "upload.deleted",
        **dict.fromkeys(("headUpload", "getUpload"), "upload.described"),
        **dict.fromkeys(("getStats", "getReduction", "getGrowth", "listTenants"), "usage.read"),
        **dict.fromkeys(
            ("listWorkers", "getPipeline", "getScrub", "getGc", "getConfig", "getAudit"),
            "fleet.read",
        ),
        "patchConfig": "settings.changed",
        "changeGc": "gc.requested",
        "listDead": "dead.listed",
        "showDead": "dead.read",
        "replayDead": "dead.replayed",
        "dropDead": "dead.dropped",
    }
)
"""The event of each operation of the API; its handler may choose another one."""
UNAUDITED = frozenset({"livez", "readyz", "tusOptions"})
"""Operations that anyone may call and that show nothing of a tenant."""


def event_table() -> str:
    """Return the table of all events as Markdown."""
    head = "| event | written when | further fields | level |\n|---|---|---|---|\n"
    return head + "".join(_rows())


def _rows() -> Iterator[str]:
    for event in EVENTS.values():
        limit = "read" if event.is_read else "limited" if event.is_limited else ""
        name = f"`{event.name}`" + (f" ({limit})" if limit else "")
        fields = ", ".join(f"`{field}`" for field in event.fields)
        yield f"| {name} | {event.when} | {fields} | {logging.getLevelName(event.level)} |\n"


def with_event_table(page: str) -> str:
    """Return the text of the page with its table replaced by the current one."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{event_table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_event_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE}\n")
