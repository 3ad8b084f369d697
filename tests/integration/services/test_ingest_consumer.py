"""Test the consumer of users' topics on a real Kafka: one blob or dead letter per record."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_ingest import consumer as ingest_consumer
from nearkin_ingest.consumer import IngestConsumer
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.message import Batch, End, Frame, decode
from nearkin_shared.kafka.clients import Outbox, create_topics, topic
from nearkin_shared.kafka.consumer_loop import run_forever
from nearkin_shared.kafka.dead_letters import OMITTED_VALUE_HEADER
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.base import ObjectStore, Payload
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.observability import metrics
from tests.support.checks.waiting import until
from tests.support.data.batches import take_apart
from tests.support.data.samples import noise
from tests.support.servers.kafka_server import users_producer

PATIENCE_SECONDS = 40.0
Headers = list[tuple[str, str | bytes | None]]


@dataclass
class Blob:
    """One attempt's frames in the topic `frames`."""

    tenant: str = ""
    key: str = ""
    content: bytes = b""
    end: End | None = None
    headers: dict[str, bytes] = field(default_factory=dict)


class Pausing(threading.Event):
    """Counts the steps that a consumer begins while it is paused."""

    steps = 0

    def is_set(self) -> bool:
        found = super().is_set()
        self.steps += found
        return found


@dataclass
class World:
    """A deployment's topics, and one topic of its user."""

    settings: Settings
    folder: Path
    users: str

    def produce(self, records: Sequence[tuple[bytes | None, bytes | None, Headers]], partition: int = 0) -> None:
        producer = users_producer(self.settings.kafka.bootstrap_servers, message_max_bytes=10**7)
        for key, value, headers in records:
            producer.produce(self.users, value, key, partition=partition, headers=headers)
        assert producer.flush(30) == 0

    def read(self, name: str) -> list[Any]:
        """Everything that is in one of our topics now."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka.bootstrap_servers,
                "group.id": "reader",
                "enable.auto.commit": False,
            }
        )
        full = topic(self.settings, name)
        found = []
        try:
            for number in consumer.list_topics(full, timeout=30).topics[full].partitions:
                low, high = consumer.get_watermark_offsets(TopicPartition(full, number), timeout=30)
                consumer.assign([TopicPartition(full, number, low)])
                left = high - low
                while left:
                    message = consumer.poll(10)
                    assert message is not None
                    assert message.error() is None
                    found.append(message)
                    left -= 1
        finally:
            consumer.close()
        return found

    def blobs(self) -> list[Blob]:
        """The attempts that ended, in the order of their ends."""
        attempts: dict[bytes, Blob] = {}
        ended = []
        for message in self.read("frames"):
            decoded = decode(message.value(), "frames")
            assert message.key() == decoded.envelope.blob
            if isinstance(decoded, Batch):
                for (content, end), one in zip(take_apart(decoded), decoded.blobs, strict=True):
                    headers = {**dict(message.headers()), "traceparent": one.traceparent or b""}
                    ended.append(Blob(decoded.envelope.tenant, one.key, content, end, headers))
                continue
            blob = attempts.setdefault(message.key(), Blob(decoded.envelope.tenant, decoded.envelope.key))
            blob.headers = dict(message.headers())
            if isinstance(decoded, Frame):
                assert (decoded.envelope.position, len(decoded.payload) <= FRAME_BYTES_MAX) == (len(blob.content), True)
                blob.content += decoded.payload.tobytes()
            elif isinstance(decoded, End):
                blob.end = decoded
                ended.append(blob)
        for blob in ended:
            assert blob.end is not None
            if blob.end.failure is None:
                assert (blob.end.size_bytes, blob.end.blake3) == (len(blob.content), blake3(blob.content).digest())
        return ended

    def whole(self) -> list[Blob]:
        return [blob for blob in self.blobs() if blob.end is not None and blob.end.failure is None]

    def committed(self, partition: int = 0) -> int:
        """The offset that the consumer's group has committed."""
        group = self.settings.ingest.group or f"{self.settings.kafka.topic_prefix}ingest"
        consumer = Consumer({"bootstrap.servers": self.settings.kafka.bootstrap_servers, "group.id": group})
        try:
            return int(consumer.committed([TopicPartition(self.users, partition)], timeout=30)[0].offset)
        except KafkaException:  # a group's coordinator may still be looked for
            return -1
        finally:
            consumer.close()

    @contextmanager
    def running(self, objects: ObjectStore | None = None, worker: str = "w", **more: Any) -> Iterator[Pausing]:
        """Run a consumer; yields what pauses it."""
        stop, paused = threading.Event(), Pausing()
        failures: list[BaseException] = []
        chosen = more.pop("settings", self.settings)

        def run() -> None:
            try:
                run_forever(lambda: IngestConsumer(chosen, objects, worker, None), stop, paused.is_set, "ingest")
            except BaseException as err:
                failures.append(err)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield paused
        finally:
            stop.set()
            thread.join(60)
            assert not thread.is_alive()
            assert failures == []


@pytest.fixture
def world(kafka: Any, topic_prefix: str, tmp_path: Path) -> World:
    users = f"users-{topic_prefix.rstrip('.')}"
    settings, _ = load(
        None,
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},
            "ingest": {"topics": [f"{users}=team"], "dataref_prefix": "in/"},
            "object_store": {"url": str(tmp_path / "objects")},
        },
    )
    create_topics(settings)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    new = NewTopic(users, 2, 1, config={"max.message.bytes": "5000000"})
    admin.create_topics([new])[users].result(30)
    (tmp_path / "objects" / "in").mkdir(parents=True)
    return World(settings, tmp_path / "objects", users)


def test_records_become_blobs_in_order_and_offsets_are_committed(world: World) -> None:
    large = noise(2_500_000, "large").tobytes()
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    world.produce(
        [
            (b"small", b"content", [("ce_id", b"1"), ("ce_source", b"/s"), ("traceparent", trace)]),
            (b"empty", b"", []),
            (b"large", large, [("content-type", b"a/b")]),
        ]
    )
    taken = metrics.RECORDS.labels("ingest"), metrics.RECORD_BYTES.labels("ingest")
    before = [counter._value.get() for counter in taken]
    with world.running():
        until(lambda: world.committed() == 3)
    assert [counter._value.get() - start for counter, start in zip(taken, before, strict=True)] == [3, 2_500_007]
    found = {blob.key: blob for blob in world.whole()}
    assert {key: blob.content for key, blob in found.items()} == {"small": b"content", "empty": b"", "large": large}
    small, end = found["small"], found["small"].end
    assert small.tenant == "team"
    assert end is not None
    assert end.metadata == {"ce_id": "1", "ce_source": "/s", "kafka": f"{world.users}[0]@0"}
    assert abs(end.began_us / 1e6 - time.time()) < 120
    assert small.headers["traceparent"] == trace
    assert small.headers["ce_specversion"] == b"1.0"
    assert world.read("dead") == []


def test_blobs_of_a_key_share_one_partition(world: World) -> None:
    """Use one partition per key in topics with more partitions than the settings name."""
    others = with_changes(world.settings, {"kafka": {"partitions": 3}})
    world.produce([(b"key", b"%d" % number, []) for number in range(12)])
    with world.running(settings=others):
        until(lambda: world.committed() == 12)
    assert len(world.whole()) == 12
    assert len({message.partition() for message in world.read("frames")}) == 1


def test_unstorable_record_is_a_dead_letter(world: World) -> None:
    """Make a dead letter of a record that cannot be stored; stall no other."""
    world.produce(
        [
            (None, b"no key", [("mine", b"kept")]),
            (b"\xff", b"bad key", []),
            (b"k", None, []),
            (b"k", None, [("dataref", b"in/none")]),
            (b"k", None, [("dataref", b"in/../containers/x")]),
            (b"k", None, [("dataref", b"in")]),
            (b"good", b"good", []),
        ]
    )
    with world.running(LocalObjectStore(world.folder)):
        until(lambda: world.committed() == 7)
    assert [blob.key for blob in world.whole()] == ["good"]
    dead = {int(dict(message.headers())["__connect.errors.offset"]): message for message in world.read("dead")}
    assert sorted(dead) == [0, 1, 2, 3, 4, 5]
    headers = dict(dead[0].headers())
    assert headers["mine"] == b"kept"
    assert headers["__connect.errors.topic"] == world.users.encode()
    assert headers["__connect.errors.partition"] == b"0"
    assert headers["__connect.errors.stage"] == b"ingest"
    assert headers["__connect.errors.exception.class.name"] == b"nearkin_shared.errors.BadInput"
    assert b"no key" in headers["__connect.errors.exception.message"]
    assert (dead[0].key(), dead[0].value()) == (None, b"no key")
    assert (dead[1].key(), dead[1].value()) == (b"\xff", b"bad key")
    assert dead[2].value() is None
    reasons = {offset: dict(dead[offset].headers())["__connect.errors.exception.message"] for offset in dead}
    assert b"not UTF-8" in reasons[1]
    assert b"no value" in reasons[2]
    assert b"in/none: no such object" in reasons[3]
    assert b"want an object below in/" in reasons[4]
    assert b"want an object below in/" in reasons[5]


def test_oversized_dead_letter_names_omissions(world: World) -> None:
    """Name what a dead letter omits because it would not fit."""
    sizes = [4_000_000, 1_048_000, 1_030_000]
    world.produce([(b"x" * 2000, b"v" * size, [("h", b"y" * 3000)]) for size in sizes])
    with world.running():
        until(lambda: world.committed() == 3)
    omitted = [dict(message.headers()).get(OMITTED_VALUE_HEADER) for message in world.read("dead")]
    assert sorted(str(found) for found in omitted) == ["None", "b'1048000'", "b'4000000'"]
    assert world.whole() == []


def test_claim_checks_are_streamed_from_the_object_store(world: World) -> None:
    content = noise(3_000_000, "object").tobytes()
    (world.folder / "in" / "dump").write_bytes(content)
    (world.folder / "in" / "none").write_bytes(b"")
    world.produce(
        [(b"a", None, [("dataref", b"in/dump")]), (b"b", b"placeholder", [("ce_dataref", b"in/none"), ("ce_id", b"7")])]
    )
    with world.running(LocalObjectStore(world.folder)):
        until(lambda: world.committed() == 2)
    found = {blob.key: blob for blob in world.whole()}
    assert {key: blob.content for key, blob in found.items()} == {"a": content, "b": b""}
    assert found["b"].end is not None
    assert found["b"].end.metadata["ce_id"] == "7"


def test_blobs_of_one_key_stay_in_order(world: World) -> None:
    """Keep a key's versions in the order of its records: its blob ids share one partition."""
    world.produce([(b"k%d" % (n % 3), b"%d" % n, []) for n in range(60)])
    with world.running():
        until(lambda: world.committed() == 60)
    places: dict[str, set[int]] = {}
    contents: dict[str, list[int]] = {}
    for message in world.read("frames"):
        decoded = decode(message.value(), "frames")
        assert isinstance(decoded, Batch)
        for content, end in take_apart(decoded):
            places.setdefault(end.envelope.key, set()).add(message.partition())
            contents.setdefault(end.envelope.key, []).append(int(content))
    assert {key: len(found) for key, found in places.items()} == {"k0": 1, "k1": 1, "k2": 1}
    assert contents == {f"k{n}": list(range(n, 60, 3)) for n in range(3)}


class UnreachableObjectStore(LocalObjectStore):
    """An object store that cannot be reached until `back` is set."""

    def __init__(self, root: Path, after_ranges: int = 0) -> None:
        super().__init__(root)
        self.back = threading.Event()
        self.asked = 0
        self._after_ranges = after_ranges

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        self.asked += 1
        if self.asked > self._after_ranges and not self.back.is_set():
            raise StoreUnavailable("no answer")
        return super().get_ranges(name, starts, ends)


def test_store_outage_delays_its_partition_only(world: World) -> None:
    """Delay only the partition that needs an unreachable object store."""
    content = noise(2_000_000, "away").tobytes()
    (world.folder / "in" / "dump").write_bytes(content)
    objects = UnreachableObjectStore(world.folder, after_ranges=1)
    world.produce([(b"before", b"1", []), (b"away", None, [("dataref", b"in/dump")]), (b"after", b"2", [])])
    world.produce([(b"other", b"3", [])], partition=1)
    with world.running(objects):
        until(lambda: world.committed(1) == 1 and objects.asked > 3)
        assert world.committed(0) == 1
        assert sorted(blob.key for blob in world.whole()) == ["before", "other"]
        objects.back.set()
        until(lambda: world.committed(0) == 3)
    assert [(blob.key, len(blob.content)) for blob in world.whole() if blob.key == "away"] == [("away", 2_000_000)]
    assert sorted(blob.key for blob in world.whole()) == ["after", "away", "before", "other"]
    failed = [blob.end for blob in world.blobs() if blob.end is not None and blob.end.failure is not None]
    assert [str(end.failure) for end in failed] == ["ingest: no answer"]  # the attempt with a published frame
    assert world.read("dead") == []


def test_record_waiting_too_long_is_dead_letter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_consumer, "RECORD_RETRY_SECONDS", 1)
    (world.folder / "in" / "dump").write_bytes(b"content")
    world.produce([(b"away", None, [("dataref", b"in/dump")]), (b"after", b"2", [])])
    settings = load(
        None,
        {
            "kafka": {
                "bootstrap_servers": world.settings.kafka.bootstrap_servers,
                "topic_prefix": world.settings.kafka.topic_prefix,
            },
            "ingest": {"topics": [world.users], "dataref_prefix": "in/"},
        },
    )[0]
    with world.running(UnreachableObjectStore(world.folder), settings=settings):
        until(lambda: world.committed() == 2)
    assert [blob.key for blob in world.whole()] == ["after"]
    (dead,) = world.read("dead")
    assert b"no answer" in dict(dead.headers())["__connect.errors.exception.message"]


def test_redelivered_record_has_the_same_origin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dying between flush and commit: all is sent once more, to be committed once."""
    world.produce([(b"k%d" % number, b"%d" % number, []) for number in range(5)])
    killed = threading.Event()
    settle = IngestConsumer._settle

    def die_first(self: IngestConsumer) -> None:
        if self._done and not killed.is_set():
            self._batches.send_all(self._partitions)
            self._outbox.flush()
            self._done.clear()
            killed.set()
            raise StoreUnavailable("killed")
        settle(self)

    monkeypatch.setattr(IngestConsumer, "_settle", die_first)
    with world.running():
        until(lambda: world.committed() == 5)
    found = world.whole()
    assert sorted(blob.key for blob in found) == sorted([f"k{number}" for number in range(5)] * 2)
    origins = {blob.key: {other.end.origin for other in found if other.end and other.key == blob.key} for blob in found}
    assert {key: len(values) for key, values in origins.items()} == {f"k{number}": 1 for number in range(5)}
    assert len({value for values in origins.values() for value in values}) == 5


def test_offset_is_committed_after_frames_acked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit an offset only after its frames were acknowledged."""
    world.produce([(b"k", b"v", [])])
    tried = threading.Event()

    def never(_self: object) -> None:
        tried.set()
        raise StoreUnavailable("not acknowledged")

    monkeypatch.setattr(Outbox, "flush", never)
    with world.running():
        assert tried.wait(PATIENCE_SECONDS)
        time.sleep(0.5)
        assert world.committed() < 0
    assert world.committed() < 0


def test_second_consumer_shares_without_loss(world: World) -> None:
    """Share work with a second consumer; lose nothing when one leaves."""

    def produce(start: int) -> None:
        for partition in (0, 1):
            world.produce([(b"%d-%d" % (partition, n), b"v", []) for n in range(start, start + 200)], partition)

    produce(0)
    with world.running():
        with world.running(worker="second"):
            produce(200)
            until(lambda: world.committed(0) == world.committed(1) == 400)
        produce(400)
        until(lambda: world.committed(0) == world.committed(1) == 600)
    keys = {blob.key for blob in world.whole()}
    assert keys == {f"{partition}-{n}" for partition in (0, 1) for n in range(600)}


def test_paused_consumer_reads_nothing_then_on(world: World) -> None:
    """Read nothing while paused, and continue afterwards."""
    with world.running() as paused:
        world.produce([(b"a", b"1", [])])
        until(lambda: world.committed() == 1)
        paused.set()
        until(lambda: paused.steps > 1)  # records read before the pause was known are done
        world.produce([(b"b", b"2", [])])
        time.sleep(1.5)
        assert world.committed() == 1
        paused.clear()
        until(lambda: world.committed() == 2)
    assert sorted(blob.key for blob in world.whole()) == ["a", "b"]


def test_long_object_keeps_the_membership(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stay in the group during a long object; the waiting records follow, once."""
    monkeypatch.setattr(ingest_consumer, "ALIVE_SECONDS", 0.05)
    content = noise(4_000_000, "long").tobytes()
    (world.folder / "in" / "dump").write_bytes(content)

    class Slow(LocalObjectStore):
        def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
            time.sleep(0.3)
            return super().get_ranges(name, starts, ends)

    world.produce([(b"long", None, [("dataref", b"in/dump")]), *((b"k%d" % n, b"v", []) for n in range(20))])
    world.produce([(b"o%d" % n, b"v", []) for n in range(20)], partition=1)
    with world.running(Slow(world.folder)):
        until(lambda: world.committed(0) == 21 and world.committed(1) == 20)
    keys = [blob.key for blob in world.whole()]
    assert sorted(keys) == sorted(["long", *(f"k{n}" for n in range(20)), *(f"o{n}" for n in range(20))])


def test_recreated_topic_is_not_the_old_one(world: World) -> None:
    admin = AdminClient({"bootstrap.servers": world.settings.kafka.bootstrap_servers})
    for count in (1, 2):
        world.produce([(b"k", b"%d" % count, [])])
        with world.running():
            until(lambda count=count: len(world.whole()) == count)  # type: ignore[misc]
        if count == 1:
            admin.delete_topics([world.users])[world.users].result(30)
            group = f"{world.settings.kafka.topic_prefix}ingest"

            def forgotten(group: str = group) -> bool:
                try:
                    admin.delete_consumer_groups([group])[group].result(30)
                except KafkaException:  # a static member is one until its session ends
                    return False
                return True

            until(forgotten)
            until(lambda: world.users not in admin.list_topics(timeout=30).topics)
            admin.create_topics([NewTopic(world.users, 2, 1)])[world.users].result(30)
            until(lambda: world.users in admin.list_topics(timeout=30).topics)
    first, second = (blob.end for blob in world.whole())
    assert first is not None
    assert second is not None
    assert first.origin != second.origin
