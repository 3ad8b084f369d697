"""Catalog entries and container summaries, the part of an index other than locations.

Invariant: both follow from containers and manifests alone, in every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.listing_entry import pack_listed, unpack_listed
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.results import FIRST_FIT_FINDER, Ledger, VersionInfo
from nearkin_shared.types import Bools
from nearkin_shared.utils.frozen import frozen


@frozen
class CatalogEntry:
    """Catalog entry of a version."""

    key: str
    version: int
    manifest_bytes: int
    seconds: float
    ledger: Ledger
    sequence: int = 0
    """Sequence of the highest announced mark: odd if the version was to be deleted. The marks themselves decide."""
    marks_bytes: int = 0
    """Bytes of the version's marks and retention records."""
    listed: bytes = b""
    """Listing entry (`nearkin_shared.index.listing_entry`); empty if written by an earlier release."""

    @property
    def info(self) -> VersionInfo | None:
        """Return the version as a listing shows it, or None if its manifest must be read.

        Raises: Corrupt.
        """
        return unpack_listed(self.key, self.version, self.ledger, self.listed)

    @property
    def has_records(self) -> bool:
        """Return whether marks or retention records may override `listed`."""
        return bool(self.sequence or self.marks_bytes)

    @property
    def deleted(self) -> bool:
        """Return whether the version counts as deleted."""
        return self.sequence % 2 == 1


def entry_of(manifest: Manifest, manifest_bytes: int) -> CatalogEntry:
    """Return the catalog entry of a version without marks."""
    return CatalogEntry(
        manifest.key,
        manifest.version,
        manifest_bytes,
        manifest.seconds,
        manifest.ledger,
        listed=pack_listed(manifest),
    )


FINDERS: Mapping[int, str] = MappingProxyType(
    {
        container_layout.LOCALITY_RANK: "locality",
        container_layout.MERGED_RANK: "gathered",
        container_layout.REFERENCE_RANK: "reference",
    }
)
"""Names of base finders other than super-features, by rank."""


def finder_name(rank: int) -> str:
    """Return the name of the base finder with this rank."""
    return FINDERS.get(rank, f"{FIRST_FIT_FINDER}{rank}")


def summarise(claims: ContainerEntries) -> ContainerSummary:
    """Summarise a container for `stats`."""
    return summarise_directory(claims.directory)


def summarise_directory(directory: Directory) -> ContainerSummary:
    """Summarise a container for `stats`, from its directory.

    A merged chunk occurs twice: in its merged block and as the chunk that refers to it. Its bytes are counted once, in
    the merged block; its chunk is counted as the delta that recipes reference.
    """
    chunks, blocks = directory.chunks, directory.blocks
    references, named = (
        chunks.there & (chunks.ranks == container_layout.REFERENCE_RANK),
        chunks.there & ~_merged_chunks(directory),
    )
    vcdiff = chunks.there & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3)
    patched = int(blocks.stored[blocks.kinds == container_layout.PATCH].sum())
    deltas = chunks.depths > 0
    ranks = np.bincount(chunks.ranks[deltas & named], minlength=1)
    raw_blocks = blocks.depths == 0
    recipes = np.diff(directory.segments.bounds)
    counted = np.bincount(directory.segments.sketches[recipes > 0], minlength=len(directory.sketch_names))
    return ContainerSummary(
        container=directory.container,
        container_bytes=directory.container_bytes,
        directory_bytes=directory.directory_bytes,
        recipe_bytes=directory.recipe_bytes,
        name_bytes=int(np.count_nonzero(chunks.there)) * 28,
        blocks=int(np.count_nonzero(blocks.raw)),
        segments=int(np.count_nonzero(recipes)),
        raw_chunks=int(np.count_nonzero(named & ~deltas)),
        raw_block_bytes=int(blocks.stored[raw_blocks].sum()),
        delta_block_bytes=int(blocks.stored[~raw_blocks].sum()),
        unique_bytes=int(chunks.lengths[~references].sum(dtype=np.uint64)),
        delta_chunk_bytes=int(chunks.lengths[deltas & named].sum(dtype=np.uint64)),
        delta_bytes=int(chunks.encoded[vcdiff].sum(dtype=np.uint64)) + patched,
        depths=tuple(int(n) for n in np.bincount(chunks.depths[named])),
        sketches={name: int(n) for name, n in zip(directory.sketch_names, counted, strict=True) if n},
        found_by={finder_name(rank): int(ranks[rank]) for rank in np.flatnonzero(ranks).tolist()},
    )


def _merged_chunks(directory: Directory) -> Bools:
    """Return a mask of the chunks of merged blocks, which no recipe references.

    Raw merged chunks are recognised indirectly: their ordinals are above all those that the container's own recipes
    reference. Where some recipes were deleted, they cannot be distinguished from other chunks.
    """
    chunks, own_rows = directory.chunks, directory.own_rows
    merged: Bools = chunks.ranks == container_layout.MERGED_RANK
    if own_rows is not None:
        merged[own_rows:] |= chunks.depths[own_rows:] == 0
    return merged
