"""Create the manifests of the next batches while the last one is reported.

    batches taken     1 2 3 4
    thread            |--1--|--2--|--3--|         manifests
    committer               |1|   |2|   |3|       index, events, offsets

Invariant (I2): the versions of a key are created in the order in which its batches were begun. A batch behind one of
which a blob was left out, or may be withdrawn, is created only when that blob is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from nearkin_committer.batch_commit import BatchCommits, CommittedVersion, ends_of
from nearkin_committer.open_blob import OpenBlob
from nearkin_committer.version_content import VersionContent, split_content
from nearkin_shared.formats.message import BatchEnd, End
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.tenant_context import TenantContext
from nearkin_shared.utils.frozen import frozen

BEGUN_MAX = 2
"""Batches begun at a time: one in work, and one for which the thread need not wait. Each has at most 256 blobs."""


@frozen
class BatchVersions:
    """The blobs of a batch and their versions, in the order of the batch."""

    ends: Sequence[End]
    contents: Sequence[VersionContent]
    versions: list[CommittedVersion | None]
    """None: to be committed by itself."""
    is_late: bool
    """Whether the manifests became durable so late that chunks may have been collected."""


Result = Future[BatchVersions | None]
"""None: not tried, since a blob of an earlier batch was left out or failed."""


class BegunBatch:
    """A batch whose manifests are being created."""

    def __init__(self, blob: OpenBlob, record: Record, begin: Callable[[Result | None], Result], after: Result | None):
        """`begin` starts, or repeats, the work behind what it is given."""
        self.blob, self.record = blob, record
        self._begin = begin
        self.result = begin(after)
        self._is_new = True

    def versions(self) -> BatchVersions:
        """Return the versions; create them if that failed, or was not tried.

        Raises what that raised.
        """
        is_new, self._is_new = self._is_new, False
        found = self.result.result() if is_new else None
        if found is None:
            found = self._begin(None).result()
            assert found is not None
        return found


class BegunBatches:
    """The batches in work, in their order. Called from one thread; has a thread of its own."""

    def __init__(self, batches: BatchCommits, is_late: Callable[[TenantContext, BatchEnd], bool]) -> None:
        """`is_late`: whether versions of a batch that became durable now are to be checked again."""
        self._batches = batches
        self._is_late = is_late
        self._thread = ThreadPoolExecutor(1, "nearkin-batch")
        self._begun: deque[BegunBatch] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def has_room(self) -> bool:
        """Return whether another batch may be begun."""
        return len(self._begun) < BEGUN_MAX

    @property
    def is_due(self) -> bool:
        """Return whether the first batch can be taken without waiting for it."""
        return len(self._begun) > 0 and self._begun[0].result.done()

    def has_batch_of(self, tenant: str) -> bool:
        """Return whether a batch of the tenant is in work."""
        return any(one.blob.envelope.tenant == tenant for one in self._begun)

    def begin(self, find_lane: Callable[[], TenantContext], blob: OpenBlob, batch: BatchEnd, record: Record) -> None:
        """Begin a batch behind those in work; `BegunBatch.versions` raises what fails."""

        def start(after: Result | None) -> Result:
            try:
                lane = find_lane()  # by this thread: a new key must exist before a manifest is encrypted with it
            except Exception as err:
                failed = Result()
                failed.set_exception(err)
                return failed
            return self._thread.submit(self._create, lane, blob, batch, after)

        self._begun.append(BegunBatch(blob, record, start, self._begun[-1].result if self._begun else None))

    def take(self) -> BegunBatch:
        """Remove the first batch; it may still be in work. Raises IndexError."""
        return self._begun.popleft()

    def wait_until_idle(self) -> None:
        """Wait until no manifest is being created; the batches stay."""
        wait([one.result for one in self._begun])

    def close(self) -> None:
        """End the thread, after the batch in work."""
        self._begun.clear()
        self._thread.shutdown(cancel_futures=True)

    def _create(
        self, lane: TenantContext, blob: OpenBlob, batch: BatchEnd, after: Result | None
    ) -> BatchVersions | None:
        if after is not None and not _is_whole(after):
            return None
        ends, contents = ends_of(batch), split_content(blob, batch)
        versions = self._batches.commit(lane, ends, contents)
        return BatchVersions(ends, contents, versions, self._is_late(lane, batch))


def _is_whole(result: Result) -> bool:
    """Return whether each blob of an ended batch has a version that stays."""
    if result.cancelled() or result.exception() is not None:
        return False
    found = result.result()
    return found is not None and not found.is_late and None not in found.versions
