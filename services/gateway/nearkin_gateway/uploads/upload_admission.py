"""Admit uploads within the quotas of their tenant.

    bytes:  committed + in flight here + this upload <= limit     reserved at admission, released by the outcome
    rate:   a debt of bytes that shrinks by the limit each second; reads wait for it, uploads beyond a bound are refused

Invariant: uploads of one gateway together never exceed a limit of logical bytes. Each gateway reserves for itself, so
several may exceed it by what the others have in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.backends.ingest_backend import COMMITTED
from nearkin_gateway.http.problems import RETRY_SECONDS, Problem
from nearkin_gateway.http.request_limits import ByteRates
from nearkin_gateway.monitoring.pipeline_load import PipelineLoad
from nearkin_gateway.uploads.in_flight import InFlightUploads
from nearkin_gateway.uploads.partition_lanes import PartitionLanes
from nearkin_gateway.uploads.tenant_usage import TenantUsage, TenantUsages
from nearkin_shared.observability import metrics
from nearkin_shared.results import Stats

DEBT_SECONDS_MAX = 10.0
"""Uploads are refused while those before them have taken so much more than the rate: the others wait for as long."""
BURST_SECONDS = 0.25
"""Reads wait only when the tenant is further ahead than this: fewer and longer pauses."""
READ_DELAY_SECONDS_MAX = 5.0
"""Longest pause between two reads of a body: less than clients and proxies take for a dead server."""
SLOWED_SECONDS = 5.0
"""Estimated wait of new uploads from which those of tenants with much in flight are slowed."""
READ_BYTES = 64 * 1024
SLOW_DELAY_SECONDS_MAX = 0.25
"""Longest pause for the pipeline after READ_BYTES of a body, reached at a minute: uploads go on at 256 KiB/s."""
ASKED_SECONDS_MAX = 60.0
"""Estimated wait from which an upload with `Expect: 100-continue` is refused."""
QUOTA_EXCEEDED, RATE_EXCEEDED = "quota-exceeded", "upload-rate-exceeded"
_REMEDY_BYTES = "delete versions (stored bytes are free after the next GC run), or ask the operator for a larger quota"
_REMEDY_RATE = "send again after Retry-After, or ask the operator for a larger quota"


class UploadAdmission:
    """The quotas of all tenants at one gateway; for one event loop."""

    def __init__(
        self,
        quota_of: Callable[[str], TenantQuota | None],
        read: Callable[[str], Stats],
        in_flight: InFlightUploads,
        lanes: PartitionLanes,
        load: PipelineLoad,
    ) -> None:
        """`read` blocks and returns the sums of a tenant."""
        self._quota_of = quota_of
        self.in_flight = in_flight
        self._lanes, self._load = lanes, load
        self._usages = TenantUsages(read)
        self._rates = ByteRates()

    def check_rate(self, tenant: str) -> None:
        """Refuse an upload of a tenant that is far beyond its rate. Raises Problem 429."""
        quota = self._quota_of(tenant)
        limit = None if quota is None else quota.upload_bytes_per_second
        if limit is None:
            return
        debt_seconds = self._rates.debt_seconds(tenant, limit)
        if debt_seconds >= DEBT_SECONDS_MAX:
            value = limit + round(debt_seconds * limit)
            problem = _refusal(429, tenant, "upload_bytes_per_second", value, limit)
            problem.headers["Retry-After"] = str(math.ceil(debt_seconds - DEBT_SECONDS_MAX / 2))
            raise _counted(tenant, problem)

    def check_lag(self, tenant: str) -> None:
        """Refuse an upload whose client asks before it sends the body. Raises Problem 503.

        Only while uploads of the same tenant wait for the pipeline, and long.
        """
        wait_seconds = self._load.wait_seconds
        if wait_seconds is not None and wait_seconds >= ASKED_SECONDS_MAX and self.in_flight.of(tenant).is_bulk:
            retry_seconds = self._load.retry_seconds(RETRY_SECONDS)
            raise Problem(
                503,
                "pipeline-behind",
                f"uploads of tenant {tenant!r} wait for the pipeline; send again after Retry-After, or without Expect",
                headers={"Retry-After": str(retry_seconds)},
            )

    async def pace(self, tenant: str, read_bytes: int) -> None:
        """Wait after a read, while the tenant is ahead of its rate or the pipeline behind."""
        await self._wait_for_rate(tenant, read_bytes)
        if self.in_flight.of(tenant).is_bulk:
            behind_seconds = (self._load.wait_seconds or 0.0) - SLOWED_SECONDS
            if behind_seconds > 0:
                delay_seconds = (
                    SLOW_DELAY_SECONDS_MAX * min(1.0, behind_seconds / 60) * max(1.0, read_bytes / READ_BYTES)
                )
                await asyncio.sleep(min(delay_seconds, READ_DELAY_SECONDS_MAX))

    async def _wait_for_rate(self, tenant: str, read_bytes: int) -> None:
        quota = self._quota_of(tenant)
        if quota is None or quota.upload_bytes_per_second is None:
            return
        self._rates.add(tenant, read_bytes, quota.upload_bytes_per_second)
        ahead_seconds = self._rates.debt_seconds(tenant, quota.upload_bytes_per_second) - BURST_SECONDS
        if ahead_seconds > 0:
            await asyncio.sleep(min(ahead_seconds, READ_DELAY_SECONDS_MAX))

    async def check_room(self, tenant: str, size_bytes: int) -> None:
        """Refuse an upload that will not fit. Raises Problem 507, StoreUnavailable."""
        quota = self._quota_of(tenant)
        if quota is None or not quota.limits_bytes:
            self._usages.forget(tenant)
            return
        problem = self._problem(tenant, quota, await self._usages.current(tenant), size_bytes)
        if problem is not None:
            problem = self._problem(tenant, quota, await self._usages.current(tenant, refuses=True), size_bytes)
        if problem is not None:
            raise _counted(tenant, problem)

    async def admit(self, tenant: str, size_bytes: int) -> bytes:
        """Reserve room for the announced bytes of an upload; return its id.

        The room is released by `cancel`, or by the outcome. Raises Problem 507, StoreUnavailable.
        """
        await self.check_room(tenant, size_bytes)
        # No other task runs between the check and this, so its result still holds.
        self._load.refresh()
        blob, partition = self._lanes.new_blob(tenant)
        self.in_flight.begin(blob, tenant, partition)
        self._grow(tenant, blob, size_bytes)
        return blob

    def grow(self, tenant: str, blob: bytes, size_bytes: int) -> None:
        """Reserve room for bytes that were not announced. Raises Problem 507."""
        quota, usage = self._quota_of(tenant), self._usages.known(tenant)
        if quota is not None and quota.limits_bytes and usage is not None:
            problem = self._problem(tenant, quota, usage, size_bytes)
            if problem is not None:
                raise _counted(tenant, problem)
        self._grow(tenant, blob, size_bytes)

    def cancel(self, blob: bytes) -> None:
        """Release the room of an upload that ended without effect."""
        self.in_flight.end(blob)

    def on_event(self, event: dict[str, Any]) -> None:
        """Release the room of an upload, and count what it stored."""
        self.in_flight.end(bytes.fromhex(str(event["id"])))
        if event["state"] == COMMITTED:
            self._usages.on_committed(event)

    async def describe(self, tenant: str) -> dict[str, dict[str, int]]:
        """Return the value and the limit of each quota that a tenant has. Raises StoreUnavailable."""
        quota = self._quota_of(tenant)
        if quota is None:
            return {}
        values = {} if not quota.limits_bytes else self._values(tenant, await self._usages.current(tenant))
        if quota.upload_bytes_per_second is not None:
            values["upload_bytes_per_second"] = self._rates.rate(tenant)
        return {name: {"value": values[name], "limit": limit} for name, limit in quota.to_json().items()}

    def _grow(self, tenant: str, blob: bytes, size_bytes: int) -> None:
        usage = self._usages.known(tenant)
        share = 1.0 if usage is None else usage.stored_share
        self.in_flight.grow(blob, size_bytes, math.ceil(size_bytes * share))

    def _values(self, tenant: str, usage: TenantUsage) -> dict[str, int]:
        held = self.in_flight.of(tenant)
        return {
            "logical_bytes": usage.logical_bytes + held.logical_bytes,
            "stored_bytes": usage.stored_bytes + held.stored_bytes,
        }

    def _problem(self, tenant: str, quota: TenantQuota, usage: TenantUsage, size_bytes: int) -> Problem | None:
        """Return why an upload does not fit.

        Stored bytes are estimated by the tenant's mean so far.
        """
        values = self._values(tenant, usage)
        added = {"logical_bytes": size_bytes, "stored_bytes": math.ceil(size_bytes * usage.stored_share)}
        for name, value in values.items():
            limit = getattr(quota, name)
            if limit is None:
                continue
            metrics.QUOTA_BYTES.labels(tenant, name).set(limit)
            metrics.QUOTA_USED.labels(tenant, name).set(value)
            if value + added[name] > limit or (not size_bytes and value >= limit):
                return _refusal(507, tenant, name, value + added[name], limit)
        return None


def _counted(tenant: str, problem: Problem) -> Problem:
    """Return a refusal, counted in the metrics."""
    metrics.QUOTA_REFUSED.labels(tenant, str(problem.members["quota"])).inc()
    return problem


def _refusal(status: int, tenant: str, quota: str, value: int, limit: int) -> Problem:
    """Return the problem of an upload beyond a quota."""
    remedy = _REMEDY_BYTES if status == 507 else _REMEDY_RATE
    return Problem(
        status,
        QUOTA_EXCEEDED if status == 507 else RATE_EXCEEDED,
        f"quota {quota} of tenant {tenant!r}: {value} with this upload, limit {limit}; {remedy}",
        members={"quota": quota, "value": value, "limit": limit, "remedy": remedy},
    )
