"""Stop, kill or fail the process at named steps, for tests of crash safety.

    NEARKIN_FAILPOINT=commit.manifest:3:kill       the third hit kills the process (SIGKILL)
    NEARKIN_FAILPOINT=gc.pending-withdrawn:1:error,put.begun:2:sleep=0.5

Actions: `kill` and `stop` (SIGKILL, SIGSTOP to this process), `error` (StoreUnavailable), `sleep=SECONDS` (at most 60).
A failpoint follows the numbered step of a crash-safe sequence that its description states. Unarmed it takes 50 to 70 ns
(`python -m tests.support.engines.soak --cost`); a put hits about ten for each object that it writes, each with 40 us of
syncs each.

Invariant: an unarmed failpoint has no effect; every name used is in POINTS.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Final

from nearkin_shared.errors import BadInput, StoreUnavailable
from nearkin_shared.utils.frozen import frozen

VARIABLE: Final = "NEARKIN_FAILPOINT"
SLEEP_SECONDS_MAX: Final = 60.0
ARMED_MAX: Final = 64

STORE_POINTS: Final = MappingProxyType(
    {
        # every object: containers, manifests, tombstones, records (nearkin_shared.objectstore.local)
        "object.begun": "nothing of a new object is written",
        "object.written": "the object's bytes are written under a temporary name, not synced",
        "object.synced": "the object's bytes are durable",
        "object.linked": "the object has its final name, which is not durable",
        "object.scratch-removed": "the temporary name is removed",
        "object.durable": "the object's name is durable",
        "object.folder-made": "a folder was created that is not durable",
        # objects written together (nearkin_shared.objectstore.group_put)
        "group.begun": "nothing of a group of objects is written",
        "group.synced": "the bytes of a group of objects are durable",
        "group.durable": "the names of a group of objects are durable",
        "object.unlinked": "an object's name is removed; the removal is not durable",
        "object.removed": "the removal of an object is durable",
        "object.replaced": "an object was replaced; the replacement is not durable",
        # parity (nearkin_shared.objectstore.parity)
        "parity.begun": "an object is durable, its parity is not written",
        "parity.put": "the object's parity is durable",
        "parity.removed": "the parity of an object to delete is removed, the object exists",
        # put (nearkin.store, nearkin.embedded.runner)
        "put.begun": "the index records that the store may contain data that it lacks",
        "put.sealed": "a container is finished, nothing of it written",
        "put.container": "1 a container is durable",
        "put.published": "2 the container is published in the index",
        "commit.begun": "all containers before the group are published, no manifest of it is written",
        "commit.manifest": "3 one manifest of the group is durable",
        "commit.manifests": "3 all manifests of the group are durable",
        "commit.catalogued": "4 the versions are in the catalog",
        "put.settled": "the index is complete again and records it",
        # deletion and undeletion (nearkin_shared.storage.deletions)
        "delete.noted": "1 the index records the tombstones",
        "undelete.newest": "2 the newest version is restored, the older ones are not",
        "delete.older": "2 all tombstones but that of the newest version are durable",
        "delete.marked": "3 all tombstones are durable",
        # index transactions (nearkin_shared.index.lmdb.lmdb_index)
        "index.writing": "a transaction is open and contains its first changes",
        "index.written": "a transaction is durable",
        # garbage collection (nearkin_maintenance.gc.gc_run)
        "gc.begun": "the GC lock and the writer lock are held; nothing is read",
        "gc.renewed": "1 the index has the entries of a new generation, the older one exists",
        "gc.replaced": "1 the older generation is deleted",
        "gc.expired": "2 a tombstone records that a version is collected",
        "gc.uncatalogued": "2 versions are removed from the catalog",
        "gc.manifest": "2 a manifest is deleted, its tombstones exist",
        "gc.marks": "2 its tombstones are deleted",
        "gc.marked": "3 the live set is known",
        "gc.refreshed": "the live set includes concurrent writes",
        "gc.removals-found": "the index entries to remove are known, other writers are active",
        "gc.section-began": "the exclusive section began, the live set includes all writes until now",
        "gc.section-ended": "the effect is applied, other writers are active",
        "gc.swept-planned": "5 the deletions are planned, other writers are active",
        "gc.marking-planned": "6 the marks for deletion are planned, other writers are active",
        "gc.due-withdrawn": "4 the index entries of pending deletes that are due are removed",
        "gc.container": "4 a container is deleted",
        "gc.pending-withdrawn": "5 the index entries of new pending deletes are removed",
        "gc.generation": "5 an index of several writers began a GC generation, the record is not written",
        "gc.recorded": "5 the pending-delete record is durable, older ones exist",
        "gc.done": "5 older records are deleted",
        # counts that nominate (nearkin_maintenance.gc.reference_counts): gc.mode hybrid, refcount, expiry
        "ledger.counted": "a transaction contains the commits and deletions since the last count",
        "ledger.written": "the transaction is durable",
        "ledger.confirmed": "the reference counts record the result of marking",
        "change.counted": "a transaction of a run by change contains commits and deletions since the run before",
        "change.written": "the transaction of a run by change is durable, its removals are proved",
        "change.found": "the index entries that a run by change removes are known, other writers are active",
        "change.confirmed": "the ledger records the removals of a run by change",
        # rebase (nearkin_maintenance.gc.gc_run), in addition to the steps of compaction
        "rebase.withdrawn": "the index entries of rebased and dead chunks are removed",
        "rebase.container": "one container depends on live bases only",
        "rebase.done": "all containers to rebase are rewritten",
        # merged blocks (nearkin_maintenance.gc.gc_run), in addition to the steps of compaction
        "merge.container": "a container has its merged chunks, or its reference blocks",
        # recompression (nearkin_maintenance.gc.gc_run), in addition to the steps of compaction
        "recompress.container": "a container is recompressed",
        # compaction (nearkin_maintenance.gc.gc_run)
        "compact.made": "a new generation is built, nothing of it written",
        "compact.put": "the new generation is durable, the older one exists",
        "compact.renewed": "the index has the entries of the new generation",
        "compact.replaced": "the older generation is deleted",
        # index rebuild and recovery (nearkin_maintenance.index_rebuild, nearkin.local.index_files)
        "rebuild.begun": "an empty index exists next to the current one, or index recovery began",
        "rebuild.container": "a container is published in the new index",
        "rebuild.versions": "versions are in its catalog",
        "rebuild.marks": "tombstones are in its catalog",
        "rebuild.complete": "the new index records that it is complete",
        "rebuild.removed": "the old index is deleted",
        "rebuild.renamed": "the new index has its final name",
        # quarantine (nearkin_shared.storage.quarantine)
        "quarantine.recorded": "a record is durable, older ones exist",
        "quarantine.done": "older records are deleted",
        # repair (nearkin_maintenance.repair.store_repair, nearkin.local.local_repair)
        "repair.replaced": "an object's original bytes are restored",
        "repair.put": "a repaired generation is durable, the damaged one exists",
        "repair.renewed": "the index has the entries of the repaired generation",
        "repair.removed": "the damaged generation is deleted",
        "repair.released": "repaired chunks are removed from quarantine",
    }
)
"""The state of a store at each failpoint, in any process that works on it."""
SERVICE_POINTS: Final = MappingProxyType(
    {
        # gateway (nearkin_gateway.uploads.upload_service)
        "upload.begun": "nothing of an upload is sent",
        "upload.sent": "all frames are sent, the end is not",
        "upload.durable": "the end is acknowledged, the caller has no response",
        # every worker's loop (nearkin_shared.kafka.consumer_loop)
        "worker.received": "1 records are fetched, nothing is processed",
        "worker.handled": "2 the records are processed, no offset is committed",
        "worker.committed": "5 offsets are committed",
        # chunker, dedup, resemblance (nearkin_chunker.handler, relaying)
        "cut.sent": "3 segments of a blob are sent, none acknowledged",
        "cut.batch-sent": "3 segments of a batch are sent, none acknowledged",
        "sparse.sent": "3 sparse segments of a blob are sent, none acknowledged",
        "relay.sent": "3 the results of messages are sent, none acknowledged",
        # delta (nearkin_delta.handler)
        "place.container": "1 a container is durable",
        "place.published": "2 the container is published in the index",
        "place.sent": "3 its messages are sent, not acknowledged",
        "place.flushed": "4 its messages are acknowledged",
        # committer (nearkin_committer.handler)
        "batch.manifest": "1 the manifests of a batch are durable",
        "batch.catalogued": "2 the versions of a batch are in the index",
        "batch.sent": "3 the events of a batch are sent, none acknowledged",
        "version.manifest": "1 a version's manifest is durable",
        "version.catalogued": "2 the version is in the catalog",
        "version.sent": "3 its event is sent, not acknowledged",
        # the maintenance worker's lease (nearkin_shared.index.redis.lease, nearkin_shared.objectstore.fenced,
        "lease.taken": "the lease is held, nothing is done",
        "lease.renewed": "the lease is renewed",
        "lease.released": "the lease is released",
        "fence.passed": "the lease was held at the check, and an object is written or removed now",
        "gc.reported": "the end of a GC run is recorded",
    }
)
"""The state at each failpoint of services."""
RECORD_POINTS: Final = MappingProxyType(
    {
        # data keys (nearkin_shared.crypto.keyring)
        "key.made": "1 a key is durable, the record of highest numbers lacks it",
        "key.noted": "2 the record of highest numbers has it",
        "key.erasure-recorded": "1 an erasure is durable, the keys exist",
        "key.erasure-cancelled": "the erasure epoch has advanced, the cancelled record exists",
        "key.removed": "2 one of the keys is removed",
        # pauses of garbage collection (nearkin_shared.storage.gc_pause)
        "pause.recorded": "a pause is durable",
        "pause.removed": "the pause is removed",
        # progress of scrubbing (nearkin_shared.storage.scrub_progress)
        "scrub.recorded": "a state is durable, the previous one exists",
        "scrub.done": "the previous state is deleted",
    }
)
"""Records that no put and no GC run writes: keys, pauses, progress."""
PURGE_POINTS: Final = MappingProxyType(
    {
        # immediate removal (nearkin_maintenance.gc.purge)
        "purge.withdrawn": "the index has no entry of data to remove",
        "purge.container": "1 a container without live data is removed",
        "purge.put": "2, 3 the next generation of a container is durable",
        "purge.renewed": "2, 3 the index has its entries",
        "purge.replaced": "2, 3 the previous generation is removed",
    }
)
"""Steps of `rm --now` and `gc --now`, which the crash engine does not call."""
RETENTION_POINTS: Final = MappingProxyType(
    {
        # extension of a retention (nearkin_shared.storage.retention_extension)
        "retention.noted": "1 the index records that a retention record exists",
        "retention.recorded": "2 the record is durable",
        # garbage collection (nearkin_maintenance.gc.version_expiry)
        "gc.retention": "2 a retention record of an ended version is removed, its tombstones exist",
    }
)
"""Steps of extended retentions, which the crash engine does not call."""
ERASURE_POINTS: Final = MappingProxyType(
    {
        # end of an erasure in a local store (nearkin.store)
        "erasure.objects-removed": "1 keys and objects of erased tenants are removed, the index may hold their digests",
        "erasure.index-renewed": "2 the index was made again, the erasures are not recorded as swept",
    }
)
"""Steps of a GC run that completes erasures, which the crash engine does not call."""
POINTS: Final = MappingProxyType(
    {**STORE_POINTS, **SERVICE_POINTS, **RECORD_POINTS, **PURGE_POINTS, **RETENTION_POINTS, **ERASURE_POINTS}
)


@frozen
class ArmedFailpoint:
    """An armed failpoint: its `count`-th hit executes `action`, once."""

    name: str
    count: int
    action: str
    seconds: float = 0.0


class _HitCounter:
    """Counts hits and executes actions; threads may call it concurrently."""

    def __init__(self, armed: Iterable[ArmedFailpoint], watch: Callable[[str], None] | None) -> None:
        self._lock = threading.Lock()
        self._armed = tuple(armed)
        self._watch = watch
        self.hits: dict[str, int] = {}

    def hit(self, name: str) -> None:
        if name not in POINTS:
            raise BadInput(f"failpoint {name!r}: not in nearkin_shared.utils.failpoints.POINTS; add it")
        with self._lock:
            count = self.hits[name] = self.hits.get(name, 0) + 1
        if self._watch is not None:
            self._watch(name)
        for armed in self._armed:
            if armed.name == name and armed.count == count:
                _execute_action(armed)


_counter: _HitCounter | None = None


def failpoint(name: str) -> None:
    """Trigger the failpoint `name` if it is armed.

    Raises StoreUnavailable if it is armed with the action `error`.
    """
    if _counter is not None:
        _counter.hit(name)


def arm(armed: str | Iterable[ArmedFailpoint] = (), watch: Callable[[str], None] | None = None) -> None:
    """Arm failpoints of this process in place of earlier ones; counts restart at 0.

    `watch` is called with the name at every hit, in the thread that hits it; its exceptions propagate. Raises BadInput.
    """
    global _counter  # noqa: PLW0603 - the only switch
    _counter = _HitCounter(parse_failpoints(armed) if isinstance(armed, str) else armed, watch)


def disarm() -> dict[str, int]:
    """Disarm all failpoints; return the number of hits of each."""
    global _counter
    before, _counter = _counter, None
    return {} if before is None else before.hits


def parse_failpoints(text: str) -> tuple[ArmedFailpoint, ...]:
    """Parse NAME:COUNT:ACTION, or several separated by commas.

    Raises BadInput with the accepted values.
    """
    found = []
    for part in text.split(","):
        name, _, rest = part.strip().partition(":")
        count, _, action = rest.partition(":")
        action, _, seconds = action.partition("=")
        if name not in POINTS:
            raise BadInput(f"{VARIABLE} {name!r}: choose one of {', '.join(POINTS)}")
        if not (count.isascii() and count.isdigit() and int(count) >= 1):
            raise BadInput(f"{VARIABLE} {part!r}: want NAME:COUNT:ACTION, with a COUNT from 1")
        if action not in ("kill", "stop", "error", "sleep") or bool(seconds) != (action == "sleep"):
            raise BadInput(f"{VARIABLE} {part!r}: want kill, stop, error or sleep=SECONDS")
        found.append(ArmedFailpoint(name, int(count), action, _seconds(part, seconds) if seconds else 0.0))
    if len(found) > ARMED_MAX:
        raise BadInput(f"{VARIABLE}: {len(found)} failpoints; use at most {ARMED_MAX}")
    return tuple(found)


def _seconds(part: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as err:
        raise BadInput(f"{VARIABLE} {part!r}: {text!r} is not a number of seconds") from err
    if not 0 <= seconds <= SLEEP_SECONDS_MAX:
        raise BadInput(f"{VARIABLE} {part!r}: want 0 to {SLEEP_SECONDS_MAX:g} seconds")
    return seconds


def _execute_action(armed: ArmedFailpoint) -> None:
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(armed.seconds)
        case _:
            raise StoreUnavailable(f"failpoint {armed.name}, hit {armed.count}: failed, as armed")


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])
