"""Compare the removals of a GC run by change with what marking finds.

Invariant: all manifests are read that exist at the moment of the removal, or of the listing of a run in a fleet.
"""

from __future__ import annotations

import numpy as np

from nearkin_maintenance.gc.incremental_run import IncrementalPass
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
