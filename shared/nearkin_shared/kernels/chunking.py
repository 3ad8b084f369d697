# size: selects the compiled kernels or their references
"""Cut bytes into chunks.

Invariant: only cuts that no later byte can change are returned; keep the uncut tail, call again with more.

Every `*_cut` answers with the lengths (uint32[chunks], bytes) of the chunks that are certain at the start of `data`.
The caller drops them, appends what arrives next to the tail and calls again, `final=True` on the last call; the pieces
in which the bytes arrive change nothing. `NEARKIN_KERNELS` chooses between the compiled kernels and their definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin_shared.kernels.reference.chunking_reference import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    GEAR,
    WINDOW_BYTES,
    expected_chunk_bytes,
    fixed_cut,
    whole_cut,
)
from nearkin_shared.kernels.selection import USE_CYTHON

if TYPE_CHECKING or USE_CYTHON:
    from nearkin_shared.kernels.native._chunking import fastcdc_cut, inck_cut, rabin_cut
    from nearkin_shared.kernels.native._leastcdc import cpu_path, leastcdc_cut
else:
    from nearkin_shared.kernels.reference.chunking_reference import fastcdc_cut, inck_cut, rabin_cut
    from nearkin_shared.kernels.reference.leastcdc_reference import cpu_path, leastcdc_cut

__all__ = [
    "CHUNK_BYTES_MAX",
    "CHUNK_BYTES_MIN",
    "GEAR",
    "WINDOW_BYTES",
    "cpu_path",
    "expected_chunk_bytes",
    "fastcdc_cut",
    "fixed_cut",
    "inck_cut",
    "leastcdc_cut",
    "rabin_cut",
    "whole_cut",
]
