"""Check invariants, so that planted mistakes can be detected.

Invariant: a check raises Violation if its invariant is broken, and returns otherwise.

power      every prefix of a workload's disk operations
killed     children at failpoints
raced      one call held while another is done
flipped    bits of containers, then verify
scrubbed   bits of each kind of object, then a scrub
read_on    a reader that began before a compaction
fenced     a GC run whose lease ends after each effect
counted    garbage, before marking finds it
repaired   broken blocks, then their content
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import random_bytes
from nearkin.store import Store, open_store
from nearkin_maintenance import DomainOwners, GcRun, Rewriter
from nearkin_maintenance.gc.gc_context import GcHooks
from nearkin_maintenance.gc.gc_run import NoIndex
from nearkin_shared.errors import NearkinError, StoreUnavailable
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.fenced import FencedObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks import inspection
from tests.support.data.stores import containers, flip, manifests, settings
from tests.support.engines import crash, crash_child, power_cut
from tests.support.engines.model import DAY, Break, Repair, Violation

KILLS_MAX = 60
SEEDS = (6, 2, 1)
"""In the order of how soon they find the rarest violation."""
BLOBS, BLOB_BYTES = 20, 30_000
BLOBS_FOLLOWED = 60
"""Blobs of a store in which a single deletion is too little to mark again."""
EFFECTS_MAX = 200

Plant = Callable[[], None]
Hunt = Callable[[Path, Plant], None]


def power(name: str) -> Hunt:
    """Return a check that cuts the power in a workload."""

    def hunt(folder: Path, plant: Plant) -> None:
        plant()
        power_cut.explore(folder, power_cut.WORKLOADS[name])

    return hunt


def hunt_crashes(*points: str, codec: str = "patch") -> Hunt:
    """Return a check that kills at these failpoints."""
    chosen = settings(crash_child.CHOSEN, {"delta": {"codec": codec}})

    def hunt(folder: Path, plant: Plant) -> None:
        for seed in SEEDS:  # each child of the campaign plants it: this process forks, and opens nothing
            campaign = crash.Campaign(folder / str(seed), seed, chosen=chosen, points=points, plant=plant)
            for violation in campaign.run(KILLS_MAX).violations:
                raise Violation(violation)

    return hunt


def hunt_races(race: Callable[[Path], object]) -> Hunt:
    """Return a check that holds one call while it does another."""

    def hunt(folder: Path, plant: Plant) -> None:
        plant()
        race(folder)

    return hunt


def hunt_bitflips(folder: Path, plant: Plant) -> None:
    """Flip bits of a container, one at a time: verify names each."""
    plant()
    with open_store(folder / "s", settings=crash_child.CHOSEN, create=True) as store:
        store.put("a", crash_child.content(2))
        store.put("a", crash_child.content(5))
    draw = random.Random(3)
    for path in containers(folder / "s"):
        size_bytes = path.stat().st_size
        for _ in range(60):
            at, bit = draw.randrange(size_bytes), draw.randrange(8)
            flip(path, at, bit)
            with open_store(folder / "s", settings=crash_child.CHOSEN, create=True) as store:
                damage = store.verify().damage
            flip(path, at, bit)
            if not damage:
                raise Violation(f"bit {bit} of byte {at} of {size_bytes} is another, and verify names nothing")


def hunt_by_scrub(folder: Path, plant: Plant) -> None:
    """Flip a bit of each object, one at a time: a whole scrub pass names it."""
    plant()
    root = folder / "s"
    with open_store(root, settings=crash_child.CHOSEN, create=True) as store:
        for number in range(6):
            store.put("a", crash_child.content(number))
    draw = random.Random(4)
    for path in (*containers(root), *manifests(root)):
        at = draw.randrange(path.stat().st_size)
        flip(path, at)
        with open_store(root, settings=crash_child.CHOSEN, create=True) as store:
            scrubber, damaged = store.scrubber(), set[str]()
            ended = False
            while not ended:
                step = scrubber.step()
                damaged |= step.damaged.keys()
                ended = step.ended
        flip(path, at)
        if str(path.relative_to(root)) not in damaged:
            raise Violation(f"byte {at} of {path.name} is another, and a whole pass names {sorted(damaged)} alone")


def _make_sparse_store(root: Path) -> tuple[dict[str, bytes], float]:
    """Make a store whose containers hold some live data and mostly data pending delete; return the time, too."""
    contents = {f"k{number}": random_bytes(BLOB_BYTES, number) for number in range(BLOBS)}
    now = [crash_child.START]
    with open_store(root, settings=crash_child.CHOSEN, clock=lambda: now[0], create=True) as store:
        list(store.put_many(contents.items()))
        for number in range(BLOBS):
            if number % 4 != 1:  # live chunks get another position in their block by the rewrite
                store.delete(f"k{number}")
                del contents[f"k{number}"]
        now[0] += 2 * DAY
        store.gc()
    return contents, now[0] + 2 * DAY


def hunt_reference_counts(folder: Path, plant: Plant) -> None:
    """Delete one of many blobs: its data are nominated before the weekly marking, and deleted."""
    plant()
    with _hybrid_store(folder / "s") as (store, clock):
        store.delete(f"k{BLOBS_FOLLOWED - 1}")
        for _ in range(3):
            clock[0] += 2 * DAY
            store.gc()
        inspection.check_no_orphans(store)


def hunt_lying_summary(folder: Path, plant: Plant) -> None:
    """Delete one of two keys with the same content: runs that follow the changes keep the data of the other."""
    plant()
    with _hybrid_store(folder / "s") as (store, clock):
        store.put("same", random_bytes(BLOB_BYTES, 0))
        store.gc()
        store.delete("k0")
        for _ in range(3):
            clock[0] += 2 * DAY
            store.gc()
    with open_store(folder / "s", read_only=True) as store:  # caches have the deleted containers
        try:
            found = store.get("same").read()
        except NearkinError as err:
            raise Violation(f"same: {type(err).__name__}: {err}") from err
        if found != random_bytes(BLOB_BYTES, 0):
            raise Violation("same: other bytes were read than were put")


@contextmanager
def _hybrid_store(root: Path) -> Iterator[tuple[Store, list[float]]]:
    """Yield a store of many blobs that a run has marked, and its clock."""
    chosen, now = settings(crash_child.CHOSEN, {"gc": {"mode": "hybrid"}}), [crash_child.START]
    with open_store(root, settings=chosen, clock=lambda: now[0], create=True) as store:
        for number in range(BLOBS_FOLLOWED):  # a put each, so that each has a container of its own
            store.put(f"k{number}", random_bytes(BLOB_BYTES, number))
        store.gc()
        yield store, now


def hunt_repair(folder: Path, plant: Plant) -> None:
    """Break a block in some containers, and repair from the content: the index equals a rebuilt one."""
    plant()
    with open_store(folder / "s", settings=crash_child.CHOSEN, create=True) as store:
        for number in range(6):
            store.put("a", crash_child.content(number))
        for draw in range(6):
            broken = Break(draw, manifest=False, verify=True, by_copy=False, contents=6)
            crash_child.perform(store, broken)
            crash_child.perform(store, Repair(broken))
        inspection.check_index_equals_a_rebuilt_one(store)


class _RemoteObjects(LocalObjectStore):
    far = True


def read_on(folder: Path, plant: Plant) -> None:
    """Read from a remote store the contents of containers that are rewritten after the reader resolved them."""
    plant()
    root = folder / "s"
    contents, later = _make_sparse_store(root)
    with open_store(root, settings=crash_child.CHOSEN, read_only=True, clock=lambda: later) as store:
        known = ContainerStore(_RemoteObjects(root), store._fingerprinter.domain, 1 << 20)
        blobs = {}
        for key in contents:
            of = store.get(key)
            blobs[key] = VersionReader(
                of.info, of._reader._manifest, known.counting(), store._fingerprinter, 0, of.info.size_bytes
            )
        for container, _ in known.ids():
            known.directory(container)
    with open_store(root, settings=crash_child.CHOSEN, clock=lambda: later, create=True) as store:
        if not store.gc().containers_rewritten:
            raise Violation("no container was rewritten")
    for key, blob in blobs.items():
        try:
            read = b"".join(blob.pieces())
        except NearkinError as err:
            raise Violation(f"{key}: {type(err).__name__}: {err}") from err
        if read != contents[key]:
            raise Violation(f"{key}: other bytes were read than were put")


class _LeasedObjects(LocalObjectStore):
    """A folder of objects under a lease that ends after a number of effects."""

    def __init__(self, root: Path, effects: int) -> None:
        super().__init__(root)
        self.remaining = effects

    def check(self) -> None:
        """Raise StoreUnavailable if the lease has ended."""
        if self.remaining <= 0:
            raise StoreUnavailable("the lease is over")

    def _count(self, name: str) -> None:
        if self.remaining <= 0:
            raise Violation(f"{name}: written or removed by a maintenance worker whose lease is over")
        self.remaining -= 1

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object, and count it."""
        self._count(name)
        super().put_new(name, *parts)

    def delete(self, name: str) -> None:
        """Remove an object, and count it."""
        self._count(name)
        super().delete(name)


def hunt_fence(folder: Path, plant: Plant) -> None:
    """End a maintenance worker's lease after its n-th effect, for each n: none follows, and all versions restore."""
    plant()
    contents, later = _make_sparse_store(folder / "all")
    with open_store(folder / "all", settings=crash_child.CHOSEN, clock=lambda: later - DAY, create=True) as store:
        store.delete("k1")
        del contents["k1"]
    later += 2 * DAY
    for effects in range(1, EFFECTS_MAX):
        root = folder / "one"
        shutil.copytree(folder / "all", root)
        with open_store(root, settings=crash_child.CHOSEN, read_only=True, clock=lambda: later) as store:
            leased = _LeasedObjects(root, effects)
            with suppress(StoreUnavailable):
                _collector(store, leased, later).run(NoIndex())
            over = leased.remaining <= 0
            for key, content in contents.items():
                if store.get(key).read() != content:
                    raise Violation(f"{key}: other bytes were read than were put")
        shutil.rmtree(root)
        if not over:
            return
    raise Violation(f"{EFFECTS_MAX} effects, and the GC run has not ended")


def _collector(store: Store, leased: _LeasedObjects, now: float) -> GcRun:
    """Return a GC run over an open store's objects, fenced as in the maintenance service."""
    fence = FencedObjectStore(leased, leased.check)
    found = ContainerStore(fence, store._fingerprinter.domain, 1 << 20)
    tenants = DomainOwners(store._fingerprinters, [store.settings.tenant], ManifestStore(fence))
    rewriter = Rewriter(found, tenants, store._fingerprinter, BlockRecoder(store.settings))
    return GcRun(fence, found, store.settings.gc, rewriter, hooks=GcHooks(clock=lambda: now))
