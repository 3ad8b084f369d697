"""Declare the metrics of a process.

Alerts and dashboard (deploy/helm/nearkin) use these names; tests/helm compares them.

Invariant: names and labels are declared here only, and the number of label values does not grow with the data. Tenants
are a label where the tokens file has a quota for them, at most QUOTA_TENANTS_MAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from nearkin_shared.observability import counters

if TYPE_CHECKING:
    from nearkin_shared.results import GcReport, Ledger

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BLOB_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

# --- the stages: each worker -----------------------------------------------------------------------------------------

RECORDS = Counter("nearkin_records", "Records taken from Kafka.", ["stage"])
RECORD_BYTES = Counter("nearkin_record_bytes", "Bytes of their values.", ["stage"])
STEP_SECONDS = Histogram("nearkin_step_seconds", "Work on one batch of records.", ["stage"], buckets=STEP_BUCKETS)
RECORD_AGE = Gauge("nearkin_record_age_seconds", "Age of the newest batch's oldest record; 0 while idle.", ["stage"])
RESTARTS = Counter("nearkin_restarts", "Restarts of a stage after a long outage of a dependency.", ["stage"])
DEAD_LETTERS = Counter("nearkin_dead_letters", "Records that were put aside.", ["stage"])
UNAUTHENTICATED = Counter("nearkin_unauthenticated", "Records refused for a missing or wrong MAC.", ["stage"])
CORRUPT = Counter("nearkin_corrupt", "Times that stored or sent bytes were not what they should be.", ["where"])

# --- what became of blobs: the committer -----------------------------------------------------------------------------

BLOBS = Counter("nearkin_blobs", "Completed blobs.", ["state"])
BLOB_SECONDS = Histogram("nearkin_blob_seconds", "From an upload's beginning to its commit.", buckets=BLOB_BUCKETS)
BYTES = Counter("nearkin_bytes", "Bytes of committed blobs: as sent, after dedup, after delta, as stored.", ["after"])
CHUNKS = Counter("nearkin_chunks", "Chunks of committed blobs.", ["kind"])

# --- the index and the fleet: the maintenance service, index shards

INDEX_WHOLE = Gauge(
    "nearkin_index_complete", "1 where the index holds what the store does, 0 until rebuilt.", ["index"]
)
"""Labelled, so that only the process with the value exposes it: otherwise all would expose 0."""
SNAPSHOT_AGE = Gauge(
    "nearkin_index_snapshot_age_seconds", "How long the snapshot of the tags has lacked many containers.", ["index"]
)
SNAPSHOT_LACKS = Gauge(
    "nearkin_index_snapshot_missing_containers", "Containers that it lacks: a start reads their directories.", ["index"]
)
REDIS_BYTES = Gauge("nearkin_redis_bytes", "Memory that Redis uses, all primaries together.")
REDIS_FULLNESS = Gauge("nearkin_redis_memory_ratio", "Memory used of maxmemory by the fullest primary.")
REDIS_EVICTS = Gauge("nearkin_redis_evictions_enabled", "1 where a primary's maxmemory-policy is not noeviction.")
UNPUBLISHED_CHUNKS = Counter(
    "nearkin_index_unpublished_chunks",
    "Chunks stored without an index entry, as Redis is full: copies are stored again.",
)
REBUILDS = Counter("nearkin_index_rebuilds", "Rebuilds of the index.", ["outcome"])
LAG = Gauge("nearkin_lag_records", "Records that a group has not committed yet.", ["group", "topic", "partition"])
OLD_LAG = Gauge("nearkin_lag_old_records", "Of these, those older than half of kafka.retention_hours.", ["group"])
LAG_SECONDS = Gauge("nearkin_lag_seconds", "Age of the oldest record that a group has not committed yet.", ["group"])
LAG_BYTES = Gauge("nearkin_lag_bytes", "Bytes of the records that a group has not committed yet, estimated.", ["group"])
LAG_SEEN = Gauge("nearkin_lag_observed_timestamp_seconds", "When lag was last read from Kafka.")
TRIMMED = Counter("nearkin_trimmed_records", "Handled records that were deleted from Kafka.", ["topic"])
TRIM_SEEN = Gauge("nearkin_trim_timestamp_seconds", "When handled records were last looked for and deleted.")

# --- scrubbing: the maintenance service, or an embedded gateway

SCRUB_BYTES = Counter("nearkin_scrub_bytes", "Bytes that scrubbing has read and checked.")
SCRUB_OBJECTS = Counter("nearkin_scrub_objects", "Containers, manifests and marks that it has.")
SCRUB_DAMAGED = Counter("nearkin_scrub_damaged", "Objects that it found damaged.")
SCRUB_REPAIRED = Counter("nearkin_scrub_repaired", "Of these, those that it repaired.")
SCRUB_ENDED = Gauge("nearkin_scrub_last_success_timestamp_seconds", "When the last pass over all that is stored ended.")

# --- garbage collection: the maintenance service, or an embedded gateway

GC_RUNS = Counter("nearkin_gc_runs", "GC runs by outcome.", ["outcome"])
GC_FREED_BYTES = Counter("nearkin_gc_freed_bytes", "Bytes that GC runs deleted, minus bytes written.")
GC_CONTAINERS = Counter("nearkin_gc_containers", "Containers that GC runs deleted or rewrote.", ["how"])
GC_SECONDS = Histogram("nearkin_gc_run_seconds", "Duration of a GC run.", buckets=BLOB_BUCKETS)
GC_PENDING = Gauge("nearkin_gc_pending_delete_containers", "Containers that the last GC run left pending deletion.")
GC_ENDED = Gauge("nearkin_gc_last_success_timestamp_seconds", "Time of the last successful GC run.")

# --- the gateway -----------------------------------------------------------------------------------------------------

REQUESTS = Counter("nearkin_http_requests", "Requests answered.", ["method", "route", "status"])
REQUEST_SECONDS = Histogram(
    "nearkin_http_request_seconds", "From a request's headers to its answer's end.", ["method"], buckets=BLOB_BUCKETS
)
RECEIVED_BYTES = Counter("nearkin_http_received_bytes", "Bytes of requests' bodies.")
SENT_BYTES = Counter("nearkin_http_sent_bytes", "Bytes of answers' bodies.")
QUOTA_BYTES = Gauge("nearkin_tenant_quota_bytes", "Limits of tenants that have quotas.", ["tenant", "quota"])
QUOTA_USED = Gauge(
    "nearkin_tenant_used_bytes", "Bytes that count against them, of uploads in flight too.", ["tenant", "quota"]
)
QUOTA_REFUSED = Counter("nearkin_quota_refused", "Uploads that a quota refused.", ["tenant", "quota"])
AUDIT_EVENTS = Counter("nearkin_audit_events", "Events for the audit log, suppressed ones included.", ["event"])
AUDIT_SUPPRESSED = Counter("nearkin_audit_suppressed", "Events whose record the audit log's rate left out.", ["event"])
AUDIT_LOST = Counter("nearkin_audit_lost", "Records that could not be written to audit.path.")

# --- every process ---------------------------------------------------------------------------------------------------

CONFIG = Info("nearkin_config", "The revision of the hot settings in force.")
CONFIG_REFUSED = Counter("nearkin_config_refused", "Changes of settings that were refused.")

for _counter, _label in (
    *((CORRUPT, where) for where in ("scrub", "restore", "record", "rollback")),
    *((counter, outcome) for counter in (GC_RUNS, REBUILDS) for outcome in ("done", "failed")),
    (DEAD_LETTERS, "ingest"),
    *((UNAUTHENTICATED, reader) for reader in ("config", "committed", "workers")),
):
    _counter.labels(_label)  # present from the start: Prometheus sees no increase in a counter that begins at 1


def count_scrubbed(read_bytes: int, objects: int, ended: bool) -> None:
    """Count a step of scrubbing."""
    SCRUB_BYTES.inc(read_bytes)
    SCRUB_OBJECTS.inc(objects)
    if ended:
        SCRUB_ENDED.set_to_current_time()


def count_committed(ledger: Ledger, manifest_bytes: int, seconds: float) -> None:
    """Count a blob that was committed just now."""
    count_committed_many([(ledger, manifest_bytes, seconds)])


def count_committed_many(blobs: Sequence[tuple[Ledger, int, float]]) -> None:
    """Count blobs (ledger, bytes of the manifest, seconds) that were committed just now."""
    BLOBS.labels("committed").inc(len(blobs))
    for _, _, seconds in blobs:
        BLOB_SECONDS.observe(seconds)
    ledgers = [ledger for ledger, _, _ in blobs]
    added_bytes = {
        "in": [ledger.logical_bytes for ledger in ledgers],
        "dedup": [ledger.unique_bytes for ledger in ledgers],
        "delta": [ledger.unique_bytes - ledger.delta_saved_bytes for ledger in ledgers],
        "stored": [ledger.stored_bytes + manifest_bytes for ledger, manifest_bytes, _ in blobs],
    }
    for after, counts in added_bytes.items():
        BYTES.labels(after).inc(sum(max(0, count) for count in counts))
    CHUNKS.labels("duplicate").inc(sum(ledger.duplicate_chunks for ledger in ledgers))
    CHUNKS.labels("delta").inc(sum(ledger.delta_chunks for ledger in ledgers))
    CHUNKS.labels("raw").inc(sum(ledger.raw_chunks for ledger in ledgers))


def count_collected(report: GcReport | None) -> None:
    """Count a GC run; None: it failed."""
    GC_RUNS.labels("failed" if report is None else "done").inc()
    if report is None:
        return
    # negative if a run only marks for deletion, by the bytes of its record
    GC_FREED_BYTES.inc(max(0, report.freed_bytes))
    GC_CONTAINERS.labels("removed").inc(report.containers_deleted)
    GC_CONTAINERS.labels("rewritten").inc(report.containers_rewritten)
    GC_SECONDS.observe(report.seconds)
    GC_PENDING.set(report.pending_delete_containers)
    GC_ENDED.set_to_current_time()


class Engine(Collector):
    """Shows what the engine has counted without us (nearkin_shared.observability.counters)."""

    def collect(self) -> Iterator[Metric]:
        """Yield it as it is now."""
        for count in counters.COUNTS:
            counted = CounterMetricFamily(count.name, count.text, labels=count.labels)
            for labels, value in count.values().items():
                counted.add_metric(labels, value)
            yield counted
        for spread in counters.SPREADS:
            spreads = HistogramMetricFamily(spread.name, spread.text, labels=spread.labels)
            ends = [*(f"{bound:g}" for bound in spread.bounds), "+Inf"]
            for labels, (counts, total) in spread.values().items():
                spreads.add_metric(labels, list(zip(ends, accumulate(counts), strict=True)), total)
            yield spreads
        for level in counters.LEVELS:
            levels = GaugeMetricFamily(level.name, level.text, labels=level.labels)
            for labels, size in level.values().items():
                levels.add_metric(labels, size)
            yield levels


REGISTRY.register(Engine())
