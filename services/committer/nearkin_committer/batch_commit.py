"""Commit the blobs of a batch together.

    1 list the versions of all keys  2 check all segments  3 create all manifests

Blobs of one key are committed one after another, in the order of the batch. A blob whose number another writer
takes at this moment is left to be committed by itself, and with it all later blobs of its key.

Invariant (I2): a manifest is created by a conditional create of its own, after all segments that it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from nearkin_committer.version_content import VersionContent, make_manifest
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.blob_table import blob_id
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import BatchEnd, End, Envelope
from nearkin_shared.kafka.tenant_context import TenantContext
from nearkin_shared.objectstore.group_put import PARTS
from nearkin_shared.observability import metrics
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import History, ManifestStore
from nearkin_shared.types import Locations
from nearkin_shared.utils.frozen import frozen


@frozen
class CommittedVersion:
    """A version whose manifest is durable."""

    manifest: Manifest
    manifest_bytes: int


def ends_of(batch: BatchEnd) -> list[End]:
    """Return the end of each blob of a batch, as if it had been sent by itself."""
    tenant = batch.envelope.tenant
    return [
        End(
            Envelope(blob_id(batch.envelope.blob, number), tenant, one.key),
            one.began_us,
            one.origin,
            one.size_bytes,
            one.blake3,
            segments=one.segments,
            metadata=one.metadata,
        )
        for number, one in enumerate(batch.blobs)
    ]


Earlier = Callable[[End, list[int]], object | None]
"""(end, versions of its key) -> the version that an earlier attempt committed, or None."""


class BatchCommits:
    """Creates the versions of batches. For one thread."""

    def __init__(self, settings: Settings, manifests: ManifestStore, heads: VersionHeads, earlier: Earlier) -> None:
        self._settings, self._manifests, self._heads, self._earlier = settings, manifests, heads, earlier
        self._threads = ThreadPoolExecutor(PARTS, "nearkin-commit")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def commit(
        self, lane: TenantContext, ends: Sequence[End], contents: Sequence[VersionContent]
    ) -> list[CommittedVersion | None]:
        """Return the version of each blob; None: to be committed by itself. Raises RetryableError."""
        found: list[CommittedVersion | None] = [None] * len(ends)
        if lane.collected.find_missing(Locations.join([content.segments for content in contents])) is not None:
            return found  # by itself a blob without a missing segment is committed, and another one reported
        left_out: set[str] = set()
        for rows in _rows_by_turn(ends):
            made = self._create(ends, contents, [row for row in rows if ends[row].envelope.key not in left_out])
            for row, version in made.items():
                found[row] = version
            left_out.update(ends[row].envelope.key for row in rows if found[row] is None)
        return found

    def _create(
        self, ends: Sequence[End], contents: Sequence[VersionContent], rows: Sequence[int]
    ) -> dict[int, CommittedVersion]:
        """Create the manifests of blobs of different keys; return those that were created."""
        manifests = {}
        for row, histories in zip(rows, self._histories([ends[row].envelope for row in rows]), strict=True):
            if not histories or self._earlier(ends[row], sorted(histories)) is None:
                manifests[row] = self._manifest(ends[row], contents[row], histories)
        sizes = self._manifests.put_many(list(manifests.values()), self._threads)
        made = {
            row: CommittedVersion(manifest, manifest_bytes)
            for (row, manifest), manifest_bytes in zip(manifests.items(), sizes, strict=True)
            if manifest_bytes is not None
        }
        metrics.count_committed_many(
            [(contents[row].ledger, one.manifest_bytes, one.manifest.seconds) for row, one in made.items()]
        )
        return made

    def _histories(self, envelopes: Sequence[Envelope]) -> Iterable[dict[int, History]]:
        """Return the versions of each key; a store far away is asked by several threads."""
        are_new = self._manifests.are_new([(one.tenant, one.key) for one in envelopes])
        left = [one for one, is_new in zip(envelopes, are_new, strict=True) if not is_new]
        mapped = self._threads.map if self._manifests.objects.far else map
        listed = iter(mapped(self._manifests.histories, [one.tenant for one in left], [one.key for one in left]))
        return [{} if is_new else next(listed) for is_new in are_new]

    def _manifest(self, end: End, content: VersionContent, histories: Mapping[int, History]) -> Manifest:
        tenant, key = end.envelope.tenant, end.envelope.key
        taken = self._heads.highest_taken(tenant, key)
        if taken:
            self._heads.warn_if_removed(tenant, key, histories)
        return make_manifest(self._settings, self._manifests, end, content, histories, taken)


def _rows_by_turn(ends: Sequence[End]) -> list[list[int]]:
    """Return the rows of the first blob of every key, then of the second ones, and so on."""
    turns: list[list[int]] = []
    counts = Counter[str]()
    for row, end in enumerate(ends):
        number = counts[end.envelope.key]
        counts[end.envelope.key] += 1
        if number == len(turns):
            turns.append([])
        turns[number].append(row)
    return turns
