"""Report what became of each blob, on topic `committed`.

    {"id", "origin", "tenant", "key", "began", "state": "committed" | "failed", "failure", ...}

Invariant: an event has the state committed only if the manifest of its version is durable.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from nearkin_shared.formats.manifest import Manifest, moment_of
from nearkin_shared.formats.message import End, Envelope
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.record_guard import headers_of
from nearkin_shared.observability import metrics
from nearkin_shared.results import Ledger
from nearkin_shared.results_json import info_json, ledger_json

_log = logging.getLogger("nearkin.commit")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
"""Kept: `json.dumps` makes a new one for each event."""


class CommittedEvents:
    """Sends the events of one committer. For one thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def send_committed(self, end: End, manifest: Manifest, ledger: Ledger, traceparent: bytes | None) -> None:
        """Report a blob committed as the version of a durable manifest."""
        _log.info("blob %s: committed as version %d", end.envelope.blob.hex(), manifest.version)
        what = {"state": "committed", "failure": None, **info_json(manifest.info)}
        what |= {"seconds": manifest.seconds, "ledger": ledger_json(ledger, manifest.seconds)}
        self._send(end.envelope, end.origin, end.began_us, traceparent, what)

    def send_failed(
        self, envelope: Envelope, end: End | None, failure: str, reason: str | None, traceparent: bytes | None
    ) -> None:
        """Report a blob failed; `reason` is a name for programs, if one exists."""
        metrics.BLOBS.labels("failed").inc()
        _log.warning("blob %s: failed: %s", envelope.blob.hex(), failure)
        origin, began_us = (envelope.blob, 0) if end is None else (end.origin, end.began_us)
        what = {"state": "failed", "failure": failure, "reason": reason}
        self._send(envelope, origin, began_us, traceparent, what)

    def _send(
        self, envelope: Envelope, origin: bytes, began_us: int, traceparent: bytes | None, what: dict[str, Any]
    ) -> None:
        event = {
            "id": envelope.blob.hex(),
            "origin": origin.hex(),
            "tenant": envelope.tenant,
            "key": envelope.key,
            "began": moment_of(began_us).isoformat() if began_us else None,
            **what,
        }
        headers = headers_of("committer", what["state"], envelope, traceparent)
        self._outbox.send("committed", envelope.blob, _ENCODER.encode(event).encode(), headers)
