"""Delete the packs of a blob once its end has passed the delta stage.

    references seen -> end seen -> offset of the end committed -> packs deleted

A worker that has crashed leaves messages behind which a later worker sends once more. So a pack stays until the end of
its blob, and a message whose pack is missing has no effect: the segments are stored, or the committer lacks them.

Another worker may have seen references before this one took the partition, even all of them. So messages with bytes are
recorded, too: the packs of a blob whose first message this worker has not seen are found by listing.

Invariant: a pack is deleted only after the effects of all references to it that precede the end of its blob.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nearkin_shared.formats.message_layout import Envelope, Pack
from nearkin_shared.storage.staged_packs import PackRemover, pack_name

BLOBS_MAX = 4096
"""Blobs of a partition whose packs are known; the gateways delete the packs of others by age."""
NAMES_MAX = 256
"""Packs of a blob whose names are kept, 2 GiB of it; those of a larger one are found by listing."""


@dataclass(slots=True)
class _Blob:
    """Packs of a blob whose end has not arrived."""

    is_whole: bool
    """All messages of it were seen by this worker, and `names` has all packs to which they refer."""
    names: dict[str, None] = field(default_factory=dict)
    missing: str | None = None
    """Name of a pack that did not exist."""

    def add(self, packs: Iterable[Pack]) -> None:
        """Keep the names of packs, unless there are too many."""
        if self.is_whole:
            self.names.update(dict.fromkeys(map(pack_name, packs)))
        if len(self.names) > NAMES_MAX:
            self.is_whole = False
            self.names.clear()


class BlobPacks:
    """Packs of the blobs in the partitions of one worker."""

    def __init__(self, remover: PackRemover) -> None:
        self._remover = remover
        self._open: dict[int, dict[bytes, _Blob]] = {}
        self._ended: dict[int, deque[tuple[int, bytes, _Blob]]] = {}

    def add(self, partition: int, envelope: Envelope, packs: Iterable[Pack] = (), missing: str | None = None) -> None:
        """Record the packs of a message, if any; `missing`: the name of one that does not exist."""
        blobs = self._open.setdefault(partition, {})
        blob = blobs.get(envelope.blob)
        if blob is None:
            if len(blobs) >= BLOBS_MAX:
                del blobs[next(iter(blobs))]
            blob = blobs[envelope.blob] = _Blob(is_whole=envelope.position == 0)
        blob.add(packs)
        blob.missing = blob.missing or missing

    def end(self, partition: int, offset: int, envelope: Envelope) -> str | None:
        """Record the end of a blob at an offset; return the name of a missing pack, if any."""
        blob = self._open.get(partition, {}).pop(envelope.blob, None) or _Blob(is_whole=False)
        self._ended.setdefault(partition, deque()).append((offset, envelope.blob, blob))
        return blob.missing

    def on_committed(self, partition: int, offset: int) -> None:
        """Delete the packs of blobs whose end is before a committed offset."""
        ended, unlisted = self._ended.get(partition, deque()), set[bytes]()
        while ended and ended[0][0] < offset:
            _, name, blob = ended.popleft()
            if not blob.is_whole:
                unlisted.add(name)
            elif blob.names:
                self._remover.remove(*blob.names)
        if unlisted:
            self._remover.remove_all(unlisted)

    def on_source_dropped(self) -> None:
        """Find packs of all open blobs by listing: another worker may see references to some."""
        for blobs in self._open.values():
            for blob in blobs.values():
                blob.is_whole = False
                blob.names.clear()

    def forget(self, partition: int) -> None:
        """Forget a partition that another worker may have."""
        self._open.pop(partition, None)
        self._ended.pop(partition, None)

    def close(self) -> None:
        """End the deletions."""
        self._remover.close()
