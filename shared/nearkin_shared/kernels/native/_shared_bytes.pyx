"""Overlap, compiled. Invariant: equal to `_overlap_reference`, whose checks run first; the loops are in shared_bytes_impl.c."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

import numpy as np

from nearkin_shared.kernels.reference import shared_bytes_reference as reference
from nearkin_shared.kernels.native._scatter_copy cimport Sources, array_of

cdef extern from "shared_bytes_impl.h" nogil:
    ctypedef struct nearkin_shared:
        uint32_t target
        uint32_t base
        uint32_t bytes
        uint32_t matches

    ctypedef struct nearkin_shared_list:
        nearkin_shared *rows
        size_t count
        size_t room

    int nearkin_overlap_group(
        const uint8_t *targets, const uint64_t *target_offsets, const uint32_t *target_lengths,
        uint32_t first_target, uint32_t end_target, const uint8_t *const *bases,
        const uint32_t *base_lengths, uint32_t first_base, uint32_t end_base, uint32_t *table,
        unsigned table_bits, uint32_t *starts, uint32_t *bytes_by_base, uint32_t *matches_by_base,
        uint32_t *touched, nearkin_shared_list *found)


def shared_bytes(
    targets, target_offsets, target_lengths, target_bounds, buffers, which, base_offsets, base_lengths, base_bounds
):
    data, target_offsets, target_lengths, target_bounds = reference.check_side(
        "target", targets, target_offsets, target_lengths, target_bounds
    )
    cdef Sources sources = Sources(buffers)
    cdef const int32_t[::1] buffer_of = array_of("which", which, np.dtype(np.int32))
    base_offsets = array_of("base offsets", base_offsets, np.dtype(np.uint64))
    base_lengths = array_of("base lengths", base_lengths, np.dtype(np.uint32))
    cdef const uint64_t[::1] base_offsets_view = base_offsets
    cdef const uint32_t[::1] base_lengths_view = base_lengths
    sources.check(buffer_of, base_offsets_view, base_lengths_view)
    base_bounds = reference.check_side_bounds("base", base_bounds, len(base_lengths))
    reference.check_groups(target_bounds, base_bounds, base_lengths)
    bits_list = reference.table_bits(base_lengths, base_bounds)
    cdef const uint8_t[::1] targets_view = data
    cdef const uint64_t[::1] target_offsets_view = target_offsets
    cdef const uint32_t[::1] target_lengths_view = target_lengths
    cdef const uint32_t[::1] target_bounds_view = target_bounds
    cdef const uint32_t[::1] base_bounds_view = base_bounds
    cdef const uint32_t[::1] bits_view = bits_list
    cdef Py_ssize_t group, groups = target_bounds_view.shape[0] - 1
    cdef uint32_t most = 1
    cdef int failed = 0
    cdef nearkin_shared_list found
    cdef uint32_t *table = NULL
    cdef uint32_t *by_base = NULL
    cdef const uint8_t **bases = NULL
    cdef Py_ssize_t row, rows = base_lengths_view.shape[0]
    found.rows = NULL
    found.count = found.room = 0
    if not groups or not data.shape[0] or not rows:
        return np.zeros((0, 4), np.uint32)
    for group in range(groups):
        most = max(most, base_bounds_view[group + 1] - base_bounds_view[group])
    try:
        table = <uint32_t *>malloc(sizeof(uint32_t) << int(bits_list.max()))
        by_base = <uint32_t *>calloc(4 * <size_t>most + 1, sizeof(uint32_t))
        bases = <const uint8_t **>malloc(rows * sizeof(uint8_t *))
        if table == NULL or by_base == NULL or bases == NULL:
            raise MemoryError
        with nogil:
            for row in range(rows):
                bases[row] = sources.table[buffer_of[row]].at + base_offsets_view[row]
            for group in range(groups):
                if base_bounds_view[group] == base_bounds_view[group + 1]:
                    continue
                if target_bounds_view[group] == target_bounds_view[group + 1]:
                    continue
                failed = nearkin_overlap_group(
                    &targets_view[0], &target_offsets_view[0], &target_lengths_view[0],
                    target_bounds_view[group], target_bounds_view[group + 1], bases,
                    &base_lengths_view[0], base_bounds_view[group], base_bounds_view[group + 1], table,
                    bits_view[group], by_base + 3 * <size_t>most, by_base, by_base + most,
                    by_base + 2 * <size_t>most, &found)
                if failed:
                    break
        if failed:
            raise MemoryError
        answer = np.empty((found.count, 4), np.uint32)
        if found.count:
            copy_rows(answer, &found)
        return answer
    finally:
        free(table)
        free(by_base)
        free(bases)
        free(found.rows)


cdef void copy_rows(uint32_t[:, ::1] answer, nearkin_shared_list *found) noexcept:
    memcpy(&answer[0, 0], found.rows, found.count * sizeof(nearkin_shared))
