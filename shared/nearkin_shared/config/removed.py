# size: a table with one reason to change, the removal of a setting
"""List settings that became constants, or part of another setting.

Invariant: a removed setting is refused by name with its constant value or its replacement, so that no file sets what
has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "audit.per_second": "100",
    "audit.window_seconds": "60",
    "block.delta_bytes": "256KiB; more in the profiles archive and finesse-paper",
    "block.raw_bytes": "4MiB; 30MiB in the profile archive",
    "block.thorough": "false; true in the profile archive",
    "dashboard.session_hours": "8",
    "deletion.erase_grace_seconds": "86400",
    "delta.level": "1",
    "features.count": "12",
    "features.sampling_bits": "7",
    "features.super_features": "3",
    "features.window_bytes": "48",
    "gateway.busy_bytes_per_second": "65536",
    "gateway.checked_patch_bytes": "64MiB",
    "gateway.connections_max": "1024",
    "gateway.downloads_max": "32",
    "gateway.header_bytes_max": "64KiB",
    "gateway.idle_per_address_max": "256",
    "gateway.key_bytes_max": "1024",
    "gateway.partial_uploads_max": "256",
    "gateway.resumable_empty_minutes": "10",
    "gateway.resumable_hours": "24",
    "gateway.resumable_max": "10000",
    "gateway.slow_bytes_per_second": "1024",
    "gateway.slow_seconds": "30",
    "gateway.tenant_share": "0.75",
    "gateway.token_share": "0.5",
    "gateway.unacknowledged_bytes": "96MiB",
    "gateway.upload_status_bytes": "64MiB",
    "gateway.upload_status_minutes": "60",
    "gateway.upload_unacknowledged_bytes": "24MiB",
    "gateway.uploads_max": "128",
    "gc.clock_gap_seconds_max": "7776000",
    "gc.merge_block_bytes": "4MiB; 8MiB in the profile archive",
    "gc.merge_versions_min": "12; 8 in the profile archive",
    "gc.recompress_level": "9",
    "ingest.dataref_bytes_max": "1024GiB",
    "ingest.retry_seconds": "3600",
    "ingest.value_bytes_max": "64MiB",
    "kafka.batch_messages": "32",
    "kafka.linger_ms": "1000",
    "kafka.session_timeout_ms": "10000",
    "kafka.upload_idle_seconds": "300",
    "monitor.stall_seconds": "300",
    "object_store.connect_timeout_seconds": "5",
    "object_store.request_timeout_seconds": "60",
    "object_store.retries": "12",
    "object_store.retry_seconds": "60",
    "pipeline.inline_bytes": "1MiB",
    "redis.partitions": "16",
    "redis.retries": "6",
    "redis.timeout_seconds": "5",
    "retention.superseded_seconds": "86400",
    "runner.batch_bytes": "16MiB; 8MiB in the profile archive",
    "runner.queue_batches": "0",
    "segment.max_bytes": "900KiB",
    "segment.target_chunks": "16",
    "storage.reserve_bytes": "64MiB",
}
"""By dotted name: the value, as a file of settings had it."""
REPLACED: Mapping[str, str] = {
    "audit.enabled": 'audit.records = "all" or "none"',
    "audit.reads": 'audit.records = "all" or "changes"',
    "base.try_all_candidates": 'profile = "archive"',
    "block.far_matches": 'profile = "archive"',
}
"""By dotted name: the setting to use instead."""


def removal_text(name: str) -> str | None:
    """Return why a setting is refused and what to do, None for one that was not removed."""
    if name in REPLACED:
        return f"no longer a setting; set {REPLACED[name]} instead"
    if name in REMOVED:
        return f"no longer a setting, but a constant ({REMOVED[name]}); remove it"
    return None
