"""Sum up the bytes and counts of a store over all its tenants.

Invariant: `parts` adds up to the stored bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from nearkin_shared.results import IndexReport, Ledger, Stats
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import is_reserved_key

if TYPE_CHECKING:
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
    from nearkin_shared.index.protocols import ContainerSummary
    from nearkin_shared.storage.containers import ContainerStore


class CountedVersion(Protocol):
    """The values of a version that are summed up: a catalog entry of any index."""

    @property
    def key(self) -> str:
        """The key of the version."""

    @property
    def manifest_bytes(self) -> int:
        """Bytes of its manifest."""

    @property
    def seconds(self) -> float:
        """Duration of its put, seconds."""

    @property
    def marks_bytes(self) -> int:
        """Bytes of its tombstones."""

    @property
    def deleted(self) -> bool:
        """Whether it was deleted."""

    @property
    def ledger(self) -> Ledger:
        """Ledger of its put."""


@frozen
class OtherObjects:
    """Stored bytes outside of containers: the descriptor, records, parity and encryption."""

    descriptor_bytes: int
    pending_delete_bytes: int = 0
    """Records of pending deletes."""
    parity_bytes: int = 0
    quarantine_bytes: int = 0
    encryption_bytes: int | None = None
    """Bytes that encryption adds; None: the store is not encrypted."""
    manifest_bytes: int | None = None
    """Manifests and tombstones; None: the sum that the catalog entries state."""

    @property
    def total_bytes(self) -> int:
        """All of them without manifests."""
        records_bytes = self.descriptor_bytes + self.pending_delete_bytes + self.quarantine_bytes
        return records_bytes + self.parity_bytes + (self.encryption_bytes or 0)


def stats(index: LmdbIndex, containers: ContainerStore, others: OtherObjects, index_bytes: int) -> Stats:
    """Sum up a local store from its index and the object store's listing.

    No container or manifest is read. All generations of containers are listed, because an interrupted GC run may leave
    one that is stored and not in the index; for the same reason `others.manifest_bytes` is the listed size.
    """
    return sum_up(
        index.catalogs(),
        list(index.containers()),
        sum(sum(generations.values()) for generations in containers.generations().values()),
        others,
        index_bytes=index_bytes,
        report=index.report,
        base_cache=(containers.blocks.hits, containers.blocks.misses),
    )


def sum_up(
    entries: Iterable[tuple[str, CountedVersion]],
    found: Collection[ContainerSummary],
    container_bytes: int,
    others: OtherObjects,
    *,
    index_bytes: int,
    report: IndexReport | None = None,
    base_cache: tuple[int, int] = (0, 0),
) -> Stats:
    """Sum up catalog entries, as (tenant, version), and container summaries.

    `container_bytes` are those of all container objects, in the index or not; `base_cache` is (hits, misses).
    """
    ledger, seconds, noted_bytes, versions = Ledger(), 0.0, 0, 0
    deleted_versions = deleted_bytes = checkpoints = checkpoint_bytes = 0
    keys: set[tuple[str, str]] = set()
    for tenant, entry in entries:
        noted_bytes += entry.manifest_bytes + entry.marks_bytes
        if is_reserved_key(entry.key):
            if not entry.deleted:
                checkpoints += 1
                checkpoint_bytes += entry.ledger.logical_bytes
            continue
        ledger += entry.ledger
        seconds += entry.seconds
        if entry.deleted:
            deleted_versions += 1
            deleted_bytes += entry.ledger.logical_bytes
        else:
            versions += 1
            keys.add((tenant, entry.key))
    manifest_bytes = noted_bytes if others.manifest_bytes is None else others.manifest_bytes
    stored_bytes = container_bytes + others.total_bytes + manifest_bytes
    depths: Counter[int] = Counter()
    sketches: Counter[str] = Counter()
    found_by: Counter[str] = Counter()
    for container in found:
        depths.update(dict(enumerate(container.depths)))
        sketches.update(container.sketches)
        found_by.update(container.found_by)
    return Stats(
        ledger=_sum_ledger(ledger, found, chunks=depths.total(), stored_bytes=stored_bytes),
        versions=versions,
        keys=len(keys),
        containers=len(found),
        segments=sum(c.segments for c in found),
        parts=_sum_parts(found, others, manifest_bytes, stored_bytes),
        index_bytes=index_bytes,
        depths=dict(depths),
        sketches=dict(sketches),
        base_cache_hits=base_cache[0],
        base_cache_misses=base_cache[1],
        seconds=seconds,
        deleted_versions=deleted_versions,
        deleted_bytes=deleted_bytes,
        checkpoints=checkpoints,
        checkpoint_bytes=checkpoint_bytes,
        found_by=dict(sorted(found_by.items())),
        index=report,
    )


def _sum_parts(
    found: Collection[ContainerSummary], others: OtherObjects, manifest_bytes: int, stored_bytes: int
) -> dict[str, int]:
    """Divide the stored bytes by use; the rest is framing."""
    parts = {
        "raw_blocks": sum(c.raw_block_bytes for c in found),
        "delta_blocks": sum(c.delta_block_bytes for c in found),
        "chunk_names": sum(c.name_bytes for c in found),
        "recipes": sum(c.recipe_bytes for c in found),
        "directories": sum(c.directory_bytes - c.name_bytes - c.recipe_bytes for c in found),
        "manifests": manifest_bytes,
        "descriptor": others.descriptor_bytes,
        "pending_delete": others.pending_delete_bytes,
        "parity": others.parity_bytes,
        "quarantine": others.quarantine_bytes,
    }
    if others.encryption_bytes is not None:
        parts["encryption"] = others.encryption_bytes
    parts["framing"] = stored_bytes - sum(parts.values())
    return parts


def _sum_ledger(puts: Ledger, found: Collection[ContainerSummary], *, chunks: int, stored_bytes: int) -> Ledger:
    """Sum up the ledger of a store.

    Logical counts are from `puts`, stored `chunks` and bytes from the containers.
    """
    unique_bytes = sum(c.unique_bytes for c in found)
    raw_chunks = sum(c.raw_chunks for c in found)
    raw_block_bytes = sum(c.raw_block_bytes for c in found)
    return Ledger(
        logical_bytes=puts.logical_bytes,
        chunks=puts.chunks,
        # A failed put may leave chunks that no version needs, so that more chunks are stored than versions need.
        duplicate_chunks=max(0, puts.chunks - chunks),
        delta_chunks=chunks - raw_chunks,
        raw_chunks=raw_chunks,
        zero_chunks=puts.zero_chunks,
        unique_bytes=unique_bytes,
        # Of merged blocks the chunks are counted where they are referenced, and the bytes where they are stored.
        delta_chunk_bytes=min(unique_bytes, sum(c.delta_chunk_bytes for c in found)),
        delta_bytes=sum(c.delta_bytes for c in found),
        block_bytes=raw_block_bytes + sum(c.delta_block_bytes for c in found),
        raw_block_bytes=raw_block_bytes,
        stored_bytes=stored_bytes,
    )
