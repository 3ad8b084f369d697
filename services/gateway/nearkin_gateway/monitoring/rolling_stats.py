"""Count the outcomes of the last hour by the minute.

Invariant: memory does not grow with the traffic.

The counts come from events that every gateway reads, so all gateways show the same hour.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

MINUTES_MAX = 60
FAILURES_MAX = 100
TEXT_CHARACTERS_MAX = 500


@dataclass(slots=True)
class Minute:
    """The outcomes of one minute. `stored_bytes`: bytes added by committed blobs."""

    committed: int = 0
    failed: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0


class RollingStats:
    """Sums of the last MINUTES_MAX minutes, and the last FAILURES_MAX failures."""

    def __init__(self) -> None:
        self._minutes: OrderedDict[int, Minute] = OrderedDict()
        self._failures: deque[dict[str, Any]] = deque(maxlen=FAILURES_MAX)

    def add(self, event: dict[str, Any]) -> None:
        """Count an event of the topic `committed`; one from before the last hour is passed over."""
        now = int(time.time() // 60)
        number = min(_minute(event) or now, now)
        if number <= now - MINUTES_MAX:
            return
        minute = self._minutes.setdefault(number, Minute())
        if event.get("state") == "committed":
            ledger = event.get("ledger") or {}
            minute.committed += 1
            minute.logical_bytes += _count(ledger.get("logical_bytes"))
            minute.stored_bytes += _count(ledger.get("stored_bytes"))
        else:
            minute.failed += 1
            details = {name: str(event.get(name) or "")[:TEXT_CHARACTERS_MAX] for name in ("tenant", "key", "failure")}
            self._failures.append({"time": _text(number), **details})
        for old in [number for number in self._minutes if number <= now - MINUTES_MAX]:
            del self._minutes[old]

    def last_hour(self) -> list[dict[str, object]]:
        """Return every minute of the last hour, oldest first."""
        now = int(time.time() // 60)
        return [
            {"minute": _text(number), **asdict(self._minutes.get(number, Minute()))}
            for number in range(now - MINUTES_MAX + 1, now + 1)
        ]

    def failures(self) -> list[dict[str, Any]]:
        """Return what failed last, newest first."""
        return list(reversed(self._failures))


def _minute(event: dict[str, Any]) -> int | None:
    """Return the minute in which an event's blob ended: began, and the seconds that it took."""
    for name in ("created", "began"):
        try:
            return int(datetime.fromisoformat(str(event[name])).timestamp() // 60)
        except (KeyError, ValueError, OverflowError):
            continue
    return None


def _text(number: int) -> str:
    return datetime.fromtimestamp(number * 60, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
