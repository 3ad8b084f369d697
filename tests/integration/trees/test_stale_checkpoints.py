"""Checkpoints that no backup continues: a GC run deletes them after two weeks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nearkin.store import Item, Store, open_store
from nearkin_shared.checkpoint_expiry import CHECKPOINT_DAYS, checkpoint_keys, expire_checkpoints
from nearkin_shared.objectstore.s3 import S3ObjectStore
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.validation import checkpoint_key_of
from tests.support.data.stores import settings, stored_bytes
from tests.support.servers.maintenance_workers import Fleet, copy_objects
from tests.support.servers.servers import Redis

DAY = 86400.0
CHOSEN = settings({"gc": {"grace_seconds": 0}})


class Clock:
    """A clock that a test sets, in days."""

    def __init__(self) -> None:
        self.days = 20_000.0

    def __call__(self) -> float:
        return self.days * DAY


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(tmp_path / "store", settings=CHOSEN, clock=clock, create=True) as opened:
        opened.put("key", b"kept")
        yield opened


def checkpoint(store: Store, key: str) -> None:
    list(store.put_many([Item(checkpoint_key_of(key), os.urandom(100_000), is_checkpoint=True)]))


def remaining(store: Store) -> set[str]:
    names = {checkpoint_key_of(key): key for key in ("home", "other")}
    return {names[key] for _, key in store._index.read(lambda index: checkpoint_keys(index, ["default"]))}


def test_gc_deletes_checkpoints_after_two_weeks(store: Store, clock: Clock) -> None:
    """The newest checkpoint of a key decides: the backup that made it may need all before it."""
    checkpoint(store, "home")
    checkpoint(store, "other")
    clock.days += 10
    checkpoint(store, "other")
    clock.days += CHECKPOINT_DAYS - 10 - 0.1
    store.gc()
    assert remaining(store) == {"home", "other"}
    clock.days += 0.2
    before = stored_bytes(store.root)
    expected = store.gc(dry_run=True)
    report = store.gc()
    assert (report.versions, report.forgotten, report.undeletable_versions) == (0, 0, 0)
    assert expected.freed_bytes == report.freed_bytes == before - stored_bytes(store.root)
    assert remaining(store) == {"other"}
    assert store.stats().checkpoints == 2
    clock.days += 10
    store.gc()
    assert remaining(store) == set()
    for _ in range(3):  # deleted, pending delete, freed
        clock.days += 1
        store.gc()
    assert stored_bytes(store.root) < before - 250_000
    assert store.get("key").read() == b"kept"
    assert not store.verify().damage


def test_gc_that_only_previews_keeps_checkpoints(store: Store, clock: Clock) -> None:
    """A dry run deletes no checkpoint."""
    checkpoint(store, "home")
    clock.days += CHECKPOINT_DAYS + 1
    store.gc(dry_run=True)
    assert remaining(store) == {"home"}


def test_checkpoint_stored_by_a_wrong_clock_is_kept(store: Store, clock: Clock) -> None:
    """A checkpoint from the future is recent."""
    clock.days += 100
    checkpoint(store, "home")
    clock.days -= 60
    store.gc()
    assert remaining(store) == {"home"}


def test_checkpoints_of_a_fleet_expire(
    tmp_path: Path, clock: Clock, s3_objects: S3ObjectStore, redis: Redis, key_prefix: str
) -> None:
    """The index in Redis lists the checkpoints of all tenants; deletions are noted in it."""
    with open_store(tmp_path / "store", settings=CHOSEN, clock=clock, create=True) as opened:
        opened.put("key", b"kept")
        checkpoint(opened, "home")
    copy_objects(tmp_path / "store", s3_objects)
    fleet = Fleet(s3_objects, redis.url, key_prefix.rstrip(":"), clock())
    with closing(fleet.index):
        fleet.fill_index()
        manifests = ManifestStore(s3_objects)
        deletions = Deletions(manifests, fleet.index.mark_many, clock=clock)
        for days, left in ((CHECKPOINT_DAYS - 1, 1), (2, 0)):
            clock.days += days
            expire_checkpoints(checkpoint_keys(fleet.index, fleet.index.tenants()), manifests, deletions, clock())
            assert len(checkpoint_keys(fleet.index, fleet.index.tenants())) == left
        assert fleet.index.tenants() == ["default"]
