# size: selects the compiled kernel or its reference
"""Compute fingerprints, check tags and names of a segment's chunks.

Invariant: every kernel and CPU computes the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.reference.fingerprint_reference import (
    DOMAIN_BYTES_MAX,
    FINGERPRINT_BYTES,
    NAME_BYTES,
    SECRET_BYTES,
    TagKey,
)
from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._fingerprint import check_tags, cpu_path, names, sha1_many, zero_mask
else:
    from nearkin_shared.kernels.reference.fingerprint_reference import check_tags, cpu_path, names, sha1_many, zero_mask

__all__ = [
    "DOMAIN_BYTES_MAX",
    "FINGERPRINT_BYTES",
    "NAME_BYTES",
    "SECRET_BYTES",
    "TagKey",
    "check_tags",
    "cpu_path",
    "names",
    "sha1_many",
    "zero_mask",
]
