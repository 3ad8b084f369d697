"""Settings of services: whom they talk to, what they take and refuse. Invariant: without any, only loopback hears."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from nearkin_shared.config.storage import STORE_FOLDERS
from nearkin_shared.config.validators import (
    FORBID_OTHERS,
    Between,
    ObjectPrefix,
    OneMatch,
    OneOf,
    Origins,
    ServerUrl,
    Share,
    Size,
    Text,
    TopicTenants,
)
from nearkin_shared.limits import GIB, KEY_BYTES_MAX, KIB, MIB
from nearkin_shared.utils.frozen import held

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
KAFKA_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
UNAUTHENTICATED_RECORDS = ("refuse", "accept")
KAFKA_COMPRESSIONS = ("none", "lz4", "zstd")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
LOG_FORMATS = ("text", "json")
NULL_VALUES = ("reject", "skip")
INGESTS = ("kafka", "embedded")


@held
class RedisSettings:
    """The Redis server or Cluster that holds the index of several workers."""

    __pydantic_config__ = FORBID_OTHERS

    url: Annotated[str, Text(1024)] = field(default="redis://127.0.0.1:6379/0", repr=False)
    """`redis://`, `rediss://` (TLS), `unix://`; `redis+cluster://` or `rediss+cluster://` for a Cluster."""
    username: str | None = None
    """Of an ACL; unset: the default user."""
    password: str | None = field(default=None, repr=False)
    """Better in NEARKIN_REDIS__PASSWORD than in a file."""
    ca_file: str | None = None
    """PEM certificates of who has issued the server's."""
    cert_file: str | None = None
    """Our own certificate, where the server asks for one."""
    key_file: str | None = None
    """The key of `cert_file`."""
    timeout_seconds: Annotated[int, Between(1, 300)] = 5
    """For connecting, and for each answer."""
    retries: Annotated[int, Between(0, 100)] = 6
    """After the first try, with waits that double from 50 ms up to 1 s."""
    prefix: Annotated[str, Text(64)] = "nearkin"
    """Of all keys: two stores may share a server."""
    partitions: Annotated[int, Between(1, 4096, power_of_two=True)] = 16
    """Hash slots that each table is spread over; takes effect when the index is made anew."""

    def __post_init__(self) -> None:
        """Refuse a URL of another kind, files without TLS, and a prefix that would move keys to another slot."""
        scheme = self.url.partition("://")[0]
        if scheme not in REDIS_SCHEMES:
            raise ValueError(f'url scheme "{scheme}": choose one of {", ".join(REDIS_SCHEMES)}')
        if (self.ca_file or self.cert_file or self.key_file) and not scheme.startswith("rediss"):
            raise ValueError(f'url scheme "{scheme}": ca_file, cert_file and key_file want rediss:// (TLS)')
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: give both or neither")
        if set(self.prefix) & set("{} \r\n"):
            raise ValueError(f'prefix "{self.prefix}": want no braces and no white space')


@held
class KafkaSettings:
    """How services reach Kafka, and the bounds of what they take from it at a time."""

    __pydantic_config__ = FORBID_OTHERS

    bootstrap_servers: Annotated[str, Text(4096)] = "127.0.0.1:9092"
    """`host:port`, with commas between several."""
    topic_prefix: Annotated[str, OneMatch(r"[A-Za-z0-9._-]{1,100}")] = "nearkin."
    """Of our topics and groups: two stores may share brokers."""
    partitions: Annotated[int, Between(1, 1024)] = 4
    """Of each topic, when it is made: as many workers of a stage can share the work."""
    replication: Annotated[int, Between(1, 9)] = 1
    """Of each topic, when it is made; 3 where there are three brokers."""
    security_protocol: Annotated[str, OneOf(KAFKA_PROTOCOLS)] = "plaintext"
    """How brokers are reached."""
    sasl_mechanism: Annotated[str, OneOf(SASL_MECHANISMS)] = "SCRAM-SHA-512"
    """How we prove who we are, with `sasl_*` protocols."""
    sasl_username: str | None = None
    """Of SASL."""
    sasl_password: str | None = field(default=None, repr=False)
    """Better in NEARKIN_KAFKA__SASL_PASSWORD than in a file."""
    ca_file: str | None = None
    """PEM certificates of who has issued the brokers'."""
    compression: Annotated[str, OneOf(KAFKA_COMPRESSIONS)] = "lz4"
    """lz4 halves the work of the broker for 5 % more of ours, on data that compress at all (benchmarks/pipeline.py)."""
    unauthenticated: Annotated[str, OneOf(UNAUTHENTICATED_RECORDS)] = "refuse"
    """What becomes of records on internal topics that carry no MAC: "accept" is for an upgrade from a release that
    sends none. Records with a wrong MAC are always refused."""
    batch_messages: Annotated[int, Between(1, 256)] = 32
    """Messages a worker takes at a time: 32 MiB at their largest."""
    session_timeout_ms: Annotated[int, Between(6_000, 300_000)] = 10_000
    """A worker that is silent for so long loses its partitions to the others."""
    upload_idle_seconds: Annotated[int, Between(1, 86_400)] = 300
    """An upload whose frames stop coming is ended as failed after this long. Want more than `gateway.slow_seconds` and
    10: a client may be silent for that long."""
    retention_hours: Annotated[int, Between(1, 87_600)] = 168
    """How long our topics keep messages, dead letters too: the longest that a stage may be down without loss."""
    linger_ms: Annotated[int, Between(1, 60_000)] = 1_000
    """How long the delta worker may hold chunks in an open container; the end of a blob seals it sooner."""


@held
class IngestSettings:
    """Blobs out of Kafka topics of the user's own: a record is one, or names an object that is."""

    __pydantic_config__ = FORBID_OTHERS

    topics: Annotated[tuple[str, ...], TopicTenants()] = ()
    """`topic` (stored for `tenant`) or `topic=TENANT`."""
    group: Annotated[str, Text(255)] | None = None
    """Consumer group; `ingest` behind `kafka.topic_prefix` where it is not set."""
    key_header: Annotated[str, Text(255)] | None = None
    """Where a record has this header, it is the blob's key, not the record's own."""
    tenant_header: Annotated[str, Text(255)] | None = None
    """Where a record has this header, it is stored for that tenant: whoever may produce then chooses."""
    null_values: Annotated[str, OneOf(NULL_VALUES)] = "reject"
    """A record without value is a dead letter, or passed over."""
    value_bytes_max: Annotated[int, Size(1, GIB)] = 64 * MIB
    """A record with a larger value is a dead letter."""
    dataref_prefix: Annotated[str | None, ObjectPrefix(STORE_FOLDERS)] = None
    """Where in the object store the objects lie that records may name; {tenant} stands for theirs. Unset: none may."""
    dataref_bytes_max: Annotated[int, Size(1, 2048 * GIB)] = 1024 * GIB
    """An object that is larger is a dead letter."""
    retry_seconds: Annotated[int, Between(1, 604_800)] = 3600
    """How long one record may hold its partition back while what it needs is away; then it is a dead letter."""


@held
class ServiceSettings:
    """What ops turn while services run. Hot."""

    __pydantic_config__ = FORBID_OTHERS

    read_only: bool = False
    """The gateway refuses new blobs; what was accepted is finished."""
    paused: bool = False
    """Workers take no more messages; what they hold is finished."""


@held
class GatewaySettings:
    """Where the gateway listens, and the bound of everything it takes or keeps (services/gateway/README.md)."""

    __pydantic_config__ = FORBID_OTHERS

    host: Annotated[str, Text(255)] = "127.0.0.1"
    """Anything but loopback needs `auth.tokens_file`."""
    port: Annotated[int, Between(0, 65_535)] = 8080
    """0 takes any free port and says which."""
    ingest: Annotated[str, OneOf(INGESTS)] = "kafka"
    """`kafka`: in front of the services; `embedded`: a whole store in this process (`nearkin serve`)."""
    body_bytes_max: Annotated[int, Size(1, 2048 * GIB)] = 1024 * GIB
    """A larger body is refused with 413."""
    key_bytes_max: Annotated[int, Between(1, KEY_BYTES_MAX)] = KEY_BYTES_MAX
    """A longer key is refused with 414."""
    header_bytes_max: Annotated[int, Size(4 * KIB, MIB)] = 64 * KIB
    """Of a request's head, metadata and all; more is refused with 431."""
    connections_max: Annotated[int, Between(1, 65_536)] = 1024
    """More are refused with 503."""
    uploads_max: Annotated[int, Between(1, 4096)] = 128
    """Uploads at a time; each holds a frame of at most 900 KiB."""
    downloads_max: Annotated[int, Between(1, 1024)] = 32
    """Restores at a time; each holds at most four pieces of 4 MiB, and with S3 32 MiB of blocks on their way."""
    tenant_share: Annotated[float, Share(1.0)] = 0.75
    """Of uploads, downloads, explanations and open resumable uploads: the most that one tenant may hold."""
    token_share: Annotated[float, Share(1.0)] = 0.5
    """The same for one token."""
    address_share: Annotated[float, Share(1.0)] = 0.75
    """The same for one peer address (IPv6: one /64). Behind a proxy all callers have the proxy's: set 1."""
    idle_per_address_max: Annotated[int, Between(1, 65_536)] = 256
    """Connections of one peer address that have sent no whole request head, or idle after an answer; the oldest is
    closed for one more. Of all addresses together the oldest is closed at `connections_max`."""
    requests_per_second: Annotated[int, Between(0, 1_000_000)] = 1000
    """For each token (without tokens: each address), in bursts of as many; 0 is without bound."""
    upload_unacknowledged_bytes: Annotated[int, Size(MIB, GIB)] = 8 * MIB
    """Of one upload on its way into Kafka."""
    unacknowledged_bytes: Annotated[int, Size(MIB, 16 * GIB)] = 48 * MIB
    """Of all uploads together on their way into Kafka."""
    slow_seconds: Annotated[int, Between(1, 3600)] = 30
    """See `slow_bytes_per_second`."""
    slow_bytes_per_second: Annotated[int, Between(1, 1_000_000_000)] = 1024
    """A client slower than this over `slow_seconds`, sending or taking, is let go."""
    busy_bytes_per_second: Annotated[int, Between(1, 1_000_000_000)] = 65_536
    """The same once all uploads, or downloads, that may run are running; from half of them on the bound rises to it."""
    upload_status_bytes: Annotated[int, Size(MIB, 4 * GIB)] = 64 * MIB
    """Memory for what has become of uploads; the oldest go first."""
    upload_status_minutes: Annotated[int, Between(1, 10_080)] = 60
    """How far back a gateway that starts reads what has become of uploads."""
    resumable_hours: Annotated[int, Between(1, 720)] = 24
    """A resumable upload must be whole so long after it began."""
    resumable_empty_minutes: Annotated[int, Between(1, 43_200)] = 10
    """A resumable upload of which no byte has arrived expires so long after it began."""
    resumable_max: Annotated[int, Between(1, 1_000_000)] = 10_000
    """Resumable uploads that are open at a time, of all tenants."""
    partial_uploads_max: Annotated[int, Between(1, 1000)] = 256
    """Partial uploads that one final upload may concatenate (tus `Upload-Concat`)."""
    access_log: bool = True
    """Log a line for each request, probes that succeed left out (logger `nearkin.access`)."""
    cors_origins: Annotated[tuple[str, ...], Origins()] = ()
    """Web origins (`https://app.example`, `*` for all) whose pages may use the API with a token. Empty: none."""
    checked_patch_bytes: Annotated[int, Size(MIB, 16 * GIB)] = 64 * MIB
    """A PATCH with `Upload-Checksum` waits on local disk until its checksum agrees."""
    shutdown_seconds: Annotated[int, Between(1, 3600)] = 30
    """What is under way has so long to end once the gateway is told to stop."""


@held
class DashboardSettings:
    """The pages at `/` of the gateway."""

    __pydantic_config__ = FORBID_OTHERS

    enabled: bool = True
    """Serve them."""
    session_hours: Annotated[int, Between(1, 168)] = 8
    """A login counts for so long, and never longer than its token."""


@held
class AuthSettings:
    """Who may do what. Without a file there is one tenant, and only loopback is listened on."""

    __pydantic_config__ = FORBID_OTHERS

    tokens_file: str | None = None
    """Hashed tokens as `nearkin token` keeps them; read again when it changes."""


@held
class AuditSettings:
    """The audit log of a gateway (docs/reference/audit-log.md)."""

    __pydantic_config__ = FORBID_OTHERS

    enabled: bool = True
    """Write it: logins, failed authentication, reads, changes of blobs and settings (logger `nearkin.audit`)."""
    reads: bool = True
    """Record reads, listings and pages of the dashboard too; changes and authentication always are."""
    per_second: Annotated[int, Between(0, 100_000)] = 100
    """The most records a second of each tenant and event, in bursts of as many; further ones are counted. Changes are
    never left out. 0: no bound."""
    window_seconds: Annotated[int, Between(1, 3600)] = 60
    """Repeated use, and repeated failure, of one token from one address is summed up in one record a window."""
    path: Annotated[str, Text(4096)] | None = None
    """File for its records, as JSON with mode 0600; opened again after it was moved. Unset: with the other logs."""


@held
class MonitorSettings:
    """Where a service tells how it is: `/livez`, `/readyz`, `/metrics`."""

    __pydantic_config__ = FORBID_OTHERS

    host: Annotated[str, Text(255)] = "127.0.0.1"
    """The address that is listened on."""
    port: Annotated[int | None, Between(0, 65_535)] = None
    """Unset: nowhere. 0 takes any free port and says which."""
    stall_seconds: Annotated[int, Between(10, 86_400)] = 300
    """A worker that has done no step for so long is not live. A dependency that is away is asked again after 60 s at
    most, and each such step counts; Kafka itself gives up on a consumer after 600 s."""


@held
class LogSettings:
    """What services write on stderr."""

    __pydantic_config__ = FORBID_OTHERS

    format: Annotated[str, OneOf(LOG_FORMATS)] = "text"
    """json: an object a line; of work on a blob with `blob`, `tenant`, `trace_id` and `span_id`."""


@held
class TracingSettings:
    """Traces to an OpenTelemetry collector, by OTLP over HTTP (docs/how-to/operate-services.md)."""

    __pydantic_config__ = FORBID_OTHERS

    endpoint: Annotated[str | None, ServerUrl()] = None
    """The collector's URL, such as http://otel-collector:4318. Unset: nothing is traced."""
    ratio: Annotated[float, Share(1.0)] = 0.01
    """Share of the requests that are traced. One that brings a trace context is traced as that says."""
