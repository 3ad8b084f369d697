"""What an index keeps beside locations. Invariant: it follows from containers and manifests alone, in every backend."""

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
    """What the catalog keeps of a version."""

    key: str
    version: int
    manifest_bytes: int
    seconds: float
    ledger: Ledger
    sequence: int = 0
    """Of the highest mark that was announced: odd where the version was to be deleted. The marks themselves decide."""
    marks_bytes: int = 0
    """Of its marks and retention records."""
    listed: bytes = b""
    """What a listing shows (`nearkin_shared.index.listing_entry`); empty in what an earlier release wrote."""

    @property
    def info(self) -> VersionInfo | None:
        """Return the version as a listing shows it; None where its manifest has to be read. Raises Corrupt."""
        return unpack_listed(self.key, self.version, self.ledger, self.listed)

    @property
    def has_records(self) -> bool:
        """Return whether marks or retention records may say otherwise than `listed`."""
        return bool(self.sequence or self.marks_bytes)

    @property
    def deleted(self) -> bool:
        """Return whether it counts as deleted."""
        return self.sequence % 2 == 1


def entry_of(manifest: Manifest, manifest_bytes: int) -> CatalogEntry:
    """Return what the catalog keeps of a version without marks."""
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
"""What found a base that no super-feature did."""


def finder_name(rank: int) -> str:
    """Return what found a base of this rank."""
    return FINDERS.get(rank, f"{FIRST_FIT_FINDER}{rank}")


def summarise(claims: ContainerEntries) -> ContainerSummary:
    """Return what `stats` needs of a container."""
    return summarise_directory(claims.directory)


def summarise_directory(directory: Directory) -> ContainerSummary:
    """Return what `stats` needs of a container, from its directory.

    What was gathered is there twice, joined and as chunks that refer to it: its bytes are counted once, where they lie,
    its chunks as the deltas that versions name.
    """
    chunks, blocks = directory.chunks, directory.blocks
    refer, named = (
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
        unique_bytes=int(chunks.lengths[~refer].sum(dtype=np.uint64)),
        delta_chunk_bytes=int(chunks.lengths[deltas & named].sum(dtype=np.uint64)),
        delta_bytes=int(chunks.encoded[vcdiff].sum(dtype=np.uint64)) + patched,
        depths=tuple(int(n) for n in np.bincount(chunks.depths[named])),
        sketches={name: int(n) for name, n in zip(directory.sketch_names, counted, strict=True) if n},
        found_by={finder_name(rank): int(ranks[rank]) for rank in np.flatnonzero(ranks).tolist()},
    )


def _merged_chunks(directory: Directory) -> Bools:
    """Return which chunks a round has joined of others, which refer to them: no version names these.

    Of those that lean on nothing they lie behind all that the container's own recipes name; where some of these have
    gone nobody can tell them from others.
    """
    chunks, own_rows = directory.chunks, directory.own_rows
    joined: Bools = chunks.ranks == container_layout.MERGED_RANK
    if own_rows is not None:
        joined[own_rows:] |= chunks.depths[own_rows:] == 0
    return joined
