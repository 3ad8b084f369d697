"""Test which uploads are admitted, slowed and ended; the parts are those of a gateway, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import REGISTRY

from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import ConcurrencyLimit, Holders
from nearkin_gateway.monitoring.pipeline_load import RETRY_SECONDS_MAX, PipelineLoad
from nearkin_gateway.uploads import quota_metrics, upload_admission
from nearkin_gateway.uploads.in_flight import BULK_COST_BYTES, InFlightUploads
from nearkin_gateway.uploads.partition_lanes import PartitionLanes
from nearkin_gateway.uploads.staged_bytes import StagedBytes
from nearkin_gateway.uploads.upload_admission import UploadAdmission
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.results import Ledger, Stats

RATE = 100_000
SLOTS = 10


class Admitting:
    """An admission with its parts; `stored_bytes`: those of each tenant in the index."""

    def __init__(self, wait_seconds: float | None = None) -> None:
        self.quotas: dict[str, TenantQuota] = {}
        self.stored_bytes = 0
        self.readings = 0
        self.pool = WorkerPool("test", 1)
        self.slots = ConcurrencyLimit("uploads", SLOTS)
        self.staged = StagedBytes()
        self.load = PipelineLoad(lambda: wait_seconds, self.pool)
        in_flight = InFlightUploads()
        lanes = PartitionLanes(0, in_flight, lambda: False, dict)
        self.admission = UploadAdmission(
            self.quotas.get, self.read, in_flight, lanes, self.load, self.slots, self.staged
        )

    async def read(self, _tenant: str, _needs_whole: bool) -> tuple[Stats, bool]:
        self.readings += 1
        ledger = Ledger(logical_bytes=self.stored_bytes, stored_bytes=self.stored_bytes)
        return cast(Stats, SimpleNamespace(ledger=ledger, deleted_bytes=0, checkpoint_bytes=0)), True

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Take upload slots."""
        with ExitStack() as held:
            for number in range(count):
                held.enter_context(self.slots.one(Holders(f"t{number}", "", "")))
            yield


def run(test: Callable[[Admitting], Awaitable[None]], wait_seconds: float | None = None) -> None:
    """Run a test on an event loop, with a pipeline that is behind by `wait_seconds`."""

    async def with_parts() -> None:
        parts = Admitting(wait_seconds)
        while parts.load.wait_seconds != wait_seconds:
            await asyncio.sleep(0.001)
        try:
            await test(parts)
        finally:
            await parts.load.close()
            await parts.pool.close()

    asyncio.run(asyncio.wait_for(with_parts(), 60))


def refused(check: Callable[[], None]) -> Problem:
    with pytest.raises(Problem) as found:
        check()
    return found.value


def test_parallel_uploads_far_ahead_of_the_rate_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """End uploads with 429 beyond a debt of a minute: more of them would exceed the rate by any factor."""
    monkeypatch.setattr(upload_admission, "READ_DELAY_SECONDS_MAX", 0.001)

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(upload_bytes_per_second=RATE)

        async def upload() -> None:
            for _ in range(10):
                await parts.admission.pace("t", RATE)

        ends = await asyncio.gather(*[upload() for _ in range(50)], return_exceptions=True)
        problems = [end for end in ends if isinstance(end, Problem)]
        assert len(problems) >= 44
        assert {(problem.status, problem.name) for problem in problems} == {(429, "upload-rate-exceeded")}
        assert all(50 <= int(problem.headers["Retry-After"]) <= RETRY_SECONDS_MAX for problem in problems)
        taken = (await parts.admission.describe("t"))["upload_bytes_per_second"]["value"]
        assert taken is not None
        assert taken * 10 <= RATE * (61 + 50 + 10)  # a rate over 10 s: a debt of a minute, and a last piece of each

    run(test)


def test_lowered_rate_keeps_retry_after_bounded() -> None:
    """Name at most RETRY_SECONDS_MAX, though the bytes before the change take a day at the new rate."""

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(upload_bytes_per_second=1 << 40)
        for _ in range(20):
            await parts.admission.pace("t", 1 << 38)
        parts.quotas["t"] = TenantQuota(upload_bytes_per_second=RATE)
        problem = refused(lambda: parts.admission.check_rate("t"))
        assert int(problem.headers["Retry-After"]) == RETRY_SECONDS_MAX

    run(test)


def test_tenant_ahead_of_its_rate_takes_half_of_the_slots() -> None:
    """Refuse its next upload beyond half of the slots; a tenant within its rate gets the others."""

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(upload_bytes_per_second=RATE)
        await parts.admission.pace("t", RATE)
        with parts.taken(SLOTS // 2):
            parts.admission.check_slots("t")
            with parts.taken(1):
                problem = refused(lambda: parts.admission.check_slots("t"))
                assert (problem.status, problem.name) == (429, "upload-rate-exceeded")
                assert int(problem.headers["Retry-After"]) >= 1
                parts.admission.check_slots("other")

    run(test)


def test_tenant_slowed_by_the_pipeline_takes_half_of_the_slots() -> None:
    """Refuse its next upload beyond half of the slots; end those that run while slots are scarce."""

    async def test(parts: Admitting) -> None:
        await parts.admission.admit("bulk", BULK_COST_BYTES)
        await parts.admission.admit("light", 1000)
        with parts.taken(SLOTS // 2 + 1):
            problem = refused(lambda: parts.admission.check_slots("bulk"))
            assert (problem.status, problem.name) == (503, "pipeline-behind")
            assert int(problem.headers["Retry-After"]) == 40
            parts.admission.check_slots("light")
            await parts.admission.pace("bulk", 1000)
        with parts.taken(SLOTS - 1):
            with pytest.raises(Problem) as ended:
                await parts.admission.pace("bulk", 1000)
            assert ended.value.status == 503
            await parts.admission.pace("light", 1000)

    run(test, wait_seconds=40.0)


def test_upload_that_pauses_ends_while_slots_are_scarce() -> None:
    """End it with 429 where its pauses are longer than those of a client that is cut for its speed."""

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(upload_bytes_per_second=RATE)
        with parts.taken(SLOTS - 1):
            await parts.admission.pace("t", RATE // 2)
            with pytest.raises(Problem) as ended:
                await parts.admission.pace("t", 2 * RATE)
            assert ended.value.status == 429

    run(test)


def test_streamed_upload_grows_after_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the sums again before a body of unknown length is refused, as for the other uploads."""
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.REFUSED_SECONDS", 0.0)
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.COST_SHARE", 0)

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(logical_bytes=1000)
        parts.stored_bytes = 900
        blob = await parts.admission.admit("t", None)
        await parts.admission.grow("t", blob, 100)
        parts.stored_bytes = 0
        await parts.admission.grow("t", blob, 900)
        with pytest.raises(Problem) as refusal:
            await parts.admission.grow("t", blob, 1)
        assert refusal.value.status == 507
        assert parts.admission.in_flight.of("t").logical_bytes == 1000

    run(test)


def test_streamed_uploads_never_grow_beyond_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve in the same step as the last check, however many tasks wait for the same reading."""
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.REFUSED_SECONDS", 0.0)
    monkeypatch.setattr("nearkin_gateway.uploads.tenant_usage.COST_SHARE", 0)

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(logical_bytes=1000)
        parts.stored_bytes = 950
        blobs = [await parts.admission.admit("t", None) for _ in range(10)]
        parts.stored_bytes = 0
        grown = await asyncio.gather(*[parts.admission.grow("t", blob, 300) for blob in blobs], return_exceptions=True)
        assert grown.count(None) == 3
        assert parts.admission.in_flight.of("t").logical_bytes == 900

    run(test)


def test_staged_bytes_count_until_they_are_handed_over() -> None:
    """Count declared lengths of open resumable uploads once: while handed over as an upload in flight."""

    async def test(parts: Admitting) -> None:
        parts.quotas["t"] = TenantQuota(logical_bytes=1000)
        parts.staged.add("a", "t", 600)
        parts.staged.add("b", "other", 600)
        with pytest.raises(Problem):
            await parts.admission.check_room("t", 500)
        await parts.admission.check_room("t", 1000, without=["a", "a", "b"])
        blob = await parts.admission.admit("t", 600, staged="a")
        await parts.admission.check_room("t", 400)
        with pytest.raises(Problem):
            await parts.admission.check_room("t", 401)
        parts.admission.cancel(blob)
        parts.admission.end_hand_over("a")
        with pytest.raises(Problem):
            await parts.admission.check_room("t", 500)
        parts.staged.discard("a")
        await parts.admission.check_room("t", 1000)

    run(test)


def series(tenant: str, quota: str) -> list[float | None]:
    names = ("nearkin_tenant_used_bytes", "nearkin_tenant_quota_bytes", "nearkin_quota_refused_total")
    return [REGISTRY.get_sample_value(name, {"tenant": tenant, "quota": quota}) for name in names]


def test_metrics_of_a_quota_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove values and refusals of a quota that was removed, of idle tenants too; keep those of the others."""

    async def test(parts: Admitting) -> None:
        tenant = "metrics-end"
        parts.quotas[tenant] = TenantQuota(logical_bytes=10, upload_bytes_per_second=RATE)
        with pytest.raises(Problem):
            await parts.admission.check_room(tenant, 11)
        assert series(tenant, "logical_bytes") == [0, 10, 1]
        await parts.admission.pace(tenant, 20)
        await parts.admission.check_room(tenant, 5)
        parts.admission.forget_idle()
        assert series(tenant, "logical_bytes") == [0, 10, 1]
        parts.quotas[tenant] = TenantQuota(upload_bytes_per_second=RATE)
        await parts.admission.check_room(tenant, 11)  # as its next upload does
        assert series(tenant, "logical_bytes") == [None] * 3
        for gone in (True, False):
            parts.quotas[tenant] = TenantQuota(logical_bytes=10)
            with pytest.raises(Problem):
                await parts.admission.check_room(tenant, 11)
            if gone:
                del parts.quotas[tenant]  # and it uploads no more
            else:
                monkeypatch.setattr(quota_metrics, "IDLE_SECONDS", -1.0)
            parts.admission.forget_idle()
            assert series(tenant, "logical_bytes") == [None] * 3

    run(test)


def test_quota_without_known_sums_shows_no_value() -> None:
    """Describe limits while the index is rebuilt; refuse uploads, since nothing is known of the tenant."""

    async def test(parts: Admitting) -> None:
        async def rebuilt(tenant: str, needs_whole: bool) -> tuple[Stats, bool]:
            assert needs_whole
            raise StoreUnavailable(f"{tenant}: the index is being rebuilt")

        parts.quotas["t"] = TenantQuota(logical_bytes=10)
        parts.admission._usages._read = rebuilt
        assert await parts.admission.describe("t") == {"logical_bytes": {"value": None, "limit": 10}}
        with pytest.raises(StoreUnavailable):
            await parts.admission.admit("t", 1)

    run(test)
