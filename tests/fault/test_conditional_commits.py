"""Conditional puts in the pipeline's committers, over a real Redis and a folder of objects."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis as redis_client
from blake3 import blake3

from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotFound
from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.formats.message import End, Envelope, encode
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.tenant_context import tenant_contexts
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.preconditions import Precondition
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks.linearizability import ABSENT, Recorder, State, is_linearizable
from tests.support.fakes.committers import EmptyBacklog, RecordingOutbox
from tests.support.servers.redis_server import RedisServer

ONLY_FIRST = Precondition(if_none_match=("*",))


class Fleet:
    """Committers and gateways that share one Redis and one folder of objects."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objects, self.found = open_store_of(settings)
        self.index = RedisIndex(settings.redis, b"")
        self.locks = FleetKeyLocks(self.index.state)
        self.blobs = 0
        self._counting = threading.Lock()

    def committer(self) -> CommitterHandler:
        """Return a committer without any state."""
        made = tenant_contexts(
            self.settings,
            self.objects,
            bytes.fromhex(self.found.secret),
            self.found.fingerprint_bits,
            self.index.for_domain,
        )
        manifests = ManifestStore(self.objects, self.locks)
        handler = CommitterHandler(self.settings, manifests, made, "w", EmptyBacklog(), None, self.locks)
        handler.on_assigned(0, "")
        return handler

    def records(self, value: str, precondition: Precondition | None) -> list[Record]:
        """Return the records of an empty blob of key `k`: no container is needed, and its digest represents `value`."""
        with self._counting:
            self.blobs += 1
            number = self.blobs
        blob = number.to_bytes(16, "big")
        began_us, digest = time.time_ns() // 1000, blake3(value.encode()).digest()
        end = End(Envelope(blob, "t", "k"), began_us, blob, 0, digest, None, 0, precondition=precondition)
        return [Record("placed", 0, number, blob, encode(end), {}, ())]

    @staticmethod
    def put(handler: CommitterHandler, records: list[Record]) -> dict[str, object]:
        """Return the event of a committer about a blob."""
        outbox: RecordingOutbox = handler._outbox  # type: ignore[assignment]
        handler.handle(records)
        return outbox.events[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def fleet(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(committer_handler, "Outbox", RecordingOutbox)
    with redis_client.Redis.from_url(server.url) as client:
        client.flushall()
    changes = {
        "object_store": {"url": str(tmp_path / "objects")},
        "redis": {"url": server.url},
        "storage": {"create": True},
    }
    made = Fleet(with_changes(Settings(), changes))
    yield made
    made.index.close()


def test_concurrent_first_puts_commit_one(fleet: Fleet) -> None:
    """F.16: Several committers decide about one key at once, as after a rebalance: one version, no dead letter."""
    states: list[object] = []
    handlers = [fleet.committer() for _ in range(4)]

    def one(number: int) -> None:
        states.append(fleet.put(handlers[number], fleet.records(f"v{number}", ONLY_FIRST))["state"])

    run_concurrently([partial(one, number) for number in range(4)])
    assert sorted(map(str, states)) == ["committed", "failed", "failed", "failed"]
    assert ManifestStore(fleet.objects).versions("t", "k") == [1]
    letters: list[RecordingOutbox] = [handler._outbox for handler in handlers]  # type: ignore[misc]
    assert not any(outbox.letters for outbox in letters)


def test_refusal_is_reported_with_its_reason(fleet: Fleet) -> None:
    """F.16: The status of an upload answered by 202 reports the failed precondition."""
    handler = fleet.committer()
    fleet.put(handler, fleet.records("one", None))
    event = fleet.put(handler, fleet.records("two", ONLY_FIRST))
    assert (event["state"], event["reason"]) == ("failed", "precondition-failed")
    assert "precondition failed" in str(event["failure"])
    offsets = {partition: offset for partition, offset, _ in handler.committable()}
    assert offsets[0] == 3  # past the records of both


def test_refused_blob_read_again_stays_refused(fleet: Fleet) -> None:
    """F.16: Its caller received 412; after a crash the condition may hold, and the blob must not be committed then."""
    first, again = fleet.committer(), fleet.committer()
    fleet.put(first, fleet.records("one", None))
    records = fleet.records("two", ONLY_FIRST)
    assert fleet.put(first, records)["state"] == "failed"
    delete(fleet)
    assert fleet.put(again, records)["state"] == "failed"
    assert fleet.put(again, fleet.records("three", ONLY_FIRST))["state"] == "committed"


def test_committed_blob_read_again_is_reported_committed(fleet: Fleet) -> None:
    """F.16: After a crash the conflicting version is its own: the origin is checked before the condition."""
    records = fleet.records("one", ONLY_FIRST)
    assert fleet.put(fleet.committer(), records)["state"] == "committed"
    assert fleet.put(fleet.committer(), records)["version"] == 1


def test_key_lock_of_a_dead_holder_expires(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.16: A committer that dies inside its commit holds the key for a bounded time."""
    monkeypatch.setattr("nearkin_shared.fleet.fleet_key_locks.LOCK_SECONDS", 1)
    held = fleet.locks.for_put("t", "k")
    held.__enter__()  # never left
    started = time.monotonic()
    with fleet.locks.for_deletion("t", "k"):
        assert 0.5 < time.monotonic() - started < 10


def test_history_of_the_committers_is_linearizable(fleet: Fleet) -> None:
    """F.16: Concurrent conditional puts, gets and deletions of a key are explained by some order of them."""
    for seed in range(4):
        recorder = Recorder()
        handlers = [fleet.committer() for _ in range(4)]
        first = read(fleet)[0]

        def work(
            number: int, seed: int = seed, recorder: Recorder = recorder, handlers: list[CommitterHandler] = handlers
        ) -> None:
            drawn = random.Random(seed * 10 + number)
            for step in range(6):
                do_random_call(fleet, handlers[number], recorder, f"{seed}.{number}.{step}", drawn)

        run_concurrently([partial(work, number) for number in range(4)])
        assert is_linearizable(recorder.operations, first), recorder.operations


def do_random_call(
    fleet: Fleet, handler: CommitterHandler, recorder: Recorder, value: str, drawn: random.Random
) -> None:
    """Do one call and record it; a version's content is its digest."""
    content, started = f"blake3:{blake3(value.encode()).hexdigest()}", recorder.start()
    match drawn.choice(["get", "create", "replace", "delete"]):
        case "get":
            recorder.end("get", started, read(fleet)[0])
        case "create":
            event = fleet.put(handler, fleet.records(value, ONLY_FIRST))
            recorder.end("put", started, content, ABSENT, done=event["state"] == "committed")
        case "replace":
            seen = read(fleet)[0]
            recorder.end("get", started, seen)
            if seen is not None:
                started = recorder.start()
                event = fleet.put(handler, fleet.records(value, Precondition((seen,))))
                recorder.end("put", started, content, seen, done=event["state"] == "committed")
        case _:
            recorder.end("delete", started, done=delete(fleet))


def read(fleet: Fleet) -> tuple[State, int]:
    newest = ManifestStore(fleet.objects).newest("t", "k")
    return (None, 0) if newest is None else (newest.info.digest, newest.version)


def delete(fleet: Fleet) -> bool:
    try:
        deletions = Deletions(ManifestStore(fleet.objects, fleet.locks), fleet.index.mark_many)
        deletions.delete("t", "k", undelete_seconds=60)
    except NotFound:
        return False
    return True


def run_concurrently(works: list[Callable[[], None]]) -> None:
    """Run all at once."""
    failures: list[BaseException] = []

    def one(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=one, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
