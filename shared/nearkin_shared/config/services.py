"""Define the settings of services: connections, listeners, limits.

Invariant: with the defaults a service listens on loopback only.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from nearkin_shared.config.storage import STORE_FOLDERS
from nearkin_shared.config.validators import (
    FORBID_OTHERS,
    MatchingText,
    NameChoice,
    NumberRange,
    ObjectPrefix,
    Origins,
    ServerUrl,
    ShareRange,
    SizeRange,
    StageGroups,
    Text,
    TopicTenants,
)
from nearkin_shared.limits import GIB
from nearkin_shared.utils.frozen import held

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
KAFKA_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
UNAUTHENTICATED_RECORDS = ("refuse", "accept")
KAFKA_COMPRESSIONS = ("none", "lz4", "zstd")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
LOG_FORMATS = ("text", "json")
NULL_VALUES = ("reject", "skip")
INGESTS = ("kafka", "embedded")
AUDIT_RECORDS = ("all", "changes", "none")


@held
class RedisSettings:
    """The Redis server or Cluster that stores the index of several workers."""

    __pydantic_config__ = FORBID_OTHERS

    url: Annotated[str, Text(1024)] = field(default="redis://127.0.0.1:6379/0", repr=False)
    """`redis://`, `rediss://` (TLS), `unix://`; `redis+cluster://` or `rediss+cluster://` for a Cluster."""
    username: str | None = None
    """User of an ACL; unset: the default user."""
    password: str | None = field(default=None, repr=False)
    """Password. Prefer NEARKIN_REDIS__PASSWORD to a file."""
    ca_file: str | None = None
    """PEM certificates of the authorities that issued the server's certificate."""
    cert_file: str | None = None
    """Client certificate, if the server requires one."""
    key_file: str | None = None
    """Private key of `cert_file`."""
    prefix: Annotated[str, Text(64)] = "nearkin"
    """Prefix of all keys: two stores may share a server."""
    bytes_max: Annotated[int, SizeRange(0, 64 * 1024 * GIB)] = 0
    """Memory of all primaries beyond which new chunks get no index entry: copies of them are stored again, and the
    pipeline goes on. 0: 95 % of `maxmemory`."""

    def __post_init__(self) -> None:
        """Refuse an unknown URL scheme, TLS files without TLS, and an invalid prefix.

        Braces in the prefix would change the slots of keys.
        """
        scheme = self.url.partition("://")[0]
        if scheme not in REDIS_SCHEMES:
            raise ValueError(f'url scheme "{scheme}": choose one of {", ".join(REDIS_SCHEMES)}')
        if (self.ca_file or self.cert_file or self.key_file) and not scheme.startswith("rediss"):
            raise ValueError(f'url scheme "{scheme}": ca_file, cert_file and key_file need rediss:// (TLS)')
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: give both or neither")
        if set(self.prefix) & set("{} \r\n"):
            raise ValueError(f'prefix "{self.prefix}": use no braces and no white space')


@held
class KafkaSettings:
    """Connection to Kafka, and the bounds of messages per batch, sessions and retention."""

    __pydantic_config__ = FORBID_OTHERS

    bootstrap_servers: Annotated[str, Text(4096)] = "127.0.0.1:9092"
    """`host:port`, separated by commas."""
    topic_prefix: Annotated[str, MatchingText(r"[A-Za-z0-9._-]{1,100}")] = "nearkin."
    """Prefix of this store's topics and consumer groups: two stores may share brokers."""
    partitions: Annotated[int, NumberRange(1, 1024)] = 4
    """Partitions of each topic when it is created: as many workers of a stage can share the work."""
    replication: Annotated[int, NumberRange(1, 9)] = 1
    """Replicas of each topic when it is created; use 3 with three brokers."""
    security_protocol: Annotated[str, NameChoice(KAFKA_PROTOCOLS)] = "plaintext"
    """Protocol of the connection to brokers."""
    sasl_mechanism: Annotated[str, NameChoice(SASL_MECHANISMS)] = "SCRAM-SHA-512"
    """Authentication mechanism with `sasl_*` protocols."""
    sasl_username: str | None = None
    """User for SASL."""
    sasl_password: str | None = field(default=None, repr=False)
    """Password for SASL. Prefer NEARKIN_KAFKA__SASL_PASSWORD to a file."""
    ca_file: str | None = None
    """PEM certificates of the authorities that issued the brokers' certificates."""
    compression: Annotated[str, NameChoice(KAFKA_COMPRESSIONS)] = "lz4"
    """Compression of messages. lz4 halves the broker's CPU time for 5 % more in services, if data compress at all
    (benchmarks/pipeline.py).
    """
    unauthenticated: Annotated[str, NameChoice(UNAUTHENTICATED_RECORDS)] = "refuse"
    """Whether records on internal topics without a MAC are accepted. "accept" is for an upgrade from a release that
    sends none. Records with a wrong MAC are always refused.
    """
    session_timeout_ms: int = 10_000
    """A worker that sends no heartbeat for this time loses its partitions to the others."""
    upload_idle_seconds: int = 300
    """An upload that receives no frame for this long fails. Must exceed 40: a gateway waits 30 s for a byte, then sends
    a frame within 10 s.
    """
    retention_hours: Annotated[int, NumberRange(1, 87_600)] = 168
    """Retention of this store's topics, dead letters included: the longest time that a stage may be down without loss.
    """
    trim_seconds: Annotated[int, NumberRange(0, 86_400)] = 15
    """Interval at which the maintenance service deletes handled records of the stage topics from the brokers; 0: they
    stay for `retention_hours`.
    """


@held
class IngestSettings:
    """Ingest from users' Kafka topics: a record contains a blob or names an object."""

    __pydantic_config__ = FORBID_OTHERS

    topics: Annotated[tuple[str, ...], TopicTenants()] = ()
    """`topic` (stored for `tenant`) or `topic=TENANT`."""
    group: Annotated[str, Text(255)] | None = None
    """Consumer group; unset: `ingest` after `kafka.topic_prefix`."""
    key_header: Annotated[str, Text(255)] | None = None
    """Header whose value is used as the blob's key in place of the record's own key."""
    tenant_header: Annotated[str, Text(255)] | None = None
    """Header whose value is the tenant of the record: producers then choose the tenant."""
    null_values: Annotated[str, NameChoice(NULL_VALUES)] = "reject"
    """A record without a value becomes a dead letter (`reject`) or is ignored (`skip`)."""
    dataref_prefix: Annotated[str | None, ObjectPrefix(STORE_FOLDERS)] = None
    """Folder of the object store with the objects that records may name; {tenant} is replaced by the tenant. Unset:
    records may name no object.
    """


@held
class PipelineSettings:
    """The stages of the write path, and which of them share a process."""

    __pydantic_config__ = FORBID_OTHERS

    stages: Annotated[str, StageGroups()] = "fused"
    """`fused` (all stages in each worker), `split` (a worker for each stage), or groups such as
    `chunker+dedup, resemblance+delta+committer`. Stages of one worker pass messages in memory, others through Kafka.
    """


@held
class ServiceSettings:
    """Switches that operators change while services run. Hot."""

    __pydantic_config__ = FORBID_OTHERS

    read_only: bool = False
    """The gateway refuses new blobs; accepted blobs are completed."""
    paused: bool = False
    """Workers fetch no more messages; fetched messages are completed."""


@held
class GatewaySettings:
    """The listener of the gateway, and the bounds of all that it accepts or keeps."""

    __pydantic_config__ = FORBID_OTHERS

    host: Annotated[str, Text(255)] = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires `auth.tokens_file`."""
    port: Annotated[int, NumberRange(0, 65_535)] = 8080
    """Port to listen on. 0 selects a free port and prints it."""
    ingest: Annotated[str, NameChoice(INGESTS)] = "kafka"
    """`kafka`: in front of the services; `embedded`: a whole store in this process (`nearkin serve`)."""
    edge: bool = False
    """With `kafka`: cut uploads here, ask the index, and send only chunks that the store lacks. For stores that receive
    much known data; takes 0.7 s of CPU per GB here in place of the workers.
    """
    body_bytes_max: Annotated[int, SizeRange(1, 2048 * GIB)] = 1024 * GIB
    """A larger body is refused with 413."""
    address_share: Annotated[float, ShareRange(1.0)] = 0.75
    """The share of uploads, downloads, explanations and open resumable uploads that one peer address may use (IPv6: one
    /64). Behind a proxy all callers have its address: set 1.
    """
    requests_per_second: Annotated[int, NumberRange(0, 1_000_000)] = 1000
    """Rate for each token (without tokens: each address), in bursts of as many requests; 0: unlimited."""
    access_log: bool = True
    """Log a line for each request except successful probes (logger `nearkin.access`)."""
    cors_origins: Annotated[tuple[str, ...], Origins()] = ()
    """Web origins (`https://app.example`, `*` for all) whose pages may use the API with a token. Empty: none."""
    shutdown_seconds: Annotated[int, NumberRange(1, 3600)] = 30
    """Requests in progress may take this long after the gateway is asked to stop."""

    def __post_init__(self) -> None:
        """Refuse deduplication before the pipeline where there is no pipeline."""
        if self.edge and self.ingest == "embedded":
            raise ValueError('edge "true": with ingest "embedded" this process deduplicates anyway; remove edge')


@held
class DashboardSettings:
    """The pages at `/` of the gateway."""

    __pydantic_config__ = FORBID_OTHERS

    enabled: bool = True
    """Serve the dashboard."""


@held
class AuthSettings:
    """Authentication by tokens.

    Without a tokens file there is one tenant, and the gateway listens on loopback only.
    """

    __pydantic_config__ = FORBID_OTHERS

    tokens_file: str | None = None
    """File of hashed tokens, as `nearkin token` writes it; read again when it changes."""


@held
class AuditSettings:
    """The audit log of a gateway (docs/reference/audit-log.md)."""

    __pydantic_config__ = FORBID_OTHERS

    records: Annotated[str, NameChoice(AUDIT_RECORDS)] = "all"
    """Records to write (logger `nearkin.audit`). `all`: logins, failed authentication, changes of blobs and settings,
    reads, listings and dashboard pages; `changes`: all except reads, listings and pages; `none`: no audit log.
    """
    path: Annotated[str, Text(4096)] | None = None
    """File for the audit records, as JSON with mode 0600; reopened after it was moved. Unset: with the other logs."""


@held
class MonitorSettings:
    """The endpoints at which a service reports its state: `/livez`, `/readyz`, `/metrics`."""

    __pydantic_config__ = FORBID_OTHERS

    host: Annotated[str, Text(255)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int | None, NumberRange(0, 65_535)] = None
    """Port to listen on. Unset: none. 0 selects a free port and prints it."""
    stall_seconds: int = 300
    """A worker without any step for this long is not live. An unavailable dependency is tried again after at most 60 s,
    and each try counts as a step; Kafka itself removes a consumer after 600 s.
    """


@held
class LogSettings:
    """Logs of services, on stderr."""

    __pydantic_config__ = FORBID_OTHERS

    format: Annotated[str, NameChoice(LOG_FORMATS)] = "text"
    """json: one object per line, with `blob`, `tenant`, `trace_id` and `span_id` for work on a blob."""


@held
class TracingSettings:
    """Traces to an OpenTelemetry collector, by OTLP over HTTP.

    See docs/how-to/operate-services.md.
    """

    __pydantic_config__ = FORBID_OTHERS

    endpoint: Annotated[str | None, ServerUrl()] = None
    """URL of the collector, such as http://otel-collector:4318. Unset: no tracing."""
    ratio: Annotated[float, ShareRange(1.0)] = 0.01
    """Share of the requests that are traced. A request with a trace context is traced as the context requests."""
