"""Settings: what there are, their defaults, bounds and profiles. Invariant: each field carries the rule it is held to.

Where their values come from: nearkin/config_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from nearkin.config_rules import (
    Between,
    ObjectPrefix,
    OneMatch,
    OneOf,
    ParityScheme,
    ServerUrl,
    Share,
    Size,
    TenantName,
    Text,
    Token,
    TopicTenants,
)
from nearkin.frozen import held
from nearkin.limits import DEPTH_MAX, GIB, KEY_BYTES_MAX, KIB, MIB, SEGMENT_BYTES_MAX

CHUNKERS = ("fastcdc", "leastcdc", "rabin", "inck", "fixed", "whole")
FEATURES = ("finesse", "ntransform", "odess", "none")
BASE_POLICIES = ("first-fit", "locality", "locality+first-fit")
DELTA_CODECS = ("xdelta3", "patch", "none")
INDEXES = ("lmdb",)
MARK_SWEEP, HYBRID, REFCOUNT, EXPIRY = GC_MODES = ("mark-sweep", "hybrid", "refcount", "expiry")
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
KAFKA_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
KAFKA_COMPRESSIONS = ("none", "lz4", "zstd")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
LOG_FORMATS = ("text", "json")
NULL_VALUES = ("reject", "skip")
STORE_FOLDERS = (
    *("containers", "manifests", "gc", "parity", "pause", "quarantine", "scrub", "keys"),
    *("index", "tmp", "uploads", "nearkin.json"),
)
ENCRYPTIONS = ("none", "aes-256-gcm")
OBJECT_CHECKSUMS = ("sha256", "crc64nvme", "none")
SECRETS = frozenset(
    {
        *("token", "kafka.sasl_password", "redis.password", "storage.key"),
        *("object_store.secret_access_key", "object_store.session_token"),
    }
)
"""Shown as *** wherever settings are printed."""
SECRET_URLS = frozenset({"redis.url"})
"""Shown with *** for `user:password`."""
HIDDEN = "***"
HOT_FIELDS = frozenset(
    {
        *("features.algorithm", "features.count", "features.super_features", "features.sampling_bits"),
        *("base.policy", "delta.codec", "delta.level", "delta.max_depth"),
        *("block.raw_bytes", "block.delta_bytes", "block.level", "service.read_only", "service.paused"),
    }
)
"""What a running service takes from a changed file or `PATCH /v1/config`; all else needs a restart."""
INGESTS = ("kafka", "embedded")
PROFILE_NAMES = ("default", "archive", "finesse-paper")

_FORBID = {"extra": "forbid"}


@held
class ChunkerSettings:
    """How a blob is cut into chunks; changing any of it stops new data from matching old chunks."""

    __pydantic_config__ = _FORBID

    algorithm: Annotated[str, OneOf(CHUNKERS)] = "leastcdc"
    min_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 2 * KIB
    target_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 8 * KIB
    max_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 64 * KIB

    def __post_init__(self) -> None:
        """Refuse bounds that are out of order."""
        if not self.min_bytes <= self.target_bytes <= self.max_bytes:
            raise ValueError(
                f"min_bytes {self.min_bytes}, target_bytes {self.target_bytes}, max_bytes {self.max_bytes}: "
                "want min <= target <= max"
            )
        if self.algorithm in ("rabin", "inck") and self.min_bytes < 256:
            raise ValueError(f"min_bytes {self.min_bytes}: {self.algorithm} wants >= 256")
        if self.algorithm in ("rabin", "inck") and self.target_bytes & (self.target_bytes - 1):
            raise ValueError(f"target_bytes {self.target_bytes}: {self.algorithm} wants a power of two")


@held
class SegmentSettings:
    """How chunks are grouped into segments."""

    __pydantic_config__ = _FORBID

    target_chunks: Annotated[int, Between(1, 1024, power_of_two=True)] = 16
    max_bytes: Annotated[int, Size(64 * KIB, SEGMENT_BYTES_MAX)] = SEGMENT_BYTES_MAX


@held
class FeatureSettings:
    """How resemblance is detected. Hot: toggling it never harms stored data."""

    __pydantic_config__ = _FORBID

    algorithm: Annotated[str, OneOf(FEATURES)] = "finesse"
    count: Annotated[int, Between(1, 64)] = 12
    super_features: Annotated[int, Between(1, 16)] = 3
    window_bytes: Annotated[int, Between(48, 64)] = 48
    sampling_bits: Annotated[int, Between(0, 16)] = 7

    def __post_init__(self) -> None:
        """Refuse groups of unequal size, and an odess window that cannot hold its hash."""
        if self.count % self.super_features:
            raise ValueError(f"count {self.count}: want a multiple of super_features ({self.super_features})")
        if self.algorithm == "odess" and 32 + self.sampling_bits > self.window_bytes:
            raise ValueError(f"sampling_bits {self.sampling_bits}: want at most window_bytes - 32")


@held
class BaseSettings:
    """Which similar chunk becomes the base, and how many bytes of decoded base blocks stay in memory."""

    __pydantic_config__ = _FORBID

    policy: Annotated[str, OneOf(BASE_POLICIES)] = "locality+first-fit"
    """`first-fit`: by super-features; `locality`: what lay between the same neighbours in an older version."""
    cache_bytes: Annotated[int, Size(MIB, 64 * GIB)] = 160 * MIB
    """Of decoded blocks, in a put; restores have `restore.cache_bytes` where these are more."""
    try_all: bool = False
    """Try old neighbours also in blobs where few of them turn out to be bases: docs/decisions/0023."""


@held
class DeltaSettings:
    """How a chunk is written as a difference. Hot."""

    __pydantic_config__ = _FORBID

    codec: Annotated[str, OneOf(DELTA_CODECS)] = "patch"
    """`xdelta3`: chunk by chunk, VCDIFF; `patch`: whole blocks, zstd with the bases as prefix."""
    level: Annotated[int, Between(1, 9)] = 1
    """Of xdelta3; blocks are compressed at `block.level`."""
    max_depth: Annotated[int, Between(1, DEPTH_MAX - 1)] = 4


@held
class BlockSettings:
    """How fresh chunks are gathered and compressed. Hot, but for `far_matches`."""

    __pydantic_config__ = _FORBID

    raw_bytes: Annotated[int, Size(64 * KIB, 30 * MIB)] = 4 * MIB
    """Of decoded bytes: what one read of a chunk may cost. A chunk more must stay below 32 MiB."""
    delta_bytes: Annotated[int, Size(4 * KIB, 16 * MIB)] = 256 * KIB
    level: Annotated[int, Between(1, 22)] = 3
    """Of zstd. At 3, the default, raw blocks that compress badly are written at 2: docs/decisions/0023."""
    far_matches: bool = False
    """Look for repeats in the whole of a raw block, and at level 9 deeper in all: docs/decisions/0019."""


@held
class ContainerSettings:
    """How large a container grows before it is sealed."""

    __pydantic_config__ = _FORBID

    target_bytes: Annotated[int, Size(256 * KIB, 256 * MIB)] = 4 * MIB


@held
class StorageSettings:
    """How objects are kept, whatever is in them."""

    __pydantic_config__ = _FORBID

    parity: Annotated[str, ParityScheme()] = "none"
    """rs-K-M: containers, manifests and descriptor are cut into K shards, and M of Reed-Solomon parity (needs the extra
    `parity`) lie beside: what is damaged in up to M of K + M places repairs itself, for M / K of the bytes more."""
    encryption: Annotated[str, OneOf(ENCRYPTIONS)] = "none"
    """aes-256-gcm: all objects are sealed, each tenant's by keys of its own (needs the extra `encryption`). A store is
    made with or without, and stays so."""
    key_file: Annotated[str | None, Text(4096)] = None
    """Holds the key-encryption keys, the newest first: `nearkin keys generate FILE`. Not readable by everybody."""
    key: Annotated[str | None, Text(4096)] = field(default=None, repr=False)
    """The same keys as text, for NEARKIN_STORAGE__KEY; in place of a file."""

    def __post_init__(self) -> None:
        """Refuse encryption without a key, two sources of keys, and keys that would not be used."""
        given = [name for name in ("key_file", "key") if getattr(self, name) is not None]
        if self.encryption != "none" and len(given) != 1:
            raise ValueError(
                f"encryption {self.encryption}: want key_file or key, {'not both' if given else 'and neither is set'}; "
                "`nearkin keys generate FILE` makes a key"
            )
        if self.encryption == "none" and given:
            raise ValueError(f'{given[0]} is set, and encryption is "none": set encryption = "{ENCRYPTIONS[1]}"')


@held
class ScrubSettings:
    """How what is stored is read again and again, so that damage is found while it can be repaired."""

    __pydantic_config__ = _FORBID

    every_days: Annotated[int, Between(0, 3650)] = 30
    """A pass over all that is stored begins so long after the last one began, at the earliest; 0: none ever does."""
    rate_bytes: Annotated[int, Size(KIB, 1024 * GIB)] = 4 * MIB
    """A pass reads so many bytes a second at most: 10 TiB in 30 days."""


@held
class IndexSettings:
    """The rebuildable index."""

    __pydantic_config__ = _FORBID

    backend: Annotated[str, OneOf(INDEXES)] = "lmdb"
    map_bytes: Annotated[int, Size(16 * MIB, 16 * 1024 * GIB)] = 64 * GIB


@held
class RedisSettings:
    """The Redis server or Cluster that holds the index of several workers."""

    __pydantic_config__ = _FORBID

    url: Annotated[str, Text(1024)] = field(default="redis://127.0.0.1:6379/0", repr=False)
    """`redis://`, `rediss://` (TLS), `unix://`; `redis+cluster://` or `rediss+cluster://` for a Cluster."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
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
class RestoreSettings:
    """Bounds of a restore."""

    __pydantic_config__ = _FORBID

    cache_bytes: Annotated[int, Size(8 * MIB, 64 * GIB)] = 128 * MIB


@held
class RunnerSettings:
    """Bounds of the embedded runner."""

    __pydantic_config__ = _FORBID

    batch_bytes: Annotated[int, Size(2 * MIB, 64 * MIB)] = 16 * MIB
    queue_batches: Annotated[int, Between(0, 16)] = 0
    """Wait between two threads at most; 0: a batch is handed over when the next thread is free. Each takes memory."""


@held
class ObjectStoreSettings:
    """Where services keep containers and manifests. Without keys here, the usual AWS_* variables and roles count."""

    __pydantic_config__ = _FORBID

    url: str | None = None
    """`s3://bucket`, `s3://bucket/prefix`, or a folder as a path or `file://` URL; `store` where it is not set."""
    endpoint: str | None = None
    """URL of a server other than Amazon's."""
    region: Annotated[str, Text(64)] = "us-east-1"
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    allow_http: bool = False
    virtual_hosted: bool = False
    """Ask `bucket.endpoint/name`, not `endpoint/bucket/name`; an `endpoint` that is set then names the bucket."""
    ca_file: str | None = None
    checksum: Annotated[str, OneOf(OBJECT_CHECKSUMS)] = "sha256"
    """Sent with each object and checked by the server before it acknowledges."""
    connect_timeout_seconds: Annotated[int, Between(1, 60)] = 5
    request_timeout_seconds: Annotated[int, Between(1, 600)] = 60
    retries: Annotated[int, Between(0, 100)] = 12
    retry_seconds: Annotated[int, Between(1, 3600)] = 60
    """No try begins later than this after the first."""

    def __post_init__(self) -> None:
        """Refuse half a pair of keys, and an endpoint without encryption that was not asked for."""
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ValueError(f"{missing} is not set: want access_key_id and secret_access_key, or neither")
        if self.endpoint is not None:
            scheme = self.endpoint.partition("://")[0]
            if scheme not in ("http", "https"):
                raise ValueError(f'endpoint "{self.endpoint}": want a URL such as https://s3.example.org')
            if scheme == "http" and not self.allow_http:
                raise ValueError(f'endpoint "{self.endpoint}": is not encrypted: want https://, or allow_http = true')
        if self.url is not None and "://" in self.url and not self.url.startswith(("s3://", "file:///")):
            raise ValueError(f'url "{self.url}": want s3://bucket/prefix, file:///folder or a folder')


@held
class KafkaSettings:
    """How services reach Kafka, and the bounds of what they take from it at a time."""

    __pydantic_config__ = _FORBID

    bootstrap_servers: Annotated[str, Text(4096)] = "127.0.0.1:9092"
    topic_prefix: Annotated[str, OneMatch(r"[A-Za-z0-9._-]{1,100}")] = "nearkin."
    partitions: Annotated[int, Between(1, 1024)] = 4
    replication: Annotated[int, Between(1, 9)] = 1
    security_protocol: Annotated[str, OneOf(KAFKA_PROTOCOLS)] = "plaintext"
    sasl_mechanism: Annotated[str, OneOf(SASL_MECHANISMS)] = "SCRAM-SHA-512"
    sasl_username: str | None = None
    sasl_password: str | None = None
    ca_file: str | None = None
    compression: Annotated[str, OneOf(KAFKA_COMPRESSIONS)] = "lz4"
    """lz4 halves the work of the broker for 5 % more of ours, on data that compress at all (bench/pipeline.py)."""
    batch_messages: Annotated[int, Between(1, 256)] = 32
    """Messages a worker takes at a time: 32 MiB at their largest."""
    session_timeout_ms: Annotated[int, Between(6_000, 300_000)] = 10_000
    upload_idle_seconds: Annotated[int, Between(1, 86_400)] = 300
    """An upload whose frames stop coming is ended as failed after this long."""
    retention_hours: Annotated[int, Between(1, 87_600)] = 168
    """How long our topics keep messages, dead letters too: the longest that a stage may be down without loss."""
    linger_ms: Annotated[int, Between(1, 60_000)] = 1_000
    """How long the delta worker may hold chunks in an open container; the end of a blob seals it sooner."""


@held
class IngestSettings:
    """Blobs out of Kafka topics of the user's own: a record is one, or names an object that is."""

    __pydantic_config__ = _FORBID

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
    dataref_prefix: Annotated[str | None, ObjectPrefix(STORE_FOLDERS)] = None
    """Where in the object store the objects lie that records may name; {tenant} stands for theirs. Unset: none may."""
    dataref_bytes_max: Annotated[int, Size(1, 2048 * GIB)] = 1024 * GIB
    retry_seconds: Annotated[int, Between(1, 604_800)] = 3600
    """How long one record may hold its partition back while what it needs is away; then it is a dead letter."""


@held
class DeletionSettings:
    """What becomes of deleted versions."""

    __pydantic_config__ = _FORBID

    undelete_seconds: Annotated[int, Between(0, 315_360_000)] = 604_800
    """How long a version that is deleted from now on can be brought back, up to ten years; nothing of it is freed
    before. A week: a mistake made on a Friday is found on the Monday after the next weekend."""


_KEPT = Between(-1, 1_000_000)
_SECONDS = Between(0, 3_153_600_000)


@held
class RetentionPolicy:
    """What stays of each key that starts with `prefix`, as `nearkin forget` takes it; -1 is all, 0 sets no rule."""

    __pydantic_config__ = _FORBID

    prefix: str = ""
    tenant: Annotated[str | None, TenantName()] = None
    """Of this tenant alone."""
    keep_last: Annotated[int, _KEPT] = 0
    keep_daily: Annotated[int, _KEPT] = 0
    keep_weekly: Annotated[int, _KEPT] = 0
    keep_monthly: Annotated[int, _KEPT] = 0
    keep_yearly: Annotated[int, _KEPT] = 0
    keep_within_seconds: Annotated[int, _SECONDS] = 0
    """Of the key's newest version."""
    min_age_seconds: Annotated[int, _SECONDS] = 0
    """Nobody deletes a younger version."""


@held
class RetentionSettings:
    """How long versions stay: `nearkin forget` and `nearkin gc` delete what no policy keeps."""

    __pydantic_config__ = _FORBID

    min_age_seconds: Annotated[int, _SECONDS] = 0
    """Nobody deletes a younger version, of whatever key, by the server's clock."""
    policies: tuple[RetentionPolicy, ...] = ()
    """Of those that match a key, the one of the longest prefix says what stays; the longest minimum age holds."""


@held
class GcSettings:
    """How what no version needs is freed: condemned in one round, gone in a later one."""

    __pydantic_config__ = _FORBID

    mode: Annotated[str, OneOf(GC_MODES)] = MARK_SWEEP
    """When a round marks, which alone condemns and frees: always, or where `hybrid` (counts of what changed),
    `refcount` or `expiry` nominate something, something condemned is due, or a week has passed. Services only mark."""
    grace_seconds: Annotated[int, Between(0, 315_360_000)] = 43_200
    """How long it stays condemned before it goes: longer than a restore may take, and twice as long as a blob may be on
    its way through the services; one that took longer is looked at again, and failed if it needs what has gone."""
    compact_below: Annotated[float, Share(0.95)] = 0.9
    """A container is written anew where less than this share of its bytes is needed; 0 never does. At 0.9 a store was
    1.09 times a fresh one after 30 days of changes in stretches, at 0.5 1.24 times (docs/decisions/0015)."""
    bytes_per_second: Annotated[int, Size(KIB, 1024 * GIB)] = 64 * MIB
    """Containers are written anew at this speed at most, reads and writes together."""
    interval_seconds: Annotated[int, Between(0, 31_536_000)] = 86_400
    """How often a round is done by an embedded gateway, or by the janitors of a fleet together; 0: never. One more
    frees what it condemned, where the grace is at most three quarters of this."""
    services_ended: bool = False
    """The services behind Kafka, which have written this store, never will again: else their janitor alone collects."""


@held
class ServiceSettings:
    """What ops turn while services run. Hot."""

    __pydantic_config__ = _FORBID

    read_only: bool = False
    """The gateway refuses new blobs; what was accepted is finished."""
    paused: bool = False
    """Workers take no more messages; what they hold is finished."""


PLAIN_FIELDS: dict[str, ServerUrl | Token | None] = {"store": None, "server": ServerUrl(), "token": Token()}
"""Settings that every command may be given: read and checked without pydantic, whose import takes 130 ms."""


@held
class GatewaySettings:
    """Where the gateway listens, and the bound of everything it takes or keeps (services/gateway/README.md)."""

    __pydantic_config__ = _FORBID

    host: Annotated[str, Text(255)] = "127.0.0.1"
    """Anything but loopback needs `auth.tokens_file`."""
    port: Annotated[int, Between(0, 65_535)] = 8080
    """0 takes any free port and says which."""
    ingest: Annotated[str, OneOf(INGESTS)] = "kafka"
    body_bytes_max: Annotated[int, Size(1, 2048 * GIB)] = 1024 * GIB
    key_bytes_max: Annotated[int, Between(1, KEY_BYTES_MAX)] = KEY_BYTES_MAX
    header_bytes_max: Annotated[int, Size(4 * KIB, MIB)] = 64 * KIB
    connections_max: Annotated[int, Between(1, 65_536)] = 1024
    uploads_max: Annotated[int, Between(1, 4096)] = 128
    """Uploads at a time; each holds a frame of at most 900 KiB."""
    downloads_max: Annotated[int, Between(1, 1024)] = 32
    """Restores at a time; each holds at most four pieces of 4 MiB, and with S3 32 MiB of blocks on their way."""
    requests_per_second: Annotated[int, Between(0, 1_000_000)] = 1000
    """For each token (without tokens: each address), in bursts of as many; 0 is without bound."""
    upload_unacknowledged_bytes: Annotated[int, Size(MIB, GIB)] = 8 * MIB
    unacknowledged_bytes: Annotated[int, Size(MIB, 16 * GIB)] = 48 * MIB
    slow_seconds: Annotated[int, Between(1, 3600)] = 30
    slow_bytes_per_second: Annotated[int, Between(1, 1_000_000_000)] = 1024
    """A client slower than this over `slow_seconds`, sending or taking, is let go."""
    outcomes_bytes: Annotated[int, Size(MIB, 4 * GIB)] = 64 * MIB
    outcomes_minutes: Annotated[int, Between(1, 10_080)] = 60
    """How far back a gateway that starts reads what has become of uploads."""
    resumable_hours: Annotated[int, Between(1, 720)] = 24
    resumable_max: Annotated[int, Between(1, 1_000_000)] = 10_000
    """Resumable uploads that are open at a time, of all tenants."""
    checked_patch_bytes: Annotated[int, Size(MIB, 16 * GIB)] = 64 * MIB
    """A PATCH with `Upload-Checksum` waits on local disk until its checksum agrees."""
    shutdown_seconds: Annotated[int, Between(1, 3600)] = 30


@held
class DashboardSettings:
    """The pages at `/` of the gateway."""

    __pydantic_config__ = _FORBID

    enabled: bool = True
    session_hours: Annotated[int, Between(1, 168)] = 8
    """A login counts for so long, and never longer than its token."""


@held
class AuthSettings:
    """Who may do what. Without a file there is one tenant, and only loopback is listened on."""

    __pydantic_config__ = _FORBID

    tokens_file: str | None = None
    """Hashed tokens as `nearkin token` keeps them; read again when it changes."""


@held
class MonitorSettings:
    """Where a service tells how it is: `/livez`, `/readyz`, `/metrics`."""

    __pydantic_config__ = _FORBID

    host: Annotated[str, Text(255)] = "127.0.0.1"
    port: Annotated[int | None, Between(0, 65_535)] = None
    """Unset: nowhere. 0 takes any free port and says which."""
    stall_seconds: Annotated[int, Between(10, 86_400)] = 300
    """A worker that has done no step for so long is not live. A dependency that is away is asked again after 60 s at
    most, and each such step counts; Kafka itself gives up on a consumer after 600 s."""


@held
class LogSettings:
    """What services write on stderr."""

    __pydantic_config__ = _FORBID

    format: Annotated[str, OneOf(LOG_FORMATS)] = "text"
    """json: an object a line; of work on a blob with `blob`, `tenant`, `trace_id` and `span_id`."""


@held
class TracingSettings:
    """Traces to an OpenTelemetry collector, by OTLP over HTTP (docs/operations.md)."""

    __pydantic_config__ = _FORBID

    endpoint: Annotated[str | None, ServerUrl()] = None
    """The collector's URL, such as http://otel-collector:4318. Unset: nothing is traced."""
    ratio: Annotated[float, Share(1.0)] = 0.01
    """Share of the requests that are traced. One that brings a trace context is traced as that says."""


@held
class Settings:
    """Every setting of a store and its runners."""

    __pydantic_config__ = _FORBID

    profile: Annotated[str, OneOf(PROFILE_NAMES)] = "default"
    store: str | None = None
    """Folder of the local store."""
    server: Annotated[str | None, PLAIN_FIELDS["server"]] = None
    """URL of a gateway, used instead of a local store."""
    token: Annotated[str | None, PLAIN_FIELDS["token"]] = field(default=None, repr=False)
    """What the gateway knows the caller by."""
    tenant: Annotated[str, TenantName()] = "default"
    chunker: ChunkerSettings = ChunkerSettings()
    segment: SegmentSettings = SegmentSettings()
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
    ingest: IngestSettings = IngestSettings()
    deletion: DeletionSettings = DeletionSettings()
    retention: RetentionSettings = RetentionSettings()
    gc: GcSettings = GcSettings()
    service: ServiceSettings = ServiceSettings()
    gateway: GatewaySettings = GatewaySettings()
    dashboard: DashboardSettings = DashboardSettings()
    auth: AuthSettings = AuthSettings()
    monitor: MonitorSettings = MonitorSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    def __post_init__(self) -> None:
        """Refuse sections that contradict one another."""
        own = [entry for entry in self.ingest.topics if entry.startswith(self.kafka.topic_prefix)]
        if own:
            raise ValueError(
                f'ingest.topics "{own[0]}": topics that start with kafka.topic_prefix "{self.kafka.topic_prefix}" are '
                "Nearkin's own"
            )
        if self.chunker.max_bytes > self.segment.max_bytes:
            raise ValueError(
                f"chunker.max_bytes {self.chunker.max_bytes}: want at most segment.max_bytes "
                f"({self.segment.max_bytes}): a chunk never spans segments"
            )


PROFILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "default": {},
    # As few bytes as it can, for what is written once and seldom read: docs/decisions/0019.
    "archive": {
        "chunker": {"min_bytes": 8 * KIB, "target_bytes": 32 * KIB, "max_bytes": 256 * KIB},
        "base": {"try_all": True, "cache_bytes": 72 * MIB},
        "block": {"raw_bytes": 30 * MIB, "delta_bytes": 2 * MIB, "level": 9, "far_matches": True},
        "container": {"target_bytes": 24 * MIB},
        "restore": {"cache_bytes": 160 * MIB},
        "runner": {"batch_bytes": 8 * MIB},
    },
    # Finesse, FAST '19, section 5.1: Rabin, 8 KiB, 3 SFs of 4 features, FirstFit, 400 MB LRU base cache, Xdelta.
    "finesse-paper": {
        "chunker": {"algorithm": "rabin", "min_bytes": 2 * KIB, "target_bytes": 8 * KIB, "max_bytes": 64 * KIB},
        "features": {"algorithm": "finesse", "count": 12, "super_features": 3, "window_bytes": 48},
        "base": {"policy": "first-fit", "cache_bytes": 400_000_000},
        "delta": {"codec": "xdelta3", "max_depth": 1},
        "block": {"raw_bytes": MIB, "delta_bytes": 512 * KIB},
    },
}
assert tuple(PROFILES) == PROFILE_NAMES
