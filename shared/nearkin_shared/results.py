"""Reports: what callers are told. Invariant: values never change after they are made, and what adds up does so exactly.

put -> PutResult    stats -> Stats    verify, repair, rebuild-index, gc -> a report each    explain -> Explanation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import field, fields
from datetime import datetime

from nearkin_shared.utils.frozen import frozen


@frozen
class Ledger:
    """Where the bytes of one put, or of a whole store, went. All bytes; the sums hold exactly.

    logical - dedup_saved = unique; unique - delta_saved - compression_saved = block_bytes.
    """

    logical_bytes: int = 0
    chunks: int = 0
    duplicate_chunks: int = 0
    """Those of zeros among them."""
    delta_chunks: int = 0
    """Of a single put those for which a base was taken: where their block came out smaller without, `explain` and the
    ledger of the store count them among the raw ones."""
    raw_chunks: int = 0
    zero_chunks: int = 0
    unique_bytes: int = 0
    """Bytes of fresh chunks, before delta and compression."""
    delta_chunk_bytes: int = 0
    """Of `unique_bytes`, those of chunks kept as deltas."""
    delta_bytes: int = 0
    """What these became, before block compression; chunks in patch blocks: as stored, or estimated for a single put."""
    block_bytes: int = 0
    """All blocks as stored, after compression."""
    raw_block_bytes: int = 0
    """Of `block_bytes`, those of blocks that hold raw chunks (the bases)."""
    stored_bytes: int = 0
    """Every byte added under the object root: blocks, directories, recipes, manifests, framing."""

    @property
    def dedup_saved_bytes(self) -> int:
        """Return what dedup kept out."""
        return self.logical_bytes - self.unique_bytes

    @property
    def delta_saved_bytes(self) -> int:
        """Return what delta encoding took off the fresh chunks.

        A patch block is compressed with its bases, all at once: what its chunks became before is an estimate in the
        ledger of a put, and where more is stored, compression saved nothing and deltas the rest.
        """
        saved_bytes = self.delta_chunk_bytes - self.delta_bytes
        return min(saved_bytes, max(0, self.unique_bytes - self.block_bytes))

    @property
    def compression_saved_bytes(self) -> int:
        """Return what block compression took off after that."""
        return self.unique_bytes - self.delta_saved_bytes - self.block_bytes

    @property
    def reduction_ratio(self) -> float:
        """Return logical / stored; 0.0 for an empty store."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    @property
    def dcr(self) -> float:
        """Return the Delta Compression Ratio: fresh bytes before / after delta compression (Finesse, section 5.1)."""
        after = self.unique_bytes - self.delta_saved_bytes
        return self.unique_bytes / after if after else 1.0

    @property
    def dce(self) -> float:
        """Return the Delta Compression Efficiency: 1 - delta bytes / bytes of the similar chunks (Finesse, 5.1)."""
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
    """Up to when the version must not be deleted; None where nothing retains it."""
    source_changed: bool = False
    """Whether the source was modified while it was read: the content may mix two states of it."""


@frozen
class Deletion:
    """A version that is deleted and whose bytes are still there."""

    key: str
    version: int
    deleted: datetime
    until: datetime
    """Up to when it can be undeleted; nothing of it is freed before."""
    who: str
    reason: str


@frozen
class PutResult:
    """What a put answers once the version is committed."""

    info: VersionInfo
    ledger: Ledger
    seconds: float

    @property
    def source_changed(self) -> bool:
        """Return whether the source changed while it was read: the version may mix two states of it."""
        return self.info.source_changed


@frozen
class Stats:
    """Sums over a store. `parts` says where `ledger.stored_bytes` lie, and adds up to them.

    `ledger` and `seconds` are of all that is stored: of deleted versions too, until they are collected.
    """

    ledger: Ledger
    versions: int
    """To be seen, as `keys`: deleted ones are counted apart."""
    keys: int
    containers: int
    segments: int
    parts: Mapping[str, int]
    """Bytes by use: base blocks, delta blocks, chunk names, recipes, directory rest, manifests, framing, descriptor."""
    index_bytes: int
    depths: Mapping[int, int]
    """Chunks by depth."""
    sketches: Mapping[str, int]
    """Segments by the algorithm that sketched them."""
    base_cache_hits: int
    base_cache_misses: int
    seconds: float
    """Time spent in all puts that are still there."""
    deleted_versions: int = 0
    """Deleted and not yet collected."""
    deleted_bytes: int = 0
    """Logical bytes of these, counted in `ledger.logical_bytes` too."""
    found_by: Mapping[str, int] = field(default_factory=dict)
    """Chunks with a base by what found it: `locality`, or `SF0` for the first super-feature, and so on."""

    @property
    def metadata_bytes(self) -> int:
        """Return what is stored beside blocks: without what is there for damage, parity and quarantine."""
        beside = ("raw_blocks", "delta_blocks", "parity", "quarantine")
        return self.ledger.stored_bytes - sum(self.parts.get(part, 0) for part in beside)

    @property
    def metadata_bytes_per_chunk(self) -> float:
        """Return `metadata_bytes` by logical chunks: every chunk of every version counts; 0.0 where there is none."""
        return self.metadata_bytes / self.ledger.chunks if self.ledger.chunks else 0.0

    @property
    def metadata_bytes_per_fresh_chunk(self) -> float:
        """Return `metadata_bytes` by the chunks that are stored, each once; 0.0 where there is none."""
        fresh = self.ledger.raw_chunks + self.ledger.delta_chunks
        return self.metadata_bytes / fresh if fresh else 0.0


FIRST_FIT_FINDER = "SF"
"""What found a base by a super-feature is called so, with its number behind it."""


def policy_of(finder: str) -> str:
    """Return the `base.policy` that this finder serves; a base that a round found has none, and is told as it is."""
    return "first-fit" if finder.startswith(FIRST_FIT_FINDER) else finder


def by_policy(found_by: Mapping[str, int]) -> dict[str, int]:
    """Return chunks with a base by policy, the one that found most first."""
    sums: Counter[str] = Counter()
    for finder, chunks in found_by.items():
        sums[policy_of(finder)] += chunks
    return dict(sums.most_common())


@frozen
class Damage:
    """One broken object and the versions it touches."""

    object_name: str
    problem: str
    versions: tuple[tuple[str, int], ...]
    """(key, version) of the tenant that asks."""
    of_other_tenants: tuple[tuple[str, str, int], ...] = ()
    """(tenant, key, version) of all others whose data this store holds."""
    repairable: bool = False
    """Its parity holds what it was: reads go on, and `nearkin repair` puts it right."""


@frozen
class VerifyReport:
    """What `verify` read and found; `damage` empty means all is well."""

    containers: int
    chunks: int
    versions: int
    bytes_read: int
    damage: tuple[Damage, ...]
    seconds: float
    untagged_containers: int = 0
    """Of `containers`, those whose tenant no version names: their chunks were compared by SHA-1, not by check tag."""
    forgotten: bool | None = None
    """Whether the index has let go of the chunks that are broken, so that the same data, put again, are stored anew.
    None: no chunk is broken. False: a put was running, or the store cannot be written; verify again."""
    containers_total: int = 0
    """All there are: `containers` of them were read, the directories of all."""
    container_bytes: int = 0
    """Of all of them; `bytes_read` of these were read."""
    seed: int | None = None
    """What the sample was drawn by: the same seed draws the same one of the same containers."""
    index_entries: int | None = None
    """Entries of the index that were compared with containers; None: it was not looked at, or a put was running."""
    parity_missing: tuple[str, ...] = ()
    """Sound objects that should have parity by the settings, and have none: `repair` adds it."""
    erased_objects: int = 0
    """Of tenants that were erased: nobody can read them, and `gc` removes them."""


@frozen
class Repaired:
    """One object that was damaged and is not any more, or less than before."""

    object_name: str
    by: str
    """`parity`, `a copy`, `copies of chunks`, of parity itself `its object`, or how lost chunks were removed."""
    chunks: int = 0
    """That were found elsewhere."""
    chunks_lost: int = 0
    """That were found nowhere: a later run goes on."""


@frozen
class RepairReport:
    """What `repair` did. `damage` is what is left."""

    repaired: tuple[Repaired, ...]
    damage: tuple[Damage, ...]
    quarantined_chunks: int
    parity_added: int
    """Objects that had no parity, and have it now."""
    seconds: float


@frozen
class RebuildReport:
    """What `rebuild-index` read."""

    containers: int
    chunks: int
    segments: int
    versions: int
    seconds: float
    skipped: tuple[str, ...] = ()
    """Objects that could not be read and were left out; `verify` says more."""


@frozen
class ChunkExplained:
    """How one chunk of a version is kept."""

    offset: int
    length_bytes: int
    kind: str
    """`duplicate`, `zero`, `delta` or `raw`; a duplicate was stored earlier, whatever its encoding."""
    fingerprint: str
    depth: int
    stored_estimate_bytes: int
    """Its share of its block, by encoded length."""
    base_fingerprint: str | None = None
    found_by: str | None = None
    """What found the base, in the words of `Stats.found_by`; the segment says whose super-features those are."""


@frozen
class SegmentExplained:
    """How one segment of a version is kept; `known` segments cost one reference."""

    sequence: int
    offset: int
    length_bytes: int
    known: bool
    chunks: tuple[ChunkExplained, ...]
    sketch: str = ""
    """What sketched it, in the words of `Stats.sketches`."""


@frozen
class Explanation:
    """A version, segment by segment; `found_by` counts deltas by what found their base."""

    info: VersionInfo
    segments: tuple[SegmentExplained, ...]
    duplicate_chunks: int
    """Those of zeros among them, as in a `Ledger`."""
    zero_chunks: int
    delta_chunks: int
    raw_chunks: int
    found_by: Mapping[str, int] = field(default_factory=dict)


@frozen
class RemainingCopy:
    """One place that may hold contents, key names or keys of a tenant after its erasure."""

    place: str
    """A fixed word for scripts: `kafka`, `redis`, `bucket-versions`, `key-copies`, `backups`, `logs`, ..."""
    holds: str
    until: datetime | None
    """When it ends by itself, at the latest; None: not by itself, or its owner alone knows."""
    remedy: str


@frozen
class GcReport:
    """What a round of garbage collection did, or would do (`dry_run`). Bytes are of objects under the root."""

    dry_run: bool
    versions: int
    """Deleted for good: what was left of them is gone, but for a mark that keeps a number taken."""
    containers_deleted: int
    containers_rewritten: int
    freed_bytes: int
    """Less than before, exactly: what was removed without what was written. Negative where a round only condemns, or
    what leans on what will go takes more without it."""
    pending_delete_containers: int
    """Unreached, whole or in part: they go in a later round, once `due` is past, if they are unreached still."""
    pending_delete_bytes: int
    """What that will free if nothing else happens. Of a dry run exactly; of a round that was done about as much: what
    leans on it is encoded again then, and takes more, and what stays of its containers is written anew, and takes less.
    """
    due: datetime | None
    """When the first of what is condemned may go; None where nothing is."""
    held: Mapping[str, int]
    """Bytes of chunks that no version names to be read and that stay, by what holds them. Only of a dry run."""
    seconds: float
    pending_erasures: int = 0
    """Tenants whose erasure waits for its grace to end: it can be cancelled."""
    finished_erasures: int = 0
    """Tenants whose keys and objects this run removed: their erasure is complete."""
    remaining: tuple[RemainingCopy, ...] = ()
    """Copies that these erasures do not reach."""
    rolled_back_keys: int = 0
    """Keys whose newest version an earlier run has listed, and whose manifest and marks are gone since."""
    refused_records: int = 0
    """Records that are not authenticated by the store's key: nothing was removed because of them."""
    forgotten: int = 0
    """Versions that the settings' policies did not keep, deleted at the end of the round."""


@frozen
class GcState:
    """How garbage collection stands: paused since when and by whom, or not; what is condemned, and when it may go."""

    paused_since: datetime | None
    paused_by: str
    pending_delete_containers: int
    due: datetime | None
