"""Records: what travels between stages and what callers see. Invariant: values never change after they are made.

Chunks travel as arrays beside one payload, never as objects:

    payload   | chunk 0 | chunk 1 | chunk 2 | ...      uint8
    offsets   uint64[n] bytes from the payload's start
    lengths   uint32[n] bytes
    names     uint8[n, 32]: fingerprint 20, check tag 8, length 4
    segments  chunk_bounds uint32[s + 1]: segment j is chunks chunk_bounds[j] .. chunk_bounds[j + 1]

Stored ones, which lie in many decoded blocks, as `Pieces` of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from datetime import datetime
from typing import NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin.frozen import frozen

ContainerId = NewType("ContainerId", int)
"""64 bits: creation in ms since 1970 << 20, plus 20 random bits. Sorting by it gives stream order."""

SELF = ContainerId(0)
"""In a recipe: the container that holds the recipe."""
ZERO = ContainerId(1)
"""In a recipe: the built-in all-zero chunk (MAD2, section 4.2); its ordinal is the chunk's length in bytes."""
CONTAINER_ID_MIN = 2

NAME_BYTES = 32
SEGMENT_ID_BYTES = 20

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

IntegerT = TypeVar("IntegerT", bound=np.integer)


@frozen
class Locations:
    """Where chunks lie: container ids uint64[n] and ordinals uint32[n] in that container's directory."""

    containers: U64
    ordinals: U32

    def __len__(self) -> int:
        return len(self.ordinals)

    def take(self, index: NDArray[np.intp] | Bools | slice) -> Locations:
        """Return the chosen rows."""
        return Locations(self.containers[index], self.ordinals[index])

    @staticmethod
    def empty(count: int = 0) -> Locations:
        """Return `count` rows of zeros."""
        return Locations(np.zeros(count, np.uint64), np.zeros(count, np.uint32))

    @staticmethod
    def join(parts: list[Locations]) -> Locations:
        """Return all rows of `parts` in order."""
        if not parts:
            return Locations.empty()
        return Locations(np.concatenate([p.containers for p in parts]), np.concatenate([p.ordinals for p in parts]))


def distinct(values: NDArray[IntegerT]) -> NDArray[IntegerT]:
    """Return the distinct values, ascending. A plain np.unique imports numpy.ma: 15 ms of a command's start."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def bounds_of(counts: NDArray[np.integer] | Bools) -> U32:
    """Return uint32[n + 1]: run i of so many rows is rows bounds[i] to bounds[i + 1]."""
    bounds = np.zeros(len(counts) + 1, np.uint32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def offsets_of(lengths: U32) -> U64:
    """Return where each of the consecutive pieces starts, bytes."""
    wide = lengths.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


def grouped(containers: U64) -> list[tuple[int, NDArray[np.intp]]]:
    """Return (container, its rows) for each container, rows ascending. Unlike np.unique it does not import numpy.ma."""
    if not len(containers):
        return []
    if (containers[1:] == containers[0]).all():
        return [(int(containers[0]), np.arange(len(containers)))]
    order = np.argsort(containers, kind="stable")
    changes = np.flatnonzero(np.diff(containers[order])) + 1
    return [(int(containers[rows[0]]), rows) for rows in np.split(order, changes)]


@frozen
class Pieces:
    """Bytes of n chunks, wherever they lie: of chunk i lengths[i] bytes of buffers[which[i]] from offsets[i] on.

    `which` int32[n], `offsets` uint64[n] and `lengths` uint32[n], bytes. A chunk of no bytes names a buffer too.
    """

    buffers: tuple[U8, ...]
    which: I32
    offsets: U64
    lengths: U32

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(payload: U8, offsets: U64, lengths: U32) -> Pieces:
        """Return chunks that all lie in one buffer."""
        return Pieces((payload,), np.zeros(len(lengths), np.int32), offsets, lengths)

    def take(self, rows: NDArray[np.intp]) -> Pieces:
        """Return some of them, in this order."""
        return Pieces(self.buffers, self.which[rows], self.offsets[rows], self.lengths[rows])

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """Return all chunks of `parts` in order. No byte is copied."""
        rows, count = list[tuple[slice, Pieces]](), 0
        for part in parts:
            rows.append((slice(count, count + len(part)), part))
            count += len(part)
        return Pieces.placed(count, rows)

    @staticmethod
    def placed(count: int, parts: Sequence[tuple[NDArray[np.intp] | slice, Pieces]]) -> Pieces:
        """Return `count` chunks: of each part those that become these rows; all others have no bytes."""
        buffers = list[U8]()
        which, offsets, lengths = np.zeros(count, np.int32), np.zeros(count, np.uint64), np.zeros(count, np.uint32)
        for rows, part in parts:
            which[rows] = part.which + np.int32(len(buffers))
            offsets[rows], lengths[rows] = part.offsets, part.lengths
            buffers += part.buffers
        return Pieces(tuple(buffers) or (np.zeros(0, np.uint8),), which, offsets, lengths)


@frozen
class SegmentBatch:
    """Segments of one or more blobs, in stream order: the chunker's output, the dedup stage's input.

    `blobs` uint32[s] says to which blob of the writer's session each segment belongs.
    """

    payload: U8
    offsets: U64
    lengths: U32
    names: U8
    zero: Bools
    chunk_bounds: U32
    blobs: U32
    segment_ids: U8

    @property
    def segments(self) -> int:
        """Return how many segments the batch holds."""
        return len(self.blobs)

    @property
    def logical_bytes(self) -> int:
        """Return the bytes of all chunks."""
        return int(self.lengths.sum(dtype=np.uint64))

    def cut(self, segments: slice, chunks: slice, payload: U8) -> SegmentBatch:
        """Return some segments, one behind the other, that have these chunks; their offsets are into `payload`."""
        return SegmentBatch(
            payload=payload,
            offsets=self.offsets[chunks],
            lengths=self.lengths[chunks],
            names=self.names[chunks],
            zero=self.zero[chunks],
            chunk_bounds=self.chunk_bounds[segments.start : segments.stop + 1] - np.uint32(chunks.start),
            blobs=self.blobs[segments],
            segment_ids=self.segment_ids[segments],
        )


@frozen
class FreshBatch:
    """After dedup: `batch` with what is known of it.

    `segment_known` bool[s]; `segment_locations` of known segments (container, segment ordinal), zeros elsewhere.
    `chunk_known` bool[n]; `chunk_locations` of known chunks; `first` int64[n]: for a fresh chunk the row of its first
    copy in this batch (itself when it is the first). Chunks of known segments count as known without a location.
    """

    batch: SegmentBatch
    segment_known: Bools
    segment_locations: Locations
    chunk_known: Bools
    chunk_locations: Locations
    first: NDArray[np.int64]
    fresh: NDArray[np.intp]
    """Rows of the chunks that must be stored: not known, first of their kind in the batch."""


@frozen
class PairedBatch:
    """After resemblance: `fresh` chunks with their sketches and base candidates.

    `super_features` uint64[f, k], 0 where there is none; `sketch` names the algorithm with its parameters.
    `base_found` bool[f]; `bases` the candidate's location; `base_rank` uint8[f] which SF matched.
    """

    fresh: FreshBatch
    sketch: str
    super_features: U64
    base_found: Bools
    bases: Locations
    base_rank: U8


@frozen
class Ledger:
    """Where the bytes of one put, or of a whole store, went. All bytes; the sums hold exactly.

    logical - dedup_saved = unique; unique - delta_saved - compression_saved = block_bytes.
    """

    logical_bytes: int = 0
    chunks: int = 0
    duplicate_chunks: int = 0
    delta_chunks: int = 0
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
        """Return what delta encoding took off the fresh chunks."""
        return self.delta_chunk_bytes - self.delta_bytes

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
    """Objects that should have parity by the settings, and have none: `repair` adds it."""
    erased_objects: int = 0
    """Of tenants that were erased: nobody can read them, and `gc` removes them."""


@frozen
class Repaired:
    """One object that was damaged and is not any more, or less than before."""

    object_name: str
    by: str
    """`parity`, `a copy`, `copies of chunks`, or of parity itself `its object`."""
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
    """What found the base: `locality`, or a super-feature, such as `finesse SF1`."""


@frozen
class SegmentExplained:
    """How one segment of a version is kept; `known` segments cost one reference."""

    sequence: int
    offset: int
    length_bytes: int
    known: bool
    chunks: tuple[ChunkExplained, ...]


@frozen
class Explanation:
    """A version, segment by segment; `found_by` counts deltas by what found their base."""

    info: VersionInfo
    segments: tuple[SegmentExplained, ...]
    duplicate_chunks: int
    zero_chunks: int
    delta_chunks: int
    raw_chunks: int
    found_by: Mapping[str, int] = field(default_factory=dict)


@frozen
class GcReport:
    """What a round of garbage collection did, or would do (`dry_run`). Bytes are of objects under the root."""

    dry_run: bool
    versions: int
    """Deleted for good: what was left of them is gone, but for a mark that keeps a number taken."""
    containers_deleted: int
    containers_rewritten: int
    freed_bytes: int
    """Less than before, exactly: what was removed without what was written. Negative where a round only condemns."""
    condemned_containers: int
    """Unreached, whole or in part: they go in a later round, once `due` is past, if they are unreached still."""
    freed_later_bytes: int
    """What that will free if nothing else happens, exactly."""
    due: datetime | None
    """When the first of what is condemned may go; None where nothing is."""
    held: Mapping[str, int]
    """Bytes of chunks that no version names to be read and that stay, by what holds them. Only of a dry run."""
    seconds: float
    forgotten: int = 0
    """Versions that the settings' policies did not keep, deleted at the end of the round."""


@frozen
class GcState:
    """How garbage collection stands: paused since when and by whom, or not; what is condemned, and when it may go."""

    paused_since: datetime | None
    paused_by: str
    condemned_containers: int
    due: datetime | None
