"""Define the settings of a store: objects, index, restore, retention, GC.

Invariant: every resource has a bound.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from nearkin_shared.config.validators import (
    FORBID_OTHERS,
    InvalidValue,
    LocalFolder,
    NameChoice,
    NumberRange,
    ParityScheme,
    ServerUrl,
    ShardUrls,
    ShareRange,
    SizeRange,
    TagLists,
    TenantName,
    Text,
)
from nearkin_shared.limits import DESCRIPTOR, GIB, KIB, MIB
from nearkin_shared.utils.frozen import held

REDIS, SHARDS = INDEX_BACKENDS = ("redis", "shards")
MARK_SWEEP, HYBRID, REFCOUNT, EXPIRY = GC_MODES = ("mark-sweep", "hybrid", "refcount", "expiry")
STORE_FOLDERS = (
    *("containers", "manifests", "gc", "parity", "pause", "quarantine", "scrub", "keys", "heads"),
    *("index", "tmp", "uploads", "staging", "reserve", DESCRIPTOR),
)
ENCRYPTIONS = ("none", "aes-256-gcm")
PAGE_CACHES = ("drop", "keep")
AUTO, SAMPLED = "auto", "sampled"
INDEX_KINDS = (AUTO, "exact", "tablets", SAMPLED)
OBJECT_CHECKSUMS = ("sha256", "crc64nvme", "none")


@held
class StorageSettings:
    """How objects are stored, whatever their content."""

    __pydantic_config__ = FORBID_OTHERS

    parity: Annotated[str, ParityScheme()] = "none"
    """rs-K-M: containers, manifests and the descriptor get M Reed-Solomon parity shards for every K data shards (needs
    the extra `parity`). Damage to up to M of K + M shards is repaired, for M / K more bytes.
    """
    encryption: Annotated[str, NameChoice(ENCRYPTIONS)] = "none"
    """aes-256-gcm: all objects are encrypted, each tenant's with its own keys (needs the extra `encryption`). Fixed
    when the store is created.
    """
    page_cache: Annotated[str, NameChoice(PAGE_CACHES)] = "drop"
    """Page cache of containers in a folder. `drop`: evict a container once it is durable, as suits backups; `keep`: for
    a slow disk where the next version follows soon (docs/adr/0031).
    """
    key_file: Annotated[str | None, Text(4096)] = None
    """File with the key-encryption keys, the newest first (`nearkin keys generate FILE`). Only its owner may read it.
    """
    key: Annotated[str | None, Text(4096)] = field(default=None, repr=False)
    """The same keys as text, for NEARKIN_STORAGE__KEY; in place of a file."""
    create: bool = False
    """Services create the store if the object store has none: for the first start. Otherwise they refuse to start, so
    that a wrong or unmounted path does not receive a second, empty store. Commands use `nearkin init`.
    """
    allow_other_chunking: bool = False
    """Write with a profile or `chunker.*` that differs from the store's (`chunking.json`), with a warning: such data
    share no chunks with stored data. Commands have `--force`.
    """

    def __post_init__(self) -> None:
        """Refuse encryption without a key, two sources of keys, and keys that would not be used."""
        sources = [name for name in ("key_file", "key") if getattr(self, name) is not None]
        if self.encryption != "none" and len(sources) != 1:
            raise ValueError(
                f"encryption {self.encryption}: want key_file or key, "
                f"{'not both' if sources else 'and neither is set'}; "
                "`nearkin keys generate FILE` creates a key"
            )
        if self.encryption == "none" and sources:
            raise ValueError(f'{sources[0]} is set but encryption is "none"; set encryption = "{ENCRYPTIONS[1]}"')


@held
class ScrubSettings:
    """Continuous verification of stored data.

    Damage is then found while it can be repaired.
    """

    __pydantic_config__ = FORBID_OTHERS

    every_days: Annotated[int, NumberRange(0, 3650)] = 30
    """Minimum time between the starts of two scrub passes, in days; 0: no scrub."""
    rate_bytes: Annotated[int, SizeRange(KIB, 1024 * GIB)] = 4 * MIB
    """Maximum read speed of a pass, bytes a second: 10 TiB in 30 days at the default; at most a quarter of a core."""


@held
class IndexSettings:
    """The rebuildable index."""

    __pydantic_config__ = FORBID_OTHERS

    kind: Annotated[str, NameChoice(INDEX_KINDS)] = AUTO
    """Index of a local store. `auto`: `exact` up to `index.memory`, then `sampled`. `exact`: all entries in a file,
    which should fit into free memory; `tablets`: 6 bytes of memory a chunk, and chunks are found in the directories of
    their containers (docs/adr/0081); `sampled`: the same within `index.memory`: above some 33 million chunks in 256 MiB
    some duplicates are stored again (docs/adr/0084). A store that is opened for writing rebuilds its index after a
    change from or to `exact`.
    """
    memory: Annotated[int, SizeRange(16 * MIB, 1024 * GIB)] = 256 * MIB
    """Memory of the index of a local store: with `exact` of the page cache, else for tags and directories. With
    `tablets` tags that need more take more, and 8 MiB are left for directories. Super-features have as many bytes of
    the page cache; those of the oldest containers are evicted. `nearkin stats` states what is used.
    """
    map_bytes: Annotated[int, SizeRange(16 * MIB, 16 * 1024 * GIB)] = 64 * GIB
    """Maximum size of a local index: about 170 bytes a chunk, or 80 in the kinds `tablets` and `sampled`."""
    backend: Annotated[str, NameChoice(INDEX_BACKENDS)] = REDIS
    """Index of the services. `redis`: in Redis (`redis.*`); `shards`: in the processes of `index.shards`, without any
    Redis (docs/adr/0086, docs/adr/0088). After a change the other one is complete before uploads are handled.
    """
    shards: Annotated[tuple[str, ...], ShardUrls()] = ()
    """URLs of the index shards in the order of their numbers, such as `["http://index-0.index:7420"]`; at most 64. All
    services have the same. For another count stop all first; each shard rebuilds its index.
    """
    path: Annotated[str | None, LocalFolder()] = None
    """Folder on a local disk for the indexes of local stores, one folder for each store; unset: `index/` in the store.
    For stores on network filesystems or slow media. If several machines write a store one after another, each rebuilds
    its index after another one wrote (docs/reference/filesystems.md).
    """

    def __post_init__(self) -> None:
        """Refuse shards without URLs, and URLs that nothing uses."""
        if self.backend == SHARDS and not self.shards:
            raise ValueError('backend "shards": index.shards is empty; give the URL of each shard')
        if self.backend != SHARDS and self.shards:
            raise ValueError(f'shards {len(self.shards)} URLs, and backend is "{self.backend}": set it to "shards"')


@held
class RestoreSettings:
    """Bounds of a restore."""

    __pydantic_config__ = FORBID_OTHERS

    cache_bytes: Annotated[int, SizeRange(8 * MIB, 64 * GIB)] = 128 * MIB
    """Memory for decoded blocks during a restore."""


@held
class RunnerSettings:
    """Bounds of the embedded writer."""

    __pydantic_config__ = FORBID_OTHERS

    batch_bytes: Annotated[int, SizeRange(2 * MIB, 64 * MIB)] = 16 * MIB
    """Bytes that are chunked, fingerprinted and reduced in one batch; three batches are in memory."""


@held
class ObjectStoreSettings:
    """The object store of the services.

    Without keys here the usual AWS_* variables and roles apply.
    """

    __pydantic_config__ = FORBID_OTHERS

    url: str | None = None
    """`s3://bucket`, `s3://bucket/prefix`, or a folder as a path or `file://` URL; unset: `store`."""
    endpoint: str | None = None
    """URL of a server other than Amazon's."""
    region: Annotated[str, Text(64)] = "us-east-1"
    """Region of the bucket."""
    access_key_id: str | None = None
    """Used with `secret_access_key`; unset: AWS_ACCESS_KEY_ID and so on, or the role of the machine."""
    secret_access_key: str | None = field(default=None, repr=False)
    """Secret key. Prefer NEARKIN_OBJECT_STORE__SECRET_ACCESS_KEY to a file."""
    session_token: str | None = field(default=None, repr=False)
    """Session token of temporary credentials."""
    allow_http: bool = False
    """Accept an `endpoint` without encryption."""
    virtual_hosted: bool = False
    """Request `bucket.endpoint/name`, not `endpoint/bucket/name`; `endpoint`, if set, then contains the bucket."""
    ca_file: str | None = None
    """PEM certificates of the authorities that issued the server's certificate."""
    checksum: Annotated[str, NameChoice(OBJECT_CHECKSUMS)] = "sha256"
    """Checksum sent with each object; the server verifies it before it acknowledges."""

    def __post_init__(self) -> None:
        """Refuse half a pair of keys, and an unencrypted endpoint without `allow_http`."""
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ValueError(f"{missing} is not set: set access_key_id and secret_access_key, or neither")
        for name in ("access_key_id", "secret_access_key", "session_token", "region"):
            if any(ord(character) <= 32 or ord(character) == 127 for character in getattr(self, name) or ""):
                raise ValueError(f"{name}: contains a space or a line break (from `echo`?); remove it")
        if self.endpoint is not None:
            if "@" in self.endpoint.partition("://")[2].partition("/")[0]:
                raise ValueError("endpoint: contains a user name or password; use access_key_id and secret_access_key")
            try:
                ServerUrl().check(self.endpoint)
            except InvalidValue as err:
                raise ValueError(f'endpoint "{self.endpoint}": want a URL such as https://s3.example.org') from err
            scheme = self.endpoint.partition("://")[0]
            if scheme == "http" and not self.allow_http:
                raise ValueError(f'endpoint "{self.endpoint}": is not encrypted; use https:// or set allow_http = true')
        if self.url is not None and "://" in self.url and not self.url.startswith(("s3://", "file:///")):
            raise ValueError(f'url "{self.url}": want s3://bucket/prefix, file:///folder or a folder')


@held
class DeletionSettings:
    """Deletion of versions and tenants."""

    __pydantic_config__ = FORBID_OTHERS

    undelete_seconds: Annotated[int, NumberRange(0, 315_360_000)] = 604_800
    """How long a version that is deleted from now on can be restored with `undelete`, up to ten years; none of its data
    are freed before. A week: a mistake made on a Friday is found on the Monday after the next weekend.
    """


_KEPT = NumberRange(-1, 1_000_000)
_SECONDS = NumberRange(0, 3_153_600_000)


@held
class RetentionPolicy:
    """The versions to keep of keys that start with `prefix`, as in `nearkin forget`.

    -1: all, 0: no rule.
    """

    __pydantic_config__ = FORBID_OTHERS

    prefix: str = ""
    """Prefix of keys; empty: all keys."""
    tenant: Annotated[str | None, TenantName()] = None
    """Restrict the policy to this tenant."""
    keep_last: Annotated[int, _KEPT] = 0
    """Keep this many newest versions."""
    keep_hourly: Annotated[int, _KEPT] = 0
    """Keep the newest version of each of this many hours (UTC) that have a version."""
    keep_daily: Annotated[int, _KEPT] = 0
    """The same for days."""
    keep_weekly: Annotated[int, _KEPT] = 0
    """The same for ISO weeks."""
    keep_monthly: Annotated[int, _KEPT] = 0
    """The same for months."""
    keep_yearly: Annotated[int, _KEPT] = 0
    """The same for years."""
    keep_within_seconds: Annotated[int, _SECONDS] = 0
    """Keep versions up to this much older than the newest version of the key."""
    keep_within_hourly_seconds: Annotated[int, _SECONDS] = 0
    """Of versions up to this much older than the newest version of the key, keep the newest of each hour."""
    keep_within_daily_seconds: Annotated[int, _SECONDS] = 0
    """The same for days."""
    keep_within_weekly_seconds: Annotated[int, _SECONDS] = 0
    """The same for ISO weeks."""
    keep_within_monthly_seconds: Annotated[int, _SECONDS] = 0
    """The same for months."""
    keep_within_yearly_seconds: Annotated[int, _SECONDS] = 0
    """The same for years."""
    keep_tags: Annotated[tuple[str, ...], TagLists()] = ()
    """Keep versions with one of these tags, which `nearkin backup --tag` sets; `a,b`: with both tags."""
    min_age_seconds: Annotated[int, _SECONDS] = 0
    """No caller can delete a version before this age."""


@held
class RetentionSettings:
    """How long versions are kept.

    `nearkin forget` and `nearkin gc` delete versions that no policy keeps.
    """

    __pydantic_config__ = FORBID_OTHERS

    min_age_seconds: Annotated[int, _SECONDS] = 0
    """No caller can delete a version of any key before this age, by the server's clock."""
    superseded_seconds: int = 86_400
    """The policies keep a version that was the newest less than this time ago: many new versions expire no older one.
    """
    policies: tuple[RetentionPolicy, ...] = ()
    """Of the policies that match a key, the one with the longest prefix applies; the longest minimum age applies."""


@held
class GcSettings:
    """Garbage collection: one run marks data for deletion, a later run deletes them."""

    __pydantic_config__ = FORBID_OTHERS

    mode: Annotated[str, NameChoice(GC_MODES)] = MARK_SWEEP
    """When a run marks, that is reads all manifests: `mark-sweep`: always; `hybrid`: after a week, in doubt, and once
    ended versions had added 2 % of the store; until then it frees whole containers by reading the changed keys alone
    (docs/adr/0078, 0085); `refcount` or `expiry`: when they nominate containers, when a pending delete is due, or
    after a week. Services support `mark-sweep` and `hybrid`, which needs room in TMPDIR: 200
    bytes a version, 100 a segment.
    """
    grace_seconds: Annotated[int, NumberRange(0, 315_360_000)] = 43_200
    """How long data are pending delete before they are deleted: longer than a restore takes, and twice as long as a
    blob takes through the services. A blob that took longer is validated again, and fails if it needs deleted data.
    """
    compact_below: Annotated[float, ShareRange(0.95)] = 0.9
    """Rewrite a container when less than this share of its bytes is live; 0: never. At 0.9 a store was 1.09 times the
    size of a fresh one after 30 days of changes in regions, at 0.5 1.24 times (docs/adr/0015).
    """
    merge_block_bytes: Annotated[int, SizeRange(0, 16 * MIB)] = 4 * MIB
    """Where base chains reach `delta.max_depth`, a run merges the chunks that newer versions changed in a region into
    that region's block, up to this many decoded bytes; 0: never. With recompression 40 dumps take 50.6 MB in
    place of 81.4, the last 16 of 44 take 42 to 44 in place of 64 to 66 (docs/adr/0033, 0035, 0036).
    """
    merge_versions_min: int = 12
    """Minimum number of kept versions that depend on one region before its chunks are merged (a large region of several
    containers counts as several): for fewer, merging costs more than it saves (docs/adr/0033).
    """
    recompress_level: int = 9
    """zstd level at which a run recompresses, once, blocks without bases that a put wrote at a lower `block.level`; 0:
    never. Ten botocore releases take a fifth less, twelve dumps a seventh (docs/adr/0036).
    """
    bytes_per_second: Annotated[int, SizeRange(KIB, 1024 * GIB)] = 64 * MIB
    """Maximum speed of rewriting containers, reads and writes together."""
    interval_seconds: Annotated[int, NumberRange(0, 31_536_000)] = 86_400
    """Interval between runs of an embedded gateway, or of all maintenance workers of a fleet together; 0: never. The
    run after frees the data that a run marked for deletion, if the grace is at most three quarters of this.
    """
    sign_old_records: bool = False
    """Let a run add a MAC to tombstones of an older release; without a MAC their versions are never freed. Set it for
    one run after an upgrade, if no one else could write to the store.
    """
    trust_clock: bool = False
    """Let a run trust this machine's clock, however far it is ahead of the times in the store. Set it for one run."""
    assume_services_stopped: bool = False
    """The services behind Kafka that wrote this store will never write again. Otherwise only their maintenance worker
    runs GC.
    """
