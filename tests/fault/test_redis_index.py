"""Redis fails: emptied, killed, full, rolled back, tampered with.

An answer is right or "not found", never wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.errors import ConfigError, Corrupt, FormatTooNew, RetryableError, StoreUnavailable
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.redis import RedisIndex, redis_index
from nearkin_shared.index.redis.connection import RETRIES
from nearkin_shared.index.redis.memory_bound import READ_SECONDS, MemoryBound
from nearkin_shared.index.redis.redis_index import PARTITIONS
from nearkin_shared.index.redis.scripts import BUCKET_ENTRIES_MAX
from nearkin_shared.observability import metrics
from nearkin_shared.types import ContainerId
from tests.support.conformance.index_contract import (
    FIRST,
    SECOND,
    SKETCH,
    THIRD,
    chunk_names,
    claims,
    first_claims,
    ids,
    manifest,
    of_rank,
    rows,
    second_claims,
)
from tests.support.data import samples
from tests.support.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.start()
    with redis.Redis.from_url(shared_server.url) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    return shared_server


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


Connect = Callable[..., RedisIndex]


@pytest.fixture
def connect(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    made = []

    def one(retries: int = RETRIES, partitions: int = PARTITIONS, **changes: Any) -> RedisIndex:
        monkeypatch.setattr(redis_index, "PARTITIONS", partitions)
        settings = RedisSettings(url=server.url, **changes)
        made.append(RedisIndex(settings, samples.DOMAIN, timeout_seconds=2, retries=retries))
        return made[-1]

    yield one
    for index in made:
        index.close()


def many_claims(container: ContainerId, count: int, label: str) -> ContainerEntries:
    chunks = [f"{label}{number:05}" for number in range(count)]
    return claims(
        container, chunks, [f"{label}s1", f"{label}s2"], [[number + 1, number + 7] for number in range(count)]
    )


def mark_complete(index: RedisIndex) -> None:
    """Mark the index as rebuilt, as a rebuild does."""
    from nearkin_shared.index.redis.background_rebuild import Rebuilder

    Rebuilder(index, lambda _: None).run_once()


# --- emptied --------------------------------------------------------------------------------------------------------


def test_emptied_server_finds_nothing_and_needs_a_rebuild(connect: Connect, raw: redis.Redis) -> None:
    """An emptied server answers "not found" and requires a rebuild."""
    index = connect()
    index.publish(first_claims())
    index.commit(manifest("k", 1, [(FIRST, 0)]), 100)
    mark_complete(index)
    assert not index.needs_rebuild
    raw.flushall()
    assert rows(index.locate_chunks(chunk_names("a", "bb"))) == [None, None]
    assert index.needs_rebuild
    assert index.versions_of("default", "k") == []
    assert list(index.containers()) == []


def test_flush_between_lookup_and_publish_keeps_locations(connect: Connect, raw: redis.Redis) -> None:
    """After a flush between lookup and publish a container is found at its location."""
    index = connect()
    index.publish(first_claims())
    assert rows(index.locate_chunks(chunk_names("bb"))) == [(FIRST, 1)]
    raw.flushall()
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("a", "bb", "dddd"))) == [None, (SECOND, 0), (SECOND, 1)]


@pytest.mark.parametrize("step", ["first_numbers", "finish"])
def test_flush_within_publish_writes_to_the_new_epoch(
    connect: Connect, raw: redis.Redis, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a flush within a publish the entries belong to the new epoch.

    Numbers were assigned, or entries were written, and then all are lost: the publish starts over.
    """
    index, other = connect(), connect()
    index.publish(first_claims())
    real, flushes = getattr(index.epochs, step), iter([True])

    def flush_after(*args: object) -> object:
        if next(flushes, False):
            answer = real(*args) if step == "first_numbers" else None
            raw.flushall()
            other.publish(claims(THIRD, ["x", "yy", "zzz"], ["t1", "t2"], [[1], [2], [3]]))  # takes the same numbers
            return answer if step == "first_numbers" else real(*args)
        return real(*args)

    monkeypatch.setattr(index.epochs, step, flush_after)
    index.publish(second_claims())
    for seen_by in (index, other, connect()):
        found = rows(seen_by.locate_chunks(chunk_names("a", "bb", "dddd", "eeeee", "x", "zzz")))
        assert found == [None, (SECOND, 0), (SECOND, 1), (SECOND, 2), (THIRD, 0), (THIRD, 2)]
    assert len(list(index.containers())) == 2


def test_remembered_numbers_are_not_used_in_another_epoch(connect: Connect, raw: redis.Redis) -> None:
    """Numbers that a client remembers are never used in another epoch.

    Both containers get the same numbers in their epochs; a client that knew the first must not confuse them.
    """
    remembers, other = connect(), connect()
    remembers.publish(claims(FIRST, ["p", "qq", "rrr"], ["s1", "s2"], [[1], [2], [3]]))
    assert rows(remembers.locate_chunks(chunk_names("qq"))) == [(FIRST, 1)]
    raw.flushall()
    other.publish(claims(SECOND, ["rrr", "qq", "p"], ["s1", "s2"], [[3], [2], [1]]))
    assert rows(remembers.locate_chunks(chunk_names("p", "qq", "rrr"))) == [(SECOND, 2), (SECOND, 1), (SECOND, 0)]
    assert rows(of_rank(remembers, SKETCH, 0, np.array([1, 3], np.uint64))) == [(SECOND, 2), (SECOND, 0)]
    assert rows(remembers.locate_segments(ids("s2"))) == [(SECOND, 1)]


def test_lost_partition_ends_the_epoch(connect: Connect, raw: redis.Redis) -> None:
    """In a Cluster one server can be emptied alone; the entries of the others belong to an epoch that is over."""
    index = connect()
    index.publish(first_claims())
    mark_complete(index)
    before = index.epochs.current.name
    raw.delete(*[key for key in raw.scan_iter() if b"{c" in key])
    assert rows(index.locate_chunks(chunk_names("a"))) == [None]
    assert index.epochs.current.name != before
    assert index.needs_rebuild
    index.publish(first_claims())
    mark_complete(index)  # sweeps
    assert not [key for key in raw.scan_iter() if before.encode() in key]
    assert rows(index.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]


def test_many_clients_begin_one_epoch(connect: Connect, raw: redis.Redis) -> None:
    """Of many clients that notice the loss one begins the epoch."""
    clients = [connect() for _ in range(8)]
    raw.flushall()
    threads = [threading.Thread(target=client.locate_chunks, args=(chunk_names("a"),)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.check()
    assert len({client.epochs.current.name for client in clients}) == 1
    name = clients[0].epochs.current.name.encode()
    assert all(name in key for key in raw.scan_iter() if not key.endswith((b"epoch", b"lease", b"fence")))


# --- killed and rolled back -----------------------------------------------------------------------------------------


def test_server_killed_in_a_batch_answers_nothing_wrong(connect: Connect, server: RedisServer) -> None:
    """A server killed during a batch loses entries and never answers wrongly."""
    index = connect(retries=30)
    published: list[ContainerId] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def publish() -> None:
        try:
            for number in range(10_000):
                if stop.is_set():
                    return
                container = ContainerId((1 << 40) + 7 * number)
                index.publish(many_claims(container, 40, f"c{number}-"))
                published.append(container)
        except BaseException as err:
            failures.append(err)

    thread = threading.Thread(target=publish)
    thread.start()
    for _ in range(2):
        target = len(published) + 20
        while len(published) < target and thread.is_alive():
            time.sleep(0.005)
        server.kill()
        server.start()
    target = len(published) + 20
    while len(published) < target and thread.is_alive():
        time.sleep(0.005)
    stop.set()
    thread.join(30)
    assert failures == []
    right = wrong = 0
    for seen_by in (index, connect()):
        for number, container in enumerate(published):
            found = rows(seen_by.locate_chunks(chunk_names(*[f"c{number}-{n:05}" for n in range(40)])))
            right += sum(place == (container, n) for n, place in enumerate(found))
            wrong += sum(place not in (None, (container, n)) for n, place in enumerate(found))
    assert wrong == 0
    assert right >= 2 * 20 * 40  # all entries published after the last kill


def test_unreachable_server_is_a_retryable_error(
    connect: Connect, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stays unreachable is an error that may be retried."""
    index = connect(retries=2)
    index.publish(first_claims())
    server.kill()
    tries: list[redis.Connection] = []
    plain = redis.Connection._connect

    def counted(connection: redis.Connection) -> Any:
        tries.append(connection)
        return plain(connection)

    monkeypatch.setattr(redis.Connection, "_connect", counted)
    with pytest.raises(StoreUnavailable, match="may be repeated"):
        index.locate_chunks(chunk_names("a"))
    assert len(tries) == 3
    with pytest.raises(RetryableError):
        index.publish(second_claims())
    assert len(tries) == 6
    with pytest.raises(StoreUnavailable):
        connect(retries=0)
    assert len(tries) == 7
    server.start()
    assert rows(index.locate_chunks(chunk_names("a"))) == [None]
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("bb"))) == [(SECOND, 0)]


def test_older_snapshot_reuses_no_number(tmp_path: Path) -> None:
    """An older snapshot never assigns a used number to a second container.

    The dump lacks the last container; its number must not pass to another while a client remembers it.
    """
    with RedisServer(tmp_path) as server:
        settings = RedisSettings(url=server.url)
        index = RedisIndex(settings, samples.DOMAIN)
        index.publish(first_claims())
        with redis.Redis.from_url(server.url) as client:
            client.save()
        index.publish(claims(SECOND, ["p", "qq", "rrr"], ["s7", "s8"], [[1], [2], [3]]))
        assert rows(index.locate_chunks(chunk_names("qq"))) == [(SECOND, 1)]
        before = index.epochs.current.name
        server.kill()
        server.start()
        assert rows(index.locate_chunks(chunk_names("a", "qq"))) == [(FIRST, 0), None]  # still of that epoch, and right
        other = RedisIndex(settings, samples.DOMAIN)  # reads the run_id when it starts
        other.publish(claims(THIRD, ["x", "qq", "zzz"], ["t1", "t2"], [[7], [8], [9]]))
        # GC never freed FIRST: the continued epoch still has its entries.
        assert rows(index.locate_chunks(chunk_names("a", "x", "qq"))) == [(FIRST, 0), (THIRD, 0), (THIRD, 1)]
        assert index.epochs.current.name == other.epochs.current.name != before
        index.close()
        other.close()


def test_scripts_lost_by_the_server_are_loaded_again(connect: Connect, raw: redis.Redis) -> None:
    """Scripts that the server lost are loaded again."""
    index = connect()
    index.publish(first_claims())
    raw.script_flush()
    assert rows(index.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
    raw.script_flush()
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("dddd"))) == [(SECOND, 1)]


# --- refused, full --------------------------------------------------------------------------------------------------


def test_eviction_policy_is_refused_with_the_remedy(connect: Connect, raw: redis.Redis) -> None:
    """A memory policy that evicts is refused with the remedy."""
    raw.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r'"allkeys-lru".*CONFIG SET maxmemory-policy noeviction'):
        connect()


def test_full_server_refuses_entries_and_answers(connect: Connect, raw: redis.Redis) -> None:
    """A full server refuses entries and still answers."""
    index = connect()
    index.publish(first_claims())
    raw.config_set("maxmemory", "1mb")
    with pytest.raises(StoreUnavailable, match="raise maxmemory"):
        index.publish(second_claims())
    with pytest.raises(StoreUnavailable, match="raise maxmemory"):
        index.commit(manifest("k", 1, [(FIRST, 0)]), 100)
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), None]
    raw.config_set("maxmemory", 0)
    index.publish(second_claims())
    index.commit(manifest("k", 1, [(FIRST, 0)]), 100)
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), (SECOND, 1)]
    assert index.versions_of("default", "k") == [1]


def test_full_index_publishes_containers_without_entries(connect: Connect) -> None:
    """Beyond `redis.bytes_max` containers and versions are recorded, and their chunks and segments are not found."""
    before = metrics.UNPUBLISHED_CHUNKS._value.get()
    index, entries = connect(bytes_max=1), first_claims()
    index.publish(entries)
    assert not any(rows(index.locate_chunks(chunk_names("a", "bb"))))
    assert not index.locate_segments(entries.segment_ids)[1].any()
    assert metrics.UNPUBLISHED_CHUNKS._value.get() - before == len(entries.findable)
    index.commit(manifest("k", 1, [(FIRST, 0)]), 100)
    assert index.container_ids().tolist() == [FIRST]
    assert index.versions_of("default", "k") == [1]


def nearly_fill(index: RedisIndex, raw: redis.Redis) -> int:
    """Publish a first container and return the memory in use; 16 MiB of it belong to another key."""
    index.publish(first_claims())
    raw.set("other", bytes(16 << 20))
    return int(raw.info("memory")["used_memory"])


def test_index_near_its_bound_leaves_out_super_features(connect: Connect, raw: redis.Redis) -> None:
    """From 90 % of the bound on super-features are left out; chunks are still found."""
    roomy = connect()
    index = connect(bytes_max=nearly_fill(roomy, raw) * 20 // 19)
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("dddd"))) == [(SECOND, 1)]
    assert rows(of_rank(index, SKETCH, 0, np.array([82], np.uint64))) == [None]
    roomy.publish(second_claims())
    assert rows(of_rank(index, SKETCH, 0, np.array([82], np.uint64))) == [(SECOND, 2)]


def test_index_without_bound_leaves_room_below_maxmemory(connect: Connect, raw: redis.Redis) -> None:
    """Without `redis.bytes_max` the last 5 % of `maxmemory` take containers and versions only."""
    raw.config_set("maxmemory", nearly_fill(connect(), raw) * 51 // 50)
    index = connect()
    index.publish(second_claims())
    index.commit(manifest("k", 1, [(SECOND, 0)]), 100)
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), None]
    assert index.container_ids().tolist() == [FIRST, SECOND]
    assert index.versions_of("default", "k") == [1]


def test_memory_added_lets_entries_in_again(connect: Connect, raw: redis.Redis) -> None:
    """Once there is room again, containers get their entries."""
    now = [0.0]
    raw.config_set("maxmemory", nearly_fill(connect(), raw) * 51 // 50)
    index = connect()
    index._memory = MemoryBound(index.server, 0, clock=lambda: now[0])
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("dddd"))) == [None]
    raw.config_set("maxmemory", 0)
    now[0] += READ_SECONDS
    index.publish(second_claims())
    assert rows(index.locate_chunks(chunk_names("dddd"))) == [(SECOND, 1)]


def test_password_is_required_and_never_shown(tmp_path: Path) -> None:
    """The password is required and never shown."""
    with RedisServer(tmp_path, "--requirepass", "s3same") as server:
        with pytest.raises(ConfigError, match=r"redis\.password") as refused:
            RedisIndex(RedisSettings(url=server.url, password="opn-wrong"), samples.DOMAIN, retries=0)
        assert "opn-wrong" not in str(refused.value)
        index = RedisIndex(RedisSettings(url=server.url, password="s3same"), samples.DOMAIN)
        index.publish(first_claims())
        assert rows(index.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
        assert "s3same" not in repr(RedisSettings(url=server.url, password="s3same"))
        index.close()


def test_password_changed_under_a_worker_is_retryable(tmp_path: Path) -> None:
    """A password that changes while a worker runs counts as an unreachable server.

    A worker would put aside, as wrong, every message that it was given meanwhile.
    """
    with RedisServer(tmp_path, "--requirepass", "old") as server:
        index = RedisIndex(RedisSettings(url=server.url, password="old"), samples.DOMAIN, retries=0)
        index.publish(first_claims())
        with redis.Redis.from_url(server.url, password="old") as client:
            client.config_set("requirepass", "new")
        with redis.Redis.from_url(server.url, password="new") as client:
            client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(StoreUnavailable, match=r"redis\.password"):
                index.locate_chunks(chunk_names("a"))
            client.config_set("requirepass", "old")
        assert rows(index.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
        index.close()


# --- tampered with --------------------------------------------------------------------------------------------------


def partitions_of(raw: redis.Redis, letter: str) -> list[bytes]:
    return [key for key in raw.scan_iter() if b"{" + letter.encode() in key and raw.type(key) == b"hash"]


def value_of(raw: redis.Redis, key: bytes, field: bytes) -> bytes:
    value = raw.hget(key, field)
    assert isinstance(value, bytes)
    return value


def buckets_of(raw: redis.Redis, key: bytes) -> list[bytes]:
    """Return a partition's buckets: fields of 3 bytes; shorter ones are its state, GC generation and server."""
    return [field for field in raw.hkeys(key) if isinstance(field, bytes) and len(field) == 3]


@pytest.mark.parametrize("state", [None, b"", b"1 0", b"0 0 0 0", b"99 0 0", b"2 9 0", b"-1 0 0", b"\0" * 40])
def test_foreign_state_is_an_error_with_the_key(connect: Connect, raw: redis.Redis, state: bytes | None) -> None:
    """A state that no writer wrote is an error that names the key."""
    index = connect()
    index.publish(first_claims())
    for key in partitions_of(raw, "c"):
        if state is None:
            raw.delete(key)
            raw.set(key, b"not a hash")
        else:
            raw.hset(key, "", state)
    with pytest.raises(Corrupt, match=r"nearkin:\{c.*delete all keys"):
        index.locate_chunks(chunk_names("a"))
    with pytest.raises(Corrupt, match=r"nearkin:\{c"):
        index.publish(second_claims())


@pytest.mark.parametrize("generation", [b"", b"noise", b"-1", b"nan", b"0x1", b"9" * 400])
def test_damaged_gc_generation_is_stale_until_checked(connect: Connect, raw: redis.Redis, generation: bytes) -> None:
    """F.23: A partition whose GC generation is no number misses, accepts entries, and answers once it was checked."""
    index = connect()
    index.publish(first_claims())
    mark_complete(index)
    for key in [key for letter in "cfs" for key in partitions_of(raw, letter)]:
        raw.hset(key, "g", generation)
    assert rows(index.locate_chunks(chunk_names("a", "bb"))) == [None, None]
    assert rows(index.locate_segments(ids("s1"))) == [None]
    assert rows(of_rank(index, SKETCH, 0, np.array([70], np.uint64))) == [None]
    index.publish(second_claims())
    assert index.advance_generation(7) == 7
    assert index.is_stale()
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [None, None]
    mark_complete(index)
    assert not index.is_stale()
    assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [(FIRST, 0), (SECOND, 1)]


@pytest.mark.parametrize("highest", [b"", b"noise", b"inf", b"9" * 400])
def test_damaged_highest_number_is_an_error_with_the_key(connect: Connect, raw: redis.Redis, highest: bytes) -> None:
    """F.23: A partition whose highest number is unknown accepts no entries: numbers might be assigned twice."""
    index = connect()
    index.publish(first_claims())
    for key in partitions_of(raw, "c"):
        raw.hset(key, "m", highest)
    with pytest.raises(Corrupt, match=r"nearkin:\{c.*delete all keys"):
        index.publish(second_claims())


@pytest.mark.parametrize("cut", [1, 5, 13, 17, 19])
def test_truncated_bucket_counts_as_missing(connect: Connect, raw: redis.Redis, cut: int) -> None:
    """A truncated bucket counts as a missing one."""
    index = connect(partitions=1)
    claimed = many_claims(FIRST, 30, "t")  # one bucket of 30 entries: the cut falls within one
    index.publish(claimed)
    (key,) = partitions_of(raw, "c")
    (field,) = buckets_of(raw, key)
    raw.hset(key, field, value_of(raw, key, field)[:-cut])
    assert rows(index.locate_chunks(claimed.directory.chunks.names)) == [None] * 30
    index.publish(claimed)
    assert rows(index.locate_chunks(claimed.directory.chunks.names)) == [(FIRST, n) for n in range(30)]


def test_bucket_of_noise_finds_nothing_and_accepts_entries(connect: Connect, raw: redis.Redis) -> None:
    """A bucket of noise finds nothing and accepts entries."""
    index = connect()
    index.publish(first_claims())
    for letter, width in (("c", 18), ("f", 10), ("s", 18)):
        for number, key in enumerate(partitions_of(raw, letter)):
            for field in buckets_of(raw, key):
                raw.hset(key, field, samples.noise(width * 50, f"{letter}{number}").tobytes())
    assert rows(index.locate_chunks(chunk_names("a", "bb"))) == [None, None]
    assert rows(index.locate_segments(ids("s1"))) == [None]
    assert rows(of_rank(index, SKETCH, 0, np.array([70, 80], np.uint64))) == [None, None]
    index.publish(first_claims())
    assert rows(index.locate_chunks(chunk_names("a", "bb"))) == [(FIRST, 0), (FIRST, 1)]


@pytest.mark.parametrize("number", [0, 4, 1000, (1 << 40) - 1])
def test_unassigned_number_is_not_a_location(connect: Connect, raw: redis.Redis, number: int) -> None:
    """A number that was never assigned is not a location."""
    index = connect(partitions=1)
    index.publish(first_claims())  # numbers 1 to 3
    (key,) = partitions_of(raw, "c")
    (field,) = buckets_of(raw, key)
    bucket = value_of(raw, key, field)
    forged = b"".join(bucket[at : at + 13] + number.to_bytes(5, "little") for at in range(0, len(bucket), 18))
    raw.hset(key, field, forged)
    assert rows(index.locate_chunks(chunk_names("a", "bb", "ccc"))) == [None] * 3


@pytest.mark.parametrize("record", [b"", b"short", b"\xff" * 36, b"\0" * 36, b"\1" * 400])
def test_tampered_container_table_finds_nothing(connect: Connect, raw: redis.Redis, record: bytes) -> None:
    """A container table that was tampered with finds nothing."""
    connect().publish(first_claims())
    (table,) = [key for key in raw.scan_iter() if key.endswith(b":table")]
    raw.lset(table, 0, record)  # type: ignore[arg-type]  # redis-py accepts bytes, too
    assert rows(connect().locate_chunks(chunk_names("a", "bb"))) == [None, None]


@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"1 short 16 abc 0", b"1 AbCdEfGh 16 0000 1", b"1 AbCdEfGh 0 abc 0"]
)
def test_foreign_epoch_is_replaced(connect: Connect, raw: redis.Redis, value: bytes) -> None:
    """An epoch that no writer wrote is replaced."""
    index = connect()
    index.publish(first_claims())
    raw.set("nearkin:{m}:epoch", value)
    for client in (index, connect()):
        assert rows(client.locate_chunks(chunk_names("a"))) == [None]
        assert client.needs_rebuild
    index.publish(first_claims())
    assert rows(connect().locate_chunks(chunk_names("a"))) == [(FIRST, 0)]


def test_later_layout_is_left_unchanged(connect: Connect, raw: redis.Redis) -> None:
    """A later layout is left unchanged."""
    raw.set("nearkin:{m}:epoch", b"2 AbCdEfGh 16 abc 1")
    with pytest.raises(FormatTooNew, match="layout 2"):
        connect()
    assert raw.get("nearkin:{m}:epoch") == b"2 AbCdEfGh 16 abc 1"


def test_version_that_does_not_parse_is_corrupt(connect: Connect, raw: redis.Redis) -> None:
    """A version that does not parse is Corrupt."""
    index = connect()
    index.commit(manifest("k", 1, []), 100)
    (versions,) = [key for key in raw.scan_iter() if raw.type(key) == b"zset"]
    raw.zadd(versions, {b"k\0\0short": 0})
    with pytest.raises(Corrupt, match="does not parse"):
        list(index.catalog("default"))


def test_crafted_super_features_fill_one_bucket(connect: Connect, raw: redis.Redis) -> None:
    """Keys of one bucket at every level: the bucket stops growing, and the others continue."""
    from nearkin_shared.index.redis.key_encoding import FEATURES, Keys

    index = connect(partitions=1)
    epoch = index.epochs.current
    count = BUCKET_ENTRIES_MAX + 300
    packed = np.zeros((count, FEATURES.width), np.uint8)  # the first 24 bits choose the bucket: all zero
    packed[:, 3:5] = np.arange(count, dtype="<u2").view(np.uint8).reshape(-1, 2)
    packed[:, 5] = 1
    assert len(Keys(packed[:, :5], np.zeros(count, np.uint16))) == count
    key = epoch.partition(FEATURES, 0)
    added, sizes = 0, (5, FEATURES.width, FEATURES.bucket_entries)
    for start in range(0, count, 512):
        part = packed[start : start + 512].tobytes()
        added += index.server.one(index.server.call("insert", [key], part, *sizes, 0))
    assert added == BUCKET_ENTRIES_MAX
    assert max(len(value) for value in raw.hvals(key)) == BUCKET_ENTRIES_MAX * FEATURES.width
    index.publish(first_claims())
    assert rows(of_rank(index, SKETCH, 0, np.array([70], np.uint64))) == [(FIRST, 0)]
