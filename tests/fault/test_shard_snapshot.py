"""Snapshot of a shard's tags: written before the shard is ready, kept recent, and too old for readiness if it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin_index.shard_index import ShardIndex
from nearkin_index.shard_server import ShardOptions, open_complete
from nearkin_index.snapshot_keeper import AGE_SECONDS_MAX, SAVE_SECONDS, SnapshotKeeper
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.shards.key_ranges import part_of
from nearkin_shared.index.tablets.tag_snapshot import FILE_NAME
from nearkin_shared.limits import MIB
from nearkin_shared.observability import metrics
from tests.support.conformance.index_contract import first_claims, second_claims
from tests.support.servers.index_shards import ContainerShelf, shards


class SettableClock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class KeptShard:
    """Index of a shard with two containers that its snapshot lacks, and the keeper of the snapshot."""

    def __init__(self, folder: Path) -> None:
        self.shelf, self.clock = ContainerShelf(), SettableClock()
        self.options = ShardOptions(0, 1, folder, map_bytes=64 * MIB)
        self.index: ShardIndex = self.open()
        self.keeper = SnapshotKeeper(self.index, self.clock)
        self.keeper.step()
        for claims in (first_claims(), second_claims()):
            self.shelf.stored[int(claims.directory.container)] = claims
            self.index.add_parts([part_of(claims, 0, 1)])
        self.snapshot = folder / "0-of-1" / FILE_NAME

    def open(self) -> ShardIndex:
        """Return the index with all that the shelf has."""
        return open_complete(self.options, self.shelf.store_of(0, 1))

    def pass_time(self, seconds: float) -> None:
        """Step as the keeper's thread does, every 15 s."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            self.clock.seconds += 15
            self.keeper.step()


def test_snapshot_is_saved_once_it_is_old(tmp_path: Path) -> None:
    """A killed shard then reads few directories; an idle one has age 0 for ever."""
    shard = KeptShard(tmp_path)
    shard.pass_time(SAVE_SECONDS - 30)
    assert not shard.snapshot.exists()
    assert 0 < shard.keeper.age_seconds < SAVE_SECONDS
    shard.pass_time(60)
    assert shard.snapshot.exists()
    assert (shard.keeper.age_seconds, shard.index.tablets.unsaved) == (0, 0)
    shard.pass_time(10 * AGE_SECONDS_MAX)
    shard.keeper.check()
    shard.index.close()


def test_shard_with_a_snapshot_too_old_is_not_ready(tmp_path: Path) -> None:
    """The reason names age, containers and remedy; once the file can be written it is ready again."""
    shard = KeptShard(tmp_path)
    obstacle = shard.snapshot.with_suffix(".new")
    obstacle.mkdir()
    shard.pass_time(AGE_SECONDS_MAX)
    shard.keeper.check()
    shard.pass_time(60)
    with pytest.raises(StoreUnavailable, match=r"18\d\d s old and lacks 2 containers: .*volume full"):
        shard.keeper.check()
    assert metrics.SNAPSHOT_AGE.labels("shards")._value.get() > AGE_SECONDS_MAX
    assert metrics.SNAPSHOT_LACKS.labels("shards")._value.get() == 2
    obstacle.rmdir()
    shard.pass_time(SAVE_SECONDS)
    shard.keeper.check()
    assert shard.snapshot.exists()
    shard.index.close()


def test_completed_index_has_a_snapshot_before_it_answers(tmp_path: Path) -> None:
    """A shard without its snapshot, killed right after its start, does not read all directories again."""
    shard = KeptShard(tmp_path)
    shard.index.close()
    shard.snapshot.unlink()
    index = shard.open()
    assert shard.snapshot.exists()
    assert (index.tablets.unsaved, index.tablets.tag_bytes > 0) == (0, True)
    index.close()


def test_readiness_asks_for_the_age_of_the_snapshot(tmp_path: Path) -> None:
    """Calls are answered meanwhile: an old snapshot has no wrong entry."""
    with shards(tmp_path, 1) as index:
        (server,) = index.servers
        server.check_ready()
        index.publish_many([first_claims(), second_claims()])
        assert server.keeper is not None
        server.keeper._behind_since = -10 * AGE_SECONDS_MAX
        with pytest.raises(StoreUnavailable, match="s old and lacks 2 containers"):
            server.check_ready()
        assert index.container_ids().tolist()
