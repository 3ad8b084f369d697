# size: one data structure
"""Order commits by round robin over tenants, uploads of a key in their order.

A tenant's records of users' topics have a queue of their own: no client waits for them. Whether a blob was a record is
known by its metadata alone, which an upload may have too, as that of a copied version has.

Invariant: two uploads of a key are taken in the order in which they were added, as are two records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from nearkin_committer.open_blob import OpenBlob
from nearkin_committer.round_robin import RoundRobin
from nearkin_shared.kafka.consumer_loop import Record

ReadyBlob = tuple[OpenBlob, Record]
"""A complete blob, and the record that completed it."""


class ReadyBlobs:
    """Complete blobs that wait for their commit. Not thread-safe."""

    def __init__(self) -> None:
        self._queues: RoundRobin[tuple[str, bool], ReadyBlob] = RoundRobin()
        """By tenant, and whether they are taken as records."""
        self._uploads: dict[tuple[str, str], deque[ReadyBlob]] = {}
        """Those that were not taken as records, by key."""
        self._records: Counter[tuple[str, str]] = Counter()
        """Number of others by key, without batches."""

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, blob: OpenBlob, record: Record) -> None:
        """Add a complete blob."""
        key = (blob.envelope.tenant, blob.envelope.key)
        is_record = blob.is_of_topic or self._records[key] > 0
        if blob.batch is None and is_record:
            self._records[key] += 1
        elif blob.batch is None:
            self._uploads.setdefault(key, deque()).append((blob, record))
        self._queues.add((blob.envelope.tenant, is_record), (blob, record))

    def has_any(self, may_take: Callable[[OpenBlob], bool]) -> bool:
        """Return whether `take` finds a blob."""
        return self._queues.has_any(lambda ready: may_take(ready[0]))

    def take(self, may_take: Callable[[OpenBlob], bool] = lambda _: True) -> tuple[OpenBlob, list[ReadyBlob]]:
        """Remove the next blob that may be taken; return (it, what to commit).

        That is itself after uploads of its key; these are taken later too, with nothing to commit then.

        Raises: KeyError, if there is none.
        """
        (_, is_record), (blob, record) = self._queues.take(lambda ready: may_take(ready[0]))
        if blob.batch is not None:
            return blob, [(blob, record)]
        key = (blob.envelope.tenant, blob.envelope.key)
        if is_record:
            self._records[key] -= 1
            if not self._records[key]:
                del self._records[key]
            return blob, [*self._uploads.pop(key, ()), (blob, record)]
        waiting = self._uploads.get(key)
        if waiting is None or waiting[0][0] is not blob:  # committed before a later one
            return blob, []
        waiting.popleft()
        if not waiting:
            del self._uploads[key]
        return blob, [(blob, record)]
