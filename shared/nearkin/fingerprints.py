"""Names of chunks and segments. Invariant: equal names mean equal contents, whatever an adversary sends."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from nearkin.kernels.fingerprint import TagKey, check_tags, names, sha1_many, zero_mask
from nearkin.records import NAME_BYTES, SEGMENT_ID_BYTES, U8, U32, U64, Bools

DOMAIN_BYTES = 16


class Fingerprinter:
    """Names chunks of one dedup domain (one tenant): its tags never agree with another domain's."""

    def __init__(self, secret: bytes, tenant: str, fingerprint_bits: int = 160) -> None:
        self.domain = blake3(tenant.encode(), derive_key_context="nearkin 2026 dedup domain of a tenant").digest(
            DOMAIN_BYTES
        )
        self._key = TagKey(secret, self.domain)
        self._mask = np.frombuffer(((1 << 160) - (1 << (160 - fingerprint_bits))).to_bytes(20, "big"), np.uint8)
        self._truncated = fingerprint_bits < 160

    def name_chunks(self, payload: U8, offsets: U64, lengths: U32) -> U8:
        """Return uint8[n, 32]: SHA-1 20, check tag 8, length 4, of each chunk."""
        fingerprints = sha1_many(payload, offsets, lengths)
        if self._truncated:
            fingerprints &= self._mask
        return names(fingerprints, check_tags(payload, offsets, lengths, self._key), lengths)

    def zero_chunks(self, payload: U8, offsets: U64, lengths: U32) -> Bools:
        """Return which chunks are all zero: they are known from the start (MAD2, section 4.2)."""
        return zero_mask(payload, offsets, lengths)

    def name_segments(self, chunk_names: U8, chunk_bounds: U32) -> U8:
        """Return uint8[s, 20] segment ids: 12 bytes SHA-1 and 8 bytes check tag over the names of their chunks."""
        data = np.ascontiguousarray(chunk_names).reshape(-1)
        offsets = chunk_bounds[:-1].astype(np.uint64) * np.uint64(NAME_BYTES)
        lengths = np.diff(chunk_bounds).astype(np.uint32) * np.uint32(NAME_BYTES)
        ids = np.empty((len(lengths), SEGMENT_ID_BYTES), np.uint8)
        ids[:, :12] = sha1_many(data, offsets, lengths)[:, :12]
        ids[:, 12:] = check_tags(data, offsets, lengths, self._key).astype("<u8").view(np.uint8).reshape(-1, 8)
        return ids
