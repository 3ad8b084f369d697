"""Rows next to others, compiled. Invariant: equal to `colocated_rows_reference`, whose checks run first.

keys    table << 32 | row        slots   key and the group that added it: keys of another group count as absent
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memcpy

import numpy as np

from nearkin_shared.kernels.reference import colocated_rows_reference as reference
from nearkin_shared.kernels.native._table_rows cimport Tables, mixed, table_rows

cdef struct kept_key:
    uint64_t key
    uint64_t turn


cdef struct key_set:
    kept_key *slots
    size_t mask


cdef int make_set(key_set *made, size_t most) except -1:
    """Make a set for so many keys in a group."""
    cdef size_t slots = 16
    while slots < 2 * most:
        slots *= 2
    made.mask = slots - 1
    made.slots = <kept_key *>calloc(slots, sizeof(kept_key))
    if made.slots is NULL:
        raise MemoryError("no memory to look rows up")
    return 0


cdef inline kept_key *slot_of(const key_set *of, uint64_t key, uint64_t turn) noexcept nogil:
    """Return the slot of a key in its group, or the free slot for it."""
    cdef size_t at = mixed(key) & of.mask
    while of.slots[at].turn == turn and of.slots[at].key != key:
        at = (at + 1) & of.mask
    return &of.slots[at]


cdef inline bint put(const key_set *to, uint64_t key, uint64_t turn) noexcept nogil:
    """Add a key; return whether it was absent in this group."""
    cdef kept_key *slot = slot_of(to, key, turn)
    cdef bint new = slot.turn != turn
    slot.key, slot.turn = key, turn
    return new


cdef inline bint has(const key_set *of, uint64_t key, uint64_t turn) noexcept nogil:
    return slot_of(of, key, turn).turn == turn


cdef int by_key(const void *one, const void *other) noexcept nogil:
    cdef uint64_t a = (<const uint64_t *>one)[0], b = (<const uint64_t *>other)[0]
    return -1 if a < b else a > b


cdef inline uint32_t number_at(const uint8_t *at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, at, sizeof(value))
    return value


def rows_beside(tables, which, ordinals, moved, bounds, depth_below, bytes_max, kind_left_out=None):
    dtype = reference.check_beside(tables, which, ordinals, moved, bounds)
    cdef Py_ssize_t rows = len(which), groups = len(bounds) - 1, most = 0
    if not rows or dtype is None:
        return np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.intp)
    cdef Tables known = Tables(tables)
    cdef size_t row_bytes = <size_t>dtype.itemsize
    cdef size_t length_at = dtype.fields["lengths"][1], block_at = dtype.fields["blocks"][1]
    cdef size_t depth_at = dtype.fields["depths"][1], kind_at = dtype.fields["kinds"][1]
    cdef const int32_t[::1] of = np.ascontiguousarray(which)
    cdef const uint32_t[::1] ordinal = np.ascontiguousarray(ordinals), bound = np.ascontiguousarray(bounds)
    cdef const uint8_t[::1] is_moved = np.ascontiguousarray(moved).view(np.uint8)
    cdef int64_t too_deep = depth_below, longest = bytes_max, left_out = -1 if kind_left_out is None else kind_left_out
    most = int(np.diff(bounds).max(initial=0))
    found_keys, found_groups = np.empty(2 * rows, np.uint64), np.empty(2 * rows, np.intp)
    cdef uint64_t[::1] key_of = found_keys
    cdef Py_ssize_t[::1] group_of = found_groups
    cdef key_set mine, read
    cdef Py_ssize_t row, group, found = 0, first
    cdef uint64_t key, beside, turn
    cdef const uint8_t *at
    cdef table_rows *table
    cdef int side
    mine.slots = read.slots = NULL
    try:
        make_set(&mine, 3 * <size_t>most)
        make_set(&read, <size_t>rows)
        with nogil:
            for row in range(rows):
                table = &known.rows[of[row]]
                if table.at is not NULL and ordinal[row] < table.count:
                    key = <uint64_t>of[row] << 32 | number_at(table.at + ordinal[row] * row_bytes + block_at)
                    put(&read, key, 1)
            for group in range(groups):
                turn, first = <uint64_t>group + 1, found
                for row in range(bound[group], bound[group + 1]):
                    put(&mine, <uint64_t>of[row] << 32 | ordinal[row], turn)
                for row in range(bound[group], bound[group + 1]):
                    if not is_moved[row]:
                        continue
                    table = &known.rows[of[row]]
                    for side in range(2):
                        beside = <uint64_t>ordinal[row] + (1 if side else <uint64_t>(-1))
                        if table.at is NULL or beside >= table.count:
                            continue
                        at = table.at + beside * row_bytes
                        if number_at(at + length_at) == 0 or number_at(at + length_at) > longest:
                            continue
                        if (at + depth_at)[0] >= too_deep or (at + kind_at)[0] == left_out:
                            continue
                        if not has(&read, <uint64_t>of[row] << 32 | number_at(at + block_at), 1):
                            continue
                        if put(&mine, <uint64_t>of[row] << 32 | beside, turn):
                            key_of[found] = <uint64_t>of[row] << 32 | beside
                            group_of[found] = group
                            found += 1
                qsort(&key_of[0] + first, <size_t>(found - first), sizeof(uint64_t), by_key)
    finally:
        free(mine.slots)
        free(read.slots)
    keys = found_keys[:found]
    return (keys >> np.uint64(32)).astype(np.int32), keys.astype(np.uint32), found_groups[:found].copy()
