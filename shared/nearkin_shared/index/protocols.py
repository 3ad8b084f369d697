"""What an index must do. Invariant: batch calls only; an entry names bytes that are durable (I1)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin_shared.index.catalog import CatalogEntry


@frozen
class ContainerSummary:
    """What `stats` needs of a container, so that it need not read them all."""

    container: ContainerId
    container_bytes: int
    directory_bytes: int
    recipe_bytes: int
    name_bytes: int
    blocks: int
    segments: int
    raw_chunks: int
    raw_block_bytes: int
    delta_block_bytes: int
    unique_bytes: int
    delta_chunk_bytes: int
    delta_bytes: int
    depths: tuple[int, ...]
    """Chunks by depth, from 0."""
    sketches: dict[str, int]
    """Segments by sketch."""
    found_by: dict[str, int] = field(default_factory=dict)
    """Chunks with a base by what found it: `locality`, or `SF0` for the first super-feature, and so on."""


@frozen
class MarkedVersion:
    """That a version has marks or retention records: which mark is the highest, 0 for none, and the bytes of all."""

    tenant: str
    key: str
    version: int
    sequence: int
    marks_bytes: int


@frozen
class CollectedVersion:
    """A version that no index is to list any more. `manifest` None: it cannot be read, its segments stay counted.

    `marks_bytes`: of the marks that stay, the highest of them `sequence`: they keep the version's number taken.
    """

    tenant: str
    key: str
    version: int
    manifest: Manifest | None
    sequence: int = 0
    marks_bytes: int = 0


class FingerprintIndex(Protocol):
    """Chunk name -> where the chunk lies."""

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names; rows not found are zeros."""


class FeatureIndex(Protocol):
    """Super-feature -> the first chunk that had it."""

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint64[n, k] super-features: the first chunk stored with each, of its rank.

        k * n rows, all of a rank one behind the other. Those that are 0, which means none, are not found.
        """


class SegmentLedger(Protocol):
    """Segment -> where its recipe lies, and how many versions hold it."""

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids; a location is (container, segment ordinal)."""


class Catalog(Protocol):
    """(tenant, key) -> versions."""

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending."""

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version; deleted ones too."""

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) of all versions whose key starts with `prefix`, by key and version."""


@runtime_checkable
class SupportsCollection(Protocol):
    """An index that lets go of what is to be freed."""

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Let go of entries by the container they name.

        `chunks` and `segments` by container: ordinals, or None for all (of `chunks`: of its segments too);
        `containers` are gone as a whole and no longer counted. What is not there is fine. `looked_up`: what the same
        index found for these, or for more, in a look before; it spares some the search, and others do not heed it.
        """

    def renew(self, summary: ContainerSummary) -> None:
        """Replace what `containers` tells of a container: it was written anew."""

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog and count their segments no more, before their manifests go.

        Repeating changes nothing.
        """


@runtime_checkable
class SupportsGenerations(Protocol):
    """An index that may come back from an older copy of itself, and tells by a count of GC runs."""

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation, once `withdraw` has removed what a GC run withdraws; return its number."""


@runtime_checkable
class SupportsReports(Protocol):
    """An index that is checked when a container that it names turns out to be missing."""

    def report_missing(self, container: int) -> None:
        """Report a container that an entry names and the store lacks."""


class Index(FingerprintIndex, FeatureIndex, SegmentLedger, Catalog, Protocol):
    """All of it, with the two writes that make entries appear."""

    def publish(self, claims: ContainerEntries) -> None:
        """Make a durable container's entries findable. The first entry wins; repeating changes nothing."""

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Do that for durable containers in their order, for less than one after another."""

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a durable version to the catalog and count its segments. Repeating changes nothing."""

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Do that for many versions at once, each with its manifest's bytes."""

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Note the marks of versions, before they are written. The highest stands; repeating changes nothing."""

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield what is known of each container whose entries are all there, in stream order."""

    def close(self) -> None:
        """Release all resources."""
