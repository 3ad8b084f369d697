# size: one class, which every worker uses
"""Report the state of a worker to gateways.

Invariant: a failed report does not affect the work.
"""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, datetime

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.live_config import LiveConfig
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator

_log = logging.getLogger("nearkin.worker")

REPORT_SECONDS = 5.0
STATES = ("running", "paused", "stopped")


def word(service: str, worker: str, revision: str, started: str, state: str) -> dict[str, str]:
    """Return the current report of a worker; `state` is one of STATES."""
    return {
        "worker": f"{service}/{worker}",
        "service": service,
        "revision": revision,
        "started": started,
        "seen": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": state,
    }


def report(
    settings: Settings,
    hot: LiveConfig,
    authenticator: EnvelopeAuthenticator,
    service: str,
    worker: str,
    stop: threading.Event,
) -> None:
    """Send reports periodically until `stop`: gateways list the worker."""
    outbox = Outbox(settings, f"{service}-{worker}-report", authenticator)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    name = f"{service}/{worker}"
    while True:
        state = "stopped" if stop.is_set() else "paused" if hot.settings.service.paused else "running"
        report = word(service, worker, hot.revision, started, state)
        try:
            outbox.send("workers", name.encode(), json.dumps(report).encode(), {})
            outbox.flush()
        except NearkinError as err:
            _log.warning("report: %s", err)
            outbox.close()
            outbox = Outbox(settings, f"{service}-{worker}-report", authenticator)
        if stop.wait(REPORT_SECONDS) and report["state"] == "stopped":
            outbox.close()
            return
