# size: one function
"""Take batches of small blobs apart, for tests that look at single blobs."""

from __future__ import annotations

from itertools import accumulate, pairwise

from nearkin_shared.formats.blob_table import blob_id
from nearkin_shared.formats.message import Batch, End, Envelope


def take_apart(batch: Batch) -> list[tuple[bytes, End]]:
    """Return the bytes and the end of each blob of a batch, as if it had been sent by itself."""
    bounds = accumulate((blob.size_bytes for blob in batch.blobs), initial=0)
    return [
        (
            batch.payload[start:stop].tobytes(),
            End(
                Envelope(blob_id(batch.envelope.blob, number), batch.envelope.tenant, blob.key),
                blob.began_us,
                blob.origin,
                blob.size_bytes,
                blob.blake3,
                metadata=blob.metadata,
            ),
        )
        for number, (blob, (start, stop)) in enumerate(zip(batch.blobs, pairwise(bounds), strict=True))
    ]
