"""Rows of several tables, compiled. Invariant: equal to `_rows_reference`, whose checks run first.

values   7 | 9 | 7 | 4 | ...      slots   0 | 2 | 0 | 1 | ...   1 + a value's number by its hash, linear probing
numbers  0 | 1 | 0 | 2 | ...
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

from nearkin.kernels import _rows_reference as reference

# Values may be chosen by who wrote a container; where they fall is not.
cdef uint64_t SEED = <uint64_t>int.from_bytes(os.urandom(8), "little") | 1


cdef inline size_t slot_of(uint64_t value) noexcept nogil:
    cdef uint64_t mixed = (value ^ SEED) * <uint64_t>0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 32)) * SEED
    return <size_t>(mixed ^ (mixed >> 29))


def numbered(values):
    reference.check_array("values", values, np.uint64)
    cdef const uint64_t[::1] value = np.ascontiguousarray(values)
    cdef Py_ssize_t count = value.shape[0], i
    numbers, distinct = np.empty(count, np.int32), np.empty(count, np.uint64)
    if not count:
        return numbers, distinct
    cdef int32_t[::1] number = numbers
    cdef uint64_t[::1] known = distinct
    cdef size_t slots = 16, slot
    while slots < 2 * <size_t>count:
        slots *= 2
    cdef uint32_t *table = <uint32_t *>calloc(slots, sizeof(uint32_t))
    if table is NULL:
        raise MemoryError("no memory to number values")
    cdef uint32_t found = 0
    with nogil:
        for i in range(count):
            if i and value[i] == value[i - 1]:
                number[i] = number[i - 1]
                continue
            slot = slot_of(value[i]) & (slots - 1)
            while table[slot] and known[table[slot] - 1] != value[i]:
                slot = (slot + 1) & (slots - 1)
            if not table[slot]:
                known[found] = value[i]
                found += 1
                table[slot] = found
            number[i] = <int32_t>(table[slot] - 1)
    free(table)
    return numbers, distinct[:found].copy()


def rows_to_fill(rows, sizes, room_bytes):
    reference.check_array("rows", rows, np.intp)
    reference.check_array("sizes", sizes, np.uint32)
    cdef const Py_ssize_t[::1] row_of = np.ascontiguousarray(rows)
    cdef const uint32_t[::1] size = np.ascontiguousarray(sizes)
    cdef int64_t left = room_bytes
    cdef Py_ssize_t taken = 0, row
    while taken < row_of.shape[0]:
        row = row_of[taken]
        if row < 0 or row >= size.shape[0]:
            reference.check_row(row, size.shape[0])
        left -= size[row]
        taken += 1
        if left <= 0:
            break
    return taken


cdef class _Rows:
    """A table's bytes, held from construction to destruction."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, rows, bint writable):
        PyObject_GetBuffer(rows.view(np.uint8), &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef struct table_rows:
    const uint8_t *at
    uint64_t count


def take_rows(tables, which, ordinals, out):
    reference.check_rows(tables, which, ordinals, out)
    cdef Py_ssize_t count = len(which), i
    if not count:
        return 0
    cdef size_t row_bytes = <size_t>out.dtype.itemsize
    held = [None if table is None or not len(table) else _Rows(table, False) for table in tables]
    cdef const int32_t[::1] of = np.ascontiguousarray(which)
    cdef const uint32_t[::1] ordinal = np.ascontiguousarray(ordinals)
    cdef _Rows target = _Rows(out, True), rows
    cdef uint8_t *to = <uint8_t *>target.view.buf
    cdef table_rows *kept = <table_rows *>calloc(len(held), sizeof(table_rows))
    cdef table_rows *one
    if kept is NULL:
        raise MemoryError("no memory to list the tables")
    for i in range(len(held)):
        kept[i].count = <uint64_t>(-1) if tables[i] is None else <uint64_t>len(tables[i])
        if held[i] is not None:
            rows = held[i]
            kept[i].at = <const uint8_t *>rows.view.buf
    cdef Py_ssize_t done = count
    with nogil:
        for i in range(count):
            one = &kept[of[i]]
            if ordinal[i] >= one.count:
                done = i
                break
            if one.at is NULL:
                memset(to + <size_t>i * row_bytes, 0, row_bytes)
            else:
                memcpy(to + <size_t>i * row_bytes, one.at + <size_t>ordinal[i] * row_bytes, row_bytes)
    free(kept)
    return done
