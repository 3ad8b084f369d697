# size: one report
"""Report the state of the scrub.

Invariant (I10): the report is bounded, whatever is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping

from nearkin_shared.config.storage import ScrubSettings
from nearkin_shared.formats.manifest import moment_of
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.storage.containers import object_name
from nearkin_shared.storage.scrub_progress import ScrubState
from nearkin_shared.types import ContainerId

QUARANTINED_SHOWN_MAX = 100


def scrub_json(
    state: ScrubState, quarantined: Mapping[int, PendingDelete], settings: ScrubSettings
) -> dict[str, object]:
    """Return the state as JSON has it."""
    running = {
        "begun": _time(state.begun_us),
        "ended": None,
        "read_bytes": state.read_bytes,
        "objects": state.read_objects,
        "damaged": state.damaged_objects,
    }
    last = {
        "begun": None if state.running else _time(state.begun_us),
        "ended": _time(state.ended_us),
        "read_bytes": state.ended_bytes,
        "objects": state.ended_objects,
        "damaged": state.ended_damaged,
    }
    return {
        "every_days": settings.every_days,
        "rate_bytes": int(settings.rate_bytes),
        "running": running if state.running else None,
        "last": last if state.ended_us else None,
        "quarantined": [
            {
                "object_name": object_name(ContainerId(container)),
                "since": _time(entry.at_us),
                "chunks": None if entry.whole else len(entry.chunks),
            }
            for container, entry in sorted(quarantined.items())[:QUARANTINED_SHOWN_MAX]
        ],
        "quarantined_containers": len(quarantined),
    }


def _time(at_us: int) -> str:
    return moment_of(at_us).isoformat()
