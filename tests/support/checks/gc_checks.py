"""Check GC runs over a test's store.

Invariant: the report of a run equals the dry run before it and the change on the disk.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

from nearkin.store import Store
from nearkin_shared.utils.failpoints import POINTS
from tests.support.data.stores import SMALL, process, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

COLLECTED = settings(
    SMALL, {"deletion": {"undelete_seconds": 7 * DAY}, "gc": {"grace_seconds": DAY, "compact_below": 0.8}}
)
"""A grace of a day, and an undelete window of a week."""


def collect_repeatedly(store: Store, clock: Clock, runs: int = 4) -> int:
    """Do GC runs a day apart; return the bytes freed.

    Raises: AssertionError.
    """
    freed = 0
    for _ in range(runs):
        clock.now += DAY
        preview, before = store.gc(dry_run=True), stored_bytes(store.root)
        done = store.gc()
        assert before - stored_bytes(store.root) == done.freed_bytes == preview.freed_bytes
        assert (done.versions, done.pending_delete_containers) == (preview.versions, preview.pending_delete_containers)
        assert store.verify().damage == ()
        assert store.stats().ledger.stored_bytes == stored_bytes(store.root)
        freed += done.freed_bytes
    return freed


_GC_RUN = """
import json, sys
from nearkin_shared.utils import failpoints
from nearkin import open_store
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import settings
with open_store(sys.argv[1], settings=settings(COLLECTED, json.loads(sys.argv[3])), create=True) as store:
    failpoints.arm(sys.argv[2])
    store.gc()
"""


def kill_during_gc(root: Path, chosen: Mapping[str, Mapping[str, object]], point: str, times: int) -> None:
    """Do a GC run in a process that is killed at the n-th passing of a failpoint.

    `chosen`: changes of COLLECTED. Raises: AssertionError if the process never reaches the failpoint.
    """
    assert point in POINTS
    with process(_GC_RUN, root, f"{point}:{times}:kill", json.dumps(chosen)) as dying:
        dying.communicate(timeout=60)
    assert dying.returncode == -signal.SIGKILL, f"{point} was not passed {times} times"
