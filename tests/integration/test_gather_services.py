"""Test that GC runs of the services over S3 and Redis merge blocks as a local store's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.objectstore.s3 import S3ObjectStore
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.utils import failpoints
from tests.support.data.stores import SMALL, settings
from tests.support.servers.maintenance_workers import GC, Fleet, copy_objects
from tests.support.servers.servers import Redis

YEAR = 31_536_000.0
CHOSEN = settings(
    SMALL,
    {
        "block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"},
        "delta": {"codec": "patch", "max_depth": 2},
        "deletion": {"undelete_seconds": 0},
    },
)
GATHERING = GcSettings(
    grace_seconds=GC.grace_seconds,
    interval_seconds=GC.interval_seconds,
    compact_below=0.9,
    merge_block_bytes=1 << 20,
    merge_versions_min=2,
)
VERSIONS = range(1, 17)


class Deployed(Fleet):
    """Sixteen versions, each with nearly all chunks changed; after `later` they are old."""

    def __init__(self, folder: Path, elsewhere: S3ObjectStore, redis: Redis, prefix: str) -> None:
        self.contents: dict[int, bytes] = {}
        content = text_like(600_000, 5)
        with open_store(folder / "s", settings=CHOSEN, create=True) as store:
            for number in VERSIONS:
                content = self.contents[number] = mutate(content, number, edits=150, edit_bytes_max=40)
                assert store.put("k", content).info.version == number
            now = store._clock() + 60
        copy_objects(folder / "s", elsewhere)
        super().__init__(elsewhere, redis.url, prefix, now, CHOSEN)
        self.fill_index()

    def later(self) -> None:
        self.now += YEAR

    def delete(self, number: int) -> None:
        deletions = Deletions(self.manifests, self.index.mark_many, clock=lambda: self.now)
        assert deletions.delete("default", "k", number, undelete_seconds=0) == 1
        del self.contents[number]

    def blocks(self) -> tuple[int, int]:
        """Return how many blocks are gathered, and how many refer to such."""
        containers = self.containers(self.objects)
        found = [containers.directory(container) for container, _ in containers.ids()]
        return sum(int(merged_blocks(one).sum()) for one in found), sum(
            int(reference_blocks(one).sum()) for one in found
        )

    def check(self) -> None:
        for number, content in self.contents.items():
            assert self.read("k", number) == content
        self.check_index()


@pytest.fixture
def fleet(tmp_path: Path, s3_objects: S3ObjectStore, redis: Redis, key_prefix: str) -> Iterator[Deployed]:
    made = Deployed(tmp_path, s3_objects, redis, key_prefix.rstrip(":"))
    with closing(made.index):
        yield made


@pytest.mark.soak
def test_old_data_is_merged_and_deleted(fleet: Deployed) -> None:
    """Merge blocks that are old enough; delete them with their versions."""
    worker, before = fleet.make_gc_worker(gc=GATHERING), fleet.stored_bytes()
    assert worker.run_once() is not None
    assert fleet.blocks() == (0, 0)  # their versions might be in flight
    fleet.later()
    report = worker.run_once()
    assert report is not None
    whole, references = fleet.blocks()
    assert whole > 0
    assert references > 0
    assert report.containers_rewritten > 1
    fleet.check()
    fleet.now += 3601
    assert worker.run_once() is not None
    assert fleet.stored_bytes() < 0.8 * before
    fleet.check()
    for going in (VERSIONS[:6], VERSIONS[6:-1], VERSIONS[-1:]):
        stored_before = fleet.stored_bytes()
        for number in going:
            fleet.delete(number)
        for _ in range(4):
            fleet.now += 3601
            assert worker.run_once() is not None
            fleet.check()
        assert fleet.stored_bytes() < stored_before
    assert not list(fleet.containers(fleet.objects).ids())


@pytest.mark.soak
def test_gc_run_ended_amid_a_merge_continues(fleet: Deployed) -> None:
    fleet.later()
    failpoints.arm("merge.container:1:error")
    try:
        with pytest.raises(StoreUnavailable):
            fleet.make_gc_worker(gc=GATHERING).run_once()
    finally:
        failpoints.disarm()
    whole, references = fleet.blocks()
    assert whole > 0
    assert references == 0
    fleet.check()
    fleet.now += 3601
    assert fleet.make_gc_worker(gc=GATHERING).run_once() is not None
    assert fleet.blocks()[1] > 0
    fleet.check()
