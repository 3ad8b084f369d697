"""Sums over a store, all its tenants. Invariant: `parts` adds up to the stored bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from nearkin_shared.results import Ledger, Stats

if TYPE_CHECKING:
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
    from nearkin_shared.index.protocols import ContainerSummary
    from nearkin_shared.storage.containers import ContainerStore


class Version(Protocol):
    """What is counted of a version: a catalog entry of any index."""

    @property
    def key(self) -> str:
        """The key it is a version of."""

    @property
    def manifest_bytes(self) -> int:
        """Bytes of its manifest."""

    @property
    def seconds(self) -> float:
        """How long its put took."""

    @property
    def marks_bytes(self) -> int:
        """Bytes of its marks."""

    @property
    def deleted(self) -> bool:
        """Whether it was deleted."""

    @property
    def ledger(self) -> Ledger:
        """What its put saved."""


def stats(
    index: LmdbIndex,
    containers: ContainerStore,
    descriptor_bytes: int,
    pending_delete_bytes: int,
    index_bytes: int,
    *,
    manifest_bytes: int,
    parity_bytes: int = 0,
    quarantine_bytes: int = 0,
    encryption_bytes: int | None = None,
) -> Stats:
    """Return the sums, from the index and the object store's listing: no container or manifest is read.

    `manifest_bytes` of all manifests and marks. Listed, like every generation of a container: what a round that died
    has left is not in the index, and stored.
    """
    return sum_up(
        index.catalogs(),
        list(index.containers()),
        sum(sum(generations.values()) for generations in containers.generations().values())
        + descriptor_bytes
        + pending_delete_bytes
        + parity_bytes
        + quarantine_bytes
        + (encryption_bytes or 0),
        manifest_bytes=manifest_bytes,
        pending_delete_bytes=pending_delete_bytes,
        parity_bytes=parity_bytes,
        quarantine_bytes=quarantine_bytes,
        encryption_bytes=encryption_bytes,
        descriptor_bytes=descriptor_bytes,
        index_bytes=index_bytes,
        base_cache=(containers.blocks.hits, containers.blocks.misses),
    )


def sum_up(
    entries: Iterable[tuple[str, Version]],
    found: Collection[ContainerSummary],
    object_bytes: int,
    *,
    descriptor_bytes: int,
    index_bytes: int,
    base_cache: tuple[int, int] = (0, 0),
    manifest_bytes: int | None = None,
    pending_delete_bytes: int = 0,
    parity_bytes: int = 0,
    quarantine_bytes: int = 0,
    encryption_bytes: int | None = None,
) -> Stats:
    """Return the sums over (tenant, version) and containers.

    `object_bytes` of all containers, known to the index or not, the descriptor, parity, records of what is condemned
    or quarantined, and what encryption adds (None: there is none); `manifest_bytes` of all manifests and marks, None:
    as `entries` have them; `base_cache` (hits, misses).
    """
    ledger, seconds, noted_bytes, versions = Ledger(), 0.0, 0, 0
    deleted_versions = deleted_bytes = 0
    keys: set[tuple[str, str]] = set()
    for tenant, entry in entries:
        ledger += entry.ledger
        seconds += entry.seconds
        noted_bytes += entry.manifest_bytes + entry.marks_bytes
        if entry.deleted:
            deleted_versions += 1
            deleted_bytes += entry.ledger.logical_bytes
        else:
            versions += 1
            keys.add((tenant, entry.key))
    if manifest_bytes is None:
        manifest_bytes = noted_bytes
    stored = object_bytes + manifest_bytes
    parts = {
        "raw_blocks": sum(c.raw_block_bytes for c in found),
        "delta_blocks": sum(c.delta_block_bytes for c in found),
        "chunk_names": sum(c.name_bytes for c in found),
        "recipes": sum(c.recipe_bytes for c in found),
        "directories": sum(c.directory_bytes - c.name_bytes - c.recipe_bytes for c in found),
        "manifests": manifest_bytes,
        "descriptor": descriptor_bytes,
        "pending_delete": pending_delete_bytes,
        "parity": parity_bytes,
        "quarantine": quarantine_bytes,
    }
    if encryption_bytes is not None:
        parts["encryption"] = encryption_bytes
    parts["framing"] = stored - sum(parts.values())
    depths: Counter[int] = Counter()
    sketches: Counter[str] = Counter()
    found_by: Counter[str] = Counter()
    for container in found:
        depths.update(dict(enumerate(container.depths)))
        sketches.update(container.sketches)
        found_by.update(container.found_by)
    unique_bytes = sum(c.unique_bytes for c in found)
    raw_chunks = sum(c.raw_chunks for c in found)
    delta_chunks = depths.total() - raw_chunks
    return Stats(
        ledger=Ledger(
            logical_bytes=ledger.logical_bytes,
            chunks=ledger.chunks,
            # Chunks of a put that failed may be stored and in no version: fewer are then needed than are there.
            duplicate_chunks=max(0, ledger.chunks - raw_chunks - delta_chunks),
            delta_chunks=delta_chunks,
            raw_chunks=raw_chunks,
            zero_chunks=ledger.zero_chunks,
            unique_bytes=unique_bytes,
            # Of what was gathered the chunks that refer are counted, and where it lies its bytes.
            delta_chunk_bytes=min(unique_bytes, sum(c.delta_chunk_bytes for c in found)),
            delta_bytes=sum(c.delta_bytes for c in found),
            block_bytes=parts["raw_blocks"] + parts["delta_blocks"],
            raw_block_bytes=parts["raw_blocks"],
            stored_bytes=stored,
        ),
        versions=versions,
        keys=len(keys),
        containers=len(found),
        segments=sum(c.segments for c in found),
        parts=parts,
        index_bytes=index_bytes,
        depths=dict(depths),
        sketches=dict(sketches),
        base_cache_hits=base_cache[0],
        base_cache_misses=base_cache[1],
        seconds=seconds,
        deleted_versions=deleted_versions,
        deleted_bytes=deleted_bytes,
        found_by=dict(sorted(found_by.items())),
    )
