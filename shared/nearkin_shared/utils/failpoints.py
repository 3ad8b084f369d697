"""Failpoints. Invariant: unarmed they do nothing, and cost a call and a comparison; every name passed is in POINTS.

    NEARKIN_FAILPOINT=commit.manifest:3:kill       the third passing kills the process (SIGKILL)
    NEARKIN_FAILPOINT=gc.forgot:1:error,put.begun:2:sleep=0.5

Actions: `kill` and `stop` (SIGKILL, SIGSTOP to this process), `error` (StoreUnavailable), `sleep=SECONDS` (60 at most).
A name stands at a numbered step of what must survive a crash, *after* what it names. Unarmed: 50 to 70 ns (measured by
`python -m tests.support.engines.soak --cost`), and a put passes some ten for each object that it writes, 40 us of syncs
each.
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
        # every object: containers, manifests, marks, records (nearkin_shared.objectstore.base)
        "object.begun": "before anything of a new object is written",
        "object.written": "its bytes are written under a name nobody reads, not synced",
        "object.synced": "its bytes are durable",
        "object.linked": "it has its name, which is not durable",
        "object.scratch-removed": "its other name is gone",
        "object.durable": "its name is durable",
        "object.folder-made": "a folder was made that is not durable",
        "object.unlinked": "an object's name is gone, which is not durable",
        "object.removed": "an object is gone for good",
        "object.replaced": "other bytes have an object's name, which is not durable",
        # parity (nearkin_shared.objectstore.parity)
        "parity.begun": "an object is durable, its parity is not there",
        "parity.put": "its parity is durable",
        "parity.removed": "parity of an object that is to go is gone, the object is there",
        # put (nearkin.store, nearkin.embedded.runner)
        "put.begun": "the index says that the store may come to hold more than it",
        "put.sealed": "a container is made, nothing of it written",
        "put.container": "1 a container is durable",
        "put.published": "2 and in the index",
        "commit.begun": "all containers before it are published, no manifest of the group is written",
        "commit.manifest": "3 one manifest of the group is durable",
        "commit.manifests": "3 all manifests of the group are",
        "commit.catalogued": "4 and in the catalog",
        "put.settled": "the index is whole again and says so",
        # deletion and undeletion (nearkin_shared.storage.deletions)
        "delete.noted": "1 the index knows of the marks",
        "undelete.newest": "2 the newest version is back, the older ones are not",
        "delete.older": "2 all but the newest version's mark are durable",
        "delete.marked": "3 all marks are",
        # index transactions (nearkin_shared.index.lmdb.lmdb_index)
        "index.writing": "a transaction is open and holds its first changes",
        "index.written": "a transaction is durable",
        # garbage collection (nearkin_maintenance.gc.gc_run)
        "gc.begun": "the lock of rounds is held, and the store's for a turn; nothing is read",
        "gc.renewed": "1 the index knows what a new generation holds, the older one is there",
        "gc.replaced": "1 and the older one is gone",
        "gc.sentenced": "2 a mark says that a version never comes back",
        "gc.uncatalogued": "2 versions have left the index",
        "gc.manifest": "2 a manifest is gone, its marks are there",
        "gc.marks": "2 and its marks are gone",
        "gc.marked": "3 it is known what is reached",
        "gc.looked": "what was stored since is added to that",
        "gc.looked-up": "it is known which entries the index is to forget, others may write",
        "gc.turn": "nobody else writes, and it is known what was stored until now",
        "gc.turned": "an effect is done, others may write",
        "gc.swept-planned": "5 it is known what is to go, others may write",
        "gc.condemned-planned": "6 it is known what is to be condemned, others may write",
        "gc.forgot-due": "4 the index has forgotten what was condemned and goes now",
        "gc.container": "4 a container is gone",
        "gc.forgot": "5 the index has forgotten what is condemned now",
        "gc.generation": "5 an index of several writers has begun a GC generation, the record is not written",
        "gc.recorded": "5 the record of it is durable, older ones are there",
        "gc.done": "5 and older ones are gone",
        # counts that nominate (nearkin_maintenance.gc.reference_counts): gc.mode hybrid, refcount, expiry
        "ledger.counted": "a transaction holds what was committed and what is gone since",
        "ledger.written": "it is durable",
        "ledger.confirmed": "marking has looked, and the ledger knows",
        # re-basing (nearkin_maintenance.gc.gc_run): what leans on what goes, beside compaction's steps
        "rebase.forgot": "the index has forgotten what goes with what leans elsewhere now",
        "rebase.container": "one container leans on what lives",
        "rebase.done": "all that were to be are written anew",
        # gathering (nearkin_maintenance.gc.gc_run): beside compaction's steps
        "gather.container": "a container holds what it took in, or refers to what others did",
        # compressing further (nearkin_maintenance.gc.gc_run): beside compaction's steps
        "recompress.container": "a container holds the same in fewer bytes",
        # compaction (nearkin_maintenance.gc.gc_run)
        "compact.made": "a new generation is made, nothing of it written",
        "compact.put": "it is durable, beside the older one",
        "compact.renewed": "the index knows what it holds",
        "compact.replaced": "the older one is gone",
        # index rebuild and catching up (nearkin_maintenance.index_rebuild, nearkin.local.index_lifecycle)
        "rebuild.begun": "an empty index lies beside the one until now, or one that is behind is caught up with",
        "rebuild.container": "a container is published into it",
        "rebuild.versions": "versions are in its catalog",
        "rebuild.marks": "and their marks",
        "rebuild.complete": "it says that it is complete",
        "rebuild.removed": "the one until now is gone",
        "rebuild.renamed": "the new one is in its place",
        # quarantine (nearkin_shared.storage.quarantine)
        "quarantine.recorded": "a record is durable, older ones are there",
        "quarantine.done": "and older ones are gone",
        # repair and healing (nearkin_maintenance.repair.store_repair, nearkin.local.local_repair)
        "repair.replaced": "an object's own bytes are back in its place",
        "heal.put": "a generation with what was found is durable, beside the broken one",
        "heal.renewed": "the index knows what it holds",
        "heal.removed": "the broken one is gone",
        "heal.released": "what is sound again is out of quarantine",
    }
)
"""What has happened where a name stands: in whoever works on a store, services too."""
SERVICE_POINTS: Final = MappingProxyType(
    {
        # gateway (nearkin_gateway.uploads.upload_service)
        "intake.begun": "nothing of an upload is sent",
        "intake.sent": "all its frames are sent, its end is not",
        "intake.durable": "its end is acknowledged, nobody is answered",
        # every worker's loop (nearkin_shared.kafka.consumer_loop)
        "worker.taken": "1 records are taken, nothing is done",
        "worker.handled": "2 they are worked on, no offset is committed",
        "worker.committed": "5 offsets are committed",
        # chunker, dedup, resemblance (nearkin_chunker.handler, relaying)
        "cut.sent": "3 segments of a blob are sent, none acknowledged",
        "relay.sent": "3 what messages became is sent, none acknowledged",
        # delta (nearkin_delta.handler)
        "place.container": "1 a container is durable",
        "place.published": "2 and in the index",
        "place.told": "3 what it holds is told onwards, not acknowledged",
        "place.flushed": "4 and acknowledged",
        # committer (nearkin_committer.handler)
        "version.manifest": "1 a version's manifest is durable",
        "version.catalogued": "2 and in the index",
        "version.told": "3 and told, not acknowledged",
        # maintenance's lease (nearkin_shared.index.redis.lease, nearkin_shared.objectstore.fenced,
        # nearkin_maintenance.gc.gc_worker)
        "lease.taken": "the lease is held, nothing is done",
        "lease.renewed": "it is held for another term",
        "lease.released": "it is free again",
        "fence.passed": "it was held a moment ago, and an object is written or removed now",
        "round.told": "a round's end is told",
    }
)
"""What has happened where a name stands in services alone."""
RECORD_POINTS: Final = MappingProxyType(
    {
        # data keys (nearkin_shared.crypto.keyring)
        "key.made": "1 a key is durable, the record of highest numbers does not have it",
        "key.noted": "2 and it does",
        "key.erasure-recorded": "1 an erasure is durable, the keys are there",
        "key.erasure-cancelled": "the erasure epoch has advanced, the cancelled record is there",
        "key.removed": "2 one of the keys is gone",
        # pauses of garbage collection (nearkin_shared.storage.gc_pause)
        "pause.recorded": "a pause is durable",
        "pause.removed": "and gone again",
        # progress of scrubbing (nearkin_shared.storage.scrub_progress)
        "scrub.recorded": "a state is durable, the one before is there",
        "scrub.done": "and it is gone",
    }
)
"""What has happened to records of a store that no put and no GC run writes: keys, pauses, progress."""
PURGE_POINTS: Final = MappingProxyType(
    {
        # immediate removal (nearkin_maintenance.gc.purge)
        "purge.withdrawn": "the index names nothing that is to be removed",
        "purge.container": "1 a container of which nothing is needed is removed",
        "purge.put": "2, 3 the next generation of a container is durable",
        "purge.renewed": "2, 3 and the index has it",
        "purge.replaced": "2, 3 and the generation before is removed",
    }
)
"""Steps of `rm --now` and `gc --now`, which the crash engine does not call."""
RETENTION_POINTS: Final = MappingProxyType(
    {
        # extension of a retention (nearkin_shared.storage.retention_extension)
        "retention.noted": "1 the index knows that there is a record",
        "retention.recorded": "2 the record is durable",
        # garbage collection (nearkin_maintenance.gc.version_expiry)
        "gc.retention": "2 a retention record of a version that ended is removed, its marks are there",
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
    """One point: at its `count`-th passing `action` is done, once."""

    name: str
    count: int
    action: str
    seconds: float = 0.0


class _Watch:
    """Counts passings, and acts. Its caller's threads pass side by side."""

    def __init__(self, armed: Iterable[ArmedFailpoint], watch: Callable[[str], None] | None) -> None:
        self._lock = threading.Lock()
        self._armed = tuple(armed)
        self._watch = watch
        self.passings: dict[str, int] = {}

    def hit(self, name: str) -> None:
        if name not in POINTS:
            raise BadInput(f"failpoint {name!r}: not in nearkin_shared.utils.failpoints.POINTS; name it there")
        with self._lock:
            count = self.passings[name] = self.passings.get(name, 0) + 1
        if self._watch is not None:
            self._watch(name)
        for armed in self._armed:
            if armed.name == name and armed.count == count:
                _act(armed)


_watching: _Watch | None = None


def failpoint(name: str) -> None:
    """Stand at a step. Raises StoreUnavailable where that is what is armed here."""
    if _watching is not None:
        _watching.hit(name)


def arm(armed: str | Iterable[ArmedFailpoint] = (), watch: Callable[[str], None] | None = None) -> None:
    """Arm points of this process, in place of those until now; counting begins anew. Raises BadInput.

    `watch` is told the name at every passing, in the thread that passes; what it raises goes through.
    """
    global _watching  # noqa: PLW0603 - the one switch
    _watching = _Watch(parse_failpoints(armed) if isinstance(armed, str) else armed, watch)


def disarm() -> dict[str, int]:
    """Switch all off; return how often each was passed."""
    global _watching
    before, _watching = _watching, None
    return {} if before is None else before.passings


def parse_failpoints(text: str) -> tuple[ArmedFailpoint, ...]:
    """Return what NAME:COUNT:ACTION says, or several with commas between. Raises BadInput, naming what is right."""
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
        raise BadInput(f"{VARIABLE}: {len(found)} points; {ARMED_MAX} at most")
    return tuple(found)


def _seconds(part: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as err:
        raise BadInput(f"{VARIABLE} {part!r}: {text!r} is no number of seconds") from err
    if not 0 <= seconds <= SLEEP_SECONDS_MAX:
        raise BadInput(f"{VARIABLE} {part!r}: want 0 to {SLEEP_SECONDS_MAX:g} seconds")
    return seconds


def _act(armed: ArmedFailpoint) -> None:
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(armed.seconds)
        case _:
            raise StoreUnavailable(f"failpoint {armed.name}, passing {armed.count}: failed, as armed")


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])
