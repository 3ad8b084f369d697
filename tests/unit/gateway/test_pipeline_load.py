"""Test the estimate of how long an upload waits for the pipeline."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.monitoring import pipeline_load
from nearkin_gateway.monitoring.pipeline_load import RETRY_SECONDS_MAX, PipelineLoad, retry_seconds
from nearkin_gateway.monitoring.pipeline_state import FEW_RECORDS, Reading, drain_seconds
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.lag import GroupLag

GROUPS = ("chunker", "delta")


def lag(group: str, waiting: int, taken: int) -> GroupLag:
    return GroupLag(group, {("topic", 0): waiting // 2, ("topic", 1): waiting - waiting // 2}, 0, taken)


def reading(at: float, chunker: tuple[int, int], delta: tuple[int, int] = (0, 0)) -> Reading:
    """Return a reading; the pairs are (waiting records, handled records)."""
    return at, [lag("chunker", *chunker), lag("delta", *delta), lag("ingest", 10**9, 0)]


def test_drain_seconds_of_one_stage_is_lag_by_rate() -> None:
    """Divide the waiting records by the measured rate; those of users' topics do not count."""
    assert drain_seconds([reading(0, (5000, 0)), reading(5, (4000, 1000))], GROUPS) == pytest.approx(20)


def test_drain_seconds_of_two_stages_adds_up() -> None:
    """Add the times of all stages: records that the first one has handled wait for the second one."""
    readings = [reading(0, (5000, 0), (600, 0)), reading(5, (4000, 1000), (500, 500))]
    assert drain_seconds(readings, GROUPS) == pytest.approx(20 + 5)


def test_drain_seconds_after_idle_time_uses_the_best_rate() -> None:
    """Count no time in which nothing waited."""
    readings = [reading(0, (0, 0)), reading(50, (0, 0)), reading(55, (9000, 1000))]
    assert drain_seconds(readings, GROUPS) == pytest.approx(45)


def test_drain_seconds_of_few_records_is_short() -> None:
    """Take the last records before a commit for no backlog, though an idle stage has a low rate."""
    assert drain_seconds([reading(0, (1, 0)), reading(50, (2, 1))], GROUPS) == 5
    assert drain_seconds([reading(0, (FEW_RECORDS, 0))], GROUPS) == 5
    assert drain_seconds([reading(0, (0, 0))], GROUPS) == 0


def test_drain_seconds_of_a_still_stage_is_infinite() -> None:
    """Report a stage that handles nothing; before the second reading nothing is known."""
    assert drain_seconds([reading(0, (5000, 7)), reading(5, (6000, 7))], GROUPS) == math.inf
    assert drain_seconds([reading(0, (5000, 7))], GROUPS) is None


def test_retry_seconds_is_bounded() -> None:
    """Round up, within the least value and the bound."""
    assert [retry_seconds(wait, 5) for wait in (None, 0.0, 5.2, 1e9, math.inf)] == [
        5, 5, 6, RETRY_SECONDS_MAX, RETRY_SECONDS_MAX
    ]  # fmt: skip


def test_load_is_read_once_for_all_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the last estimate at once while a reading is under way, and read again when it is old."""
    monkeypatch.setattr(pipeline_load, "LOOK_SECONDS", 0.05)
    results: list[float | Exception] = [40.0, StoreUnavailable("kafka is away"), 50.0, ValueError("not an offset")]
    release, calls = threading.Event(), []

    def read() -> float:
        calls.append(1)
        release.wait(30)
        found = results.pop(0) if results else 7.0
        if isinstance(found, Exception):
            raise found
        return found

    async def run() -> None:
        pool = WorkerPool("test", 1)
        load = PipelineLoad(read, pool)
        assert [load.retry_seconds(1) for _ in range(100)] == [1] * 100
        release.set()
        for wanted in (40.0, None, 50.0, None, 7.0):
            while load.wait_seconds != wanted or load._reading is None:
                await asyncio.sleep(0.001)
        await load.close()
        assert load.wait_seconds == 7.0
        await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(calls) <= 7


def test_load_of_a_hanging_reading_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return no estimate once the last successful reading is old, while Kafka leaves the next one unanswered."""
    monkeypatch.setattr(pipeline_load, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(pipeline_load, "KNOWN_SECONDS", 0.2)
    release, calls = threading.Event(), []

    def read() -> float:
        calls.append(1)
        if len(calls) > 1:
            release.wait(30)
        return 40.0

    async def run() -> None:
        pool = WorkerPool("test", 1)
        load = PipelineLoad(read, pool)
        while load.wait_seconds != 40.0:
            await asyncio.sleep(0.001)
        while load.wait_seconds is not None:
            await asyncio.sleep(0.01)
        assert len(calls) == 2
        assert load.retry_seconds(5) == 5
        release.set()
        while load.wait_seconds != 40.0:
            await asyncio.sleep(0.001)
        await load.close()
        await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))
