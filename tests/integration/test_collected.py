"""Test a writer concurrent with a maintenance worker.

No pending-delete bases, no stale reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin.store import Store
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.pipeline.lookups import EmbeddedLookups, InFlight
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.pending_delete_watch import PendingDeleteFilter, PendingDeleteWatcher
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, settings

CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 3600}})


class World:
    """A store with one of two blobs pending delete, and a worker's view of it."""

    def __init__(self, root: Path) -> None:
        self.now = 1_764_000_000.0
        self.store = open_store(root, settings=CHOSEN, clock=lambda: self.now, create=True)
        self.objects = LocalObjectStore(root)
        self.containers = ContainerStore(self.objects, domain_of("default"), 1 << 20)
        self.watch = PendingDeleteWatcher(PendingDeleteStore(self.objects), 0.0)
        self.collected = PendingDeleteFilter(self.watch, self.containers, lambda: self.fresh())
        for key in ("kept", "gone"):
            self.store.put(key, random_bytes(60_000, len(key) * 7 + ord(key[0])))
        self.segments = {key: self.store._manifests.get("default", key, 1).segments for key in ("kept", "gone")}
        self.chunks = {key: self.chunks_of(segments) for key, segments in self.segments.items()}

    def fresh(self) -> ContainerStore:
        return ContainerStore(self.objects, domain_of("default"), 1 << 20)

    def chunks_of(self, segments: Locations) -> Locations:
        recipes = self.containers.directory(segments.containers[0]).segments
        return recipes.chunks.take(slice(int(recipes.bounds[0]), int(recipes.bounds[1])))

    def run_gc(self) -> None:
        self.now += 3601
        self.store.gc()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "s")
    yield made
    made.store.close()


def delete(store: Store) -> None:
    store.delete("gone")


def test_pending_delete_chunk_is_no_base(world: World) -> None:
    """Use no chunk pending delete as base, but any other."""
    source = InFlight(world.containers)
    facts = EmbeddedLookups(PendingIndex(world.store._index.readable(), b""), source, world.collected)
    locations = Locations.join([world.chunks["kept"], world.chunks["gone"]])
    before = facts.answer(LookupRequest(similar=locations), LookupResults()).similar
    assert before is not None
    assert before.available.all()
    delete(world.store)
    world.run_gc()
    after = facts.answer(LookupRequest(similar=locations), LookupResults()).similar
    assert after is not None
    removed = np.repeat([False, True], [len(world.chunks["kept"]), len(world.chunks["gone"])])
    assert np.array_equal(after.available, ~removed)
    assert not after.pieces.lengths[removed].any()


def test_quarantined_chunk_is_no_base(world: World) -> None:
    """A chunk that a scrub quarantined is no base, though its block is cached and intact there."""
    quarantine = Quarantine(world.objects, lambda: world.now)
    watch = PendingDeleteWatcher(PendingDeleteStore(world.objects), 0.0, quarantine=quarantine)
    collected = PendingDeleteFilter(watch, world.containers, world.fresh)
    facts = EmbeddedLookups(PendingIndex(world.store._index.readable(), b""), InFlight(world.containers), collected)
    broken = world.chunks["gone"]
    locations = Locations.join([world.chunks["kept"], broken])
    before = facts.answer(LookupRequest(similar=locations), LookupResults()).similar
    assert before is not None
    assert before.available.all()
    quarantine.note({int(broken.containers[0]): broken.ordinals}, {}, everything=False)
    after = facts.answer(LookupRequest(similar=locations), LookupResults()).similar
    assert after is not None
    assert np.array_equal(after.available, np.repeat([True, False], [len(world.chunks["kept"]), len(broken)]))
    assert np.array_equal(collected.lost(locations, world.containers), ~after.available)


def test_directories_are_evicted_on_record_change(world: World) -> None:
    container = world.chunks["gone"].containers[0]
    world.collected.refresh()
    world.containers.directory(container)
    delete(world.store)
    world.run_gc()
    world.run_gc()  # gone
    world.containers.directory(container)  # still known here
    world.collected.refresh()
    with pytest.raises(Exception, match="missing"):
        world.containers.directory(container)


def test_directories_are_evicted_after_a_gc_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release directories after a GC run that rewrote containers and marked none."""
    monkeypatch.setattr("nearkin_shared.storage.pending_delete_watch.REFRESH_SECONDS", -1.0)
    ended = iter([None, None, 1.0, 1.0])
    watch = PendingDeleteWatcher(PendingDeleteStore(world.objects), 3600.0, lambda: next(ended))
    collected = PendingDeleteFilter(watch, world.containers, world.fresh)
    container = world.chunks["kept"].containers[0]
    known = list[bool]()
    for _ in range(4):
        before = world.containers.directory(container)
        collected.refresh()
        known.append(world.containers.directory(container) is before)
    assert known == [False, True, False, True], "a change before the first check is not known"


def test_pending_or_deleted_chunks_are_lost(world: World) -> None:
    """Report chunks as lost once they are pending delete and once deleted."""
    locations = Locations.join([world.chunks["kept"], world.chunks["gone"]])
    removed = np.repeat([False, True], [len(world.chunks["kept"]), len(world.chunks["gone"])])
    assert not world.collected.lost(locations, world.containers).any()
    delete(world.store)
    for _ in range(2):
        world.run_gc()
        assert np.array_equal(world.collected.lost(locations, world.containers), removed)


def test_pending_or_deleted_segments_dangle(world: World) -> None:
    """Report segments as dangling once pending delete and once deleted."""
    assert world.collected.find_dangling(world.segments["gone"]) is None
    delete(world.store)
    world.run_gc()
    assert "is pending deletion" in (world.collected.find_dangling(world.segments["gone"]) or "")
    world.run_gc()
    assert "missing" in (world.collected.find_dangling(world.segments["gone"]) or "")
    assert world.collected.find_dangling(world.segments["kept"]) is None
