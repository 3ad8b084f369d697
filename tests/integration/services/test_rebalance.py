"""Workers that come and go while messages stream: each works on what is its own alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from confluent_kafka import Producer

from nearkin.config import Settings
from nearkin.config_layers import with_changes
from nearkin.runners.kafka.clients import create_topics, topic
from nearkin.runners.kafka.loop import Loop, Record

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

    def assigned(self, partition: int, metadata: str) -> None:
        self.mine.add(partition)

    def handle(self, records: list[Record]) -> None:
        self.handled += len(records)
        for record in records:
            if record.partition in self.mine:
                self._next[record.partition] = record.offset + 1
            else:
                self.foreign.append(record.named)

    def idle(self) -> float:
        return 0.25

    def drain(self, partition: int) -> None:
        pass

    def dropped(self, partition: int) -> None:
        self.mine.discard(partition)
        self._next.pop(partition, None)
        self.given_away += 1

    def committable(self) -> Iterable[tuple[int, int, str]]:
        return [(partition, offset, "") for partition, offset in self._next.items()]

    def close(self) -> None:
        pass


@contextmanager
def beside(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Do `work` in a thread; tell it by `over` to end."""
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
    client = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers})

    def send() -> None:
        number = 0
        while not over.wait(0.02):
            client.produce(topic(settings, "frames"), b"message", b"%d" % number)
            client.poll(0)
            number += 1

    with beside(send, over):
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

    with beside(run, stop):
        yield
    assert not failures


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, "it was not reached in time"
        time.sleep(0.05)


def test_what_was_taken_of_a_partition_that_is_given_away_is_left_to_its_next_owner(
    kafka: object, topic_prefix: str
) -> None:
    """A batch grows for a second while messages stream, and a rebalance comes in between: a crash of the chunker."""
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
    first, second = Watcher(), Watcher()
    with streaming(settings), working(settings, "first", first):
        wait_until(lambda: len(first.mine) == PARTITIONS and first.handled > 0)
        with working(settings, "second", second):
            wait_until(lambda: len(second.mine) == PARTITIONS // 2 and second.handled > 0)
            assert first.given_away
        handled = first.handled
        wait_until(lambda: first.handled > handled + PARTITIONS)
    assert not first.foreign
    assert not second.foreign
