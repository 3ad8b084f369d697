"""Names that real shards send ahead: the same answers with fewer requests, and never one that was withdrawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.redis_index import claims_of
from nearkin_index import name_grants
from nearkin_index.shard_app import ShardCalls
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards import held_names
from nearkin_shared.index.shards.key_ranges import owners_of_names
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.types import U8, ContainerId
from tests.support.data import samples
from tests.support.servers.index_shards import STORE_ID, TOKEN, ShelvedShards, shards

CONTAINERS, CHUNKS = 24, 96
SECONDS = 3.0
"""Life of a grant here: longer than a test looks, also on a busy machine."""
Filled = tuple[ShelvedShards, ShardedIndex, list[ContainerEntries]]
"""Shards with containers in memory, a client that holds no names, and the containers."""


@pytest.fixture
def long_grants() -> Iterator[None]:
    with (
        mock.patch.object(held_names, "HELD_SECONDS", SECONDS),
        mock.patch.object(name_grants, "GRANT_SECONDS", SECONDS * 1.25),
    ):
        yield


def entries(containers: int = CONTAINERS, chunks: int = CHUNKS) -> list[ContainerEntries]:
    """Return containers with random names."""
    return [
        claims_of(ContainerId(number << 20), chunks, np.random.default_rng(number))
        for number in range(1, containers + 1)
    ]


def names_of(one: ContainerEntries) -> U8:
    return one.directory.chunks.names


def client(index: ShelvedShards) -> ShardedIndex:
    """Return a client that holds no names."""
    return ShardedIndex(index.urls, STORE_ID, samples.DOMAIN, TOKEN, retries=1)


@contextmanager
def filled(folder: Path, count: int, published: list[ContainerEntries] | None = None) -> Iterator[Filled]:
    """Run `count` shards that have looked up all names of the containers, by default those of `entries`."""
    published = entries() if published is None else published
    with shards(folder, count) as index, closing(client(index)) as reader:
        index.publish_many(published)
        index.locate_chunks(np.concatenate([names_of(one) for one in published]))
        yield index, reader, published


def requests_of(index: ShardedIndex, names: U8) -> int:
    """Look up names that are all known; return the number of requests."""
    with mock.patch.object(index, "_call_many", wraps=index._call_many) as calls:
        assert index.locate_chunks(names)[1].all()
    return sum(len(call.args[1]) for call in calls.call_args_list)


@pytest.mark.usefixtures("long_grants")
def test_next_names_of_a_stream_need_no_request(tmp_path: Path) -> None:
    """Chunks and segments are found where the shards find them; names that are new are asked of the shards."""
    with shards(tmp_path, 2) as index, closing(client(index)) as reader, closing(client(index)) as fresh:
        published = entries()
        index.publish_many(published)
        names = np.concatenate([names_of(one) for one in published])
        ids = np.concatenate([one.segment_ids for one in published])
        expected, expected_segments = index.locate_chunks(names)[0], index.locate_segments(ids)[0]
        counts = [requests_of(reader, names_of(one)) for one in published]
        assert counts[0] == 2
        assert sum(counts) <= 6
        locations = reader.locate_chunks(names)[0]
        assert locations.containers.tolist() == expected.containers.tolist()
        assert locations.ordinals.tolist() == expected.ordinals.tolist()
        new = names ^ np.uint8(1)
        assert not reader.locate_chunks(new)[1].any()
        fresh.locate_segments(ids[:8])
        with mock.patch.object(fresh, "_call_many", wraps=fresh._call_many) as calls:
            found = fresh.locate_segments(ids[8:])
        assert found[1].all()
        assert found[0].containers.tolist() == expected_segments.containers[8:].tolist()
        assert found[0].ordinals.tolist() == expected_segments.ordinals[8:].tolist()
        assert calls.call_args_list[0].args[1] == []


@pytest.mark.usefixtures("long_grants")
def test_withdrawn_name_is_found_by_no_client(tmp_path: Path) -> None:
    """Once `withdraw` has returned, not even by one that held it, and asks the shards for other names."""
    with filled(tmp_path, 2) as (index, reader, published):
        requests_of(reader, names_of(published[0]))
        lost, kept = names_of(published[3]), names_of(published[4])
        assert requests_of(reader, lost) == requests_of(reader, kept) == 0, "they are not held"
        container = int(published[3].directory.container)
        index.withdraw({container: None}, {}, [])
        assert not reader.locate_chunks(lost)[1].any()
        reader.locate_chunks(kept)
        assert not reader.locate_chunks(lost)[1].any(), "a later answer prolonged it"
        assert requests_of(reader, kept) == 0
        index.publish(published[3])
        assert reader.locate_chunks(lost)[1].all()


@pytest.mark.usefixtures("long_grants")
def test_client_that_reads_on_never_finds_what_is_gone(tmp_path: Path) -> None:
    """Lookups all the time, while container after container is withdrawn and deleted."""
    with filled(tmp_path, 2) as (index, _, published):
        gone, stop, failures, found = set[int](), threading.Event(), list[str](), 0

        def look_up() -> None:
            nonlocal found
            with closing(client(index)) as reader:
                while not stop.is_set():
                    for one in published:
                        was_gone = int(one.directory.container) in gone
                        is_found = reader.locate_chunks(names_of(one))[1].any()
                        found += int(is_found)
                        if was_gone and is_found:
                            failures.append(f"container {one.directory.container:x}")

        thread = threading.Thread(target=look_up)
        thread.start()
        try:
            for one in published[:3]:
                index.withdraw({int(one.directory.container): None}, {}, [int(one.directory.container)])
                gone.add(int(one.directory.container))
        finally:
            stop.set()
            thread.join()
        assert found > 0
        assert failures == []


@pytest.mark.usefixtures("long_grants")
def test_restarted_shard_waits_for_grants_of_before(tmp_path: Path) -> None:
    """It does not know which it gave: its first withdrawal lasts as long as one may."""
    with filled(tmp_path, 1) as (index, reader, published):
        requests_of(reader, names_of(published[0]))
        assert requests_of(reader, names_of(published[3])) == 0
        server = index.servers[0]
        assert server.index is not None
        server.shard.calls = ShardCalls(server.index, list)
        index.withdraw({int(published[3].directory.container): None}, {}, [])
        assert not reader.locate_chunks(names_of(published[3]))[1].any()


@pytest.mark.usefixtures("long_grants")
def test_shard_away_leaves_only_what_is_held(tmp_path: Path) -> None:
    """Held names are found while their grant lasts, other calls fail; then all fail."""
    with filled(tmp_path, 2) as (index, reader, published):
        requested_at = time.monotonic()
        requests_of(reader, names_of(published[0]))
        index.servers[1].shard.calls = None
        is_found = reader.locate_chunks(names_of(published[1]))[1]
        if time.monotonic() < requested_at + SECONDS:
            assert is_found.all()
        with pytest.raises(StoreUnavailable, match="being completed"):
            reader.locate_chunks(names_of(published[1]) ^ np.uint8(1))
        time.sleep(max(0.0, requested_at + SECONDS + 0.1 - time.monotonic()))
        with pytest.raises(StoreUnavailable, match="being completed"):
            reader.locate_chunks(names_of(published[1]))


@pytest.mark.usefixtures("long_grants")
def test_shard_of_an_earlier_release_is_asked_each_time(tmp_path: Path) -> None:
    """During an upgrade one shard carries no names: its names are asked of it, those of the other are held."""
    with filled(tmp_path, 2) as (index, reader, published):
        calls = index.servers[1].shard.calls
        with mock.patch.object(calls, "_granted", return_value=b""):
            counts = [requests_of(reader, names_of(one)) for one in published]
        assert counts[0] == 2
        assert min(counts) == 1
        assert len(published) < sum(counts) <= len(published) + 4


@pytest.mark.usefixtures("long_grants")
def test_large_or_damaged_directory_does_not_travel(tmp_path: Path) -> None:
    """Its chunks are found as before, those of a damaged one not; containers around it are right."""
    small, large = entries(), claims_of(ContainerId(1 << 30), 9000, np.random.default_rng(99))
    with filled(tmp_path, 1, [*small, large]) as (index, reader, _):
        assert [requests_of(reader, names_of(large)) for _ in range(2)] == [1, 1]
        damaged = int(small[5].directory.container)
        del index.shelf.stored[damaged]
        server = index.servers[0]
        assert server.index is not None
        server.index.tablets.tablets.clear()
        for one in small:
            locations, found = reader.locate_chunks(names_of(one))
            assert found.all() == (one is not small[5])
            assert set(locations.containers[found].tolist()) <= {int(one.directory.container)}


@pytest.mark.usefixtures("long_grants")
def test_copy_of_a_chunk_is_not_carried(tmp_path: Path) -> None:
    """A chunk that two containers have is found in the first one, also by a client that holds names of the second."""
    with shards(tmp_path, 2) as index, closing(client(index)) as reader:
        first, second = entries(2)
        names_of(second)[10:20] = names_of(first)[:10]
        index.publish_many([first, second])
        index.locate_chunks(names_of(second))
        owners = owners_of_names(names_of(second), 2)
        asked = names_of(second)[20:][[int(np.flatnonzero(owners[20:] == shard)[0]) for shard in (0, 1)]]
        assert reader.locate_chunks(asked)[1].all()
        assert requests_of(reader, names_of(second)[20:]) == 0, "nothing is held"
        locations, found = reader.locate_chunks(names_of(second)[10:20])
        assert found.all()
        assert set(locations.containers.tolist()) == {int(first.directory.container)}
