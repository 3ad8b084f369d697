"""Scrub concurrently with puts.

Invariant: a put waits for at most one step of the scrub; damage is handled before the next step.
It runs on the writer's thread, because repair writes containers and index entries, and the store has one writer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from nearkin_shared.errors import NearkinError
from nearkin_shared.observability import metrics

if TYPE_CHECKING:
    from nearkin.store import Store
    from nearkin_maintenance.verify.scrubber import ScrubStep

RETRY_SECONDS = 60.0
"""After an error, such as a full disk, the next step is tried so much later."""
_log = logging.getLogger("nearkin.gateway")


class BackgroundScrubTask:
    """The scrub of one local store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scrubber = store.scrubber()
        self._not_before = 0.0

    def waits_seconds(self) -> float | None:
        """Return how long until the next step is due; None where none ever is."""
        try:
            wait = self._scrubber.waits_seconds()
        except NearkinError as err:
            self._put_off(err)
            wait = RETRY_SECONDS
        return None if wait is None else max(wait, self._not_before - time.monotonic())

    def step_if_due(self) -> None:
        """Do a step where one is due."""
        if self.waits_seconds() == 0.0:
            self.step()

    def step(self) -> None:
        """Do a step, and deal with what it found."""
        try:
            done = self._scrubber.step(self._attend)
            metrics.count_scrubbed(done.read_bytes, done.objects, done.ended)
        except NearkinError as err:
            self._put_off(err)

    def close(self) -> None:
        """Store the progress durably."""
        try:
            if self._scrubber.state.running:
                self._scrubber.save()
        except NearkinError as err:
            _log.warning("scrub: %s", err)

    def _attend(self, done: ScrubStep) -> None:
        for problem in done.damaged.values():
            _log.error("scrub: %s", problem)
        repaired, left = self._store.attend(done)
        metrics.SCRUB_DAMAGED.inc(len(done.damaged))
        metrics.CORRUPT.labels("scrub").inc(len(done.damaged))
        metrics.SCRUB_REPAIRED.inc(len(repaired))
        for damage in left:
            touched = ", ".join(f"{key!r} version {version}" for key, version in damage.versions[:8])
            more = f" and {len(damage.versions) - 8} more" if len(damage.versions) > 8 else ""
            _log.error("scrub: %s still corrupt; affected versions: %s%s", damage.object_name, touched or "none", more)

    def _put_off(self, err: NearkinError) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        _log.error("scrub: %s", err)
