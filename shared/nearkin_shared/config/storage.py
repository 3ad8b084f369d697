"""Settings of a store: where and how objects are kept, read, looked up and freed. Invariant: no bound is absent."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from nearkin_shared.config.validators import (
    FORBID_OTHERS,
    Between,
    InvalidValue,
    LocalFolder,
    OneOf,
    ParityScheme,
    ServerUrl,
    Share,
    Size,
    TenantName,
    Text,
)
from nearkin_shared.limits import GIB, KIB, MIB
from nearkin_shared.utils.frozen import held

INDEXES = ("lmdb",)
MARK_SWEEP, HYBRID, REFCOUNT, EXPIRY = GC_MODES = ("mark-sweep", "hybrid", "refcount", "expiry")
STORE_FOLDERS = (
    *("containers", "manifests", "gc", "parity", "pause", "quarantine", "scrub", "keys", "heads"),
    *("index", "tmp", "uploads", "reserve", "nearkin.json"),
)
ENCRYPTIONS = ("none", "aes-256-gcm")
PAGE_CACHES = ("drop", "keep")
OBJECT_CHECKSUMS = ("sha256", "crc64nvme", "none")


@held
class StorageSettings:
    """How objects are kept, whatever is in them."""

    __pydantic_config__ = FORBID_OTHERS

    parity: Annotated[str, ParityScheme()] = "none"
    """rs-K-M: containers, manifests and descriptor are cut into K shards, and M of Reed-Solomon parity (needs the extra
    `parity`) lie beside: what is damaged in up to M of K + M places repairs itself, for M / K of the bytes more."""
    encryption: Annotated[str, OneOf(ENCRYPTIONS)] = "none"
    """aes-256-gcm: all objects are sealed, each tenant's by keys of its own (needs the extra `encryption`). A store is
    made with or without, and stays so."""
    page_cache: Annotated[str, OneOf(PAGE_CACHES)] = "drop"
    """Of containers in a folder. `drop`: they leave it once they are durable, as backups should; `keep`: they stay, for
    a slow disk where the next version comes soon (docs/adr/0031)."""
    reserve_bytes: Annotated[int, Size(0, GIB)] = 64 * MIB
    """Of a store in a folder: at most so much of the disk is kept in a file `reserve`, for `rm`, `forget`, `gc` and
    `gc --pause` to go on with once the disk is full; 0: none. It takes a 32nd of the stored bytes, at least 1 MiB."""
    key_file: Annotated[str | None, Text(4096)] = None
    """Holds the key-encryption keys, the newest first: `nearkin keys generate FILE`. Not readable by everybody."""
    key: Annotated[str | None, Text(4096)] = field(default=None, repr=False)
    """The same keys as text, for NEARKIN_STORAGE__KEY; in place of a file."""
    create: bool = False
    """Services create the store if the object store has none: for the first start. Otherwise they refuse to start, so
    that a wrong or unmounted place does not get a second, empty store. Commands use `nearkin init`."""
    allow_other_chunking: bool = False
    """Write under another profile or other `chunker.*` than the store is written with (`chunking.json`), with a
    warning: such data share no chunks with what is stored. Commands have `--force`."""

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

    __pydantic_config__ = FORBID_OTHERS

    every_days: Annotated[int, Between(0, 3650)] = 30
    """A pass over all that is stored begins so long after the last one began, at the earliest; 0: none ever does."""
    rate_bytes: Annotated[int, Size(KIB, 1024 * GIB)] = 4 * MIB
    """A pass reads so many bytes a second at most: 10 TiB in 30 days; it takes at most a quarter of a core."""


@held
class IndexSettings:
    """The rebuildable index."""

    __pydantic_config__ = FORBID_OTHERS

    backend: Annotated[str, OneOf(INDEXES)] = "lmdb"
    """Of a local store; services have their index in Redis."""
    map_bytes: Annotated[int, Size(16 * MIB, 16 * 1024 * GIB)] = 64 * GIB
    """The most that a local index may grow to: some 170 bytes a chunk."""
    path: Annotated[str | None, LocalFolder()] = None
    """A folder on a local disk of this machine for the indexes of local stores, each in a folder named after its store;
    unset: `index/` in the store. For stores on network filesystems or slow media. Where several machines write a store
    in turn each rebuilds its own index after another one wrote (docs/reference/filesystems.md)."""


@held
class RestoreSettings:
    """Bounds of a restore."""

    __pydantic_config__ = FORBID_OTHERS

    cache_bytes: Annotated[int, Size(8 * MIB, 64 * GIB)] = 128 * MIB
    """Of decoded blocks, in a restore."""


@held
class RunnerSettings:
    """Bounds of the embedded runner."""

    __pydantic_config__ = FORBID_OTHERS

    batch_bytes: Annotated[int, Size(2 * MIB, 64 * MIB)] = 16 * MIB
    """What is cut, named and reduced at a time; three of them are in memory."""
    queue_batches: Annotated[int, Between(0, 16)] = 0
    """Wait between two threads at most; 0: a batch is handed over when the next thread is free. Each takes memory."""


@held
class ObjectStoreSettings:
    """Where services keep containers and manifests. Without keys here, the usual AWS_* variables and roles count."""

    __pydantic_config__ = FORBID_OTHERS

    url: str | None = None
    """`s3://bucket`, `s3://bucket/prefix`, or a folder as a path or `file://` URL; `store` where it is not set."""
    endpoint: str | None = None
    """URL of a server other than Amazon's."""
    region: Annotated[str, Text(64)] = "us-east-1"
    """Of the bucket."""
    access_key_id: str | None = None
    """With `secret_access_key`; unset: AWS_ACCESS_KEY_ID and so on, or the role of the machine."""
    secret_access_key: str | None = field(default=None, repr=False)
    """Better in NEARKIN_OBJECT_STORE__SECRET_ACCESS_KEY than in a file."""
    session_token: str | None = field(default=None, repr=False)
    """Of keys that are lent for a time."""
    allow_http: bool = False
    """Take an `endpoint` that is not encrypted."""
    virtual_hosted: bool = False
    """Ask `bucket.endpoint/name`, not `endpoint/bucket/name`; an `endpoint` that is set then names the bucket."""
    ca_file: str | None = None
    """PEM certificates of who has issued the server's."""
    checksum: Annotated[str, OneOf(OBJECT_CHECKSUMS)] = "sha256"
    """Sent with each object and checked by the server before it acknowledges."""
    connect_timeout_seconds: Annotated[int, Between(1, 60)] = 5
    """For making a connection."""
    request_timeout_seconds: Annotated[int, Between(1, 600)] = 60
    """For a whole request, its bytes included."""
    retries: Annotated[int, Between(0, 100)] = 12
    """After the first try."""
    retry_seconds: Annotated[int, Between(1, 3600)] = 60
    """No try begins later than this after the first."""

    def __post_init__(self) -> None:
        """Refuse half a pair of keys, and an endpoint without encryption that was not asked for."""
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ValueError(f"{missing} is not set: want access_key_id and secret_access_key, or neither")
        for name in ("access_key_id", "secret_access_key", "session_token", "region"):
            if any(ord(character) <= 32 or ord(character) == 127 for character in getattr(self, name) or ""):
                raise ValueError(f"{name}: holds a space or a line break: was it made by `echo`?")
        if self.endpoint is not None:
            if "@" in self.endpoint.partition("://")[2].partition("/")[0]:
                raise ValueError("endpoint: holds a name or password: want access_key_id and secret_access_key")
            try:
                ServerUrl().check(self.endpoint)
            except InvalidValue as err:
                raise ValueError(f'endpoint "{self.endpoint}": want a URL such as https://s3.example.org') from err
            scheme = self.endpoint.partition("://")[0]
            if scheme == "http" and not self.allow_http:
                raise ValueError(f'endpoint "{self.endpoint}": is not encrypted: want https://, or allow_http = true')
        if self.url is not None and "://" in self.url and not self.url.startswith(("s3://", "file:///")):
            raise ValueError(f'url "{self.url}": want s3://bucket/prefix, file:///folder or a folder')


@held
class DeletionSettings:
    """What becomes of deleted versions."""

    __pydantic_config__ = FORBID_OTHERS

    undelete_seconds: Annotated[int, Between(0, 315_360_000)] = 604_800
    """How long a version that is deleted from now on can be brought back, up to ten years; nothing of it is freed
    before. A week: a mistake made on a Friday is found on the Monday after the next weekend."""
    erase_grace_seconds: Annotated[int, Between(0, 31_536_000)] = 86_400
    """How long `nearkin keys erase` waits before a tenant's keys are removed; until then it can be cancelled. The
    tenant's data cannot be read or written from the start of the grace."""


_KEPT = Between(-1, 1_000_000)
_SECONDS = Between(0, 3_153_600_000)


@held
class RetentionPolicy:
    """What stays of each key that starts with `prefix`, as `nearkin forget` takes it; -1 is all, 0 sets no rule."""

    __pydantic_config__ = FORBID_OTHERS

    prefix: str = ""
    """Of keys; the empty one is of all."""
    tenant: Annotated[str | None, TenantName()] = None
    """Of this tenant alone."""
    keep_last: Annotated[int, _KEPT] = 0
    """The newest so many versions."""
    keep_daily: Annotated[int, _KEPT] = 0
    """The newest version of each of so many days, by UTC, that have one."""
    keep_weekly: Annotated[int, _KEPT] = 0
    """Of so many ISO weeks."""
    keep_monthly: Annotated[int, _KEPT] = 0
    """Of so many months."""
    keep_yearly: Annotated[int, _KEPT] = 0
    """Of so many years."""
    keep_within_seconds: Annotated[int, _SECONDS] = 0
    """Of the key's newest version."""
    min_age_seconds: Annotated[int, _SECONDS] = 0
    """Nobody deletes a younger version."""


@held
class RetentionSettings:
    """How long versions stay: `nearkin forget` and `nearkin gc` delete what no policy keeps."""

    __pydantic_config__ = FORBID_OTHERS

    min_age_seconds: Annotated[int, _SECONDS] = 0
    """Nobody deletes a younger version, of whatever key, by the server's clock."""
    superseded_seconds: Annotated[int, _SECONDS] = 86_400
    """The policies delete no version that was the newest less than so long ago: many new ones push none out."""
    policies: tuple[RetentionPolicy, ...] = ()
    """Of those that match a key, the one of the longest prefix says what stays; the longest minimum age holds."""


@held
class GcSettings:
    """How what no version needs is freed: condemned in one round, gone in a later one."""

    __pydantic_config__ = FORBID_OTHERS

    mode: Annotated[str, OneOf(GC_MODES)] = MARK_SWEEP
    """When a round marks, which alone condemns and frees: always, or where `hybrid` (counts of what changed),
    `refcount` or `expiry` nominate something, something condemned is due, or a week has passed. Services only mark."""
    grace_seconds: Annotated[int, Between(0, 315_360_000)] = 43_200
    """How long it stays condemned before it goes: longer than a restore may take, and twice as long as a blob may be on
    its way through the services; one that took longer is looked at again, and failed if it needs what has gone."""
    compact_below: Annotated[float, Share(0.95)] = 0.9
    """A container is written anew where less than this share of its bytes is needed; 0 never does. At 0.9 a store was
    1.09 times a fresh one after 30 days of changes in stretches, at 0.5 1.24 times (docs/adr/0015)."""
    merge_block_bytes: Annotated[int, Size(0, 16 * MIB)] = 4 * MIB
    """Where chains are as long as `delta.max_depth` allows, a round takes what newer versions changed of a stretch of
    chunks into the block of that stretch, up to so many bytes decoded; 0: never. With `gc.recompress_level` 40
    dumps take 50.6 MB so in place of 81.4, the last 16 of 44 take 42 to 44 in place of 64 to 66 (docs/adr/0033,
    0035, 0036)."""
    merge_versions_min: Annotated[int, Between(2, 65_536)] = 12
    """From so many versions on that are kept and lean on one stretch (a large one of several containers counts as
    several): where fewer are kept, gathering costs more than it saves (docs/adr/0033)."""
    recompress_level: Annotated[int, Between(0, 19)] = 9
    """zstd's level at which a round writes again, once, what a put wrote fast: blocks that lean on nothing, where
    `block.level` is lower; 0: never. Ten botocore releases take a fifth less, twelve dumps a seventh
    (docs/adr/0036)."""
    bytes_per_second: Annotated[int, Size(KIB, 1024 * GIB)] = 64 * MIB
    """Containers are written anew at this speed at most, reads and writes together."""
    interval_seconds: Annotated[int, Between(0, 31_536_000)] = 86_400
    """How often a round is done by an embedded gateway, or by the maintenance services of a fleet together; 0:
    never. One more frees what it condemned, where the grace is at most three quarters of this."""
    sign_old_records: bool = False
    """A run gives deletion marks of an older release, which have no MAC, one; without, their versions are never freed.
    Set it for one run after an upgrade, if no one else could write to the store."""
    clock_gap_seconds_max: Annotated[int, Between(3_600, 3_153_600_000)] = 7_776_000
    """A run refuses to free by a clock that says that nothing happened in the store for longer than this: neither a
    container was written nor a run done. A clock that is ahead looks so; set `gc.trust_clock` if it is right.
    Without the record of an earlier run all gaps between containers count."""
    trust_clock: bool = False
    """A run takes this machine's clock for right, however far ahead of what the store knows. Set it for one run."""
    assume_services_stopped: bool = False
    """The services behind Kafka, which have written this store, never will again: else their maintenance service
    alone collects.
    """
