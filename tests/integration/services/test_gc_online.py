"""Test GC runs every second concurrently with ingest and restore (workers, Kafka, Redis)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.fleet.gc_status import GcStatusStore
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks.waiting import until
from tests.support.servers.pipeline import Pipeline, Uploader, uploading

KEEP = 2
GRACE_SECONDS = 4
DAYS = 8


POLICIES = [
    {"prefix": "kept/", "tenant": "default", "keep_last": 2},
    {"prefix": "other/", "tenant": "another tenant", "keep_last": 1},
]


@pytest.fixture
def pipeline(
    request: pytest.FixtureRequest,
    kafka: object,
    redis: object,
    topic_prefix: str,
    key_prefix: str,
    tmp_path: Path,
) -> Iterator[Pipeline]:
    chosen = getattr(request, "param", {})
    config = {
        **chosen,
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},  # type: ignore[attr-defined]
        "redis": {"url": redis.url, "prefix": key_prefix.rstrip(":")},  # type: ignore[attr-defined]
        "object_store": {"url": str(tmp_path / "objects")},
        "gc": {**chosen.get("gc", {}), "grace_seconds": GRACE_SECONDS, "interval_seconds": 1},
    }
    temporary = {"maintenance": {"TMPDIR": str(tmp_path)}}
    with Pipeline(tmp_path / "pipeline", config, environments=temporary) as made:
        yield made
        codes = made.stop()
        assert set(codes.values()) == {0}, made.logs()


class Reader(threading.Thread):
    """Restores versions that are there, again and again, with caches that live on."""

    def __init__(self, pipeline: Pipeline, live: dict[tuple[str, int], bytes]) -> None:
        super().__init__()
        self.objects, found = open_store_of(pipeline.settings)
        objects = self.objects
        self.namer = Fingerprinter(bytes.fromhex(found.secret), "default")
        self.manifests = ManifestStore(objects)
        self.containers = ContainerStore(objects, self.namer.domain, 16 << 20)
        self.live = live
        self.over = threading.Event()
        self.restored, self.wrong = 0, list[str]()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for (key, version), content in list(self.live.items()):
                try:
                    right = self.read(key, version) == content
                except Exception as err:
                    right = False
                    if (key, version) in self.live:
                        self.wrong.append(f"{key} {version}: {err!r}")
                if not right and (key, version) in self.live:
                    self.wrong.append(f"{key} {version}")
                self.restored += right

    def read(self, key: str, version: int) -> bytes:
        manifest = self.manifests.get("default", key, version)
        return b"".join(
            VersionReader(manifest.info, manifest, self.containers, self.namer, 0, manifest.size_bytes).pieces()
        )


@pytest.mark.parametrize("pipeline", [{}, {"gc": {"mode": "hybrid"}}], indirect=True, ids=["mark-sweep", "hybrid"])
def test_gc_frees_during_puts_and_gets(pipeline: Pipeline) -> None:
    """Free deleted versions while others are put and read."""
    live: dict[tuple[str, int], bytes] = {}
    index = RedisIndex(pipeline.settings.redis, domain_of("default"))
    with uploading(pipeline.settings) as uploader:
        reader = Reader(pipeline, live)
        deletions = Deletions(reader.manifests, index.mark_many)
        reader.start()
        put = put_days(uploader, deletions, live)
        again = uploader.wait(uploader.put("again", [live["a", DAYS]]))
        assert again["ledger"]["unique_bytes"] == 0
        deletions.delete("default", "again", undelete_seconds=0)
        objects = reader.containers
        try:
            until(lambda: sum(size for _, size in objects.ids()) <= put * 0.6, pipeline.logs, poll_seconds=0.5)
            until(lambda: reader.restored > 10, pipeline.logs)
        finally:
            reader.over.set()
            reader.join()
        assert reader.wrong == [], pipeline.logs()
        assert index.versions_of("default", "a")[-KEEP:] == [DAYS - 1, DAYS]
        # Chunks that are left still deduplicate, and deleted ones are stored again.
        event = uploader.wait(uploader.put("a", [live["a", DAYS]]))
        assert (event["state"], event["ledger"]["unique_bytes"]) == ("committed", 0)
        fresh = Reader(pipeline, live)
        for (key, version), content in live.items():
            assert fresh.read(key, version) == content
    index.close()


def put_days(uploader: Uploader, deletions: Deletions, live: dict[tuple[str, int], bytes]) -> int:
    """Put versions of two keys, of which the last ones are kept; return the bytes ever new."""
    draw, stored = random.Random(1), 0
    contents = {"a": text_like(300_000, 1), "b": text_like(200_000, 2)}
    for day in range(1, DAYS + 1):
        for key, before in list(contents.items()):
            contents[key] = mutate(before, draw.randrange(1 << 30), edits=40)
            content = contents[key] + random_bytes(100_000, draw.randrange(1 << 30))
            event = uploader.wait(uploader.put(key, [content]))
            assert (event["state"], event["version"]) == ("committed", day), event
            live[key, day] = content
            stored += event["ledger"]["stored_bytes"]
            if day > KEEP:
                del live[key, day - KEEP]
                deletions.delete("default", key, day - KEEP, undelete_seconds=0)
        time.sleep(0.2)
    return stored


@pytest.mark.soak
@pytest.mark.parametrize("pipeline", [{"retention": {"superseded_seconds": 0, "policies": POLICIES}}], indirect=True)
def test_gc_forgets_by_policy_and_undeletes(pipeline: Pipeline) -> None:
    """Forget by policy; undelete a deleted version."""
    live: dict[tuple[str, int], bytes] = {}
    reader, index = Reader(pipeline, live), RedisIndex(pipeline.settings.redis, domain_of("default"))
    deletions = Deletions(reader.manifests, index.mark_many)
    contents = [random_bytes(50_000, seed) for seed in range(4)]
    with uploading(pipeline.settings) as uploader:
        for content in contents:
            for key in ("kept/a", "other/a"):
                uploader.wait(uploader.put(key, [content]))
    deletions.delete("default", "other/a", 4, undelete_seconds=3600)
    until(lambda: visible_versions(reader, "kept/a") == [3, 4], pipeline.logs)
    status_store = GcStatusStore(index.state)
    before, state = status_store.last(), status_store.state()
    status_store.request_run()
    until(lambda: status_store.last() != before and not status_store.requested_run, pipeline.logs)
    assert status_store.state() != state
    assert visible_versions(reader, "other/a") == [1, 2, 3]
    assert deletions.undelete("default", "other/a", 4) == 1
    assert reader.read("other/a", 4) == contents[3]
    GcPauseFlag(reader.objects).pause("the test")
    until(lambda: not status_store.requested_run, pipeline.logs)
    time.sleep(2)  # a worker that had not seen the pause has begun by now, and has the lease
    until(lambda: not index.server.one(("EXISTS", f"{index.prefix}:{{m}}:lease")), pipeline.logs)
    assert deletions.undelete("default", "kept/a", 2) == 1  # the next GC run would forget it again
    assert reader.read("kept/a", 2) == contents[1]
    GcPauseFlag(reader.objects).resume()
    until(lambda: visible_versions(reader, "kept/a") == [3, 4], pipeline.logs)
    index.close()


def visible_versions(reader: Reader, key: str) -> list[int]:
    """Return the versions of a key that are to be seen."""
    histories = reader.manifests.histories("default", key)
    return sorted(v for v, history in histories.items() if reader.manifests.shows("default", key, history))
