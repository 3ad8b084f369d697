"""What a worker tells of itself. Invariant: telling fails quietly; the work goes on."""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, datetime

from nearkin.config import Settings
from nearkin.errors import Retryable
from nearkin.runners.kafka.clients import Outbox
from nearkin.runners.kafka.hot import HotSettings

_log = logging.getLogger("nearkin.worker")

REPORT_SECONDS = 5.0


def report(settings: Settings, hot: HotSettings, service: str, worker: str, stop: threading.Event) -> None:
    """Tell, now and then until `stop`, what this worker runs: gateways list it."""
    outbox = Outbox(settings, f"{service}-{worker}-report")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    name = f"{service}/{worker}"
    while True:
        told = {
            "worker": name,
            "service": service,
            "revision": hot.revision,
            "started": started,
            "seen": datetime.now(UTC).isoformat(timespec="seconds"),
            "state": "stopped" if stop.is_set() else "paused" if hot.settings.service.paused else "running",
        }
        try:
            outbox.send("workers", name.encode(), json.dumps(told).encode(), {})
            outbox.flush()
        except Retryable as err:
            _log.warning("report: %s", err)
            outbox.close()
            outbox = Outbox(settings, f"{service}-{worker}-report")
        if stop.wait(REPORT_SECONDS) and told["state"] == "stopped":
            outbox.close()
            return
