"""Test GC by a clock that is ahead: nothing is freed.

The error has both times and the remedy.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from nearkin.store import Store, open_store
from nearkin_maintenance.gc.clock_check import check_clock
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import GcSettings, RetentionPolicy
from nearkin_shared.errors import ClockSkew, RetentionActive
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.storage.clock_records import FOLDER, ClockRecords
from tests.support.fakes.clock import DAY, Clock

START = float(int(time.time()))
"""Containers are named by the real clock."""
YEAR = 365 * DAY


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


def open_collected(root: Path, clock: Clock, **gc: object) -> Store:
    changes = {"gc": {"grace_seconds": 0, **gc}, "deletion": {"undelete_seconds": 0}}
    return open_store(root, settings=with_changes(Settings(), changes), clock=clock, create=True)


def format_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def container(seconds: float) -> int:
    """Return the id of a container that was written then."""
    return int(seconds * 1000) << 20


def test_gc_refuses_a_clock_far_ahead(tmp_path: Path, clock: Clock) -> None:
    """Refuse the run by a clock a year ahead, which would free recent deletions."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"x" * 1000)
        store.delete("k")
        clock.now += YEAR
        day = f"(?:{format_time(START)[:10]}|{format_time(START + DAY)[:10]})"
        match = rf"clock shows {format_time(START + YEAR)}, and between {day}.*gc.trust_clock"
        for attempt in (store.gc, store.purge, lambda: store.forget("", RetentionPolicy(keep_last=1))):
            with pytest.raises(ClockSkew, match=match):
                attempt()
        assert store._manifests.is_committed("default", "k", 1)
        assert store.gc(dry_run=True).versions == 1  # a preview frees nothing
        clock.now = START + 1
        assert store.gc().versions == 1


def test_put_by_a_wrong_clock_does_not_confirm_it() -> None:
    """Reject a container as far ahead as the clock as proof: the gap before it counts."""
    objects = memory_objects()
    check_clock(objects, [container(START)], START, GcSettings())
    with pytest.raises(ClockSkew):
        check_clock(objects, [container(START), container(START + YEAR)], START + YEAR + 1, GcSettings())
    monthly = [container(START + month * 30 * DAY) for month in range(13)]
    check_clock(objects, monthly, START + YEAR, GcSettings())


@pytest.mark.parametrize("record", ["none", "lost"])
def test_put_before_the_first_gc_confirms_no_clock(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    """Free nothing retained after a put by a clock 400 days ahead, without clock record."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", os.urandom(1000))
        store.retain("k", datetime.fromtimestamp(START + 300 * DAY, UTC))
        if record == "lost":
            store.gc()
            shutil.rmtree(store.root / FOLDER)
    ahead = START + 400 * DAY
    monkeypatch.setattr(time, "time", lambda: ahead)
    monkeypatch.setattr(time, "time_ns", lambda: int(ahead * 1e9))
    clock.now = ahead
    with open_collected(tmp_path / "s", clock) as store:
        store.put("other", os.urandom(1000))
        assert max(int(found) >> 20 for found in store._containers.generations()) == int(ahead * 1000)
        store.delete("k")
        clock.now += 10
        for attempt in (store.gc, store.purge):
            with pytest.raises(ClockSkew, match="nothing is freed"):
                attempt()
        assert store._manifests.is_committed("default", "k", 1)


def test_deletion_by_a_clock_behind_keeps_its_window(tmp_path: Path, clock: Clock) -> None:
    """Start the undelete window of an rm by a clock 10 days behind at the last GC run's time."""
    changes = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 7 * DAY}}
    settings = with_changes(Settings(), changes)
    with open_store(tmp_path / "s", settings=settings, clock=clock, create=True) as store:
        store.put("k", b"one")
        clock.now += 30 * DAY
        store.gc()
    clock.now -= 10 * DAY
    with open_store(tmp_path / "s", settings=settings, clock=clock) as store:
        store.gc()  # does not lower the recorded time
        store.delete("k")
    clock.now = START + 30 * DAY + 60
    with open_store(tmp_path / "s", settings=settings, clock=clock) as store:
        assert store.gc().versions == 0
        assert store.undelete("k") == 1
        assert store.get("k").read() == b"one"


def test_deletion_by_a_clock_before_the_put_keeps_it(tmp_path: Path, clock: Clock) -> None:
    """Without a GC run the window begins at the version's own time at the earliest."""
    changes = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 7 * DAY}}
    with open_store(tmp_path / "s", settings=with_changes(Settings(), changes), clock=clock, create=True) as store:
        store.put("k", b"one")
        clock.now -= 10 * DAY
        store.delete("k")
        clock.now = START + 60
        assert store.gc().versions == 0
        assert store.undelete("k") == 1


def test_version_dated_in_9999_can_be_deleted(tmp_path: Path, clock: Clock) -> None:
    """Delete a version dated to the last day that a tombstone can express; purge frees it."""
    changes = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 7 * DAY}}
    with open_store(tmp_path / "s", settings=with_changes(Settings(), changes), clock=clock, create=True) as store:
        clock.now = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
        store.put("k", b"one")
        clock.now = START
        store.put("k", b"two")
        assert store.delete("k", 1) == 1
        assert store.purge().versions == 1


def test_min_age_by_a_clock_behind_is_not_shortened(tmp_path: Path, clock: Clock) -> None:
    """Retain a put by a clock that is behind from the last GC run's time, not from the past."""
    settings = with_changes(Settings(), {"retention": {"min_age_seconds": 5 * DAY}})
    with open_store(tmp_path / "s", settings=settings, clock=clock, create=True) as store:
        store.put("k", b"one")
        clock.now += 30 * DAY
        store.gc()
    clock.now -= 10 * DAY
    with open_store(tmp_path / "s", settings=settings, clock=clock) as store:
        store.put("new", b"two")
        expected = datetime.fromtimestamp(START + 35 * DAY, UTC)
        assert store.info("new").retain_until == expected
    with open_collected(tmp_path / "s", clock) as store:
        clock.now = START + 30 * DAY + 60
        with pytest.raises(RetentionActive):
            store.delete("new")


def test_old_gap_is_confirmed_once() -> None:
    """Require `gc.trust_clock` once for a gap among old containers.

    That run's record covers it.
    """
    objects = memory_objects()
    containers = [container(START - YEAR), container(START)]
    with pytest.raises(ClockSkew, match=rf"between {format_time(START - YEAR)} and {format_time(START)}"):
        check_clock(objects, containers, START + 1, GcSettings())
    check_clock(objects, containers, START + 1, GcSettings(trust_clock=True))
    check_clock(objects, containers, START + 2, GcSettings())


def test_trusted_clock_is_recorded(tmp_path: Path, clock: Clock) -> None:
    """One run with `gc.trust_clock` confirms the clock; later ones need it no more."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"x")
    clock.now += YEAR
    with open_collected(tmp_path / "s", clock) as store, pytest.raises(ClockSkew):
        store.gc()
    with open_collected(tmp_path / "s", clock, trust_clock=True) as store:
        store.gc()
    clock.now += DAY
    with open_collected(tmp_path / "s", clock) as store:
        store.gc()
        assert store.verify().damage == ()


def test_clock_record_is_written_once_a_day(tmp_path: Path, clock: Clock) -> None:
    """Write one record, replaced after a day; never refuse a store with regular GC runs."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"x")
        for _ in range(5):
            store.gc()
            clock.now += 60 * DAY
            records = ClockRecords(store._covered)
            assert len(records.list_records()) == 1
        before = records.read()
        clock.now = START + 4 * 60 * DAY + 3600
        store.gc()
        assert records.read() == before


def test_forged_clock_record_counts_as_none(tmp_path: Path, clock: Clock) -> None:
    """A record that the store's key does not authenticate confirms no clock; verify names it."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"x")
        name = ClockRecords(store._covered).name(7)
        path = store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": 1, "at_us": int((START + YEAR) * 1e6)}))
        clock.now += YEAR
        with pytest.raises(ClockSkew):
            store.gc()
        assert name in [found.object_name for found in store.verify().damage]


def test_clock_behind_lowers_the_record_only_if_trusted() -> None:
    """A GC run by a clock that is behind leaves the recorded time; `gc.trust_clock` sets it."""
    objects = memory_objects()
    check_clock(objects, [], START, GcSettings())
    check_clock(objects, [], START - 10 * DAY, GcSettings())
    assert ClockRecords(objects).read() == int(START * 1e6)
    check_clock(objects, [], START - 10 * DAY, GcSettings(trust_clock=True))
    assert ClockRecords(objects).read() == int((START - 10 * DAY) * 1e6)


class Dated(ObstoreObjectStore):
    """An object store whose server has a stopped clock."""

    has_server_clock = True

    def modified_seconds(self, name: str) -> float:
        self.size_bytes(name)
        return START


def test_clock_behind_that_of_a_server_leaves_the_record() -> None:
    """Keep the recorded time, also if a server dates the records and the clock is behind."""
    objects = Dated(MemoryStore())
    check_clock(objects, [], START, GcSettings())
    check_clock(objects, [], START - 10 * DAY, GcSettings())
    assert ClockRecords(objects).read() == int(START * 1e6)


def test_clock_behind_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Report both times if the clock is behind the store's containers, and continue the run."""
    objects = memory_objects()
    with caplog.at_level(logging.WARNING):
        check_clock(objects, [container(START + YEAR)], START, GcSettings())
    assert f"written at {format_time(START + YEAR)}" in caplog.text
    assert f"this clock shows {format_time(START)}" in caplog.text


def test_gc_refuses_a_clock_ahead_of_the_s3_server(s3_objects: ObjectStore) -> None:
    """Tolerate 300 s beyond an S3 server's date, and no more; a clock behind is no danger."""
    now = datetime.now(UTC).timestamp()
    check_clock(s3_objects, [], now + 200, GcSettings())
    with pytest.raises(ClockSkew, match=r"the object store's 2.*Z, [45]\d\d s less.*nothing is freed"):
        check_clock(s3_objects, [], now + 500, GcSettings())
    check_clock(s3_objects, [], now + 500, GcSettings(trust_clock=True))
    check_clock(s3_objects, [], now - 5000, GcSettings())
    assert len([name for name, _ in s3_objects.names(FOLDER)]) == 1
