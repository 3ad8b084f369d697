"""Admit uploads within the quotas of their tenant.

    bytes:  committed + in flight here + open resumable uploads + this upload <= limit
            reserved at admission, released by the outcome
    rate:   a debt of bytes that shrinks by the limit each second; reads wait for it, uploads beyond a bound are refused
    slots:  an upload that is slowed pauses, which the minimum speed of clients leaves out: while slots are scarce the
            next one is refused, and with few left those that run are ended

Invariant: uploads of one gateway together never exceed a limit of logical bytes. Each gateway reserves for itself, so
several may exceed it by what the others have in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.backends.ingest_backend import COMMITTED
from nearkin_gateway.http.problems import RETRY_SECONDS, Problem
from nearkin_gateway.http.request_limits import ByteRates, ConcurrencyLimit
from nearkin_gateway.monitoring.pipeline_load import PipelineLoad, retry_seconds
from nearkin_gateway.uploads.in_flight import InFlightUploads
from nearkin_gateway.uploads.partition_lanes import PartitionLanes
from nearkin_gateway.uploads.quota_metrics import QuotaMetrics
from nearkin_gateway.uploads.staged_bytes import StagedBytes
from nearkin_gateway.uploads.tenant_usage import ReadSums, TenantUsage, TenantUsages
from nearkin_shared.errors import StoreUnavailable

DEBT_SECONDS_MAX = 10.0
"""Uploads are refused while those before them have taken so much more than the rate: the others wait for as long."""
ENDED_DEBT_SECONDS = 60.0
"""A running upload is ended beyond this debt: so many read at once that their longest pauses do not hold the rate."""
BURST_SECONDS = 0.25
"""Reads wait only when the tenant is further ahead than this: fewer and longer pauses."""
READ_DELAY_SECONDS_MAX = 5.0
"""Longest pause between two reads of a body: less than clients and proxies take for a dead server."""
SLOWED_SECONDS = 5.0
"""Estimated wait of new uploads from which those of tenants with much in flight are slowed."""
READ_BYTES = 64 * 1024
SLOW_DELAY_SECONDS_MAX = 0.25
"""Longest pause for the pipeline after READ_BYTES of a body, reached at a minute: uploads go on at 256 KiB/s."""
SLOWED_SHARE_MAX = 0.5
"""Share of the upload slots beyond which a slowed tenant gets no more of them: the others are left to the rest."""
SCARCE_SHARE = 0.9
"""Share of the upload slots from which uploads that are slowed are ended; the share of one tenant is smaller."""
SCARCE_AHEAD_SECONDS = 1.0
"""For a rate only those with longer pauses: they move less than READ_BYTES a second, as slow clients that are cut."""
ASKED_SECONDS_MAX = 60.0
"""Estimated wait from which an upload with `Expect: 100-continue` is refused."""
QUOTA_EXCEEDED, RATE_EXCEEDED, PIPELINE_BEHIND = "quota-exceeded", "upload-rate-exceeded", "pipeline-behind"
_REMEDY_BYTES = "delete versions (stored bytes are free after the next GC run), or ask the operator for a larger quota"
_REMEDY_RATE = "send again after Retry-After, or ask the operator for a larger quota"


class UploadAdmission:
    """The quotas of all tenants at one gateway; for one event loop."""

    def __init__(
        self,
        quota_of: Callable[[str], TenantQuota | None],
        read: ReadSums,
        in_flight: InFlightUploads,
        lanes: PartitionLanes,
        load: PipelineLoad,
        slots: ConcurrencyLimit,
        staged: StagedBytes,
    ) -> None:
        """`slots`: those of running uploads; `staged`: the open resumable uploads."""
        self._quota_of = quota_of
        self.in_flight = in_flight
        self._lanes, self._load, self._slots = lanes, load, slots
        self._staged = staged
        self._handed_over: set[str] = set()
        """Resumable uploads that are in flight, which count as such."""
        self._usages = TenantUsages(read)
        self._rates = ByteRates()
        self._metrics = QuotaMetrics()

    def check_rate(self, tenant: str) -> None:
        """Refuse an upload of a tenant that is far beyond its rate. Raises Problem 429."""
        limit = self._rate_limit(tenant)
        if limit is not None and self._rates.debt_seconds(tenant, limit) >= DEBT_SECONDS_MAX:
            raise self._rate_problem(tenant, limit)

    def check_slots(self, tenant: str) -> None:
        """Refuse an upload of a slowed tenant while many slots are taken.

        An upload that pauses holds its slot for hours: two slowed tenants could take all. Raises Problem 429 or 503.
        """
        if self._slots.occupancy <= SLOWED_SHARE_MAX:
            return
        limit = self._rate_limit(tenant)
        # Half of it, since a pause ends where all of it is left.
        if limit is not None and self._rates.debt_seconds(tenant, limit) > BURST_SECONDS / 2:
            raise self._rate_problem(tenant, limit)
        if self._behind_seconds(tenant) > 0:
            raise self._behind_problem(tenant, "send again after Retry-After")

    def check_lag(self, tenant: str) -> None:
        """Refuse an upload whose client asks before it sends the body. Raises Problem 503.

        Only while uploads of the same tenant wait for the pipeline, and long.
        """
        wait_seconds = self._load.wait_seconds
        if wait_seconds is not None and wait_seconds >= ASKED_SECONDS_MAX and self.in_flight.of(tenant).is_bulk:
            raise self._behind_problem(tenant, "send again after Retry-After, or without Expect")

    async def pace(self, tenant: str, read_bytes: int) -> None:
        """Wait after a read, while the tenant is ahead of its rate or the pipeline behind.

        Raises Problem 429 or 503, which end the upload: too many of the tenant read at once, or slots are scarce.
        """
        await self._wait_for_rate(tenant, read_bytes)
        behind_seconds = self._behind_seconds(tenant)
        if behind_seconds > 0:
            if self._slots.occupancy >= SCARCE_SHARE:
                raise self._behind_problem(tenant, "and slots are scarce; send again after Retry-After")
            delay_seconds = SLOW_DELAY_SECONDS_MAX * min(1.0, behind_seconds / 60) * max(1.0, read_bytes / READ_BYTES)
            await asyncio.sleep(min(delay_seconds, READ_DELAY_SECONDS_MAX))

    async def _wait_for_rate(self, tenant: str, read_bytes: int) -> None:
        limit = self._rate_limit(tenant)
        if limit is None:
            return
        self._rates.add(tenant, read_bytes, limit)
        debt_seconds = self._rates.debt_seconds(tenant, limit)
        ahead_seconds = debt_seconds - BURST_SECONDS
        is_scarce = self._slots.occupancy >= SCARCE_SHARE
        if debt_seconds > ENDED_DEBT_SECONDS or (is_scarce and ahead_seconds > SCARCE_AHEAD_SECONDS):
            raise self._rate_problem(tenant, limit)
        if ahead_seconds > 0:
            await asyncio.sleep(min(ahead_seconds, READ_DELAY_SECONDS_MAX))

    def _rate_limit(self, tenant: str) -> int | None:
        quota = self._quota_of(tenant)
        return None if quota is None else quota.upload_bytes_per_second

    def _rate_problem(self, tenant: str, limit: int) -> Problem:
        """Return the refusal of a tenant ahead of its rate, counted."""
        debt_seconds = self._rates.debt_seconds(tenant, limit)
        problem = _refusal(429, tenant, "upload_bytes_per_second", limit + round(debt_seconds * limit), limit)
        problem.headers["Retry-After"] = str(retry_seconds(debt_seconds - DEBT_SECONDS_MAX / 2, 1))
        return self._count_refusal(tenant, problem)

    def _behind_seconds(self, tenant: str) -> float:
        """Return how much longer uploads of a tenant wait for the pipeline than they should."""
        if not self.in_flight.of(tenant).is_bulk:
            return 0.0
        return max(0.0, (self._load.wait_seconds or 0.0) - SLOWED_SECONDS)

    def _behind_problem(self, tenant: str, remedy: str) -> Problem:
        why = f"uploads of tenant {tenant!r} wait for the pipeline; {remedy}"
        headers = {"Retry-After": str(self._load.retry_seconds(RETRY_SECONDS))}
        return Problem(503, PIPELINE_BEHIND, why, headers=headers)

    async def check_room(
        self, tenant: str, size_bytes: int, without: Collection[str] = (), *, for_checkpoint: bool = False
    ) -> None:
        """Refuse bytes that will not fit; open resumable uploads `without` are not counted.

        For a checkpoint, those of other checkpoints are counted too: else they would have no bound. No other task runs
        between the last check and the return. Raises Problem 507, StoreUnavailable.
        """
        refusal = await self.find_refusal(tenant, size_bytes, without, for_checkpoint=for_checkpoint)
        if refusal is not None:
            raise self._count_refusal(tenant, refusal)

    async def find_refusal(
        self, tenant: str, size_bytes: int, without: Collection[str] = (), *, for_checkpoint: bool = False
    ) -> Problem | None:
        """Return why bytes will not fit, None if they do. Raises StoreUnavailable."""
        quota = self._quota_of(tenant)
        self._metrics.remove(tenant, () if quota is None else quota.to_json())
        if quota is None or not quota.limits_bytes:
            self._usages.forget(tenant)
            return None
        problem = None
        for refuses in (False, True):  # a refusal wants recent sums
            usage = await self._usages.current(tenant, refuses=refuses)
            values = self._values(tenant, usage, without)
            if for_checkpoint:
                values["logical_bytes"] += usage.checkpoint_bytes
            problem = self._problem(tenant, quota, usage, size_bytes, values)
            if problem is None:
                break
        return problem

    async def admit(
        self, tenant: str, size_bytes: int | None, staged: str | None = None, *, for_checkpoint: bool = False
    ) -> bytes:
        """Reserve room for the announced bytes of an upload (None: not known); return its id.

        `staged`: the resumable upload that is handed over; `end_hand_over` follows. The room is released by `cancel`,
        or by the outcome. Raises Problem 507, StoreUnavailable.
        """
        await self.check_room(
            tenant, size_bytes or 0, () if staged is None else (staged,), for_checkpoint=for_checkpoint
        )
        # No other task runs between the check and this, so its result still holds.
        self._load.refresh()
        blob, partition = self._lanes.new_blob(tenant, size_bytes)
        self.in_flight.begin(blob, tenant, partition)
        if staged is not None:
            self._handed_over.add(staged)
        self._grow(tenant, blob, size_bytes or 0)
        return blob

    async def grow(self, tenant: str, blob: bytes, size_bytes: int, *, for_checkpoint: bool = False) -> None:
        """Reserve room for bytes that were not announced. Raises Problem 507, StoreUnavailable."""
        await self.check_room(tenant, size_bytes, for_checkpoint=for_checkpoint)
        self._grow(tenant, blob, size_bytes)  # no other task runs before it, as in `admit`

    def end_hand_over(self, number: str) -> None:
        """Count a resumable upload as one again, if it is still open."""
        self._handed_over.discard(number)

    def cancel(self, blob: bytes) -> None:
        """Release the room of an upload that ended without effect."""
        self.in_flight.end(blob)

    def on_event(self, event: dict[str, Any]) -> None:
        """Release the room of an upload, and count what it stored."""
        self.in_flight.end(bytes.fromhex(str(event["id"])))
        if event["state"] == COMMITTED:
            self._usages.on_committed(event)

    def forget_usage(self, tenant: str) -> None:
        """Forget the sums of a tenant that has deleted something.

        Its next upload waits until they are read again.
        """
        self._usages.forget(tenant)

    def forget_idle(self) -> None:
        """Forget the sums and metrics of tenants that have no quota any more, or upload no more."""
        for tenant in {*self._usages.tenants(), *self._metrics.tenants()}:
            quota = self._quota_of(tenant)
            if quota is None or (self._metrics.is_idle(tenant) and not self.in_flight.of(tenant).blobs):
                self._metrics.remove(tenant)
                self._usages.forget(tenant)
            else:
                self._metrics.remove(tenant, kept=quota.to_json())
                if not quota.limits_bytes:
                    self._usages.forget(tenant)

    async def describe(self, tenant: str) -> dict[str, dict[str, int | None]]:
        """Return the value and the limit of each quota that a tenant has; None: not known."""
        quota = self._quota_of(tenant)
        if quota is None:
            return {}
        values: dict[str, int | None] = {"logical_bytes": None, "stored_bytes": None}
        if quota.limits_bytes:
            with suppress(StoreUnavailable):
                values |= self._values(tenant, await self._usages.current(tenant))
        if quota.upload_bytes_per_second is not None:
            values["upload_bytes_per_second"] = self._rates.rate(tenant)
        return {name: {"value": values[name], "limit": limit} for name, limit in quota.to_json().items()}

    def _count_refusal(self, tenant: str, problem: Problem) -> Problem:
        """Return a refusal, counted in the metrics."""
        self._metrics.count_refusal(tenant, str(problem.members["quota"]))
        return problem

    def _grow(self, tenant: str, blob: bytes, size_bytes: int) -> None:
        usage = self._usages.known(tenant)
        share = 1.0 if usage is None else usage.stored_share
        self.in_flight.grow(blob, size_bytes, math.ceil(size_bytes * share))

    def _values(self, tenant: str, usage: TenantUsage, without: Collection[str] = ()) -> dict[str, int]:
        held = self.in_flight.of(tenant)
        staged_bytes = self._staged.of(tenant, self._handed_over.union(without))
        return {
            "logical_bytes": usage.logical_bytes + held.logical_bytes + staged_bytes,
            "stored_bytes": usage.stored_bytes + held.stored_bytes + math.ceil(staged_bytes * usage.stored_share),
        }

    def _problem(
        self, tenant: str, quota: TenantQuota, usage: TenantUsage, size_bytes: int, values: Mapping[str, int]
    ) -> Problem | None:
        """Return why an upload does not fit.

        Stored bytes are estimated by the tenant's mean so far.
        """
        added = {"logical_bytes": size_bytes, "stored_bytes": math.ceil(size_bytes * usage.stored_share)}
        for name, value in values.items():
            limit = getattr(quota, name)
            if limit is None:
                continue
            self._metrics.show(tenant, name, value, limit)
            if value + added[name] > limit or (not size_bytes and value >= limit):
                return _refusal(507, tenant, name, value + added[name], limit)
        return None


def _refusal(status: int, tenant: str, quota: str, value: int, limit: int) -> Problem:
    """Return the problem of an upload beyond a quota."""
    remedy = _REMEDY_BYTES if status == 507 else _REMEDY_RATE
    return Problem(
        status,
        QUOTA_EXCEEDED if status == 507 else RATE_EXCEEDED,
        f"quota {quota} of tenant {tenant!r}: {value} with this upload, limit {limit}; {remedy}",
        members={"quota": quota, "value": value, "limit": limit, "remedy": remedy},
    )
