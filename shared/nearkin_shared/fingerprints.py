"""Compute the names of chunks and segments.

Invariant: equal names mean equal contents, even if an adversary chose the contents.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.fingerprint import TagKey, check_tags, names, sha1_many, zero_mask
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U32, U64, Bools

DOMAIN_BYTES = 16
ZERO_LENGTHS_MAX = 4096
"""Names of zero chunks that are cached: usually few, the chunker's maximum and the ends of holes."""


def domain_of(tenant: str) -> bytes:
    """Return the 16 bytes that identify a tenant's dedup domain.

    Raises BadInput for a tenant that is not UTF-8.
    """
    try:
        encoded = tenant.encode()
    except UnicodeEncodeError as err:
        raise BadInput(f"tenant {tenant!r}: is not valid UTF-8 (position {err.start})") from err
    return blake3(encoded, derive_key_context="nearkin 2026 dedup domain of a tenant").digest(DOMAIN_BYTES)


class Fingerprinter:
    """Computes chunk names of one dedup domain; its tags never equal another domain's."""

    def __init__(self, secret: bytes, tenant: str, fingerprint_bits: int = 160) -> None:
        self.domain: bytes = domain_of(tenant)
        self._key = TagKey(secret, self.domain)
        self._mask = np.frombuffer(((1 << 160) - (1 << (160 - fingerprint_bits))).to_bytes(20, "big"), np.uint8)
        self._zeros: dict[int, U8] = {}
        self._truncated = fingerprint_bits < 160

    def name_chunks(self, payload: U8, offsets: U64, lengths: U32) -> U8:
        """Return uint8[n, 32] for the chunks: SHA-1 20, check tag 8, length 4 bytes."""
        fingerprints = sha1_many(payload, offsets, lengths)
        if self._truncated:
            fingerprints &= self._mask
        return names(fingerprints, check_tags(payload, offsets, lengths, self._key), lengths)

    def name_stream(self, payload: U8, offsets: U64, lengths: U32) -> tuple[U8, Bools]:
        """Return the names of chunks and a mask of the all-zero ones.

        Zero chunks are known without an index (MAD2, section 4.2) and are not hashed.
        """
        zero = zero_mask(payload, offsets, lengths)
        if not zero.any():
            return self.name_chunks(payload, offsets, lengths), zero
        chunk_names = np.empty((len(lengths), NAME_BYTES), np.uint8)
        chunk_names[~zero] = self.name_chunks(payload, offsets[~zero], lengths[~zero])
        chunk_names[zero] = self.name_zeros(lengths[zero])
        return chunk_names, zero

    def name_zeros(self, lengths: U32) -> U8:
        """Return uint8[n, 32]: the names of all-zero chunks; each length is hashed once."""
        distinct, rows = np.unique(lengths, return_inverse=True)
        for length in distinct.tolist():
            if length not in self._zeros:
                if len(self._zeros) >= ZERO_LENGTHS_MAX:
                    self._zeros.clear()
                one = np.zeros(length, np.uint8), np.zeros(1, np.uint64), np.array([length], np.uint32)
                self._zeros[length] = self.name_chunks(*one)[0]
        return np.stack([self._zeros[length] for length in distinct.tolist()])[rows]

    def name_segments(self, chunk_names: U8, chunk_bounds: U32) -> U8:
        """Return uint8[s, 20]: segment ids over the names of their chunks.

        12 bytes SHA-1 and 8 bytes check tag.
        """
        data = np.ascontiguousarray(chunk_names).reshape(-1)
        offsets = chunk_bounds[:-1].astype(np.uint64) * np.uint64(NAME_BYTES)
        lengths = np.diff(chunk_bounds).astype(np.uint32) * np.uint32(NAME_BYTES)
        ids = np.empty((len(lengths), SEGMENT_ID_BYTES), np.uint8)
        ids[:, :12] = sha1_many(data, offsets, lengths)[:, :12]
        ids[:, 12:] = check_tags(data, offsets, lengths, self._key).astype("<u8").view(np.uint8).reshape(-1, 8)
        return ids
