"""Workers that come and go while messages stream: each works on what is its own alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka import earlier_messages, worker
from nearkin_shared.kafka.clients import consumer, create_topics, group, topic
from nearkin_shared.kafka.consumer_loop import Loop, Record, run_forever
from nearkin_shared.kafka.earlier_messages import EarlierMessages
from nearkin_shared.observability.health import Monitor
from tests.support.checks.waiting import until
from tests.support.servers.kafka_server import users_producer

PARTITIONS = 4
SECONDS_MAX = 60.0


class Watcher:
    """A handler that notes what it is given of partitions that are not its own."""

    def __init__(self) -> None:
        self.mine: set[int] = set()
        self.given_away = 0
        self.handled = 0
        self.foreign: list[str] = []
        self._next: dict[int, int] = {}

    def on_assigned(self, partition: int, metadata: str) -> None:
        self.mine.add(partition)

    def handle(self, records: list[Record]) -> None:
        self.handled += len(records)
        for record in records:
            if record.partition in self.mine:
                self._next[record.partition] = record.offset + 1
            else:
                self.foreign.append(record.label)

    def idle(self) -> float:
        return 0.25

    def drain(self, partition: int) -> None:
        pass

    def on_dropped(self, partition: int) -> None:
        self.mine.discard(partition)
        self._next.pop(partition, None)
        self.given_away += 1

    def committable(self) -> Iterable[tuple[int, int, str]]:
        return [(partition, offset, "") for partition, offset in self._next.items()]

    def close(self) -> None:
        pass


@contextmanager
def running_thread(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Run `work` in a thread during the block; set `over` to end it."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS_MAX)


@contextmanager
def streaming(settings: Settings) -> Iterator[None]:
    """Send messages, some each partition every second."""
    over = threading.Event()
    client = users_producer(settings.kafka.bootstrap_servers)

    def send() -> None:
        number = 0
        while not over.wait(0.02):
            client.produce(topic(settings, "frames"), b"message", b"%d" % number)
            client.poll(0)
            number += 1

    with running_thread(send, over):
        yield
    client.flush(10)


@contextmanager
def working(settings: Settings, name: str, watcher: Watcher) -> Iterator[None]:
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            Loop(settings, "chunker", "frames", name, watcher).run(stop, lambda: False)
        except BaseException as err:
            failures.append(err)

    with running_thread(run, stop):
        yield
    assert not failures


def with_topics(kafka: object, topic_prefix: str) -> Settings:
    """Return settings whose topics are there."""
    settings = with_changes(
        Settings(),
        {
            "kafka": {
                "bootstrap_servers": kafka.bootstrap,  # type: ignore[attr-defined]
                "topic_prefix": topic_prefix,
                "partitions": PARTITIONS,
                "session_timeout_ms": 6000,
            }
        },
    )
    create_topics(settings)
    return settings


class FailingWatcher(Watcher):
    """A watcher whose client fails inside its callback, as with a moving coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer: Consumer | None = None
        self.loops = 0

    def on_assigned(self, partition: int, metadata: str) -> None:
        super().on_assigned(partition, metadata)
        if self.loops == 1:
            assert self.consumer is not None
            self.consumer.seek(TopicPartition("no such topic", 0, 5))


def test_worker_survives_kafka_error_at_assign(kafka: object, topic_prefix: str) -> None:
    """Start over when `poll` raises a KafkaError.

    It is no exception class that `except Exception` catches: the thread died unnoticed.
    """
    settings, upset = with_topics(kafka, topic_prefix), FailingWatcher()
    stop = threading.Event()

    def make() -> Loop:
        loop = Loop(settings, "chunker", "frames", "upset", upset)
        upset.consumer = loop._consumer
        upset.loops += 1
        return loop

    with streaming(settings), running_thread(lambda: run_forever(make, stop, lambda: False, "chunker"), stop):
        until(lambda: upset.loops > 1 and upset.handled > 0)
    assert not upset.foreign


def test_service_ends_with_any_of_its_threads(
    kafka: object, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the service also by an error that only a bare `except` catches."""
    settings = with_topics(kafka, topic_prefix)

    def ends(*_: object) -> None:
        client = consumer(settings, group(settings, "chunker"), "bare")
        client.subscribe(
            [topic(settings, "frames")], on_assign=lambda member, _: member.seek(TopicPartition("none", 0, 5))
        )
        try:
            while True:
                client.poll(0.1)
        finally:
            client.close()

    monkeypatch.setattr(worker, "run_forever", ends)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    context: Any = SimpleNamespace(monitor=Monitor(settings.monitor))
    stop, failures = threading.Event(), list[BaseException]()
    part = worker.WorkerPart("chunker", "frames", lambda _: Watcher())
    worker._thread(context, part, stop, failures).join(SECONDS_MAX)
    assert stop.is_set()
    assert "its thread ended" in str(failures[0])


def test_revoked_partition_is_left_to_its_owner(kafka: object, topic_prefix: str) -> None:
    """Leave a partial batch to the next owner of its partition.

    A batch grows for a second; a rebalance in that second crashed the chunker.
    """
    settings = with_topics(kafka, topic_prefix)
    first, second = Watcher(), Watcher()
    with streaming(settings), working(settings, "first", first):
        until(lambda: len(first.mine) == PARTITIONS and first.handled > 0)
        with working(settings, "second", second):
            until(lambda: len(second.mine) == PARTITIONS // 2 and second.handled > 0)
            assert first.given_away
        handled = first.handled
        until(lambda: first.handled > handled + PARTITIONS)
    assert not first.foreign
    assert not second.foreign


MEMBER = """
import os, sys, threading, time
from pathlib import Path
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.kafka.consumer_loop import Loop

config, name, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
mine = set()

def report():
    (folder / f"{name}.new").write_text(" ".join(map(str, sorted(mine))))
    os.replace(folder / f"{name}.new", folder / name)

class Handler:
    def on_assigned(self, partition, metadata):
        mine.add(partition)
        report()

    def on_dropped(self, partition):
        mine.discard(partition)
        report()

    def drain(self, partition):
        (folder / f"{name}.gives").touch()
        time.sleep(2)

    def idle(self):
        return 0.1

    def committable(self):
        return []

report()
settings = with_changes(load(config)[0], {"kafka": {"session_timeout_ms": 6000}})
Loop(settings, "chunker", "frames", name, Handler()).run(threading.Event(), lambda: False)
"""


def test_worker_killed_at_revoke_leaves_no_gap(kafka: object, topic_prefix: str, tmp_path: Path) -> None:
    """Give every partition an owner after a worker was killed while revoking."""
    settings = with_topics(kafka, topic_prefix)
    config = tmp_path / "nearkin.toml"
    config.write_text(
        f'[kafka]\nbootstrap_servers = "{settings.kafka.bootstrap_servers}"\ntopic_prefix = "{topic_prefix}"\n'
        f"partitions = {PARTITIONS}\n"
    )
    (tmp_path / "member.py").write_text(MEMBER)
    members: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str) -> None:
        members[name] = subprocess.Popen([sys.executable, tmp_path / "member.py", config, name, tmp_path])

    def kill(name: str) -> None:
        members[name].kill()
        members[name].wait()
        (tmp_path / name).unlink()

    def owned(*names: str) -> list[int]:
        files = [tmp_path / name for name in names]
        return sorted(int(number) for file in files if file.exists() for number in file.read_text().split())

    try:
        start("one")
        until(lambda: owned("one") == list(range(PARTITIONS)))
        time.sleep(2.0)  # what a start makes of the group is over
        start("two")
        until((tmp_path / "one.gives").exists)
        kill("one")  # and back before its session is over: no member notices its absence
        start("one")
        until(lambda: owned("one", "two") == list(range(PARTITIONS)))
    finally:
        for member in members.values():
            member.kill()
            member.wait()


def test_chain_waits_for_messages_between_its_stages(
    kafka: object, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same partition, until the group of their stage has committed them."""
    monkeypatch.setattr(earlier_messages, "WAIT_SECONDS_MAX", 0.5)
    settings = with_topics(kafka, topic_prefix)
    earlier = EarlierMessages(settings, [("dedup", "segments"), ("resemblance", "fresh")])
    earlier.wait([0, 1])
    sender = users_producer(settings.kafka.bootstrap_servers)
    for _ in range(3):
        sender.produce(topic(settings, "fresh"), b"x", partition=1)
    sender.flush(SECONDS_MAX)
    earlier.wait([0])
    with pytest.raises(StoreUnavailable, match=r"fresh\[1\] has messages of other workers, which resemblance"):
        earlier.wait([0, 1])
    member = consumer(settings, group(settings, "resemblance"), "other")
    for offset, is_done in ((2, False), (3, True)):
        member.commit(offsets=[TopicPartition(topic(settings, "fresh"), 1, offset)], asynchronous=False)
        if is_done:
            earlier.wait([1])
        else:
            with pytest.raises(StoreUnavailable):
                earlier.wait([0, 1])
    member.close()
