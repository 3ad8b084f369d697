"""Test dead letters on a real Kafka: listed, shown, and replayed once despite races."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin.cli import main
from nearkin_ingest.records import UserRecord
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, NearkinError, NotFound, PermanentError, StoreUnavailable
from nearkin_shared.kafka import dead_letter_replay
from nearkin_shared.kafka.clients import Outbox, consumer, create_topics, group, topic
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.dead_letter_replay import REPLAYED_HEADER, drop, list_letters, read_letter, replay
from nearkin_shared.kafka.dead_letters import send_dead_letter
from nearkin_shared.kafka.lag import Backlog, LagReader
from tests.support.checks.waiting import until
from tests.support.servers.kafka_server import users_producer


class World:
    """A deployment's topics and a topic of its user, whose records can be made dead letters."""

    def __init__(self, settings: Settings, users: str) -> None:
        self.settings, self.users = settings, users

    def reject(self, *records: UserRecord) -> None:
        outbox = Outbox(self.settings, "test", None)
        for record in records:
            send_dead_letter(self.settings, outbox, record, "ingest", BadInput(f"refused {record.offset}"))
        outbox.flush()

    def record(self, offset: int, value: bytes | None = b"value", **more: Any) -> UserRecord:
        return UserRecord(
            **{"topic": self.users, "partition": 1, "offset": offset, "key": b"k", "value": value, **more}
        )

    def sent_back(self) -> list[Any]:
        """Return the records of the user's topic as its consumers see them."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka.bootstrap_servers,
                "group.id": "reader",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        found = []
        try:
            consumer.assign([TopicPartition(self.users, partition, 0) for partition in (0, 1)])
            left = 2
            while left:
                message = consumer.poll(20)
                assert message is not None
                if message.error() is not None:
                    left -= 1
                else:
                    found.append(message)
        finally:
            consumer.close()
        return found


@pytest.fixture
def world(kafka: Any, topic_prefix: str) -> World:
    users = f"users-{topic_prefix.rstrip('.')}"
    settings, _ = load(
        None, {"kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2}}
    )
    create_topics(settings)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(users, 2, 1, config={"max.message.bytes": "5000000"})])[users].result(30)
    return World(settings, users)


def test_letters_are_listed_oldest_first_and_shown_whole(world: World) -> None:
    headers = (("mine", b"a"), ("empty", None))
    world.reject(*(world.record(n, b"v%d" % n, all_headers=headers) for n in range(5)))
    world.reject(world.record(9, None, topic="elsewhere", key=None))
    found = list_letters(world.settings)
    assert sorted(letter.source or ("",) for letter in found) == sorted(
        [*((world.users, 1, n) for n in range(5)), ("elsewhere", 1, 9)]
    )
    assert [letter.timestamp_ms for letter in found] == sorted(letter.timestamp_ms for letter in found)
    assert all(letter.value is None for letter in found)
    assert {(letter.stage, letter.error) for letter in found} == {("ingest", "nearkin_shared.errors.BadInput")}
    assert len(list_letters(world.settings, 2)) == 2
    (other,) = list_letters(world.settings, source="elsewhere")
    assert (other.source, other.value_bytes, other.message) == (("elsewhere", 1, 9), 0, "refused 9")
    third = next(letter for letter in found if letter.source == (world.users, 1, 3))
    whole = read_letter(world.settings, third.place)
    assert (whole.value, whole.key, whole.headers[:2]) == (b"v3", b"k", headers)


def test_letter_is_replayed_unchanged_and_once(world: World) -> None:
    headers = (("mine", b"a"), ("mine", b"b"), ("none", None))
    world.reject(world.record(1, b"\0\xff", all_headers=headers), world.record(2, None), world.record(3))
    first, second, third = sorted(list_letters(world.settings), key=lambda letter: str(letter.source))
    assert [letter.place for letter in replay(world.settings, [first.place, second.place])] == [
        first.place,
        second.place,
    ]
    back = world.sent_back()
    assert [(message.partition(), message.key(), message.value()) for message in back] == [
        (1, b"k", b"\0\xff"),
        (1, b"k", None),
    ]
    where = f"{world.settings.kafka.topic_prefix}dead[{first.partition}]@{first.offset}".encode()
    assert back[0].headers() == [*headers, (REPLAYED_HEADER, where)]
    assert [letter.place for letter in list_letters(world.settings)] == [third.place]
    again = {letter.place: letter.replayed for letter in list_letters(world.settings, replayed=True)}
    assert again == {first.place: True, second.place: True, third.place: False}
    assert read_letter(world.settings, first.place).replayed
    with pytest.raises(BadInput, match="was sent back already"):
        replay(world.settings, [third.place, first.place])
    assert len(world.sent_back()) == 2  # the refusal sent nothing


def test_two_concurrent_replays_send_once(world: World) -> None:
    world.reject(*(world.record(n) for n in range(30)))
    places = [letter.place for letter in list_letters(world.settings)]
    failures: list[NearkinError] = []

    def work() -> None:
        try:
            replay(world.settings, places)
        except NearkinError as err:
            failures.append(err)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [letter.place for letter in list_letters(world.settings)]
    if left:  # each fenced out the one before it, and the last may have been the first to give up
        replay(world.settings, left)
    assert len(failures) >= 2
    assert len(world.sent_back()) == 30
    assert list_letters(world.settings) == []


def test_replay_killed_before_commit_sends_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.reject(world.record(1))
    (letter,) = list_letters(world.settings)
    transactional = dead_letter_replay._transactional

    class Dying:
        def __init__(self, settings: Settings) -> None:
            self._producer = transactional(settings)

        def commit_transaction(self, _timeout: float) -> None:
            self._producer.flush(10)
            raise KafkaException(KafkaError(KafkaError._FAIL, "died"))

        def abort_transaction(self, _timeout: float) -> None:
            raise KafkaException(KafkaError(KafkaError._FAIL, "died"))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._producer, name)

    with monkeypatch.context() as patched:
        patched.setattr(dead_letter_replay, "_transactional", Dying)
        with pytest.raises(StoreUnavailable, match="died"):
            replay(world.settings, [letter.place])
    replay(world.settings, [letter.place])  # fences the dead one and ends its transaction
    assert [message.value() for message in world.sent_back()] == [b"value"]


def test_oversized_record_is_read_from_its_origin(world: World) -> None:
    """Take a record that did not fit into the letter from its original topic."""
    producer = users_producer(world.settings.kafka.bootstrap_servers, message_max_bytes=10**7)
    large = b"x" * 3_000_000
    producer.produce(world.users, large, b"k", partition=1, headers=[("mine", b"a")])
    assert producer.flush(30) == 0
    world.reject(world.record(0, large, all_headers=(("mine", b"a"),)), world.record(77, large))
    kept, expired = sorted(list_letters(world.settings), key=lambda letter: str(letter.source))
    assert kept.omitted
    assert kept.value_bytes == 0
    replay(world.settings, [kept.place])
    assert [len(message.value()) for message in world.sent_back()] == [3_000_000] * 2
    assert dict(world.sent_back()[1].headers())["mine"] == b"a"
    with pytest.raises(PermanentError, match=r"is no longer in users-.*\[1\] at offset 77"):
        replay(world.settings, [expired.place])


def test_missing_letters_are_reported(world: World, kafka: Any) -> None:
    assert list_letters(world.settings) == []
    for call in (lambda: read_letter(world.settings, (0, 5)), lambda: replay(world.settings, [(9, 0)])):
        with pytest.raises(NotFound, match="letter"):
            call()
    nothing = load(None, {"kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "never."}})[0]
    assert list_letters(nothing) == []
    for text in ("", "1", "1:", ":1", "-1:2", "1:2:3", "a:b", "1:" + "9" * 19):
        with pytest.raises(BadInput, match="PARTITION:OFFSET"):
            dead_letter_replay.parse_place(text)


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def call(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("NEARKIN_KAFKA__TOPIC_PREFIX", world.settings.kafka.topic_prefix)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments, "--bootstrap", world.settings.kafka.bootstrap_servers])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_commands_list_show_and_replay(world: World, call: Callable[..., tuple[int, str, str]]) -> None:
    world.reject(
        world.record(1, "wört \x1b[31m".encode() * 100, all_headers=(("h\n", b"\xff\xfe"),)),
        world.record(2, bytes(range(256))),
    )
    code, out, err = call("dlq", "list", "--json")
    assert (code, err) == (0, "")
    first, second = sorted(json.loads(out), key=lambda letter: int(letter["offset"]))
    assert first["topic"] == world.users
    assert (first["partition"], first["offset"], first["stage"], first["message"]) == (1, 1, "ingest", "refused 1")
    assert (first["key"], first["replayed"], first["is_untruncated"]) == (
        {"encoding": "utf-8", "data": "k", "cut": False},
        False,
        True,
    )
    code, out, _ = call("dlq", "list")
    assert (code, "refused 2" in out, f"{world.users}[1]@2" in out) == (0, True, True)
    shown = json.loads(call("dlq", "show", first["letter"], "--bytes", "2", "--json")[1])
    assert shown["value"] == {"encoding": "utf-8", "data": "w", "cut": True}  # never half a character
    assert shown["headers"][0] == {"name": "h\n", "value": {"encoding": "base64", "data": "//4=", "cut": False}}
    code, out, _ = call("dlq", "show", first["letter"])
    assert (code, "\x1b" in out, "h\\n: base64://4=" in out) == (0, False, True)
    assert json.loads(call("dlq", "show", second["letter"], "--json")[1])["value"]["encoding"] == "base64"
    code, out, err = call("dlq", "replay", first["letter"])
    assert (code, out, err) == (0, f"{first['letter']} -> {world.users}[1]\n", "nearkin: 1 sent back\n")
    code, _, err = call("dlq", "replay", first["letter"])
    assert (code, "was sent back already" in err) == (2, True)
    assert [letter["letter"] for letter in json.loads(call("dlq", "list", "--json")[1])] == [second["letter"]]
    found = json.loads(call("dlq", "replay", "--all", "--topic", world.users, "--json")[1])
    assert [letter["letter"] for letter in found["replayed"]] == [second["letter"]]
    assert json.loads(call("dlq", "replay", "--all", "--json")[1]) == {"replayed": []}
    assert len(json.loads(call("dlq", "list", "--all", "--json")[1])) == 2
    assert len(world.sent_back()) == 2


def test_commands_refuse_invalid_requests(call: Callable[..., tuple[int, str, str]]) -> None:
    for arguments in ([], ["--all", "0:1"], ["0:1", "--topic", "t"], ["first"]):
        code, out, err = call("dlq", "replay", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
    code, _, err = call("dlq", "show", "0:99")
    assert (code, "nearkin dlq list" in err) == (4, True)


def test_unreachable_kafka_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_replay, "ASK_SECONDS", 1.0)
    code = main(["dlq", "list", "--bootstrap", "127.0.0.1:9"])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("nearkin: kafka 127.0.0.1:9: ")


def test_replay_marker_counts_as_no_lag(world: World) -> None:
    """Count no lag for a replay's transaction marker, which takes an offset.

    An upload that stopped there never ended, and lag grew without bound.
    """
    settings, full = world.settings, topic(world.settings, "segments")
    outbox = Outbox(settings, "test", None)
    outbox.send("segments", b"k" * 16, b"value", {})
    outbox.flush()
    (partition,) = (part for part in range(settings.kafka.partitions) if _end(settings, full, part))
    send_dead_letter(
        settings, outbox, Record(full, partition, 0, b"k" * 16, b"value", {}, ()), "dedup", ValueError("x")
    )
    outbox.flush()
    assert len(replay(settings, [letter.place for letter in list_letters(settings)])) == 1
    # Two records and a marker, which the broker writes after it has acknowledged the commit.
    until(lambda: _end(settings, full, partition) == 3, lambda: _end(settings, full, partition), 20)
    backlog, reader = Backlog(settings), LagReader(settings, ages=True)
    worker = consumer(settings, group(settings, "dedup"), "test")
    try:
        for taken, waiting in ((0, 3), (1, 2), (2, 0)):
            worker.commit(offsets=[TopicPartition(full, partition, taken)], asynchronous=False)
            (lag,) = (found for found in reader.read() if found.group == group(settings, "dedup"))
            assert backlog.unread("segments", partition, taken) == (waiting > 0)
            assert lag.behind[full, partition] == waiting
            assert (lag.oldest_seconds > 0) == (waiting > 0)
        outbox.send("segments", b"k" * 16, b"another", {})
        outbox.flush()
        assert backlog.unread("segments", partition, 2)
        assert backlog.unread("segments", partition, 3), "one record, and no marker"
    finally:
        for one in (worker, backlog, reader, outbox):
            one.close()


def _end(settings: Settings, full: str, partition: int) -> int:
    asking = consumer(settings, "test-reader", "test")
    try:
        return asking.get_watermark_offsets(TopicPartition(full, partition), timeout=20)[1]
    finally:
        asking.close()


def test_dropped_letters_are_neither_listed_nor_replayed(world: World) -> None:
    """A drop hides a letter, is marked, and excludes a replay and a second drop."""
    world.reject(world.record(1), world.record(2), world.record(3))
    first, second, third = sorted(list_letters(world.settings), key=lambda letter: str(letter.source))
    assert [letter.place for letter in drop(world.settings, [first.place, second.place], "ops@host")] == [
        first.place,
        second.place,
    ]
    assert [letter.place for letter in list_letters(world.settings)] == [third.place]
    assert [letter.place for letter in list_letters(world.settings, replayed=True)] == [third.place]
    settled = {letter.place: letter.dropped for letter in list_letters(world.settings, replayed=True, dropped=True)}
    assert settled == {first.place: True, second.place: True, third.place: False}
    shown = read_letter(world.settings, first.place)
    assert (shown.dropped, shown.replayed, shown.value) == (True, False, b"value")
    for call in (drop, replay):
        with pytest.raises(BadInput, match="was dropped already"):
            call(world.settings, [third.place, first.place])
    replay(world.settings, [third.place])
    with pytest.raises(BadInput, match="was sent back already"):
        drop(world.settings, [third.place])
    assert len(world.sent_back()) == 1, "only the third letter was replayed"


def test_dlq_drop_hides_letters_from_list(world: World, call: Callable[..., tuple[int, str, str]]) -> None:
    """`nearkin dlq drop` names what it dropped; `list --all` and `show` still mark it."""
    world.reject(*(world.record(n) for n in range(3)))
    names = [letter["letter"] for letter in json.loads(call("dlq", "list", "--json")[1])]
    assert call("dlq", "drop", names[0]) == (0, f"{names[0]}\n", "nearkin: 1 dropped\n")
    code, out, _ = call("dlq", "show", names[0])
    assert (code, "(dropped)" in out) == (0, True)
    code, _, err = call("dlq", "drop", names[0])
    assert (code, "was dropped already" in err) == (2, True)
    dropped = json.loads(call("dlq", "drop", "--all", "--json")[1])["dropped"]
    assert sorted(letter["letter"] for letter in dropped) == sorted(names[1:])
    assert json.loads(call("dlq", "list", "--json")[1]) == []
    assert all(letter["dropped"] for letter in json.loads(call("dlq", "list", "--all", "--json")[1]))
    assert call("dlq", "drop", "--all", "--topic", "t", names[0])[0] == 2
