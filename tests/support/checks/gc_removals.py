"""Compare the removals of a GC run by change with what marking finds.

Invariant: all manifests are read that exist at the moment of the removal, or of the listing of a run in a fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from nearkin_maintenance.gc import incremental_run
from nearkin_maintenance.gc.incremental_run import IncrementalPass, IncrementalResult
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.online_run import OnlinePass
from nearkin_shared.types import ContainerId


def check_removals(run: IncrementalPass, new: set[int], due: set[int]) -> None:
    """Assert that a run that marks at this moment would remove the same containers."""
    store, manifest_store = run._containers, run._manifests
    names, listed = [name for name, _ in manifest_store.names()], [container for container, _ in store.ids()]
    if isinstance(run, OnlinePass):
        names = [name for name, _ in run._listed.of(run._listed.keys).manifests]
        listed = [ContainerId(container) for container in run._listed.generations]
    live = LiveSet(store, manifest_store, names)
    pending = {c for c, entry in run._store.pending_deletes.read().items() if entry.whole}
    for removed, absent in ((due, due), (new, new | pending)):
        remaining = [container for container in listed if container not in absent]
        kept = live.transitive_closure(live.chunks, remaining)
        for container in removed:
            assert not live.segments.get(container, np.zeros(0, np.bool_)).any()
            assert not kept.get(container, np.zeros(0, np.bool_)).any()


@contextmanager
def checked_runs(share: float = 1e9, run_class: type[IncrementalPass] = IncrementalPass) -> Iterator[Counter[str]]:
    """Let runs follow the changes, up to a share of dead data; compare each with marking; count them."""
    found: Counter[str] = Counter()
    apply, run = IncrementalPass._apply, run_class.run

    def checked(self: IncrementalPass, index: Any, decision: Any, looked_up: Any) -> Any:
        check_removals(self, decision.new, decision.due)
        found["marked containers"] += len(decision.new)
        found["deleted containers"] += len(decision.due)
        return apply(self, index, decision, looked_up)

    def counted(self: IncrementalPass) -> IncrementalResult:
        result = run(self)
        found["marks" if result.report is None else "follows"] += 1
        return result

    with (
        mock.patch.object(IncrementalPass, "_apply", checked),
        mock.patch.object(run_class, "run", counted),
        mock.patch.object(incremental_run, "ENDED_SHARE", share),
    ):
        yield found
