"""Read the bytes of messages that have references to packs.

Invariant: the bytes of a message are those that its sender had, or the delta stage refuses their fingerprints.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.message_layout import Pack, UndecodedMessage
from nearkin_shared.formats.payload_references import packs_of, wanted_bytes, with_bytes
from nearkin_shared.kafka.record_guard import BoundedCache
from nearkin_shared.kernels.scatter_copy import gather_new
from nearkin_shared.limits import KIB
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.staged_packs import pack_name, read_pack
from nearkin_shared.types import U8

PACKS_MAX = 8
"""Packs in memory, 8 MiB each as gateways store them: consecutive messages of a new blob want the same pack."""
WHOLE_BYTES = 256 * KIB
"""A pack of which a message wants this much is read whole: the messages around it want the rest."""


class PayloadReader:
    """Reader of packs, with a cache. Not shared between threads."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._packs: BoundedCache[Pack, U8] = BoundedCache(lambda pack: read_pack(objects, pack), PACKS_MAX)

    def with_bytes(self, message: UndecodedMessage) -> UndecodedMessage:
        """Return a message with its chunks' bytes; one that has them already as it is.

        Raises NotFound if a pack was deleted, Corrupt, StoreUnavailable.
        """
        if not message.is_referenced:
            return message
        starts, lengths = (column.astype(np.int64) for column in wanted_bytes(message))
        ends = starts + lengths
        parts: list[U8] = []
        at = message.envelope.position
        for pack in packs_of(message):
            at, stop = max(at, pack.position), pack.end
            rows = slice(int(np.searchsorted(ends, at, side="right")), int(np.searchsorted(starts, stop, side="left")))
            if rows.start < rows.stop:
                parts.append(self._read(pack, np.maximum(starts[rows], at), np.minimum(ends[rows], stop)))
            at = max(at, stop)
        found_bytes, wanted = sum(map(len, parts)), int(lengths.sum())
        if found_bytes != wanted:
            raise Corrupt(f"{message.what}: its packs have {found_bytes} of the {wanted} bytes of its chunks")
        return with_bytes(message, parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts]))

    def _read(self, pack: Pack, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> U8:
        """Return the bytes of a pack from each start to its end, positions in the blob, joined."""
        lengths, first, last = ends - starts, int(starts[0]), int(ends[-1])
        begin = pack.position
        if int(lengths.sum()) >= WHOLE_BYTES or 2 * (last - first) > pack.size_bytes or pack in self._packs:
            data = self._packs[pack]
        else:
            (found,) = self._objects.get_ranges(pack_name(pack), [first - begin], [last - begin])
            data, begin = np.frombuffer(found, np.uint8), first
        if len(data) < last - begin:
            raise Corrupt(f"{pack_name(pack)}: {len(data)} bytes at {begin}, want {last - begin}; upload it again")
        offsets = (starts - begin).astype(np.uint64)
        return gather_new([data], np.zeros(len(offsets), np.int32), offsets, lengths.astype(np.uint32))
