"""Rows of several tables, compiled. Invariant: equal to `_rows_reference`, whose checks run first.

values   7 | 9 | 7 | 4 | ...      slots   0 | 2 | 0 | 1 | ...   1 + a value's number by its hash, linear probing
numbers  0 | 1 | 0 | 2 | ...
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

from nearkin_shared.kernels.reference import table_rows_reference as reference

# Values may be chosen by who wrote a container; where they fall is not.
SEED = <uint64_t>int.from_bytes(os.urandom(8), "little") | 1


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
            slot = mixed(value[i]) & (slots - 1)
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


cdef class Tables:

    def __cinit__(self, tables):
        self.views = <Py_buffer *>calloc(len(tables) + 1, sizeof(Py_buffer))
        self.rows = <table_rows *>calloc(len(tables) + 1, sizeof(table_rows))
        if self.views is NULL or self.rows is NULL:
            raise MemoryError("no memory to list the tables")
        for i, table in enumerate(tables):
            self.rows[i].count = <uint64_t>(-1) if table is None else <uint64_t>len(table)
            if table is None or not len(table):
                continue
            PyObject_GetBuffer(table.view(np.uint8), &self.views[self.held], PyBUF_SIMPLE)
            self.rows[i].at = <const uint8_t *>self.views[self.held].buf
            self.held += 1

    def __dealloc__(self):
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.rows)


def take_rows(tables, which, ordinals, out):
    reference.check_rows(tables, which, ordinals, out)
    cdef Py_ssize_t count = len(which), i
    if not count:
        return 0
    cdef size_t row_bytes = <size_t>out.dtype.itemsize
    cdef Tables known = Tables(tables)
    cdef const int32_t[::1] of = np.array(which, order="C")  # copies: `out` may be their memory
    cdef const uint32_t[::1] ordinal = np.array(ordinals, order="C")
    cdef uint8_t[::1] target = out.view(np.uint8)
    cdef uint8_t *to = &target[0]
    cdef table_rows *one
    cdef Py_ssize_t done = count
    with nogil:
        for i in range(count):
            one = &known.rows[of[i]]
            if ordinal[i] >= one.count:
                done = i
                break
            if one.at is NULL:
                memset(to + <size_t>i * row_bytes, 0, row_bytes)
            else:
                memcpy(to + <size_t>i * row_bytes, one.at + <size_t>ordinal[i] * row_bytes, row_bytes)
    return done
