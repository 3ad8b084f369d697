"""Define all settings: sections, profiles, secret names and hot names.

Sections: reduction.py, storage.py, services.py. Sources of values: loader.py.

Invariant: each field carries its own validation rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from nearkin_shared.config.reduction import (
    BaseSettings,
    BlockSettings,
    ChunkerSettings,
    ContainerSettings,
    DeltaSettings,
    FeatureSettings,
)
from nearkin_shared.config.services import (
    AuditSettings,
    AuthSettings,
    DashboardSettings,
    GatewaySettings,
    IngestSettings,
    KafkaSettings,
    LogSettings,
    MonitorSettings,
    PipelineSettings,
    RedisSettings,
    ServiceSettings,
    TracingSettings,
)
from nearkin_shared.config.storage import (
    DeletionSettings,
    GcSettings,
    IndexSettings,
    ObjectStoreSettings,
    RestoreSettings,
    RetentionSettings,
    RunnerSettings,
    ScrubSettings,
    StorageSettings,
)
from nearkin_shared.config.validators import FORBID_OTHERS, NameChoice, ServerUrl, TenantName, TokenText
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.utils.frozen import held

SECRETS = frozenset(
    {
        *("token", "kafka.sasl_password", "redis.password", "storage.key"),
        *("object_store.secret_access_key", "object_store.session_token"),
    }
)
"""Displayed as *** wherever settings are printed."""
SECRET_URLS = frozenset({"redis.url"})
"""Displayed with *** in place of `user:password`."""
HIDDEN = "***"
HOT_FIELDS = frozenset(
    {
        *("features.algorithm", "base.policy", "delta.codec", "delta.max_depth", "block.level"),
        *("service.read_only", "service.paused"),
    }
)
"""Settings that a running service applies from a changed file or `PATCH /v1/config`; others need a restart."""
FIXED_FIELDS = frozenset(
    {
        *("features.count", "features.super_features", "block.raw_bytes", "block.delta_bytes", "block.thorough"),
        *("runner.batch_bytes", "gc.merge_block_bytes", "gc.merge_versions_min", "gc.recompress_level"),
        *("kafka.session_timeout_ms", "kafka.upload_idle_seconds", "retention.superseded_seconds"),
        "monitor.stall_seconds",
    }
)
"""Constants, some chosen by a profile: no file, variable or argument sets them; tests do, by `with_changes`."""
PROFILE_NAMES = ("default", "archive", "finesse-paper")


@held
class Settings:
    """Every setting of a store and its runners."""

    __pydantic_config__ = FORBID_OTHERS

    profile: Annotated[str, NameChoice(PROFILE_NAMES)] = "default"
    """Values of all settings that are not set explicitly (docs/adr/0019-archive-profile.md)."""
    store: str | None = None
    """Folder of the local store."""
    server: Annotated[str | None, ServerUrl()] = None
    """URL of a gateway, used instead of a local store."""
    token: Annotated[str | None, TokenText()] = field(default=None, repr=False)
    """Bearer token that identifies the caller to the gateway."""
    tenant: Annotated[str, TenantName()] = "default"
    """Tenant whose blobs a command or an embedded gateway puts and gets; services read it from the token."""
    chunker: ChunkerSettings = ChunkerSettings()
    features: FeatureSettings = FeatureSettings()
    base: BaseSettings = BaseSettings()
    delta: DeltaSettings = DeltaSettings()
    block: BlockSettings = BlockSettings()
    container: ContainerSettings = ContainerSettings()
    storage: StorageSettings = StorageSettings()
    scrub: ScrubSettings = ScrubSettings()
    index: IndexSettings = IndexSettings()
    redis: RedisSettings = RedisSettings()
    restore: RestoreSettings = RestoreSettings()
    runner: RunnerSettings = RunnerSettings()
    object_store: ObjectStoreSettings = ObjectStoreSettings()
    kafka: KafkaSettings = KafkaSettings()
    pipeline: PipelineSettings = PipelineSettings()
    ingest: IngestSettings = IngestSettings()
    deletion: DeletionSettings = DeletionSettings()
    retention: RetentionSettings = RetentionSettings()
    gc: GcSettings = GcSettings()
    service: ServiceSettings = ServiceSettings()
    gateway: GatewaySettings = GatewaySettings()
    dashboard: DashboardSettings = DashboardSettings()
    auth: AuthSettings = AuthSettings()
    audit: AuditSettings = AuditSettings()
    monitor: MonitorSettings = MonitorSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    def __post_init__(self) -> None:
        """Refuse sections that contradict one another."""
        reserved = [entry for entry in self.ingest.topics if entry.startswith(self.kafka.topic_prefix)]
        if reserved:
            raise ValueError(
                f'ingest.topics "{reserved[0]}": topics that start with kafka.topic_prefix '
                f'"{self.kafka.topic_prefix}" are '
                "reserved for Nearkin; choose another topic or prefix"
            )


PROFILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "default": {},
    # Smallest stored size, for data that are written once and rarely read (docs/adr/0019).
    "archive": {
        "chunker": {"min_bytes": 8 * KIB, "target_bytes": 32 * KIB, "max_bytes": 256 * KIB},
        "base": {"cache_bytes": 96 * MIB},
        "block": {"raw_bytes": 30 * MIB, "delta_bytes": 2 * MIB, "level": 9, "thorough": True},
        "delta": {"max_depth": 6},
        "container": {"target_bytes": 24 * MIB},
        "restore": {"cache_bytes": 160 * MIB},
        "runner": {"batch_bytes": 8 * MIB},
        "gc": {"merge_block_bytes": 8 * MIB, "merge_versions_min": 8},
    },
    # Finesse, FAST '19, section 5.1: Rabin, 8 KiB, 3 SFs of 4 features, FirstFit, 400 MB LRU base cache, Xdelta.
    "finesse-paper": {
        "chunker": {"algorithm": "rabin", "min_bytes": 2 * KIB, "target_bytes": 8 * KIB, "max_bytes": 64 * KIB},
        "features": {"algorithm": "finesse", "count": 12, "super_features": 3},
        "base": {"policy": "first-fit", "cache_bytes": 400_000_000},
        "delta": {"codec": "xdelta3", "max_depth": 1},
        "block": {"raw_bytes": MIB, "delta_bytes": 512 * KIB},
    },
}
assert tuple(PROFILES) == PROFILE_NAMES
