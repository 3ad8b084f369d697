"""Keep the bytes of uploads in the object store while Kafka carries references to them.

    staging/<ms since 1970, 12 hex digits>-<blob id, 32>-<offset in the blob, 16>     1 byte to PACK_BYTES of one blob

Kafka would write each byte to the disk of every replica, and send it to the worker; a reference is some 200 bytes. A
pack is deleted once the offset of its reference is committed. Stages in several processes pass references on: there the
delta stage deletes packs behind the end of their blob. Packs that a crashed process leaves are deleted by age.

Invariant: a reference is sent only after its pack is durable, and a pack is deleted only after the effects of its
reference are.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import BoundedSemaphore, Event

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import Corrupt, NearkinError, NotFound
from nearkin_shared.formats.message import Envelope, StagedFrame
from nearkin_shared.formats.message_layout import Pack
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, Payload
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.staging")

FOLDER = "staging"
PACK_BYTES = 8 * MIB
"""Size of a pack: a put and a get of S3 for each, 0.71 dollars for 1 TiB; an upload has up to three in memory."""
DELETIONS_MAX = 1024
"""Deletions that wait, each of one pack or of all packs of a blob."""
_NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{12}})-([0-9a-f]{{32}})-[0-9a-f]{{16}}")


@frozen
class UploadAttempt:
    """The values of an upload that its references repeat."""

    blob: bytes
    tenant: str
    key: str
    origin: bytes
    began_us: int


def pack_name(pack: Pack) -> str:
    """Return the name of a pack's object."""
    return f"{FOLDER}/{pack.staged_ms:012x}-{pack.blob.hex()}-{pack.position:016x}"


def refer(attempt: UploadAttempt, position: int, parts: Sequence[Payload]) -> StagedFrame:
    """Return the reference to a pack that is stored now."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    envelope = Envelope(attempt.blob, attempt.tenant, attempt.key, position)
    now_ms, size_bytes = time.time_ns() // 1_000_000, sum(map(len, parts))
    return StagedFrame(envelope, attempt.origin, attempt.began_us, now_ms, size_bytes, hasher.digest())


def put_pack(objects: ObjectStore, staged: StagedFrame, parts: Sequence[Payload]) -> None:
    """Store the pack of a reference durably. Raises StoreUnavailable, PermanentError."""
    try:
        objects.put_new(pack_name(staged.pack), *parts)
    except AlreadyExists:  # the answer to an earlier request was lost; `read_pack` compares the digest
        _log.info("%s: stored before", pack_name(staged.pack))


def read_pack(objects: ObjectStore, pack: Pack) -> U8:
    """Return the bytes of a pack, uint8[size].

    Raises NotFound, Corrupt, StoreUnavailable.
    """
    name = pack_name(pack)
    data = objects.get(name)
    if len(data) != pack.size_bytes or blake3(data).digest() != pack.blake3:
        raise Corrupt(
            f"{name}: {len(data)} bytes that are not the {pack.size_bytes} of its reference: check the object store, "
            "then upload the blob again"
        )
    return np.frombuffer(data, np.uint8)


def delete_expired(objects: ObjectStore, before_ms: int) -> int:
    """Delete the packs that were stored before `before_ms`; return their number.

    Milliseconds since 1970. Their references have left Kafka, or were never sent.

    Raises: StoreUnavailable.
    """
    count = 0
    for name, _ in objects.names(FOLDER):
        found = _NAME.fullmatch(name)
        if found is not None and int(found[1], 16) < before_ms:
            with suppress(NotFound):  # another gateway deletes them, too
                objects.delete(name)
                count += 1
    return count


class PackRemover:
    """Deletes packs on a thread of its own.

    Where deletions wait behind DELETIONS_MAX others, the gateways delete the packs later, by age.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._thread = ThreadPoolExecutor(1, "nearkin-staging")
        self._room = BoundedSemaphore(DELETIONS_MAX)
        self._closing = Event()

    def remove(self, *names: str) -> None:
        """Delete packs soon, one after another."""
        self._submit(partial(self._delete, names))

    def remove_all(self, blobs: Collection[bytes]) -> None:
        """Delete all packs of blobs soon, found by listing all packs once."""
        self._submit(partial(self._delete_packs_of, frozenset(blob.hex() for blob in blobs)))

    def _submit(self, deletion: Callable[[], None]) -> None:
        if self._room.acquire(blocking=False):
            self._thread.submit(deletion).add_done_callback(lambda _: self._room.release())

    def close(self) -> None:
        """End the thread, and leave the packs that are not deleted yet."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self._closing.is_set():  # a large blob has thousands of packs, and the worker's partitions wait
                return
            delete_pack(self._objects, name)

    def _delete_packs_of(self, blobs: frozenset[str]) -> None:
        try:
            names = [name for name, _ in self._objects.names(FOLDER)]
        except NearkinError as err:
            _log.warning("packs of %d blobs, as %s: not deleted yet: %s", len(blobs), min(blobs), err)
            return
        matches = ((name, _NAME.fullmatch(name)) for name in names)
        self._delete(name for name, found in matches if found is not None and found[2] in blobs)


def delete_pack(objects: ObjectStore, name: str) -> None:
    """Delete a pack whose effects are durable, if it exists.

    A failure is logged, and `delete_expired` deletes the pack later.
    """
    try:
        objects.delete(name)
    except NotFound:
        return
    except NearkinError as err:
        _log.warning("%s: not deleted yet: %s", name, err)
