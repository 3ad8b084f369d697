"""Protocols that an index implements.

Invariant: calls are batched; an entry names durable bytes only (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nearkin_shared.errors import NotFound, PermanentError
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.types import U8, U32, U64, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin_shared.index.catalog import CatalogEntry


@frozen
class ContainerSummary:
    """Figures of a container for `stats`, which need not read all containers."""

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
    """Number of chunks by depth, from 0."""
    sketches: dict[str, int]
    """Number of segments by sketch."""
    found_by: dict[str, int] = field(default_factory=dict)
    """Number of chunks with a base by base finder: `locality`, or `SF0` for the first super-feature, and so on."""


@frozen
class MarkedVersion:
    """Highest mark of a version (0 for none), and the bytes of its marks and retentions."""

    tenant: str
    key: str
    version: int
    sequence: int
    marks_bytes: int


@frozen
class CollectedVersion:
    """Version to remove from the catalog.

    `marks_bytes` and `sequence` describe the marks that stay and keep the version number reserved.
    """

    tenant: str
    key: str
    version: int
    sequence: int = 0
    marks_bytes: int = 0


class FingerprintIndex(Protocol):
    """Lookup of chunks by fingerprint."""

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[n, 32] names; rows not found are zeros."""


class FeatureIndex(Protocol):
    """Lookup of the first stored chunk by super-feature."""

    def locate_ranks(self, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        """Return (locations, found) of the first chunk stored with each super-feature of a rank.

        `super_features` is uint64[n, k]; the result has k * n rows, grouped by rank. Value 0 means none and is not
        found.
        """


class SegmentLedger(Protocol):
    """Lookup of recipes by segment id."""

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) for uint8[s, 20] segment ids.

        A location is (container, segment ordinal).
        """


class Catalog(Protocol):
    """Lookup of versions by tenant and key."""

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending."""

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version.

        Deleted versions are included.
        """

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) as `catalog` orders them."""


@frozen
class ContainerDirectories:
    """Directories of containers to withdraw: their names say where an index has the entries.

    A directory is read when it is needed, since those of one GC run may not fit in memory.
    """

    read: Callable[[ContainerId], Directory | None]

    def get(self, container: int) -> Directory | None:
        """Return a container's directory, None if it is lost or damaged. Raises StoreUnavailable."""
        try:
            return self.read(ContainerId(container))
        except (PermanentError, NotFound):
            return None


@runtime_checkable
class SupportsCollection(Protocol):
    """Index from which a GC run can withdraw entries."""

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Withdraw entries by the container that they name.

        `chunks` and `segments` map a container to ordinals, or to None for all its chunks (its segments too).
        `containers` were deleted as a whole and are no longer counted. Missing entries are ignored. `looked_up` is the
        result of an earlier lookup of these entries, or of more, in the same index, or `ContainerDirectories` of these
        containers: it saves some backends the search; others ignore it.
        """

    def renew(self, summary: ContainerSummary) -> None:
        """Replace the summary of a container after its rewrite."""

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog. Idempotent.

        Call it before the manifests are deleted.
        """


@frozen
class IndexSnapshot:
    """Versions and containers that an index lists at one moment, about 200 bytes each."""

    versions: Mapping[bytes, bytes]
    """Packed marks of each version by its key in the index; keys of one blob key differ in the last 8 bytes."""
    containers: Mapping[int, bytes]
    """Check of each container's summary, 8 bytes; it changes when the container is rewritten."""


@runtime_checkable
class SupportsSnapshots(Protocol):
    """Index that lists all versions and containers at low cost, to find those that changed."""

    def snapshot(self) -> IndexSnapshot:
        """Return all versions and containers. Raises IndexDamaged."""

    def version_names(self, keys: Collection[bytes]) -> dict[bytes, tuple[str, str, int]]:
        """Return (tenant, key, version) of each key that is still listed.

        Raises: IndexDamaged.
        """


@runtime_checkable
class SupportsGenerations(Protocol):
    """Index that counts GC runs, which reveals a restored older copy of it."""

    def advance_generation(self, at_least: int) -> int:
        """Begin a GC generation after the withdrawal of a GC run and return its number."""


@runtime_checkable
class SupportsReports(Protocol):
    """Index that checks itself when a container that it names is missing."""

    def report_missing(self, container: int) -> None:
        """Report a container that an entry names and the store lacks."""


class Index(FingerprintIndex, FeatureIndex, SegmentLedger, Catalog, Protocol):
    """Complete index: all lookups, and the writes that add entries."""

    def publish(self, claims: ContainerEntries) -> None:
        """Publish a durable container's entries. The first entry wins; idempotent."""

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Publish durable containers in order, at a lower cost than one at a time."""

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a durable version to the catalog. Idempotent."""

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Commit several versions, each with its manifest's size in bytes."""

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Record the marks of versions before they are written. The highest wins; idempotent."""

    def containers(self) -> Iterator[ContainerSummary]:
        """Yield the summary of each completely published container, in stream order."""

    def close(self) -> None:
        """Release all resources."""
