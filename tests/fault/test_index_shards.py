"""Index shards as processes over a real store: killed, damaged, lost, and of another store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest

from nearkin import open_store
from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.local.index_recovery import super_features_of
from nearkin.workers.index_shard import shard_store
from nearkin_index.shard_server import ShardOptions, open_complete
from nearkin_maintenance import Rewriter
from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.gc_worker import GcWorker, GcWorkerPorts
from nearkin_maintenance.index_rebuild import entries_of_container
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import BadInput, ConfigError, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards.shard_connection import shard_token
from nearkin_shared.index.shards.shard_messages import BODY_BYTES_MAX, SHARD_HEADER
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL
from tests.support.data.stores import settings as chosen
from tests.support.servers.shard_process import ShardProcess

COUNT = 3


class Fleet:
    """A store, the entries of its containers, and its shards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self.settings: Settings = chosen(
            SMALL, {"store": str(self.store), "index": {"map_bytes": 64 * MIB}, "deletion": {"undelete_seconds": 0}}
        )
        with open_store(self.store, settings=self.settings, create=True) as opened:
            content = text_like(300_000, 1)
            for version in range(6):
                opened.put("k", content)
                content = mutate(content, version, edits=300, edit_bytes_max=90)
        objects, found = open_store_of(self.settings)
        self.store_id, self.domain = found.store_id, domain_of(self.settings.tenant)
        containers = ContainerStore(objects, self.domain, 8 * MIB)
        secret = bytes.fromhex(found.secret)
        owners = DomainOwners(
            lambda tenant: Fingerprinter(secret, tenant, found.fingerprint_bits),
            [self.settings.tenant],
            ManifestStore(objects),
        )
        ids = sorted(container for container, _ in containers.ids())
        sound = {int(container) for container in ids}
        self.entries: list[ContainerEntries] = [
            entries_of_container(
                containers.directory(one), containers, owners.fingerprinter(self.domain), super_features_of, sound
            )
            for one in ids
        ]
        self.token = shard_token(secret)
        environment = {"NEARKIN_STORE": str(self.store), "NEARKIN_INDEX__MAP_BYTES": str(64 * MIB)}
        self.shards = [ShardProcess(folder / f"{number}", number, COUNT, environment) for number in range(COUNT)]

    def client(self, retries: int = 1) -> ShardedIndex:
        urls = [shard.url for shard in self.shards]
        return ShardedIndex(urls, self.store_id, self.domain, self.token, retries=retries, timeout_seconds=10)

    def check(self, index: ShardedIndex) -> None:
        """Assert that all chunks, segments and super-features are found where they are."""
        names = np.concatenate([one.directory.chunks.names[one.directory.chunks.there] for one in self.entries])
        expected = [
            (int(one.directory.container), int(ordinal))
            for one in self.entries
            for ordinal in np.flatnonzero(one.directory.chunks.there)
        ]
        first = {bytes(name): place for name, place in zip(names[::-1], expected[::-1], strict=True)}
        locations, found = index.locate_chunks(names)
        assert found.all()
        places = list(zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True))
        assert places == [first[bytes(name)] for name in names]
        ids = np.concatenate([one.segment_ids for one in self.entries])
        assert index.locate_segments(ids[ids.any(axis=1)])[1].all()
        assert not index.locate_chunks(names ^ np.uint8(1))[1].any()
        for one in self.entries:
            for sketch, (_, values) in one.super_features.items():
                assert (index.locate_ranks(sketch, values)[1] == (values.T != 0).ravel()).all()
        assert index.container_ids().tolist() == [int(one.directory.container) for one in self.entries]
        assert index.versions_of("default", "k") == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    fleet.shards[0].give_new_lease()
    try:
        for shard in fleet.shards:
            shard.start()
        yield fleet
    finally:
        for shard in fleet.shards:
            shard.stop()


def test_killed_shard_gives_no_wrong_answer(fleet: Fleet) -> None:
    """While it is away calls fail; back, lost or damaged it has all entries before it answers."""
    index = fleet.client()
    fleet.check(index)
    second = fleet.shards[1]
    second.kill()
    with pytest.raises(StoreUnavailable, match="index shard"):
        fleet.check(index)
    second.start()
    fleet.check(index)
    second.kill()
    (data,) = (second.folder / "index").glob("*/data.mdb")
    data.write_bytes(b"damaged" * 2000)
    second.start()
    fleet.check(index)
    index.close()


def test_shard_killed_during_publications_loses_none(fleet: Fleet) -> None:
    """Each publication is repeated until all shards have it; lookups meanwhile are right or fail."""
    index, stop, failures = fleet.client(retries=0), threading.Event(), list[str]()
    names = np.concatenate([one.directory.chunks.names[one.directory.chunks.there] for one in fleet.entries])
    answered = 0

    def look_up() -> None:
        nonlocal answered
        reader = fleet.client(retries=0)
        while not stop.is_set():
            try:
                found = reader.locate_chunks(names)[1]
            except StoreUnavailable:
                time.sleep(0.01)
            else:
                answered += 1
                if not found.all():
                    failures.append(f"{int((~found).sum())} known chunks are not found")
        reader.close()

    thread = threading.Thread(target=look_up)
    thread.start()
    refused = 0
    for number in (1, 0):
        fleet.shards[number].kill()
        try:
            index.publish_many(fleet.entries)
        except StoreUnavailable:
            refused += 1
        fleet.shards[number].start()
        index.publish_many(fleet.entries)
    stop.set()
    thread.join()
    assert (failures, refused) == ([], 2)
    assert answered
    fleet.check(index)
    index.close()


def test_shard_refuses_other_callers_and_bad_requests(fleet: Fleet) -> None:
    """Without token, of another store or shard, unknown calls, and bodies that are none or too large."""
    url, position = fleet.shards[0].url, f"0/{COUNT}/{fleet.store_id}"
    good = {"authorization": f"Bearer {fleet.token}", SHARD_HEADER: position}
    body = b"\x80"

    def status(call: str = "locate", content: bytes = body, **headers: str) -> int:
        given = {**good, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return httpx.post(f"{url}/v1/{call}", content=content, headers=given, timeout=30).status_code

    assert status("generation") == 200
    assert status("generation", authorization="Bearer wrong") == 401
    assert status("generation", nearkin_shard=f"1/{COUNT}/{fleet.store_id}") == 409
    assert status("generation", nearkin_shard=f"0/{COUNT}/{'0' * 32}") == 409
    assert status("nothing") == 404
    assert status("locate", b"no message") == 400
    assert status("locate", bytes(BODY_BYTES_MAX + 1)) == 413
    urls = [shard.url for shard in fleet.shards]
    for given_urls, token, message in ((urls, "wrong", "401"), (urls[::-1], fleet.token, "409")):
        other = ShardedIndex(given_urls, fleet.store_id, fleet.domain, token)
        with closing(other), pytest.raises(ConfigError, match=message):
            other.versions_of("default", "k")
    with closing(fleet.client()) as index:
        with pytest.raises(BadInput, match="400"):
            index._shards[0].call("versions", {"tenant": 1})
        fleet.check(index)


def test_reported_container_is_dropped_if_it_is_missing(fleet: Fleet) -> None:
    """Shards that list it end, and find nothing in it after their start; a report of another one changes nothing."""
    index = fleet.client(retries=0)
    lost, kept = fleet.entries[0], fleet.entries[-1]
    index.report_missing(int(kept.directory.container))
    index.report_missing(1 << 60)
    fleet.check(index)
    (path,) = (
        path for path in (fleet.store / "containers").rglob("*") if f"{lost.directory.container:016x}" in path.name
    )
    path.unlink()
    with suppress(StoreUnavailable):
        index.report_missing(int(lost.directory.container))
    for shard in fleet.shards:
        until(lambda shard=shard: not shard.ready())  # type: ignore[misc]
        shard.stop()
        shard.start()
    assert not index.locate_chunks(lost.directory.chunks.names)[1].any()
    assert int(lost.directory.container) not in index.container_ids().tolist()
    index.close()


def test_gc_run_leaves_no_held_name_of_freed_data(fleet: Fleet) -> None:
    """A worker that held names of a deleted version finds none of them once the run has withdrawn them."""
    with open_store(fleet.store, settings=fleet.settings) as opened:
        opened.put("dead", random_bytes(400_000, 9))
    for shard in fleet.shards:
        shard.stop()
        shard.start()
    objects = open_store_of(fleet.settings)[0]
    containers = ContainerStore(objects, fleet.domain, 8 * MIB)
    known = {int(one.directory.container) for one in fleet.entries}
    dead = np.concatenate([containers.directory(one).chunks.names for one, _ in containers.ids() if one not in known])
    with open_store(fleet.store, settings=fleet.settings) as opened:
        opened.delete("dead")
    index, reader, now, found = fleet.client(retries=5), fleet.client(), time.time(), list[bool]()
    assert index.locate_chunks(dead)[1].all()

    def withdraw(*removals: Any) -> None:
        for _ in range(3):  # hold them, and use what is held
            reader.locate_chunks(dead)
        ShardedIndex.withdraw(index, *removals)
        found.append(bool(reader.locate_chunks(dead)[1].any()))

    with closing(index), closing(reader), mock.patch.object(index, "withdraw", withdraw):
        stored = len(list(containers.ids()))
        for hours in (1, 3, 5):
            worker = gc_worker(fleet, index, now + 3600 * hours)
            assert worker.run_once() is not None
    assert found
    assert not any(found)
    assert len(list(containers.ids())) < stored, "nothing was deleted"


def gc_worker(fleet: Fleet, index: ShardedIndex, now: float) -> GcWorker:
    """Return the GC worker of a maintenance worker, whose clock is fixed."""
    objects, found = open_store_of(fleet.settings)
    secret, manifests = bytes.fromhex(found.secret), ManifestStore(objects)

    def fingerprinter(tenant: str) -> Fingerprinter:
        return Fingerprinter(secret, tenant, found.fingerprint_bits)

    owners = DomainOwners(fingerprinter, [fleet.settings.tenant], manifests)

    def rewriter(containers: ContainerStore) -> Rewriter:
        return Rewriter(containers, owners, fingerprinter(fleet.settings.tenant), BlockRecoder(fleet.settings))

    gc = GcSettings(grace_seconds=3600, interval_seconds=60, trust_clock=True)
    ports = GcWorkerPorts(lambda: gc, lambda over: ContainerStore(over, fleet.domain, 8 * MIB), rewriter)
    return GcWorker(index, objects, ports, clock=lambda: now)


def test_shard_behind_a_gc_generation_is_rebuilt(tmp_path: Path) -> None:
    """An older copy of its folder may have entries of deleted data: none of them is kept."""
    fleet = Fleet(tmp_path)
    store = shard_store(fleet.settings, *open_store_of(fleet.settings), 0, 1)
    options = ShardOptions(0, 1, tmp_path / "index", map_bytes=64 * MIB)
    index = open_complete(options, store)
    dead = int(fleet.entries[0].directory.container)
    index.withdraw({dead: None}, {}, [])
    names = fleet.entries[0].directory.chunks.names
    assert not index.locate_chunks(names)[1].any()
    index.close()
    same = open_complete(options, store)
    assert not same.locate_chunks(names)[1].any()
    same.close()
    newer = type(store)(store.store_id, store.directories, store.container_ids, lambda: 7, store.complete)
    reopened = open_complete(options, newer)
    assert reopened.locate_chunks(names)[1].all()
    assert reopened.generation == 7
    reopened.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [((3, 3), "--shard 3"), ((-1, 3), "--shard -1"), ((0, 0), "--of 0"), ((0, 65), "--of 65")],
)
def test_shard_of_impossible_number_is_refused(fields: tuple[int, int], message: str, tmp_path: Path) -> None:
    """The error names the option and its value."""
    with pytest.raises(ConfigError, match=message):
        ShardOptions(*fields, tmp_path)


def test_shard_without_token_serves_loopback_only(tmp_path: Path) -> None:
    """Other addresses need a token."""
    assert ShardOptions(0, 1, tmp_path, "::1").host
    with pytest.raises(ConfigError, match="token"):
        ShardOptions(0, 1, tmp_path, "0.0.0.0")
