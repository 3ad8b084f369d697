"""Define the results that callers receive.

    put -> PutResult    stats -> Stats    verify, repair, rebuild-index, gc -> a report each    explain -> Explanation

Invariant: values never change after they are made, and sums hold exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import field, fields
from datetime import datetime

from nearkin_shared.utils.frozen import frozen

CONTENT_TYPE_TREE = "application/vnd.nearkin.tree"
"""Media type of a tree, in the metadata of its version."""
TAGS = "tags"
"""Name of the tags in a version's metadata, separated by commas."""
HOST = "host"
"""Name of the host of a backup in the metadata of its version."""
PATHS = "paths"
"""Name of the paths of a backup in the metadata of its version: a JSON array of texts."""


@frozen
class Ledger:
    """The bytes of one put, or of a whole store, before and after each step.

    logical - dedup_saved = unique; unique - delta_saved - compression_saved = block_bytes, exactly.
    """

    logical_bytes: int = 0
    chunks: int = 0
    duplicate_chunks: int = 0
    """Includes zero chunks."""
    delta_chunks: int = 0
    """Of a single put: chunks for which a base was selected. If their block was smaller without bases, `explain` and
    the ledger of the store count them as raw.
    """
    raw_chunks: int = 0
    zero_chunks: int = 0
    unique_bytes: int = 0
    """Bytes of fresh chunks, before delta encoding and compression."""
    delta_chunk_bytes: int = 0
    """The part of `unique_bytes` that is stored as deltas."""
    delta_bytes: int = 0
    """Size of these deltas before block compression; chunks of patch blocks: as stored, or estimated for a single put.
    """
    block_bytes: int = 0
    """All blocks as stored, after compression."""
    raw_block_bytes: int = 0
    """The part of `block_bytes` in blocks of raw chunks (the bases)."""
    stored_bytes: int = 0
    """Every byte added under the object root: blocks, directories, recipes, manifests, framing."""

    @property
    def dedup_saved_bytes(self) -> int:
        """Bytes of duplicate chunks."""
        return self.logical_bytes - self.unique_bytes

    @property
    def delta_saved_bytes(self) -> int:
        """Bytes that delta encoding removed from the fresh chunks.

        A patch block is compressed together with its bases, so the delta size of its chunks is an estimate in the
        ledger of a
        put. If the stored size exceeds the estimate, the saving counts as delta encoding only.
        """
        saved_bytes = self.delta_chunk_bytes - self.delta_bytes
        return min(saved_bytes, max(0, self.unique_bytes - self.block_bytes))

    @property
    def compression_saved_bytes(self) -> int:
        """Bytes that block compression removed after delta encoding."""
        return self.unique_bytes - self.delta_saved_bytes - self.block_bytes

    @property
    def reduction_ratio(self) -> float:
        """Logical bytes / stored bytes; 0.0 for an empty store."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    @property
    def dcr(self) -> float:
        """Delta Compression Ratio: fresh bytes before / after delta encoding (Finesse, 5.1)."""
        after = self.unique_bytes - self.delta_saved_bytes
        return self.unique_bytes / after if after else 1.0

    @property
    def dce(self) -> float:
        """Delta Compression Efficiency: 1 - delta bytes / bytes of similar chunks (Finesse, 5.1)."""
        return 1.0 - self.delta_bytes / self.delta_chunk_bytes if self.delta_chunk_bytes else 0.0

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, name) + getattr(other, name) for name in LEDGER_FIELDS))


LEDGER_FIELDS = tuple(each.name for each in fields(Ledger))


@frozen
class VersionInfo:
    """A committed version, as callers see it."""

    key: str
    version: int
    size_bytes: int
    created: datetime
    digest: str
    """`blake3:` and 64 hex digits of the whole blob."""
    sha256: str | None
    segments: int
    chunks: int
    metadata: Mapping[str, str]
    retain_until: datetime | None = None
    """Time before which the version cannot be deleted; None: no retention."""
    source_changed: bool = False
    """Whether the source changed while it was read: the content may mix two states of it."""

    @property
    def is_tree(self) -> bool:
        """Whether the version is a tree of folders, as `backup` stores it; False: a blob of `put`."""
        return self.metadata.get("content-type") == CONTENT_TYPE_TREE

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the version."""
        return tuple(filter(None, (tag.strip() for tag in self.metadata.get(TAGS, "").split(","))))

    @property
    def host(self) -> str:
        """The machine of a backup, or what a caller set; empty if it is not known."""
        return self.metadata.get(HOST, "")

    @property
    def paths(self) -> tuple[str, ...]:
        """The absolute paths that a backup stored.

        `...` stands for more; empty if they are not known.
        """
        try:
            found = json.loads(self.metadata.get(PATHS, "[]"))
        except (ValueError, RecursionError):
            return ()
        is_list = isinstance(found, list) and all(isinstance(path, str) for path in found)
        return tuple(found) if is_list else ()


@frozen
class Deletion:
    """A deleted version whose data are still stored."""

    key: str
    version: int
    deleted: datetime
    until: datetime
    """End of the undelete window; nothing of the version is freed before."""
    who: str
    reason: str
    created: datetime | None = None
    """When the version was committed; None if its manifest cannot be read, or by an older server."""


@frozen
class PutResult:
    """The result of a put whose version is committed."""

    info: VersionInfo
    ledger: Ledger
    seconds: float

    @property
    def source_changed(self) -> bool:
        """Whether the source changed while it was read: the version may mix two states of it."""
        return self.info.source_changed


@frozen
class IndexReport:
    """Memory and expected loss of an index."""

    kind: str
    """`exact`, `tablets` or `sampled`."""
    memory_bytes: int | None = None
    """Memory of its tags; None: the page cache."""
    missed_share: float = 0.0
    """Share of the duplicates that it is expected to miss, at most: they are stored again, most of them as deltas."""


@frozen
class Stats:
    """Sums over a store; `parts` divides `ledger.stored_bytes` by use and adds up to them.

    `ledger` and `seconds` cover all stored versions: deleted ones too, until they are collected. Checkpoints of backups
    are no versions.
    """

    ledger: Ledger
    versions: int
    """Visible versions, as `keys`; deleted ones are counted separately."""
    keys: int
    containers: int
    segments: int
    parts: Mapping[str, int]
    """Bytes by use: base blocks, delta blocks, chunk names, recipes, directory rest, manifests, framing, descriptor."""
    index_bytes: int
    depths: Mapping[int, int]
    """Number of chunks by depth."""
    sketches: Mapping[str, int]
    """Number of segments by sketch algorithm."""
    base_cache_hits: int
    base_cache_misses: int
    seconds: float
    """Duration of all puts whose versions are still stored."""
    deleted_versions: int = 0
    """Deleted and not yet collected."""
    deleted_bytes: int = 0
    """Logical bytes of these, included in `ledger.logical_bytes`."""
    checkpoints: int = 0
    """Checkpoints of unfinished backups. Their stored bytes count, but they are no versions, keys or logical bytes."""
    checkpoint_bytes: int = 0
    """Logical bytes of these, not included in `ledger.logical_bytes`."""
    found_by: Mapping[str, int] = field(default_factory=dict)
    """Number of chunks with a base by finder: `locality`, or `SF0` for the first super-feature, and so on."""
    index: IndexReport | None = None
    """The index of a local store."""

    @property
    def metadata_bytes(self) -> int:
        """Stored bytes outside of blocks, without parity and quarantine."""
        not_metadata = ("raw_blocks", "delta_blocks", "parity", "quarantine")
        return self.ledger.stored_bytes - sum(self.parts.get(part, 0) for part in not_metadata)

    @property
    def metadata_bytes_per_chunk(self) -> float:
        """`metadata_bytes` per logical chunk of all versions; 0.0 without chunks."""
        return self.metadata_bytes / self.ledger.chunks if self.ledger.chunks else 0.0

    @property
    def metadata_bytes_per_fresh_chunk(self) -> float:
        """`metadata_bytes` per stored chunk; 0.0 without chunks."""
        fresh = self.ledger.raw_chunks + self.ledger.delta_chunks
        return self.metadata_bytes / fresh if fresh else 0.0


FIRST_FIT_FINDER = "SF"
"""Prefix of the finder names of super-features; the number of the super-feature follows."""


def policy_of(finder: str) -> str:
    """Return the `base.policy` of a finder; a finder of a GC run has none and is its own."""
    return "first-fit" if finder.startswith(FIRST_FIT_FINDER) else finder


def by_policy(found_by: Mapping[str, int]) -> dict[str, int]:
    """Return the number of chunks with a base by policy, in descending order."""
    sums: Counter[str] = Counter()
    for finder, chunks in found_by.items():
        sums[policy_of(finder)] += chunks
    return dict(sums.most_common())


@frozen
class Damage:
    """A damaged object and the affected versions."""

    object_name: str
    problem: str
    versions: tuple[tuple[str, int], ...]
    """(key, version) of the caller's tenant."""
    of_other_tenants: tuple[tuple[str, str, int], ...] = ()
    """(tenant, key, version) of all other tenants in this store."""
    repairable: bool = False
    """Whether parity can restore the object: reads succeed, and `nearkin repair` replaces it."""
    is_too_new: bool = False
    """Whether the object is not damaged: it has the format of a later Nearkin, which this one cannot read."""
    deleted: tuple[tuple[str, int], ...] = ()
    """Those of `versions` that are deleted."""


@frozen
class VerifyReport:
    """The scope and the findings of `verify`; empty `damage` means no damage."""

    containers: int
    chunks: int
    versions: int
    bytes_read: int
    damage: tuple[Damage, ...]
    seconds: float
    untagged_containers: int = 0
    """The `containers` whose tenant no version names: their chunks were compared by SHA-1, not by check tag."""
    forgotten: bool | None = None
    """Whether the corrupt chunks were removed from the index, so that a new put of the same data stores them again.
    None: no chunk is corrupt. False: a put was running, or the store is read-only; verify again.
    """
    containers_total: int = 0
    """Containers of the store: `containers` of them were read, and the directories of all."""
    container_bytes: int = 0
    """Bytes of all containers; `bytes_read` of these were read."""
    seed: int | None = None
    """Seed of the sample: the same seed selects the same sample of the same containers."""
    index_entries: int | None = None
    """Index entries compared with containers; None: not compared, or a put was running."""
    parity_missing: tuple[str, ...] = ()
    """Undamaged objects that lack the parity that the settings require: `repair` adds it."""
    erased_objects: int = 0
    """Objects of erased tenants: they cannot be decrypted, and `gc` removes them."""
    deleted_versions: int = 0
    """Those of `versions` that are deleted and not yet freed."""


@frozen
class Repaired:
    """An object whose damage was repaired, in full or in part."""

    object_name: str
    by: str
    """`parity`, `a copy`, `copies of chunks`; for parity itself `its object`; or how lost chunks were removed."""
    chunks: int = 0
    """Chunks with a copy elsewhere."""
    chunks_lost: int = 0
    """Chunks without any copy: a later run tries again."""


@frozen
class RepairReport:
    """The actions of `repair`; `damage` remains."""

    repaired: tuple[Repaired, ...]
    damage: tuple[Damage, ...]
    quarantined_chunks: int
    parity_added: int
    """Objects that lacked parity and received it."""
    seconds: float


@frozen
class RebuildReport:
    """The objects that `rebuild-index` read."""

    containers: int
    chunks: int
    segments: int
    versions: int
    seconds: float
    skipped: tuple[str, ...] = ()
    """Objects that could not be read and were skipped; `verify` reports more."""


@frozen
class ChunkExplained:
    """How one chunk of a version is stored."""

    offset: int
    length_bytes: int
    kind: str
    """`duplicate`, `zero`, `delta` or `raw`; a duplicate was stored by an earlier version, in any encoding."""
    fingerprint: str
    depth: int
    stored_estimate_bytes: int
    """Its share of its block, by encoded length."""
    base_fingerprint: str | None = None
    found_by: str | None = None
    """Finder of the base, as in `Stats.found_by`; the segment states the sketch of its super-features."""


@frozen
class SegmentExplained:
    """How one segment of a version is stored; a `known` segment costs one reference."""

    sequence: int
    offset: int
    length_bytes: int
    known: bool
    chunks: tuple[ChunkExplained, ...]
    sketch: str = ""
    """Name of its sketch, as in `Stats.sketches`."""


@frozen
class Explanation:
    """A version, segment by segment; `found_by` counts deltas by finder."""

    info: VersionInfo
    segments: tuple[SegmentExplained, ...]
    duplicate_chunks: int
    """Includes zero chunks, as in a `Ledger`."""
    zero_chunks: int
    delta_chunks: int
    raw_chunks: int
    found_by: Mapping[str, int] = field(default_factory=dict)


@frozen
class RemainingCopy:
    """A location that may contain contents, key names or keys of an erased tenant."""

    place: str
    """A fixed word for scripts: `kafka`, `redis`, `bucket-versions`, `key-copies`, `backups`, `logs`, ..."""
    holds: str
    until: datetime | None
    """Time by which the copy expires; None: it does not expire, or only its owner knows."""
    remedy: str


@frozen
class GcReport:
    """The effects of a GC run, or of a dry run. Bytes are of objects under the root."""

    dry_run: bool
    versions: int
    """Versions deleted permanently: all their objects are deleted but a tombstone that reserves the number."""
    containers_deleted: int
    containers_rewritten: int
    freed_bytes: int
    """Change of stored bytes, exactly: bytes deleted minus bytes written. Negative if a run only marks for deletion, or
    if rebased chunks take more bytes.
    """
    pending_delete_containers: int
    """Containers with unreachable chunks; a run after `due` deletes these if they are still unreachable."""
    pending_delete_bytes: int
    """Bytes that this deletion will free if nothing else changes. Exact for a dry run; an estimate otherwise, because
    rebased deltas take more bytes and compacted containers fewer.
    """
    due: datetime | None
    """When the first pending delete may be deleted; None: nothing is pending."""
    held: Mapping[str, int]
    """Bytes of unreadable chunks that are retained, by reason. Dry run only."""
    seconds: float
    pending_erasures: int = 0
    """Tenants whose erasure is within its grace and can be cancelled."""
    finished_erasures: int = 0
    """Tenants whose keys and objects this run removed: their erasure is complete."""
    remaining: tuple[RemainingCopy, ...] = ()
    """Copies that these erasures cannot reach."""
    rolled_back_keys: int = 0
    """Keys whose newest version was listed by an earlier run, and whose manifest and tombstones are missing now."""
    refused_records: int = 0
    """Records that the store's key does not authenticate: nothing was deleted because of them."""
    forgotten: int = 0
    """Versions that no policy kept, deleted at the end of the run."""
    undeletable_versions: int = 0
    """Deleted versions whose data the run kept: their undelete window or their retention has not ended."""
    recent_containers: int = 0
    """Containers kept whole because services may still commit versions that use them."""


@frozen
class GcState:
    """The state of garbage collection: a pause, if any, and pending deletes."""

    paused_since: datetime | None
    paused_by: str
    pending_delete_containers: int
    due: datetime | None
