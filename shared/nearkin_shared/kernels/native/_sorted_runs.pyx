"""Runs of a tree, compiled. Invariant: equal to `sorted_runs_reference` wherever a run's heads ascend; its checks run first.

    run   | children | head 0 | head 1 | ... | tail, value | tail, value | ...

Heads are uniformly distributed: a key's position is estimated from it to within a few hundred bytes, so that of a run that
is not in memory one page or two of heads are read, and one of rows if the head is found.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

import numpy as np

from nearkin_shared.kernels.reference import sorted_runs_reference as reference

cdef extern from * nogil:
    """
    #include <stdint.h>
    static inline uint64_t nk_scaled(uint64_t head, uint64_t count) {
    #ifdef __SIZEOF_INT128__
        return (uint64_t)(((unsigned __int128)head * count) >> 64);
    #else
        return (head >> 32) * count >> 32;
    #endif
    }
    #if defined(__GNUC__)
    #define nk_prefetch_run(at) __builtin_prefetch(at)
    #else
    #define nk_prefetch_run(at) ((void)(at))
    #endif
    """
    uint64_t nk_scaled(uint64_t head, uint64_t count)
    void nk_prefetch_run(const void *at)

cdef enum:
    NAME_BYTES = 9
    CHILDREN_BYTES = 8
    HEAD_BYTES = 8
    FAN_BITS = 3
    DEPTH_MAX = 20
    STEP = 16  # heads: two cache lines
    AHEAD = 8  # rows whose estimated position is prefetched


cdef inline uint64_t head_at(const uint8_t *heads, uint64_t at) noexcept nogil:
    cdef uint64_t head
    memcpy(&head, heads + at * HEAD_BYTES, HEAD_BYTES)
    return head


cdef inline uint64_t lower_bound(const uint8_t *heads, uint64_t count, uint64_t head, int depth_bits) noexcept nogil:
    """The first head that is not less, `count` where none is."""
    cdef uint64_t low = 0, high = count, middle, step = STEP
    cdef uint64_t guess = nk_scaled(head << depth_bits, count)
    if head_at(heads, guess) < head:
        low = guess + 1
        while low + step < count and head_at(heads, low + step) < head:
            low += step + 1
            step *= 2
        if low + step < count:
            high = low + step
    else:
        high = guess
        while high > step and head_at(heads, high - step) >= head:
            high -= step
            step *= 2
        if high > step:
            low = high - step + 1
    while low < high:
        middle = (low + high) // 2
        if head_at(heads, middle) < head:
            low = middle + 1
        else:
            high = middle
    return low


cdef struct Asked:
    uint64_t bits
    int64_t start, end  # rows


cdef void find_rows(const uint8_t *run, uint64_t count, const Asked *asked, int depth_bits, const uint64_t *heads,
                    const uint8_t *tails, uint64_t tail_bytes, uint8_t *values, uint64_t value_bytes, uint8_t *found) noexcept nogil:
    cdef uint64_t at, head
    cdef const uint8_t *rows = run + count * HEAD_BYTES
    cdef const uint8_t *row
    cdef int64_t key
    for key in range(asked.start, asked.end):
        if key + AHEAD < asked.end:
            nk_prefetch_run(run + nk_scaled(heads[key + AHEAD] << depth_bits, count) * HEAD_BYTES)
        if found[key]:
            continue
        head = heads[key]
        at = lower_bound(run, count, head, depth_bits)
        while at < count and head_at(run, at) == head:
            row = rows + at * (tail_bytes + value_bytes)
            if memcmp(row, tails + <uint64_t>key * tail_bytes, tail_bytes) == 0:
                memcpy(values + <uint64_t>key * value_bytes, row + tail_bytes, value_bytes)
                found[key] = 1
                break
            at += 1


cdef Py_ssize_t add_children(Asked *below, Py_ssize_t count, const Asked *asked, uint8_t children, int depth,
                             const uint64_t *heads) noexcept nogil:
    """Note the children of a run that may have some of its rows' keys; return how many are noted then."""
    cdef int shift = 64 - FAN_BITS * (depth + 1)
    cdef int64_t key = asked.start
    cdef uint64_t bits
    while key < asked.end:
        bits = heads[key] >> shift
        if children >> (bits & ((1 << FAN_BITS) - 1)) & 1:
            below[count].bits, below[count].start = bits, key
            while key < asked.end and heads[key] >> shift == bits:
                key += 1
            below[count].end = key
            count += 1
        else:
            while key < asked.end and heads[key] >> shift == bits:
                key += 1
    return count


def find_in_runs(get, heads, tails, values, found):
    reference.check_keys(heads, tails, values, found)
    cdef Py_ssize_t keys = len(heads), asked_count = 1, below_count, held = 0, i
    if not keys:
        return
    cdef const uint64_t[::1] head = np.ascontiguousarray(heads)
    cdef const uint8_t[:, ::1] tail = tails
    cdef uint8_t[:, ::1] value = values
    cdef uint8_t[::1] mark = found.view(np.uint8)
    cdef uint64_t tail_bytes = <uint64_t>tail.shape[1], value_bytes = <uint64_t>value.shape[1]
    cdef uint64_t entry_bytes = HEAD_BYTES + tail_bytes + value_bytes
    cdef const uint8_t *tails_at = &tail[0, 0] if tail_bytes else NULL
    cdef uint8_t *values_at = &value[0, 0] if value_bytes else NULL
    cdef uint8_t name[NAME_BYTES]
    cdef const uint8_t *run
    cdef int depth, byte
    cdef Asked *asked = <Asked *>calloc(keys, sizeof(Asked))
    cdef Asked *below = <Asked *>calloc(keys, sizeof(Asked))
    cdef Py_buffer *views = <Py_buffer *>calloc(keys, sizeof(Py_buffer))
    try:
        if asked is NULL or below is NULL or views is NULL:
            raise MemoryError("no memory to list the runs")
        asked[0].end = keys
        for depth in range(DEPTH_MAX + 1):
            for i in range(asked_count):
                name[0] = <uint8_t>depth
                for byte in range(8):
                    name[1 + byte] = <uint8_t>(asked[i].bits >> (56 - 8 * byte))
                there = get(PyBytes_FromStringAndSize(<char *>name, NAME_BYTES))
                if there is None:
                    continue
                PyObject_GetBuffer(there, &views[held], PyBUF_SIMPLE)
                asked[held] = asked[i]
                held += 1
                if (views[held - 1].len < CHILDREN_BYTES
                        or (<uint64_t>views[held - 1].len - CHILDREN_BYTES) % entry_bytes):
                    reference.check_run(views[held - 1].len, tail_bytes + value_bytes)
            below_count = 0
            with nogil:
                for i in range(held):
                    run = <const uint8_t *>views[i].buf
                    if <uint64_t>views[i].len > CHILDREN_BYTES:
                        find_rows(run + CHILDREN_BYTES, (<uint64_t>views[i].len - CHILDREN_BYTES) // entry_bytes, &asked[i],
                                  FAN_BITS * depth, &head[0], tails_at, tail_bytes, values_at, value_bytes, &mark[0])
                    if run[0]:
                        below_count = add_children(below, below_count, &asked[i], run[0], depth, &head[0])
            while held:
                held -= 1
                PyBuffer_Release(&views[held])
            asked, below = below, asked
            asked_count = below_count
            if not asked_count:
                return
    finally:
        while held:
            held -= 1
            PyBuffer_Release(&views[held])
        free(asked)
        free(below)
        free(views)
