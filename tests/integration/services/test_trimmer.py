"""Test what the trimmer deletes from a real broker, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import Consumer

from nearkin_shared.config.loader import load
from nearkin_shared.config.pipeline_stages import STAGE_TOPICS_OF
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import Outbox, as_bytes, consumer, create_topics, group, topic
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.dead_letter_replay import drop, list_letters, replay
from nearkin_shared.kafka.dead_letters import HEADERS_BYTES_MAX, LETTER_BYTES_MAX, send_dead_letter
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.kafka.record_guard import RecordGuard
from nearkin_shared.kafka.trimmer import Trimmer
from tests.support.data.samples import noise

RECORDS = 10
KEY = b"k" * 16


class World:
    """Topics of one partition, with a trimmer, and the groups of the stages."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.trimmer = Trimmer(settings)
        self.outbox = Outbox(settings, "test", None)
        self._groups = {service: consumer(settings, group(settings, service), "test") for service in STAGE_TOPICS_OF}

    def send(self, name: str, records: int = RECORDS, value: bytes = b"value") -> None:
        for _ in range(records):
            self.outbox.send(name, KEY, value, {})
        self.outbox.flush()

    def commit(self, service: str, offset: int, epoch: int = 0) -> None:
        part = TopicPartition(topic(self.settings, STAGE_TOPICS_OF[service]), 0, offset, "", epoch)
        self._groups[service].commit(offsets=[part], asynchronous=False)

    def reject(self, service: str, offset: int, value: bytes) -> None:
        """Make a record a dead letter, as the stage does before its offset is committed."""
        record = Record(topic(self.settings, STAGE_TOPICS_OF[service]), 0, offset, KEY, value, {}, ())
        send_dead_letter(self.settings, self.outbox, record, service, ValueError("bad"))
        self.outbox.flush()

    def bounds(self, name: str) -> tuple[int, int]:
        """Return the first offset that the broker has, and the end."""
        asking: Consumer = self._groups["chunker"]
        return asking.get_watermark_offsets(TopicPartition(topic(self.settings, name), 0), timeout=20)

    def close(self) -> None:
        self.trimmer.close()
        self.outbox.close()
        for one in self._groups.values():
            one.close()


@pytest.fixture
def world(kafka: Any, topic_prefix: str) -> Iterator[World]:
    section = {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 1}
    settings = load(None, {"kafka": section})[0]
    create_topics(settings)
    made = World(settings)
    yield made
    made.close()


def test_handled_records_of_every_stage_are_deleted(world: World) -> None:
    """Delete all but the last handled record, whose epoch later shows a truncation; a second trim finds nothing."""
    for service, name in STAGE_TOPICS_OF.items():
        world.send(name)
        world.commit(service, 6)
    assert world.trimmer.trim() == {topic(world.settings, name): 5 for name in STAGE_TOPICS_OF.values()}
    assert {world.bounds(name) for name in STAGE_TOPICS_OF.values()} == {(5, RECORDS)}
    assert world.trimmer.trim() == {}


def test_lagging_group_keeps_its_records(world: World) -> None:
    """Keep what a group has not committed, whatever other groups have."""
    for name in STAGE_TOPICS_OF.values():
        world.send(name)
    world.commit("chunker", RECORDS)
    world.commit("dedup", 1)
    assert world.trimmer.trim() == {topic(world.settings, "frames"): RECORDS - 1}
    assert [world.bounds(name)[0] for name in STAGE_TOPICS_OF.values()] == [RECORDS - 1, 0, 0, 0, 0]


def test_log_shorter_than_the_offset_is_kept(world: World) -> None:
    """Delete nothing from a log that lost its end: the group reads it from its beginning."""
    world.send("frames")
    world.commit("chunker", RECORDS + 5)
    assert world.trimmer.trim() == {}
    assert world.bounds("frames") == (0, RECORDS)


def test_offset_without_an_epoch_deletes_nothing(world: World) -> None:
    """Delete nothing if it cannot be checked whether the log was written again."""
    world.send("frames")
    world.commit("chunker", 6, epoch=-1)
    assert world.trimmer.trim() == {}
    world.commit("chunker", 7)
    assert sum(world.trimmer.trim().values()) == 6


@pytest.mark.parametrize("settle", [replay, drop])
def test_record_of_a_letter_without_value_stays(world: World, settle: Any) -> None:
    """Keep a record that its dead letter only points to, until the letter is replayed or dropped."""
    large = noise(LETTER_BYTES_MAX, "large").tobytes()
    world.send("frames", 3)
    world.send("frames", 1, large)
    world.send("frames", 3)
    world.reject("chunker", 1, b"value")
    world.reject("chunker", 3, large)
    world.commit("chunker", 6)
    assert sum(world.trimmer.trim().values()) == 3
    assert world.bounds("frames")[0] == 3
    assert world.trimmer.trim() == {}

    (letter,) = (one for one in list_letters(world.settings) if one.omitted)
    settle(world.settings, [letter.place])
    assert sum(world.trimmer.trim().values()) == 2
    assert world.bounds("frames")[0] == 5


def test_letter_of_an_expired_record_holds_none(world: World) -> None:
    """Trim behind a record that retention deleted before its letter, which can no longer be replayed."""
    large = noise(LETTER_BYTES_MAX, "large").tobytes()
    full = topic(world.settings, "frames")
    world.send("frames", 1, large)
    world.send("frames", RECORDS)
    admin = AdminClient({"bootstrap.servers": world.settings.kafka.bootstrap_servers})
    admin.delete_records([TopicPartition(full, 0, 2)])[TopicPartition(full, 0)].result(20)
    world.reject("chunker", 0, large)
    world.commit("chunker", 6)
    assert world.trimmer.trim() == {full: 3}


def test_letter_of_a_message_in_memory_holds_no_record(world: World) -> None:
    """Its offset is none of Kafka's: the record there is deleted, and a replay sends what the letter has."""
    authenticator, full = EnvelopeAuthenticator(b"s" * 32), topic(world.settings, "segments")
    world.send("segments")
    outbox = Outbox(world.settings, "test", authenticator)
    guard = RecordGuard(world.settings, "dedup", outbox, "fresh")
    headers = (("traceparent", bytes(HEADERS_BYTES_MAX)),)
    assert guard.decode(Record(full, 0, 3, KEY, b"in memory", {}, headers, is_internal=True)) is None
    outbox.flush()
    outbox.close()
    world.commit("dedup", 6)
    assert world.trimmer.trim() == {full: 5}

    (letter,) = list_letters(world.settings, source=full)
    assert (letter.omitted, letter.source) == (True, None)
    replay(world.settings, [letter.place])
    reading = consumer(world.settings, "test-reader", "test")
    reading.assign([TopicPartition(full, 0, RECORDS)])
    message = reading.poll(20)
    reading.close()
    assert message is not None
    assert message.value() == b"in memory"
    mac = as_bytes(dict(message.headers() or ())[MAC_HEADER])
    authenticator.check("dedup", full, KEY, b"in memory", mac)


def test_letter_behind_an_open_transaction_delays_the_trim(world: World) -> None:
    """Delete nothing while a replay is open: letters behind its first record cannot be seen."""
    from nearkin_shared.kafka import dead_letter_replay

    world.send("frames")
    world.reject("chunker", 1, b"value")
    world.commit("chunker", 6)
    producer = dead_letter_replay._transactional(world.settings)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic(world.settings, "dead"), None, KEY, partition=0, headers=[("mark", b"0:0")])
    assert producer.flush(30) == 0
    assert world.trimmer.trim() == {}
    producer.abort_transaction(30)
    assert sum(world.trimmer.trim().values()) == 5
