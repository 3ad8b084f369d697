"""The parts of a gateway: created before the first request, released after the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.auth.sessions import Sessions
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.auth.tokens import TokenFile
from nearkin_gateway.backends.ingest_backend import Ingest
from nearkin_gateway.blocking_threads import WorkerPools
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_gateway.http.request_limits import ConcurrencyLimit, Rates, Shares
from nearkin_gateway.monitoring.audit_log import AuditLog
from nearkin_gateway.monitoring.pipeline_load import PipelineLoad
from nearkin_gateway.monitoring.usage import UsageStats
from nearkin_gateway.setting_changes import ConfigChanges
from nearkin_gateway.uploads.in_flight import InFlightUploads
from nearkin_gateway.uploads.partition_lanes import PartitionLanes
from nearkin_gateway.uploads.resumable_store import Resumable
from nearkin_gateway.uploads.upload_admission import UploadAdmission
from nearkin_gateway.uploads.upload_status import UploadIds, UploadStatuses
from nearkin_shared.config.services import GatewaySettings
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.observability.readiness import Check, Readiness
from nearkin_shared.results import Stats
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.gc_pause import GcPauseFlag

if TYPE_CHECKING:  # brings Kafka's client, which an embedded gateway does without
    from nearkin_gateway.monitoring.pipeline_state import PipelineState

EXPLANATIONS_MAX = 4
"""At a time: each takes up to 300 MB, of 200,000 chunks and 60 MB of JSON."""
HAND_OVERS_MAX = 4
"""Resumable uploads that are streamed on at a time, each with a part of 3.6 MiB in memory."""


class WorkerHeartbeats(Protocol):
    """The heartbeats of the workers."""

    def workers(self) -> list[dict[str, object]]:
        """Return the newest word of each."""


class GcControl(Protocol):
    """GC runs of this process, or of the maintenance services of a fleet. All calls may block."""

    def last_run(self) -> dict[str, object] | None:
        """Return the result of the last run, None before the first one."""

    def request_run(self) -> None:
        """Request a run, due or not: it starts as soon as a worker is free."""


@dataclass
class Gateway:
    """Everything that the routes use."""

    hot: ConfigChanges
    tokens: TokenFile | None
    ingest: Ingest
    outcomes: UploadStatuses
    tickets: UploadIds
    catalogue: VersionCatalog
    deletions: Deletions
    resumable: Resumable
    collecting: GcControl
    """Control of GC runs."""
    pauses: GcPauseFlag
    pools: WorkerPools = field(default_factory=WorkerPools)
    """Threads for blocking calls; closed when the application ends."""
    workers: WorkerHeartbeats | None = None
    pipeline: PipelineState | None = None
    """How far the stages are; None where all runs in one process."""
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Checks of /readyz by name, in addition to the object store and the destination of uploads."""
    stopping: bool = False
    failure: NearkinError | None = None
    """Why it could not begin."""
    origins: set[bytes] = field(default_factory=set)
    """Idempotency keys whose upload is running here."""
    resuming: set[str] = field(default_factory=set)
    """Resumable uploads that a request is adding to here."""
    background: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    """Hand-overs of resumable uploads, by upload."""

    def __post_init__(self) -> None:
        """Make the counters of the limits."""
        bounds = self.bounds
        self.rates = Rates(bounds.requests_per_second)
        self.audit = AuditLog(self.settings.audit)
        if self.tokens is not None:
            self.tokens.on_change = self.audit.record_token_changes
        shares, rates = shares_of(bounds), (limits.SLOW_BYTES_PER_SECOND, limits.BUSY_BYTES_PER_SECOND)
        self.uploads = ConcurrencyLimit("uploads", limits.UPLOADS_MAX, shares, rates)
        self.hand_overs = asyncio.Semaphore(HAND_OVERS_MAX)
        self.downloads = ConcurrencyLimit("downloads", limits.DOWNLOADS_MAX, shares, rates)
        self.explanations = ConcurrencyLimit("explanations", EXPLANATIONS_MAX, shares)
        self.load = PipelineLoad(None if self.pipeline is None else self.pipeline.wait_seconds, self.pools.control)
        in_flight = InFlightUploads()
        lanes = self._make_lanes(in_flight)
        self.admission = UploadAdmission(
            self._quota_of, self._recount, in_flight, lanes, self.load, self.uploads, self.resumable.staged
        )
        self.outcomes.on_event = self.admission.on_event
        self.insight = UsageStats(self.catalogue)
        self.readiness = Readiness({"object store": self.catalogue.check, "uploads": self.ingest.check, **self.checks})
        self.sessions = (
            None if self.tokens is None else Sessions(self.catalogue.secret, self.tokens, limits.SESSION_SECONDS)
        )

    async def _recount(self, tenant: str, needs_whole: bool) -> tuple[Stats, bool]:
        return await self.pools.control.run(self.catalogue.recount, tenant, needs_whole=needs_whole)

    def _make_lanes(self, in_flight: InFlightUploads) -> PartitionLanes:
        if self.pipeline is None:
            return PartitionLanes(0, in_flight, lambda: False, dict)
        several = (lambda: False) if self.tokens is None else self.tokens.has_several_tenants
        return PartitionLanes(self.settings.kafka.partitions, in_flight, several, self.pipeline.waiting_records)

    def _quota_of(self, tenant: str) -> TenantQuota | None:
        return None if self.tokens is None else self.tokens.quota(tenant)

    def pace_of(self, tenant: str) -> Callable[[int], Awaitable[None]]:
        """Return what waits after each piece of a tenant's body, given the size of the piece."""
        return partial(self.admission.pace, tenant)

    @property
    def settings(self) -> Settings:
        """Return the settings as they are now."""
        return self.hot.settings

    @property
    def bounds(self) -> GatewaySettings:
        """Return the gateway's own settings; they are not hot."""
        return self.hot.settings.gateway


def shares_of(bounds: GatewaySettings) -> Shares:
    """Return the share of each limit that one caller may take."""
    return Shares(limits.TENANT_SHARE, limits.TOKEN_SHARE, bounds.address_share)


def gateway_of(request: Request) -> Gateway:
    """Return the parts that answer a request."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found
