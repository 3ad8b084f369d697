"""Keep the bytes of uploads in the object store while Kafka carries references to them.

    staging/<blob id, 32 hex digits>-<offset in the blob, 16 hex digits>     one pack: 1 byte to PACK_BYTES of one blob

Kafka would write each byte to the disk of every replica, and send it to the worker; a reference is some 200 bytes. A
pack is deleted once the offset of its reference is committed. Packs that a crashed gateway leaves are deleted by age.

Invariant: a reference is sent only after its pack is durable, and a pack is deleted only after the effects of its
reference are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import Corrupt, NearkinError, NotFound
from nearkin_shared.formats.message import Envelope, StagedFrame
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, Payload
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.staging")

FOLDER = "staging"
PACK_BYTES = 8 * MIB
"""Size of a pack: a PUT costs as much as 10 MB in S3, and an upload holds two packs in memory."""


@frozen
class UploadAttempt:
    """The values of an upload that its references repeat."""

    blob: bytes
    tenant: str
    key: str
    origin: bytes
    began_us: int


def pack_name(blob: bytes, position: int) -> str:
    """Return the name of the pack that starts at byte `position` of a blob."""
    return f"{FOLDER}/{blob.hex()}-{position:016x}"


def put_pack(objects: ObjectStore, attempt: UploadAttempt, position: int, parts: Sequence[Payload]) -> StagedFrame:
    """Store a pack durably; return the reference to it.

    Raises StoreUnavailable, PermanentError.
    """
    hasher, size_bytes = blake3(), 0
    for part in parts:
        hasher.update(part)
        size_bytes += len(part)
    envelope = Envelope(attempt.blob, attempt.tenant, attempt.key, position)
    try:
        objects.put_new(pack_name(attempt.blob, position), *parts)
    except AlreadyExists:  # the answer to an earlier request was lost; `read_pack` compares the digest
        _log.info("%s: stored before", pack_name(attempt.blob, position))
    return StagedFrame(envelope, attempt.origin, attempt.began_us, size_bytes, hasher.digest())


def read_pack(objects: ObjectStore, staged: StagedFrame) -> U8:
    """Return the bytes of a pack, uint8[size].

    Raises NotFound, Corrupt, StoreUnavailable.
    """
    name = pack_name(staged.envelope.blob, staged.envelope.position)
    data = objects.get(name)
    if len(data) != staged.size_bytes or blake3(data).digest() != staged.blake3:
        raise Corrupt(
            f"{name}: {len(data)} bytes that are not the {staged.size_bytes} of its reference: check the object store, "
            "then upload the blob again"
        )
    return np.frombuffer(data, np.uint8)


def delete_expired(objects: ObjectStore, before_ms: int) -> int:
    """Delete the packs of uploads that began before `before_ms`; return their number.

    Milliseconds since 1970. Their references have left Kafka, or were never sent.

    Raises: StoreUnavailable.
    """
    count = 0
    for name, _ in objects.names(FOLDER):
        try:
            began_ms = int(name.removeprefix(f"{FOLDER}/")[:12], 16)
        except ValueError:
            continue  # not ours
        if began_ms < before_ms:
            objects.delete(name)
            count += 1
    return count


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
