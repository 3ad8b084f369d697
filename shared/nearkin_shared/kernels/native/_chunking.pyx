"""Chunking, compiled. Invariant: every function answers exactly as its namesake in `_chunking_reference`.

Checks of the input, masks and tables come from the reference, so that each is written once; the loops are in
chunking_impl.c.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

import numpy as np

from nearkin_shared.kernels.reference.chunking_reference import (
    GEAR,
    RABIN_POLYNOMIAL,
    TARGET_PATTERN,
    check_bounds,
    check_window,
    gear_mask,
    gear_mask_bits,
    pattern_mask_bits,
    payload_view,
)


cdef extern from "chunking_impl.h":
    ctypedef struct nk_gear_tables:
        uint64_t once[256]
        uint64_t doubled[256]

    ctypedef struct nk_cut_bounds:
        size_t min_bytes
        size_t target_bytes
        size_t max_bytes
        int final

    size_t nk_fastcdc_cut(
        const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, const nk_gear_tables *gear,
        uint64_t strict_mask, uint64_t loose_mask, uint32_t *lengths) noexcept nogil
    size_t nk_rabin_cut(
        const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, uint64_t polynomial,
        size_t window_bytes, uint64_t mask, uint64_t pattern, uint32_t *lengths) noexcept nogil
    size_t nk_inck_cut(
        const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, size_t window_bytes,
        uint64_t mask, uint64_t pattern, uint32_t *lengths) noexcept nogil


cdef nk_gear_tables _gear  # written here at import, only read afterwards


cdef void _fill_gear() except *:
    cdef size_t byte
    cdef uint64_t added
    for byte in range(256):
        added = int(GEAR[byte])
        _gear.once[byte] = added
        _gear.doubled[byte] = added << 1


_fill_gear()


cdef object _room_for_lengths(size_t total_bytes, size_t min_bytes):
    # every chunk but the last is above min_bytes or equal to max_bytes, hence never below min_bytes
    return np.empty(total_bytes // min_bytes + 1, dtype=np.uint32)


def fastcdc_cut(data, min_bytes, target_bytes, max_bytes, bint final):
    """See `_chunking.pyi`."""
    cdef const uint8_t[::1] payload = payload_view(data)
    min_bytes, target_bytes, max_bytes = check_bounds(min_bytes, target_bytes, max_bytes)
    strict_bits, loose_bits = gear_mask_bits(target_bytes)
    cdef uint64_t strict_mask = gear_mask(strict_bits)
    cdef uint64_t loose_mask = gear_mask(loose_bits)
    cdef nk_cut_bounds bounds = nk_cut_bounds(min_bytes, target_bytes, max_bytes, final)
    cdef size_t total_bytes = payload.shape[0]
    cdef size_t chunks
    lengths = _room_for_lengths(total_bytes, bounds.min_bytes)
    cdef uint32_t[::1] room = lengths
    with nogil:
        chunks = nk_fastcdc_cut(&payload[0], total_bytes, &bounds, &_gear, strict_mask, loose_mask, &room[0])
    return lengths[:chunks].copy()


def rabin_cut(data, min_bytes, target_bytes, max_bytes, bint final, window_bytes=48):
    """See `_chunking.pyi`."""
    cdef const uint8_t[::1] payload = payload_view(data)
    min_bytes, _, max_bytes = check_bounds(min_bytes, min_bytes, max_bytes)
    mask_bits = pattern_mask_bits(target_bytes, max_bytes)
    window_bytes = check_window(min_bytes, window_bytes)
    cdef uint64_t mask = (1 << mask_bits) - 1
    cdef uint64_t pattern = TARGET_PATTERN & mask
    cdef uint64_t polynomial = RABIN_POLYNOMIAL
    cdef nk_cut_bounds bounds = nk_cut_bounds(min_bytes, min_bytes, max_bytes, final)
    cdef size_t window = window_bytes
    cdef size_t total_bytes = payload.shape[0]
    cdef size_t chunks
    lengths = _room_for_lengths(total_bytes, bounds.min_bytes)
    cdef uint32_t[::1] room = lengths
    with nogil:
        chunks = nk_rabin_cut(&payload[0], total_bytes, &bounds, polynomial, window, mask, pattern, &room[0])
    return lengths[:chunks].copy()


def inck_cut(data, min_bytes, target_bytes, max_bytes, bint final, window_bytes=48):
    """See `_chunking.pyi`."""
    cdef const uint8_t[::1] payload = payload_view(data)
    min_bytes, _, max_bytes = check_bounds(min_bytes, min_bytes, max_bytes)
    mask_bits = pattern_mask_bits(target_bytes, max_bytes)
    window_bytes = check_window(min_bytes, window_bytes)
    cdef uint64_t mask = (1 << mask_bits) - 1
    cdef uint64_t pattern = TARGET_PATTERN & mask
    cdef nk_cut_bounds bounds = nk_cut_bounds(min_bytes, min_bytes, max_bytes, final)
    cdef size_t window = window_bytes
    cdef size_t total_bytes = payload.shape[0]
    cdef size_t chunks
    lengths = _room_for_lengths(total_bytes, bounds.min_bytes)
    cdef uint32_t[::1] room = lengths
    with nogil:
        chunks = nk_inck_cut(&payload[0], total_bytes, &bounds, window, mask, pattern, &room[0])
    return lengths[:chunks].copy()
